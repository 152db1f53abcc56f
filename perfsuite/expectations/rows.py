"""Rows of expectations: sourced figures that healthy devices reach, or minimums, read from TOML.

A row is an ``[[expectation]]`` table.  Shipped rows are in ``expectations.toml``; a user's rows are in the platform
files that the ini key ``perf_platforms`` names.  perfsuite docs acceptance describes every key.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, get_args

from perfsuite.base.errors import ConfigurationError, did_you_mean
from perfsuite.base.units import format_bytes, parse_bytes
from perfsuite.metrics import REGISTRY
from perfsuite.platforms.catalog import read_platform_file

SHIPPED = Path(__file__).with_name("expectations.toml")
Kind = Literal["measured", "floor", "own"]
MOST_APART = 2.0  # Ratio of the figures of two rows of one key above which they contradict each other.
_OR_MORE = re.compile(r"(.+?) or more")


@dataclass(frozen=True, kw_only=True)
class AtLeast:
    """A size in bytes above which the rate of a streaming copy no longer depends on it."""

    count: int

    def __str__(self) -> str:
        return f"{format_bytes(self.count)} or more"


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """One figure of one source."""

    platform: str  # Name of the platform's row.
    workload: str  # Name of the workload's class.
    parameters: Mapping[str, Any]  # Fields of the workload that its case sets; other fields have their defaults.
    ranks_per_node: int = 1  # Devices of a node that work at the same time; 1: a single device.
    nodes: int = 1  # Hosts that work together.
    network: str = ""
    """Class of the network between nodes, as in the user's ``[environment] network_class``; empty on one node."""
    metric: str  # Name of the metric.
    unit: str  # The metric's unit.
    kind: Kind  # measured: seen on healthy devices; floor: a minimum to pass; own: of this site's fleet.
    low: float  # Lowest value of the source, in ``unit``; of a floor the minimum.
    high: float | None = None  # Highest value of the source; None for a floor.
    spread: float | None = None  # Relative standard deviation between healthy devices; None if unknown.
    software: str = ""  # Versions and settings of the measurement; for an own row as perfsuite fleet writes them.
    date: str  # When it was seen or read, as YYYY, YYYY-MM or YYYY-MM-DD.
    source: str  # Where the figure is from.
    place: str = field(default="", compare=False)  # File and line of the row; not a key of the file.

    @property
    def key(self) -> tuple[object, ...]:
        """Return everything that a result must share with the row."""
        parameters = tuple(sorted((name, str(value)) for name, value in self.parameters.items()))
        return (self.platform, self.workload, parameters, self.ranks_per_node, self.nodes, self.network, self.metric)

    @property
    def highest(self) -> float:
        """Return ``high``, or ``low`` of a row with one value."""
        return self.low if self.high is None else self.high


_REQUIRED = ("platform", "workload", "parameters", "metric", "unit", "kind", "low", "date", "source")
_TEXTS = ("platform", "workload", "network", "metric", "unit", "kind", "software", "date", "source")
_KEYS = (*_REQUIRED, "ranks_per_node", "nodes", "network", "high", "spread", "software")


@functools.lru_cache(maxsize=1)
def shipped_rows() -> tuple[Expectation, ...]:
    """Return the rows that perfsuite ships."""
    return _read(SHIPPED)


def load_expectations(extra_files: Iterable[Path | str] = (), platforms: Iterable[str] = ()) -> list[Expectation]:
    """Return the shipped rows and those of ``extra_files``.

    If two files have an own row with the same key, the later file counts.  Rows of the files must name one of
    ``platforms``.  Raises ConfigurationError in one line for a file that cannot be read, a wrong key, type or unit, and
    rows of one key that contradict each other.
    """
    rows = list(shipped_rows())
    names = sorted(set(platforms))
    for path in extra_files:
        read = _read(Path(path))
        if other := next((row for row in read if row.platform not in names), None):
            advice = did_you_mean(other.platform, names)
            raise ConfigurationError(f"{other.place}: platform {other.platform!r} is unknown; {advice}")
        replaced = {row.key for row in read if row.kind == "own"}
        rows = [row for row in rows if not (row.kind == "own" and row.key in replaced)] + list(read)
    _refuse_contradictions(rows)
    return rows


def _read(path: Path) -> tuple[Expectation, ...]:
    text, tables = read_platform_file(path)
    written = tables.get("expectation", [])
    if not isinstance(written, list):
        raise ConfigurationError(f"{path}: expectation is a table; write a list of tables, [[expectation]] each")
    lines = [at for at, line in enumerate(text.splitlines(), 1) if re.match(r"\s*\[\[\s*expectation\s*\]", line)]
    places = [f"{path}, line {line}" for line in lines] + [str(path)] * (len(written) - len(lines))
    return tuple(_row(plain, place) for plain, place in zip(written, places, strict=False))


Wrong = Callable[[str, str], ConfigurationError]  # Make the error of a row from a key and the broken rule.


def _row(plain: object, place: str) -> Expectation:
    """Return the row; raises ConfigurationError that names its place, the key, the rule and what to write."""

    def wrong(key: str, rule: str) -> ConfigurationError:
        return ConfigurationError(f"{place}: [[expectation]] {key} {rule}")

    if not isinstance(plain, Mapping):
        raise wrong("", f"is {plain!r:.40}; write a table")
    for key in plain:
        if key not in _KEYS:
            raise wrong(key, f"is unknown; {did_you_mean(key, _KEYS)}")
    for key in _REQUIRED:
        if key not in plain:
            raise wrong(key, "is missing; perfsuite docs acceptance describes every key")
    _check_types(plain, wrong)
    for key, rule in _broken_rules(plain):
        raise wrong(key, rule)
    spec = REGISTRY[plain["metric"]]
    units = (spec.unit, "TOPS") if spec.unit == "TFLOPS" else (spec.unit,)
    if plain["unit"] not in units:
        raise wrong("unit", f"is {plain['unit']!r:.40}; {plain['metric']} is in {spec.unit}: convert the row's values")
    return Expectation(**{**plain, "parameters": _parameters(plain["parameters"], wrong)}, place=place)


def _check_types(plain: Mapping[str, Any], wrong: Wrong) -> None:
    for key in _TEXTS:
        if key in plain and (not isinstance(plain[key], str) or not plain[key].strip()):
            raise wrong(key, f"is {plain[key]!r:.40}; write a text")
    for key in ("ranks_per_node", "nodes"):
        if key in plain and (type(plain[key]) is not int or plain[key] < 1):
            raise wrong(key, f"is {plain[key]!r:.40}; write a whole number from 1")
    for key in ("low", "high", "spread"):
        value = plain.get(key, 1.0)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise wrong(key, f"is {value!r:.40}; write a number above 0")


def _broken_rules(plain: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield key and rule of every mistake in a row with valid types."""
    spec, kind = REGISTRY.get(plain["metric"]), plain["kind"]
    if kind not in get_args(Kind):
        yield "kind", f"is {kind!r:.40}; choose from {', '.join(get_args(Kind))}"
    if not re.fullmatch(r"\d{4}(-\d\d){0,2}", plain["date"]):
        yield "date", f"is {plain['date']!r:.40}; write YYYY, YYYY-MM or YYYY-MM-DD"
    if plain.get("high", plain["low"]) < plain["low"]:
        yield "high", f"is {plain['high']:g}, below low = {plain['low']:g}; exchange them"
    if plain.get("spread", 0.0) >= 1:
        yield "spread", f"is {plain['spread']:g}; write it as a share: 0.01 for 1 %"
    if kind == "floor" and "high" in plain:
        yield "high", "has no meaning for a floor, which is a minimum; leave it out"
    if kind == "own" and "spread" not in plain:
        yield "spread", "is missing: a row of kind own is judged by it; write spread = 0.01 for 1 %"
    if plain.get("nodes", 1) > 1 and "network" not in plain:
        yield "network", 'is missing for more than one node; write for example network = "8 x 400 Gb/s"'
    if spec is None:
        yield "metric", f"is {plain['metric']!r:.40}; {did_you_mean(plain['metric'], sorted(REGISTRY))}"
    elif spec.better == "neither":
        yield "metric", f"is {plain['metric']!r}, of which neither more nor less is better; name another"


def _parameters(written: object, wrong: Wrong) -> dict[str, Any]:
    if not isinstance(written, Mapping):
        raise wrong("parameters", f'is {written!r:.40}; write a table: {{ message_bytes = "1GiB", dtype = "fp32" }}')
    read = dict(written)
    for name, value in written.items():
        if not name.endswith("_bytes"):
            if not isinstance(value, str | int) and not (isinstance(value, float) and math.isfinite(value)):
                raise wrong("parameters", f"has {name} = {value!r:.40}; write a text, a number, true or false")
            continue
        if isinstance(value, int) and value is not True and value > 0:
            continue
        more = _OR_MORE.fullmatch(value) if isinstance(value, str) else None
        try:
            count = parse_bytes(more[1] if more else value)
        except (ConfigurationError, TypeError):
            raise wrong("parameters", f'has {name} = {value!r:.40}; write bytes, "1GiB" or "256MiB or more"') from None
        read[name] = AtLeast(count=count) if more else count
    return read


def _refuse_contradictions(rows: Sequence[Expectation]) -> None:
    by_key: dict[tuple[object, ...], list[Expectation]] = {}
    for row in rows:
        by_key.setdefault(row.key, []).append(row)
    for alike in by_key.values():
        own = [row for row in alike if row.kind == "own"]
        seen = [row for row in alike if row.kind != "floor"]
        for first in seen:
            for second in alike:
                apart = max(second.low / first.highest, first.low / second.highest if second.kind != "floor" else 0.0)
                if apart > (1.0 if second.kind == "floor" and first.kind == "measured" else MOST_APART):
                    raise _contradiction(first, second)
        if len(own) > 1:
            raise _contradiction(own[0], own[1])


def _contradiction(first: Expectation, second: Expectation) -> ConfigurationError:
    def described(row: Expectation) -> str:
        return f"{row.kind} {row.low:g} to {row.highest:g} {row.unit} ({row.place})"

    named = f"{first.platform} {first.workload} {first.metric}"
    return ConfigurationError(
        f"two expectations of one key contradict each other, {named}: {described(first)} and {described(second)}; "
        "correct or remove one of them"
    )


def better_of(row: Expectation) -> Literal["higher", "lower"]:
    """Return the better direction of the row's metric."""
    return cast('Literal["higher", "lower"]', REGISTRY[row.metric].better)
