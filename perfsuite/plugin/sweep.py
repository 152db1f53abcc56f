"""Turn the decorators of a test function into a sweep of sizes, world sizes and dtypes, with the ids of the cases.

:mod:`.collect` adds platform, scale and skips; this module does not depend on the machine.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from perfsuite.base.errors import ConfigurationError
from perfsuite.base.units import format_bytes, parse_bytes
from perfsuite.plugin.decorators import ACCEPTANCE, DTYPES, SIZES, WORLD_SIZES
from perfsuite.record.workload import DTYPES as KNOWN_DTYPES

Scale = Literal["full", "small"]
More = Literal[False, True, "whole"]

DEFAULT_DTYPE = "fp32"  # The dtype of a test that takes ``dtype`` without ``@dtypes``.

SHORT_NAMES = {"perf_platform": "platform", "perf_ranks": "ranks"}  # perfsuite's fixtures and their short names.

_SHAPE = re.compile(r"\d+(x\d+)+")
_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*")
_MISWRITTEN = re.compile(r"[\dx.+-]+|\d+(\.\d+)?[KMGT]i?B")
"""Words that look like names and are mistakes: a misspelt shape, or bytes for a parameter that takes none."""
MOST_DOUBLED = 256
"""Ranks of the largest published run: world sizes are doubled up to it, then the whole launch follows."""


@dataclass(frozen=True, kw_only=True)
class LaunchSizes:
    """The world sizes of a run: requested by an option, or limited by the devices."""

    asked: tuple[int, ...] = ()  # World sizes of --perf-world-sizes.
    capacity: int = 0  # Ranks of the launch, else devices of the host if ranks do not share them; 0: no limit.
    whole: int = 0
    """Ranks of a test on all devices: ``capacity``, or the devices of the vendor's host for other platforms."""

    def instead_of(self, counts: tuple[int, ...], largest: int, more: More = True) -> tuple[int, ...]:
        """Return the world sizes of a test with ``counts``, extended above ``largest``, its largest count at any scale.

        >>> LaunchSizes(capacity=24).instead_of((2, 4, 8), 2), LaunchSizes(asked=(1, 16)).instead_of((2, 4, 8), 2)
        ((2, 4, 8, 16, 24), (16,))
        >>> LaunchSizes(capacity=24, whole=24).instead_of((2,), 2, "whole")
        (2, 24)
        """
        largest = max(counts, default=largest)
        if self.asked:
            # A test does not run on fewer ranks than its own counts.
            least = min(counts, default=largest + 1)
            return tuple(count for count in self.asked if count >= least)
        if more == "whole":
            return (*counts, self.whole) if self.whole > largest else counts
        return counts + doubled(largest, self.capacity)


ANY_HOST = LaunchSizes()  # World sizes without an option and without a limit.


def doubled(beyond: int, capacity: int) -> tuple[int, ...]:
    """Return the world sizes above ``beyond``: doubled up to MOST_DOUBLED, then ``capacity``.

    >>> doubled(8, 24), doubled(8, 8), doubled(8, 600)
    ((16, 24), (), (16, 32, 64, 128, 256, 600))
    """
    most = min(capacity - 1, MOST_DOUBLED)
    steps = itertools.takewhile(lambda count: count <= most, (beyond * 2**power for power in itertools.count(1)))
    return (*steps, capacity) if capacity > beyond else ()


@dataclass(frozen=True, kw_only=True)
class Size:
    """One value of a size parameter."""

    value: Any  # Value for the test: bytes, a tuple of integers, an integer or a name.
    id: str  # Part of the id of the case.


@dataclass(frozen=True, kw_only=True)
class SweepPoint:
    """One combination of a sweep, without the platform."""

    world_size: int | None  # None for a test without ``ranks``.
    values: tuple[Any, ...]
    """Values of the arguments after platform and ranks, in the order of :attr:`Sweep.arguments`."""
    id: str  # Tokens after the platform, joined by ``-``; empty when there are none.
    extended: bool = False  # Whether the case has the marker ``perf_extended``.
    acceptance: bool = False  # Whether the case has the marker ``acceptance``.
    needs: int = 1  # Ranks of the case, from ``ranks`` or from its size.


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The sweep of one test function, from its decorators."""

    world_sizes: tuple[int, ...] = ()  # Empty for a test without ``ranks``.
    full_world_sizes: tuple[int, ...] = ()  # World sizes of the full scale.
    more: More = False  # World sizes that are added by the launch: none, doubled ones, or only the largest (``whole``).
    extended: tuple[int, ...] = ()  # World sizes whose cases have the marker ``perf_extended``.
    size_param: str = ""  # Name of the argument that takes the size; empty without ``@sizes``.
    full: tuple[Size, ...] = ()
    small: tuple[Size, ...] = ()
    extended_sizes: tuple[Size, ...] = ()  # Small sizes whose cases have the marker ``perf_extended``.
    ranks_of: Callable[[Any], int] | None = None  # Ranks by size, for a test without ``ranks``.
    dtypes: tuple[str, ...] = ()
    only_at: Size | None = None  # The only size for dtypes after the first.
    acceptance: tuple[Size, ...] | None = None
    """The acceptance run takes the first of these that the scale has; empty: all sizes; None: no case."""

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of the arguments after platform and ranks."""
        return tuple(filter(None, (self.size_param, "dtype" * bool(self.dtypes))))

    def points(self, scale: Scale, there: LaunchSizes = ANY_HOST) -> Iterator[SweepPoint]:
        """Yield every combination at this scale, ordered by world size.

        Raises ConfigurationError for a combination that occurs twice: two cases would have one id.
        """
        seen: set[str] = set()
        for point in self._points(scale, there):
            if point.id in seen:
                raise ConfigurationError(f"makes the case {point.id!r} twice; give every world size and size once")
            seen.add(point.id)
            yield point

    def _points(self, scale: Scale, there: LaunchSizes) -> Iterator[SweepPoint]:
        sizes: Sequence[Size | None] = (self.full if scale == "full" else self.small) or (None,)
        counts: tuple[int | None, ...] = (None,)
        if self.world_sizes:
            named = self.full_world_sizes if scale == "full" else self.world_sizes
            counts = there.instead_of(named, max(self.world_sizes), self.more) if self.more else named
        room = [count for count in counts if count is not None and not 0 < there.capacity < count]
        widest = max(room, default=None)
        accepted_size = next((size for size in self.acceptance or () if size in sizes), None)
        for world_size in counts:
            further = world_size is not None and world_size > max(self.world_sizes)
            rest_extended = not there.asked if self.more == "whole" else bool(self.extended)
            is_extended = world_size in self.extended or (further and rest_extended)
            for size in sizes:
                for index, dtype in enumerate(self.dtypes or (None,)):
                    if index and self.only_at is not None and size != self.only_at:
                        break
                    tokens = (f"ws{world_size}" if world_size else "", size.id if size else "", dtype or "")
                    values = (size.value,) if size else ()
                    accepted = self.acceptance is not None and world_size == widest and not index
                    yield SweepPoint(
                        world_size=world_size,
                        values=(*values, dtype) if dtype else values,
                        id="-".join(token for token in tokens if token),
                        extended=is_extended or size in self.extended_sizes,
                        acceptance=accepted and (not self.acceptance or size == accepted_size),
                        needs=world_size or (self.ranks_of(size.value) if size and self.ranks_of else 1),
                    )


_SET_ON_CASES = {
    "perf_world_size": "write @world_sizes(2) of perfsuite for two ranks",
    "perf_platform": "leave it out, and select with --perf-platform or -m",
}


def read_sweep(
    definition: pytest.Item, arguments: Collection[str], parametrized: Collection[str], foreign: Collection[str] = ()
) -> Sweep:
    """Return the sweep that a test function's decorators describe.

    ``arguments`` are the fixtures of the test, ``parametrized`` those that have values from other decorators, and
    ``foreign`` the short names that are not perfsuite's fixtures in this test.  Raises ConfigurationError for
    decorators that contradict each other or the function.
    """
    for name, remedy in _SET_ON_CASES.items():
        if definition.get_closest_marker(name):
            raise ConfigurationError(f"has the marker {name}, which perfsuite sets itself on each case; {remedy}")
    size_mark = _only_mark(definition, SIZES, "sizes")
    rank_mark = _only_mark(definition, WORLD_SIZES, "world_sizes")
    dtype_mark = _only_mark(definition, DTYPES, "dtypes")
    param, full, small, extended_sizes = _read_sizes(size_mark)
    world_sizes, extended = _read_world_sizes(rank_mark)
    options = rank_mark.kwargs if rank_mark else {}
    names: tuple[str, ...] = ()
    only_at = None
    accepted = _read_acceptance(_only_mark(definition, ACCEPTANCE, "acceptance"), param, full + small)
    if dtype_mark:
        names, only_at = _read_dtypes(dtype_mark, param, full + small)
    elif "dtype" in arguments and "dtype" not in parametrized:
        names = (DEFAULT_DTYPE,)
    arguments = set(arguments) - set(foreign)
    ranks = "perf_ranks" if "perf_ranks" in arguments or "ranks" in foreign else "ranks"
    decorated = (("sizes", param), ("world_sizes", ranks if world_sizes else ""), ("dtypes", "dtype" if names else ""))
    for decorator, argument in decorated:
        if argument and argument not in arguments:
            raise ConfigurationError(
                f"@{decorator} sets {argument!r}, which the test does not take; add it to the arguments of the test"
            )
        if argument in parametrized:
            raise ConfigurationError(f"@{decorator} and a parametrization both set {argument!r}; keep one of them")
    if ranks in arguments and not world_sizes and ranks not in parametrized:
        raise ConfigurationError(
            f"takes {ranks} without a number of them; add for example @world_sizes(2, 4), or drop it for one rank"
        )
    return Sweep(
        world_sizes=world_sizes,
        full_world_sizes=world_sizes if options.get("full") is None else options["full"],
        more=options.get("more", False),
        extended=extended,
        size_param=param,
        full=full,
        small=small,
        extended_sizes=extended_sizes,
        ranks_of=size_mark.kwargs["ranks"] if size_mark else None,
        dtypes=names,
        only_at=only_at,
        acceptance=accepted,
    )


def _only_mark(definition: pytest.Item, name: str, decorator: str) -> pytest.Mark | None:
    marks: list[tuple[pytest.Item | pytest.Collector, pytest.Mark]] = []
    for node, mark in definition.iter_markers_with_node(name=name):
        if marks and node is not marks[0][0]:
            break
        marks.append((node, mark))  # type: ignore[arg-type] # pytest types the node as its base class
    if len(marks) > 1:
        raise ConfigurationError(f"is decorated with @{decorator} {len(marks)} times; decorate once, with all values")
    if marks and "decorated" not in marks[0][1].kwargs:
        raise ConfigurationError(f"has the marker {name} without its data; write @{decorator}(...) of perfsuite")
    return marks[0][1] if marks else None


def _read_sizes(mark: pytest.Mark | None) -> tuple[str, tuple[Size, ...], tuple[Size, ...], tuple[Size, ...]]:
    """Return (argument, full sizes, small sizes, extended ones of the small sizes)."""
    if mark is None:
        return "", (), (), ()
    param = mark.kwargs["param"]
    if not isinstance(param, str) or not param.isidentifier():
        raise ConfigurationError(f"@sizes: param={param!r} is not the name of an argument of the test")
    scales = []
    for scale in ("full", "small"):
        written = mark.kwargs[scale]
        if isinstance(written, str) or not isinstance(written, Sequence) or not written:
            raise ConfigurationError(f"@sizes: {scale}={written!r} is not a list of sizes; write {scale}=[...]")
        read = tuple(_read_size(size, param) for size in written)
        _refuse_repetition("sizes", [size.id for size in read])
        scales.append(read)
    extended = tuple(_read_size(size, param) for size in mark.kwargs["extended"])
    _require_among("sizes", "extended", list(mark.kwargs["extended"]), extended, scales[1])
    return param, scales[0], scales[1], extended


def _require_among(decorator: str, name: str, written: object, chosen: Sequence[Size], choices: Sequence[Size]) -> None:
    if not set(chosen) <= set(choices):
        raise ConfigurationError(
            f"@{decorator}: {name}={written!r} is not among the sizes of @sizes; "
            f"choose from {', '.join(dict.fromkeys(size.id for size in choices))}"
        )


def _read_size(written: object, param: str) -> Size:
    if param.endswith("_bytes"):
        if isinstance(written, int) and not isinstance(written, bool) and written >= 0:
            return Size(value=written, id=format_bytes(written))
        if isinstance(written, str):
            count = parse_bytes(written)
            return Size(value=count, id=format_bytes(count))
    elif isinstance(written, bool):
        pass
    elif isinstance(written, int):
        return Size(value=written, id=str(written))
    elif isinstance(written, str) and _SHAPE.fullmatch(written):
        return Size(value=tuple(int(part) for part in written.split("x")), id=written)
    elif isinstance(written, str) and _NAME.fullmatch(written) and not _MISWRITTEN.fullmatch(written):
        return Size(value=written, id=written)
    elif isinstance(written, tuple) and written and all(type(part) is int for part in written):
        return Size(value=written, id="x".join(str(part) for part in written))
    raise ConfigurationError(
        f"@sizes: {written!r} is not a size for {param}; write "
        + ("bytes such as '64MiB'" if param.endswith("_bytes") else "1024, '1024x512', (1024, 512) or a name")
    )


def _read_world_sizes(mark: pytest.Mark | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if mark is None:
        return (), ()
    counts: tuple[int, ...] = mark.kwargs["counts"]
    decorator = f"@world_sizes({', '.join(map(repr, counts))})"
    if not counts or any(type(count) is not int or count < 1 for count in counts):
        raise ConfigurationError(f"{decorator}: every world size is a whole number of at least 1")
    _refuse_repetition("world_sizes", [str(count) for count in counts])
    extended: tuple[int, ...] = mark.kwargs["extended"]
    if not set(extended) <= set(counts):
        raise ConfigurationError(
            f"{decorator}: extended={list(extended)} is not among the world sizes; choose from them"
        )
    more = mark.kwargs["more"]
    if more not in (False, True, "whole"):
        raise ConfigurationError(f"{decorator}: more={more!r} is unknown; choose True, 'whole' or leave it out")
    full = mark.kwargs["full"]
    if full and any(type(count) is not int or count < 1 for count in full):
        raise ConfigurationError(f"@world_sizes: full={full!r}: every world size is a whole number of at least 1")
    _refuse_repetition("world_sizes", [str(count) for count in full or ()])
    return counts, extended


def _read_dtypes(mark: pytest.Mark, param: str, sizes: tuple[Size, ...]) -> tuple[tuple[str, ...], Size | None]:
    names: tuple[str, ...] = mark.kwargs["names"]
    for name in names:
        if name not in KNOWN_DTYPES:
            raise ConfigurationError(f"@dtypes: {name!r} is unknown; choose from {', '.join(KNOWN_DTYPES)}")
    if not names:
        raise ConfigurationError('@dtypes() has no dtype; write for example @dtypes("fp32", "bf16")')
    _refuse_repetition("dtypes", list(names))
    written = mark.kwargs["only_at"]
    if written is None:
        return names, None
    if not param:
        raise ConfigurationError(f"@dtypes: only_at={written!r} is a size; add @sizes, or leave it out")
    only_at = _read_size(written, param)
    _require_among("dtypes", "only_at", written, [only_at], sizes)
    return names, only_at


def _read_acceptance(mark: pytest.Mark | None, param: str, sizes: Sequence[Size]) -> tuple[Size, ...] | None:
    if mark is None:
        return None
    written: tuple[Any, ...] = mark.kwargs["sizes"]
    if written and not param:
        raise ConfigurationError(f"@acceptance: {written[0]!r} is a size; add @sizes, or leave it out")
    chosen = tuple(_read_size(size, param) for size in written)
    _require_among("acceptance", "sizes", list(written), chosen, sizes)
    return chosen


def _refuse_repetition(decorator: str, ids: list[str]) -> None:
    twice = sorted({name for name in ids if ids.count(name) > 1})
    if twice:
        raise ConfigurationError(f"@{decorator} has {', '.join(twice)} twice; write each once")
