"""The answer to "is this machine as fast as it should be?": a row per question, with its best figure.

A row has the share of the peak, the expected range where an expectation matches, the spread over devices, and LOW or
SLOW with the name of the device or link.  A disturbed figure is marked ``~`` and has no share of a peak.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from perfsuite.base.units import format_bytes, format_seconds, plural, significant
from perfsuite.metrics.disturbance import is_oversubscribed
from perfsuite.metrics.spec import on_every_device
from perfsuite.record.result import Result
from perfsuite.reports.devices import outliers
from perfsuite.reports.document import grouped
from perfsuite.reports.families import RATES, Figure, best, figure_of, is_kernel, memory_name
from perfsuite.reports.layout import fit
from perfsuite.reports.pairs import PairMatrix, pair_matrices
from perfsuite.statistics.robust import median

if TYPE_CHECKING:
    from perfsuite.expectations.judge import Expected

Mark = Literal["", "bad", "doubt", "good"]
MOST_ROWS = {"compute": 5, "memory": 4, "collectives": 4, "pairs": 2, "others": 3}
"""Rows of each family on a screen; further rows only if they are LOW or SLOW."""
_MOST_LINES = 18
_VERDICTS: Mapping[str, tuple[str, Mark]] = {"below": ("LOW", "bad"), "look": ("look", "doubt"), "pass": ("ok", "")}
_OF_PEAK = re.compile(r"^(\d+ %) (\w+)$")
_COLUMNS = ("question", "best", "of peak", "expected", "devices and links")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One row."""

    family: str  # A key of MOST_ROWS.
    question: str
    best: str
    share: str = ""  # Share of the peak, and the kind of the peak.
    expected: str = ""  # Expected range and the word of the verdict; empty if no expectation matches.
    note: str = ""  # Spread over devices, slow members by name, or the time of the smallest message.
    mark: Mark = ""


def expected_of(results: Iterable[Result]) -> list[Expected]:
    """Judge results by the shipped expectations of their platforms; empty on a platform without any."""
    from perfsuite.expectations.judge import differences, judge_one
    from perfsuite.expectations.rows import shipped_rows

    rows = grouped(((row.platform, row.workload), row) for row in shipped_rows() if row.kind != "floor")
    judged = []
    for one in results:
        related = rows.get((one.platform, one.workload.rpartition(":")[2]), ())
        equal = [row for row in related if not differences(row, one)]
        judged += [entry for entry in judge_one(one, equal) if entry.verdict != "not judged"] if equal else []
    return judged


def slow_lines(results: Sequence[Result]) -> list[str]:
    """Return a line per question that has a LOW result or a SLOW device; slow pairs are findings of their own."""
    bad = [row for row in answers(results, expected_of(results)) if row.mark == "bad" and row.family != "pairs"]
    rows = [(row.best, _OF_PEAK.sub(r"\1 of the \2 peak", row.share), row.expected, row.note) for row in bad]
    return [f"{row.question}: {', '.join(filter(None, figures))}" for row, figures in zip(bad, rows, strict=True)]


def answers(results: Iterable[Result], expected: Iterable[Expected] = ()) -> list[Answer]:
    """Return a row per question: kernels by dtype, memory, collectives, pairs, then other cases with an expectation."""
    measured = [result for result in results if result.outcome == "measured"]
    entries = grouped((entry.case, entry) for entry in expected if entry.verdict != "not judged")
    rows = [row for family, members in _questions(measured).items() for row in _answers(family, members, entries)]
    rows += [_of_pairs(matrix, entries) for matrix in pair_matrices(measured)]
    for left in list(entries.values()):
        word, mark = _expected(left, left[0].case)
        metric = left[0].metric
        best_text = f"{significant(metric.value or 0.0, 3)} {metric.unit}"
        rows.append(Answer(family="others", question=left[0].question, best=best_text, expected=word, mark=mark))
    return rows


_Cases = list[tuple[Result, Figure | None]]


def _questions(measured: Sequence[Result]) -> Mapping[str, Mapping[str, _Cases]]:
    found: dict[str, dict[str, _Cases]] = {"compute": {}, "memory": {}, "collectives": {}}
    for result in measured:
        work = result.work
        if is_kernel(result):
            family, name, figure = "compute", f"compute {work.dtype}", figure_of(result, *RATES)
        elif work.memory_path:
            family, name, figure = "memory", memory_name(result), figure_of(result, "gb_per_s")
        elif "capacity_gib" in result.values:
            family, name, figure = "memory", "capacity", figure_of(result, "capacity_gib")
        elif work.collective and work.collective != "pairs":
            family, name, figure = "collectives", work.collective, figure_of(result, "busbw_gb_per_s")
        else:
            continue
        found[family].setdefault(name, []).append((result, figure))
    return found


def _answers(family: str, questions: Mapping[str, _Cases], entries: dict[str, list[Expected]]) -> list[Answer]:
    if family == "collectives":
        return [_of_collective(name, members, entries) for name, members in questions.items()]
    picked = best((name, figure) for name, members in questions.items() for _, figure in members)
    made = []
    for name, figure in picked:
        cases = [result for result, _ in questions[name]]
        word, mark = _expected([entry for case in cases for entry in entries.pop(case.case, [])], figure.result.case)
        note, slow = _over_devices(cases)
        note = ", ".join(filter(None, (figure.burst, note)))
        shown = {"question": f"memory {name}" if family == "memory" else name, "best": figure.text, "note": note}
        mark = "bad" if slow else mark
        made.append(Answer(family=family, share=figure.share, expected=word, mark=mark, **shown))
    return made


def _of_collective(name: str, members: _Cases, entries: dict[str, list[Expected]]) -> Answer:
    """Return the bus bandwidth of the largest message on most ranks, and the time of the smallest on as many.

    Cases with more ranks than devices or cores are taken only if there are no others.
    """
    judged = [entry for result, _ in members for entry in entries.pop(result.case, [])]
    fitting = [member for member in members if not is_oversubscribed(member[0])]
    shared, members = "" if fitting else "oversubscribed", fitting or members
    ranks = max(result.world_size for result, _ in members)
    sized = [(result, figure) for result, figure in members if result.world_size == ranks and figure is not None]
    least = min((result for result, _ in members if result.world_size == ranks), key=lambda one: one.work.message_bytes)
    size = format_bytes(int(least.work.message_bytes)) if least.work.message_bytes else ""
    time_s = format_seconds(least.median_s, 3)
    asked = f"{name}, {plural(ranks, 'rank')}"
    if not sized:
        word, mark = _expected(judged, least.case)
        return Answer(family="collectives", question=asked, best=time_s, expected=word, note=shared, mark=mark)
    largest = max(result.work.message_bytes for result, _ in sized)
    ((_, figure),) = best(("", figure) for result, figure in sized if result.work.message_bytes == largest)
    word, mark = _expected(judged, figure.result.case)
    return Answer(
        family="collectives",
        question=f"{asked}, {format_bytes(int(largest))}",
        best=f"{figure.text} bus",
        share=figure.share,
        expected=word,
        note=", ".join(filter(None, [f"{size}: {time_s}" * (least.work.message_bytes < largest), shared])),
        mark=mark,
    )


def _of_pairs(matrix: PairMatrix, entries: dict[str, list[Expected]]) -> Answer:
    word, mark = _expected(entries.pop(matrix.case, []), matrix.case)
    unit = "us" if matrix.as_time else "GB/s"
    note = ""
    if matrix.slow:
        worst = matrix.slow[0]
        names = (" and " if matrix.both else " to ").join(matrix.names[rank] for rank in worst.pair)
        more = f" and {len(matrix.slow) - 1} more" if len(matrix.slow) > 1 else ""
        note = f"SLOW {names}: {worst.factor:.3g} x{more}"
    return Answer(
        family="pairs",
        question=f"pairs, {format_bytes(int(matrix.message_bytes))}{', both ways' if matrix.both else ''}",
        best=f"{matrix.figure(median(list(matrix.times_s.values())))} {unit}" if matrix.times_s else "-",
        expected=word,
        note=note,
        mark="bad" if matrix.slow else mark,
    )


def _expected(judged: Sequence[Expected], shown: str) -> tuple[str, Mark]:
    """Return the expected range with the word of the worst verdict, and its size if it is not of the case ``shown``."""
    if not judged:
        return "", ""
    worst = max(judged, key=lambda entry: (("pass", "look", "below").index(entry.verdict), -(entry.speed or 9.9)))
    word, mark = _VERDICTS[worst.verdict]
    size = f" ({worst.size})" if worst.size and worst.case != shown and worst.verdict != "pass" else ""
    if worst.low is None or worst.high is None:
        return f"{word}{size}", mark
    low, high = significant(worst.low, 3), significant(worst.high, 3)
    ends = low if low == high else f"{low}-{high}"
    return f"{ends} {worst.metric.unit} {word}{size}", mark


def _over_devices(cases: Sequence[Result]) -> tuple[str, bool]:
    """Return how far devices are apart that run the same kernel at once, and whether one of them is slow.

    Positive is faster than the median device.
    """
    together = filter(on_every_device, cases)
    case = max(together, key=lambda one: (one.world_size, one.median_s), default=None)
    ranks = case.measurement.ranks if case is not None and case.measurement is not None else ()
    if not ranks or min(rank.median_s for rank in ranks) <= 0:
        return "", False
    middle_s = median([rank.median_s for rank in ranks])
    several = len({rank.host for rank in ranks}) > 1
    odd = [rank for rank in outliers(ranks) if rank.median_s > middle_s]
    rest = [100 * (middle_s / rank.median_s - 1) for rank in ranks if rank not in odd]
    alike = abs(min(rest)) < 0.05 > abs(max(rest))
    apart = "alike" if alike else f"{min(rest):+.1f} to {max(rest):+.1f} %"
    slow = "".join(
        f", SLOW {f'{rank.host} ' if several else ''}{rank.device} {100 * (middle_s / rank.median_s - 1):+.1f} %"
        for rank in odd[:2]
    )
    more = f" and {len(odd) - 2} more" if len(odd) > 2 else ""
    return f"{plural(len(ranks), 'device')}{', others' if odd else ''} {apart}{slow}{more}", bool(odd)


def answer_lines(rows: Sequence[Answer], width: int) -> Iterator[tuple[str, Mark]]:
    """Yield the rows as a table of at most _MOST_LINES lines, each with its mark; the last line counts the others.

    Notes that are too wide for the terminal are below their row, and only those on slow members if lines are short.
    """
    shown: list[Answer] = []
    for family, most in MOST_ROWS.items():
        members = [row for row in rows if row.family == family]
        shown += [row for number, row in enumerate(members) if number < most or row.mark == "bad"]
    if not shown:
        return
    shown = sorted(shown, key=lambda row: row.mark != "bad")[:_MOST_LINES] if len(shown) > _MOST_LINES else shown
    cells = [(row.question, row.best, row.share, row.expected, row.note) for row in shown]
    columns = [index for index in range(len(_COLUMNS)) if index < 2 or any(row[index] for row in cells)]
    widths = [max(len(row[index]) for row in (_COLUMNS, *cells)) for index in range(len(_COLUMNS))]
    beside = sum(widths[index] + 2 for index in columns) - 2 <= width
    columns = columns if beside else [index for index in columns if index < 4]
    is_narrow = sum(widths[index] + 2 for index in columns) - 2 > width
    if is_narrow:  # the question on a line of its own
        shown = shown[: (_MOST_LINES - 2) // 2]
        columns = columns[1:]
        yield _COLUMNS[0], ""
    yield from ((line, "") for line in fit([f"{'  ' * is_narrow}{_joined(_COLUMNS, widths, columns)}"], width))
    spare = 0 if is_narrow else _MOST_LINES - len(cells)
    for row, texts in zip(shown, cells, strict=False):
        if is_narrow:
            yield row.question, row.mark
        for line in fit([f"{'  ' * is_narrow}{_joined(texts, widths, columns)}"], width):
            yield line, row.mark
        if not beside and row.note and (spare > 0 or row.mark == "bad"):
            spare -= 1
            yield f"    {row.note}", row.mark
    if len(rows) > len(shown):
        yield f"+ {plural(len(rows) - len(shown), 'more question')}", ""


def _joined(texts: Sequence[str], widths: Sequence[int], columns: Sequence[int]) -> str:
    return "  ".join(texts[index].ljust(widths[index]) for index in columns).rstrip()
