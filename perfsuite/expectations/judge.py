"""Judge results against expectations and print the judgement.

Only a row with an equal key is used; otherwise the nearest one is listed.

Speed is the result over the row's lowest figure; for a time it is that figure over the result.  Verdicts:

- measured: pass from 0.95, look from 0.80, below expectation under it; look above 1.10 of the highest figure.
- floor: below expectation under the minimum; no verdict above it.
- own: below expectation if slower than the middle of the row by more than 3 % and by more than six of its spreads.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from perfsuite.base.text import bare_name, listed
from perfsuite.base.units import format_bytes, plural, significant
from perfsuite.expectations.rows import AtLeast, Expectation, better_of
from perfsuite.metrics import is_headline
from perfsuite.record.result import Metric, Result

Answer = Literal["pass", "look", "below", "not judged"]
_WORST: tuple[Answer, ...] = ("below", "look", "pass", "not judged")

PASS_FROM, LOOK_FROM, LOOK_ABOVE = 0.95, 0.80, 1.10
"""Public figures of one device model differ by up to 18 %: a shipped row only detects results far below it."""
SLOWER_THAN, DEVIATIONS = 0.03, 6.0  # The rule within a fleet, see :mod:`perfsuite.fleet.standing`.


@dataclass(frozen=True, kw_only=True)
class Expected:
    """One metric of one case, and its verdict."""

    case: str
    question: str  # Workload, dtype, devices per node and nodes: cases of one question differ in size.
    size: str
    metric: Metric
    verdict: Answer
    reason: str  # The reason; for a case without a verdict, the nearest row.
    rows: tuple[Expectation, ...] = ()  # The rows that were used.

    @property
    def low(self) -> float | None:
        """Lowest expected figure; None without a measured or own row."""
        return min((row.low for row in self.rows if row.kind != "floor"), default=None)

    @property
    def high(self) -> float | None:
        """Highest expected figure; None without a measured or own row."""
        return max((row.highest for row in self.rows if row.kind != "floor"), default=None)

    @property
    def speed(self) -> float | None:
        """Return the speed relative to the slowest expected figure; None without an expected figure."""
        if self.low is None or self.high is None or not self.metric.value:
            return None
        return self.metric.value / self.low if self.metric.better == "higher" else self.high / self.metric.value


def judge_one(result: Result, rows: Sequence[Expectation]) -> list[Expected]:
    """Return one entry per metric that a row of an equal key has, else one for the headline metric, not judged."""
    unusable, name = why_unusable(result), _class_name(result)
    related = [
        row
        for row in rows
        if row.workload == name and row.platform == result.platform and (row.kind == "own" or not result.simulated)
    ]
    found = [] if unusable else [row for row in related if not differences(row, result)]
    by_metric: dict[str, list[Expectation]] = defaultdict(list)
    for row in found:
        if row.metric in result.values:
            by_metric[row.metric].append(row)
    if by_metric:
        return [_judged(result, result.metric(name), tuple(alike)) for name, alike in by_metric.items()]
    metric = headline(result)
    if metric is None:
        return []
    reason = unusable or _nearest(result, related)
    return [_expected(result, metric, verdict="not judged", reason=reason)]


def why_unusable(result: Result) -> str:
    """Return why a result cannot be judged; empty if it can."""
    if result.outcome != "measured" or result.measurement is None:
        return result.outcome.replace("_", " ")
    return f"instrumented by {result.instruments[0]}" if result.instruments else ""


def headline(result: Result) -> Metric | None:
    """Return the main metric: the first with a peak, else the first headline metric with a value."""
    valued = [metric for metric in result.metrics if metric.value is not None and metric.better != "neither"]
    rates = [metric for metric in valued if metric.peak is not None and metric.unit != "percent"]
    shown = [metric for metric in valued if is_headline(metric.name)]
    return next(iter([*rates, *shown, *valued]), None)


def differences(row: Expectation, result: Result) -> dict[str, str]:
    """Return the differences between the keys of a row and a result of its workload, as ``row instead of result``."""
    nodes = nodes_of(result)
    fields = {**result.defaults, **result.parameters}
    network = str((result.environment.get("declared") or {}).get("network_class", ""))
    return differences_of(
        row, fields, defaults=result.defaults, ranks_per_node=result.world_size / nodes, nodes=nodes, network=network
    )


def differences_of(
    row: Expectation,
    fields: Mapping[str, Any],
    *,
    defaults: Mapping[str, Any],
    ranks_per_node: float,
    nodes: int = 1,
    network: str = "",
) -> dict[str, str]:
    """Return the differences between a row and a case of its workload and platform, by name."""
    wanted = {**defaults, **row.parameters}
    pairs: dict[str, tuple[Any, Any]] = {name: (wanted.get(name), fields.get(name)) for name in {**wanted, **fields}}
    pairs["ranks_per_node"] = (row.ranks_per_node, ranks_per_node)
    pairs["nodes"] = (row.nodes, nodes)
    if row.nodes > 1 or nodes > 1:
        pairs["network"] = (row.network, network)
    return {
        name: f"{_text(name, wanted_value)} instead of {_text(name, value)}"
        for name, (wanted_value, value) in pairs.items()
        if not _equal(wanted_value, value)
    }


def _equal(wanted: Any, value: Any) -> bool:
    if isinstance(wanted, AtLeast):
        return isinstance(value, int) and value >= wanted.count
    return bool(wanted == value)


def _text(name: str, value: Any) -> str:
    if name.endswith("_bytes") and isinstance(value, int):
        return format_bytes(value)
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return "unknown" if value in ("", None) else str(value)


def nodes_of(result: Result) -> int:
    """Return how many hosts the ranks of a measured result ran on; 1 without a measurement."""
    return len({rank.host for rank in result.measurement.ranks}) if result.measurement is not None else 1


def software_of(environment: Mapping[str, Any]) -> str:
    """Return the versions of an own row: driver, torch and the library of the collectives.

    >>> software_of({"driver": {"driver": "570.86"}, "packages": {"torch": "2.7.1"}, "worker": {"nccl": "2.26.2"}})
    'driver 570.86, torch 2.7.1, nccl 2.26.2'
    """
    found: dict[str, str] = {name: str(version) for name, version in (environment.get("driver") or {}).items()}
    torch = (environment.get("packages") or {}).get("torch")
    if torch:
        found["torch"] = str(torch)
    worker = environment.get("worker") or {}
    found.update({name: str(worker[name]) for name in ("nccl", "mccl") if worker.get(name)})
    return ", ".join(f"{name} {version}" for name, version in found.items())


def _class_name(result: Result) -> str:
    return result.workload.rpartition(":")[2]


def _nearest(result: Result, related: Sequence[Expectation]) -> str:
    """Return the row of the platform and workload with the fewest differences, and these differences."""
    if not related:
        return f"no expectation for {result.platform} {_class_name(result)}"
    differing = [(differences(row, result), row) for row in related]
    apart, row = min(differing, key=lambda pair: len(pair[0]))
    if not apart:
        return f"a row has {row.metric}, which the case did not give"
    text = ", ".join(f"{name} {what}" for name, what in apart.items())
    return f"nearest row: {significant(row.low)} {row.unit} has {text}"


def _expected(result: Result, metric: Metric, **fields: Any) -> Expected:
    nodes = nodes_of(result)
    sizes = {name: value for name, value in result.parameters.items() if type(value) is int and name != "messages"}
    rest = [str(value) for name, value in result.parameters.items() if isinstance(value, str)]
    devices = f"{result.world_size} {'rank' if result.world_size == 1 else 'ranks'}"
    question = " ".join([_class_name(result), *rest, devices, *([f"{nodes} nodes"] if nodes > 1 else [])])
    bytes_ = [format_bytes(value) for name, value in sizes.items() if name.endswith("_bytes")]
    numbers = [str(value) for name, value in sizes.items() if not name.endswith("_bytes")]
    size = " ".join([*bytes_, "x".join(numbers)]).strip()
    return Expected(case=result.case, question=question, size=size, metric=metric, **fields)


def _judged(result: Result, metric: Metric, rows: tuple[Expectation, ...]) -> Expected:
    assert metric.value is not None
    answers = [_of_floor(row, metric.value) for row in rows if row.kind == "floor"]
    answers += [_of_own(row, metric.value, software_of(result.environment)) for row in rows if row.kind == "own"]
    measured = [row for row in rows if row.kind == "measured"]
    if measured:
        answers.append(_of_measured(measured, metric.value))
    verdict, reason = min(answers, key=lambda pair: _WORST.index(pair[0]))
    return _expected(result, metric, verdict=verdict, reason=reason, rows=rows)


def _speed(row: Expectation, value: float, figure: float) -> float:
    if value <= 0:
        return 0.0 if better_of(row) == "higher" else math.inf
    return value / figure if better_of(row) == "higher" else figure / value


def _of_measured(rows: Sequence[Expectation], value: float) -> tuple[Answer, str]:
    low, high = min(row.low for row in rows), max(row.highest for row in rows)
    slow, fast = (low, high) if better_of(rows[0]) == "higher" else (high, low)
    text = f"expected {_range(low, high)} {rows[0].unit} ({rows[0].source})"
    speed = _speed(rows[0], value, slow)
    if speed < LOOK_FROM:
        return "below", f"{speed:.2f} of the slowest known result, below {LOOK_FROM:.2f}: {text}"
    if speed < PASS_FROM:
        return "look", f"{speed:.2f} of the slowest known result, below {PASS_FROM:.2f}: {text}"
    if _speed(rows[0], value, fast) > LOOK_ABOVE:
        above = f"{_speed(rows[0], value, fast):.2f} of the fastest known result, above {LOOK_ABOVE:.2f}"
        return "look", f"{above}: {text}; the measurement is wrong, or the software newer than the row"
    return "pass", text


def _of_floor(row: Expectation, value: float) -> tuple[Answer, str]:
    speed = _speed(row, value, row.low)
    text = f"the minimum of {significant(row.low)} {row.unit} ({row.source})"
    if speed < 1:
        return "below", f"{speed:.2f} of {text}"
    return "not judged", f"above {text}, which does not show that the device is healthy"


def _of_own(row: Expectation, value: float, software: str) -> tuple[Answer, str]:
    assert row.spread is not None
    middle = math.sqrt(row.low * row.highest)
    slower = 1 / max(_speed(row, value, middle), 1e-12) - 1
    deviations = math.log(1 + slower) / row.spread if slower > -1 else 0.0
    text = f"own row {significant(middle)} {row.unit} of {row.date}, spread {100 * row.spread:.2g} %"
    if slower <= SLOWER_THAN or deviations <= DEVIATIONS:
        return "pass", text
    slow = f"{100 * slower:.1f} % slower ({deviations:.1f} standard deviations) than {text}"
    if row.software and row.software != software:
        return "look", f"{slow}; the row is for {row.software}, this run has {software or 'unknown software'}"
    return "below", slow


def _range(low: float, high: float) -> str:
    return significant(low) if low == high else f"{significant(low)} to {significant(high)}"


Mark = Literal["", "bad", "doubt"]
_SHOWN: Mapping[str, tuple[str, Mark]] = {"below": ("LOW", "bad"), "look": ("look", "doubt"), "pass": ("pass", "")}
_NAMED = 3  # Most questions and rows that one line lists.


@dataclass(frozen=True, kw_only=True)
class AnswerLine:
    """One line of text and its colour in a terminal."""

    text: str
    mark: Mark = ""


def verdict_of(judged: Sequence[Expected], withheld: Sequence[str] = (), *, may_judge_nothing: bool = False) -> str:
    """Return PASS or FAIL with its reason; with anything in ``withheld`` it is FAIL.

    Without any judged result it is FAIL, unless ``may_judge_nothing``.

    >>> verdict_of([])
    'FAIL: no result was judged by an expectation'
    """
    counts = Counter(entry.verdict for entry in judged)
    below, count = counts["below"], len(judged) - counts["not judged"]
    reasons = list(withheld)
    if below:
        reasons.insert(0, f"{below} of {plural(count, 'judged result')} below expectation")
    if not count and not may_judge_nothing:
        reasons.append("no result was judged by an expectation")
    if reasons:
        return f"FAIL: {'; '.join(reasons)}"
    looks = f", {counts['look']} to look at" if counts["look"] else ""
    return f"PASS: {plural(count, 'judged result')}{looks}, {counts['not judged']} not judged"


def answer_lines(judged: Sequence[Expected], width: int = 10**6) -> Iterator[AnswerLine]:
    """Yield a table with a line per judged question: best value, share of peak, expected range, share of it, verdict.

    A question is judged by its worst case; ``best`` is of all its cases.  The last line lists the other questions.
    """
    questions: dict[str, list[Expected]] = defaultdict(list)
    for entry in judged:
        questions[f"{entry.question} {entry.metric.name}"].append(entry)
    rows: list[tuple[tuple[str, ...], Mark, str]] = []
    unjudged: list[Expected] = []
    for cases in questions.values():
        worst = min(cases, key=lambda entry: (_WORST.index(entry.verdict), entry.speed or 9.9))
        if worst.verdict == "not judged":
            unjudged.append(worst)
            continue
        pick = max if worst.metric.better == "higher" else min
        best = pick(cases, key=lambda entry: entry.metric.value or 0.0)
        share, unit = best.metric.share_of_peak, worst.metric.unit
        low, high, speed = worst.low, worst.high, worst.speed
        span = "" if low is None or high is None else _range(low, high)
        word, mark = _SHOWN[worst.verdict]
        cells: tuple[str, ...] = (
            worst.question,
            f"{significant(best.metric.value or 0.0)} {best.metric.unit}{_of(best)}",
            f"{100 * share:.0f} %" if share is not None else "",
            f"{span} {unit}{_of(worst)}" if span else "",
            f"{speed:.2f}" if speed is not None else "",
            word,
        )
        rows.append((cells, mark, worst.reason if mark else ""))
    headings: tuple[str, ...] = ("question", "best", "of peak", "expected", "of low", "verdict")
    columns = [column for column in range(6) if any(cells[column] for cells, _, _ in rows)]
    table: list[tuple[tuple[str, ...], Mark, str]] = [(headings, "", ""), *rows] if rows else []
    widths = [max((len(cells[column]) for cells, _, _ in table), default=0) for column in range(6)]
    is_wide = sum(widths[column] + 2 for column in columns) - 2 > width
    for cells, mark, reason in table:
        if is_wide:
            yield AnswerLine(text=cells[0], mark=mark)
        shown = [cells[column].ljust(widths[column]) for column in (columns[1:] if is_wide else columns)]
        yield AnswerLine(text=("  " * is_wide + "  ".join(shown)).rstrip(), mark=mark)
        if reason:
            yield AnswerLine(text=f"    {reason}", mark=mark)
    if unjudged:
        named = listed([f"{entry.question} ({entry.reason})" for entry in unjudged], _NAMED, joint="; ")
        yield AnswerLine(text=f"not judged: {plural(len(unjudged), 'question')}: {named}", mark="doubt")


KEPT_FROM = 90.0
"""Percentage of the first minute's rate below which a soak is marked; assumed, without a published source."""


def soak_lines(results: Iterable[Result]) -> Iterator[AnswerLine]:
    """Yield a line for every sustained product, with the rates at its end and at its beginning."""
    for result in results:
        value = result.values.get("last_minute_percent")
        if value is not None:
            note = result.metric("last_minute_percent").note
            text = f"soak: the last minute has {value:.3g} % of the first one's rate{f' ({note})' if note else ''}"
            yield AnswerLine(text=f"{text}: {bare_name(result.case)}", mark="doubt" if value < KEPT_FROM else "")


def unused_line(rows: Sequence[Expectation], judged: Sequence[Expected], platform: str) -> str:
    """Return a line on own rows of this platform without a matching result; empty without any."""
    used = {row.place for entry in judged for row in entry.rows}
    unused = [row for row in rows if row.platform == platform and row.kind == "own" and row.place not in used]
    if not unused:
        return ""
    named = listed([f"{row.workload} {row.metric} ({row.place})" for row in unused], _NAMED)
    return f"{plural(len(unused), 'own row')} matched no result: {named}"


def _of(entry: Expected) -> str:
    return f" ({entry.size})" if entry.size else ""
