"""Deduce collective and ranks of a run of nccl-tests: from the log, else from its figures.

Figures are intervals of their printed digits: 0.57 over 0.42 is between 1.33 and 1.38.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from perfsuite.base.units import plural
from perfsuite.imports.nccl_table import KINDS, LogPoint, collective_named, factor, possible
from perfsuite.imports.nccl_text import Log
from perfsuite.imports.row import Source
from perfsuite.published.numbers import Interval, printed

MOST_RANKS = 1 << 14  # Largest number of ranks that is deduced.
_EVIDENCE = 16  # Number of rows used for a deduction, those with the most digits.
_SPARE = Fraction(1, 1000)  # Relative widening of an interval before a row counts as inconsistent.
_EXACT = 1e-9
_PROOF = 0.1  # Smallest algbw in GB/s whose two decimals prove the unit of the time.
_ONE = ("one rank: nothing is sent, so busbw is left out",)


@dataclass(frozen=True, kw_only=True)
class Found:
    """The collective and the ranks of a run."""

    collective: str  # Empty for one rank without a name: several collectives are equal then.
    ranks: int
    title: str  # The collective, or all possible ones.
    notes: tuple[str, ...] = ()


def figure(text: str) -> Interval:
    """Return the interval of a printed figure, without negative values."""
    number = printed(text).number()
    if number is None:
        return Interval.exactly(Fraction(0))
    return Interval(low=max(Fraction(0), number.interval.low), high=max(Fraction(0), number.interval.high))


def from_time(point: LogPoint) -> Interval | None:
    """Return size over time in GB/s; None if the time may be 0."""
    return Interval.exactly(Fraction(point.size, 1000 * point.time_unit_us)).over(figure(point.printed[0]))


def meets(one: Interval, other: Interval) -> bool:
    """Return whether two figures can be equal, with 0.1 % tolerance beyond the printed digits."""
    return one.meets(Interval(low=other.low * (1 - _SPARE), high=other.high * (1 + _SPARE)))


def decide(source: Source, log: Log, points: Sequence[LogPoint]) -> Found:
    """Return collective and ranks of a run. Raises ImportFailed with the missing option if they are ambiguous."""
    rows = _evidence(log, points)
    if not log.units and not any(row[0] >= _PROOF for row in rows):
        reason = f"the units are missing, and no row has an algbw of {_PROOF} and more to prove them by size over time"
        raise source.fault(log.line, reason, "keep the whole header")
    names, is_named = _names(source, log, points)
    options, notes = _options(source, log, points)
    if is_named and names[0] not in ("all_to_all", "sendrecv") and _is_unchecked(points):
        notes = [*notes, f"in place was not checked, as of all_to_all and sendrecv only: is it {names[0]}?"]
    fits = _best(names, options, rows)
    if not fits and log.ranks and log.complete and not source.options.ranks:
        more = _best(names, range(log.ranks + 1, MOST_RANKS), rows)
        if len(more) == 1:  # a line of the list is lost
            fits, notes = more, [f"{log.ranks} lines of ranks, but busbw / algbw fits {more[0][1]} ranks"]
    kinds = list(dict.fromkeys(name for name, _ in fits))
    counts = sorted({ranks for _, ranks in fits})
    if len(kinds) == 1 and log.ranks in counts and factor(kinds[0], 2) != factor(kinds[0], 3):
        counts = [log.ranks]  # the least that the list allows
    if counts == [1]:
        return Found(collective=kinds[0] if len(kinds) == 1 else "", ranks=1, title=" or ".join(kinds), notes=_ONE)
    if len(kinds) == 1 and len(counts) == 1:
        deduced = () if log.ranks or source.options.ranks else (f"ranks deduced from busbw / algbw: {counts[0]}",)
        return Found(collective=kinds[0], ranks=counts[0], title=kinds[0], notes=(*notes, *deduced))
    if is_named and not fits and log.ranks and not source.options.collective and not log.named_line:
        return Found(collective=names[0], ranks=log.ranks, title=names[0], notes=tuple(notes))
    largest = max(points, key=lambda point: point.size)
    algbw, busbw = (float(text) for text in largest.printed[1:])
    ratio = f"busbw / algbw is {busbw / algbw:.3f}" if algbw > 0 else "busbw / algbw is 0 / 0"
    ranks = source.options.ranks or log.ranks
    if not kinds:
        where = (
            f"line {log.named_line} runs {names[0]}, but " if log.named_line and not source.options.collective else ""
        )
        expected = ", ".join(f"of {name} {factor(name, ranks):.3f}" for name in names) if ranks else " and ".join(names)
        others = [] if not ranks else [name for name, _ in _best(KINDS, range(ranks, ranks + 1), rows)]
        on_ranks = f" on {plural(ranks, 'rank')}" if ranks else ""
        reason = f"{where}{ratio}, that {expected or 'of no collective'}{on_ranks}"
        raise source.fault(largest.line, reason, f"it may be {' or '.join(others) or 'of other ranks: --ranks N'}")
    if len(kinds) == 1:
        span = f"{counts[0]} to {counts[-1]} ranks" if counts[-1] < MOST_RANKS - 1 else f"{counts[0]} ranks and more"
        reason = f"the log does not say how many ranks there were, and busbw / algbw of {kinds[0]} fits {span}"
        raise source.fault(largest.line, reason, "say it: --ranks N")
    reason = f"the log does not name its collective, and busbw / algbw fits {' and '.join(kinds)}"
    raise source.fault(largest.line, reason, f"say which: --collective NAME{'' if ranks else ' --ranks N'}")


def _names(source: Source, log: Log, points: Sequence[LogPoint]) -> tuple[tuple[str, ...], bool]:
    """Return the possible collectives of the run, and whether the log names it."""
    asked, named = collective_named(source.options.collective), collective_named(log.named)
    if source.options.collective and not asked:
        reason = f"--collective {source.options.collective!r} is none of {', '.join(KINDS)}"
        raise source.fault(log.line, reason, "choose one of these")
    where = f"line {log.named_line} runs" if log.named_line else "the log is of"
    if log.named and not named and not log.named_line:
        reason = f"the log is of {log.named}, which is none of {', '.join(KINDS)}"
        raise source.fault(log.line, reason, "give the log of another collective")
    if named and asked and named != asked:
        raise source.fault(
            log.named_line or log.line, f"{where} {named}, --collective says {asked}", "leave the option out"
        )
    if asked or (named and not log.named_line):
        return (named or asked,), True
    names = possible(
        operation=points[-1].operation != "", root=points[-1].root, columns=log.columns, unchecked=_is_unchecked(points)
    )
    if named and named not in names:  # the name in a command may be cut
        reason = f"{where} {named}, whose rows have another operation, root or check"
        raise source.fault(log.named_line, reason, f"say which: --collective {' or '.join(names) or 'NAME'}")
    return ((named,), True) if named else (names, False)


def _is_unchecked(points: Sequence[LogPoint]) -> bool:
    """Return whether values were checked out of place only, as in all_to_all and sendrecv."""
    sides = {side: [point.wrong for point in points if point.in_place == side] for side in (False, True)}
    return bool(sides[False]) and "N/A" not in sides[False] and set(sides[True]) == {"N/A"}


def _options(source: Source, log: Log, points: Iterable[LogPoint]) -> tuple[range, list[str]]:
    asked = source.options.ranks
    if asked and log.ranks and (asked < log.ranks or (log.complete and asked != log.ranks)):
        reason = f"the log has {log.ranks} ranks, --ranks says {asked}"
        raise source.fault(log.line, reason, "leave the option out")
    if asked:
        return range(asked, asked + 1), []
    if log.ranks and log.complete:
        return range(log.ranks, log.ranks + 1), []
    shares = {share for point in points if (share := _share(point)) is not None}
    if shares and 1 not in shares and len(shares) == 1 and (most := shares.pop()) >= (log.ranks or 2):
        return range(most, most + 1), [f"{most} ranks, because size over count and type is {most}"]
    if log.ranks:
        return range(log.ranks, MOST_RANKS), [f"a line of the list of ranks is cut: at least {log.ranks}"]
    return range(1, MOST_RANKS), []


BYTES = {
    **dict.fromkeys(("int8", "uint8", "char", "f8e4m3", "f8e5m2", "fp8_e4m3", "fp8_e5m2"), 1),
    **dict.fromkeys(("half", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "int", "float"), 4),
    **dict.fromkeys(("int64", "uint64", "double"), 8),
}
"""Bytes of an element by the type names of nccl-tests."""


def _share(point: LogPoint) -> int | None:
    """Return size over the bytes of count elements: 1, or the ranks if count is per rank; None if unknown."""
    whole = (point.count or 0) * BYTES.get(point.dtype, 0)
    return point.size // whole if whole and point.size % whole == 0 else None


_Bounds = tuple[float, float, float, float]


def _evidence(log: Log, points: Iterable[LogPoint]) -> list[_Bounds]:
    """Return lowest and highest algbw and busbw of rows whose algbw equals size over time, the narrowest first."""
    rows: list[_Bounds] = []
    for point in points:
        algbw, busbw = (figure(text) for text in point.printed[1:])
        exact = None if log.cpu_time else from_time(point)
        if exact is None and not log.cpu_time:
            continue
        if exact is not None:
            if not algbw.meets(exact):
                continue
            algbw = Interval(low=max(algbw.low, exact.low), high=min(algbw.high, exact.high))
        if algbw.high > 0:
            rows.append((float(algbw.low), float(algbw.high), float(busbw.low), float(busbw.high)))
    return sorted(rows, key=lambda row: (row[1] - row[0]) / row[1])[:_EVIDENCE]


def _best(names: Iterable[str], options: range, rows: Sequence[_Bounds]) -> list[tuple[str, int]]:
    """Return the collectives and ranks that fit the most rows, and more than half of them."""
    best, found = 0, list[tuple[str, range]]()
    for name in names:
        spans = [_span(name, row, options) for row in rows]
        starts = sorted({options.start, *(n for span in spans for n in (span.start, span.stop) if n in options)})
        for start, stop in zip(starts, [*starts[1:], options.stop], strict=True):
            count = sum(start in span for span in spans)
            if count > best:
                best, found = count, []
            if count == best:
                found.append((name, range(start, stop)))
    if rows and 2 * best <= len(rows):
        return []
    return [(name, ranks) for name, span in found for ranks in span]


def _span(name: str, row: _Bounds, options: range) -> range:
    """Return the numbers of ranks whose factor lies between the lowest and the highest ratio of a row."""
    low, high, least, most = row
    bottom = least * (1 - _EXACT) / high
    top = most * (1 + _EXACT) / low if low > 0 else math.inf
    if factor(name, 2) == factor(name, 3):
        return options if bottom <= factor(name, 2) <= top else range(0)
    whole = 2 * factor(name, 2)  # the factor is whole x (n - 1) / n
    if bottom >= whole or top < 0:
        return range(0)
    first = math.ceil(whole / (whole - bottom) - _EXACT) if bottom > 0 else 1
    last = math.floor(whole / (whole - top) + _EXACT) if top < whole else options.stop - 1
    return range(max(first, options.start), min(last + 1, options.stop))
