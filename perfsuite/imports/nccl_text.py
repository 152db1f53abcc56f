"""Text of nccl-tests and its forks in all versions: the runs of a log, their ranks and the rows of their tables.

A cut row is refused alone. Sources: nccl-tests 925a705 (2017) to a0b82b2 (2.19.6).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from perfsuite.imports.lines import Line
from perfsuite.imports.nccl_table import ROW, LogPoint, NcclTable, Unreadable, is_table
from perfsuite.imports.row import Refused, Source


@dataclass(frozen=True, kw_only=True)
class Log:
    """One run of nccl-tests."""

    points: tuple[LogPoint, ...]
    line: int = 1
    ranks: int | None  # Ranks of the communicator (of one of ``groups``); None if the log does not list them.
    complete: bool = True  # ``ranks`` is certain; otherwise it is the smallest possible number.
    groups: int = 1
    named: str = ""  # The program, if the log names it; else empty.
    named_line: int = 0  # Line of the command that names the program; 0 if nccl-tests itself names it.
    columns: frozenset[str] | None = None  # The columns redop and root of the table; None if unknown.
    units: bool = True
    deviations: bool = False
    """The last column is the largest deviation (before August 2022), not a count of wrong values."""
    cpu_time: bool = False  # The time is CPU time (option -C); bandwidths do not follow from it.
    verdict: str = ""  # OK or FAILED of the last lines.
    settings: Mapping[str, str] = field(default_factory=dict)
    refused: tuple[Refused, ...] = ()
    notes: tuple[str, ...] = ()


BEGIN = re.compile(r"\bnThread\s+(\d{1,6})\s+nGpus\s+(\d{1,6})\s+minBytes")
_RANK = re.compile(
    r"(?:#\s*(?=Rank)|(?=Rank\s+\d+\s+(?:Group|Pid)\s))Rank\s+(\d{1,6})\s+(?:Group\s+(\d{1,6})\s+)?(?:Pid\s+(\d+)\s+)?(\S)"
)
_RANK_INSIDE = re.compile(r"Rank\s+(\d{1,6})\s+(?:Group\s+(\d{1,6})\s+)?Pid\s+(\d+)\s+(on)\s.*")
"""A rank after another process's message on the same line."""
_RANK_LIKE = re.compile(r"\bdevice\s+\d+\s+\[[0-9a-f:.x]|\bPid\s+\d+\s+on\s")
_MESSAGE = re.compile(r"^$|[NRM]CCL|WARN|INFO|:\d+:\d+ |\w *: ")
_HEADINGS = re.compile(
    r"#(?:$|.*(?:out-of-place|size|\(B\)|Using devices|Out of bounds|Collective test|nThread|bandwidth))"
)
_STARTED = re.compile(r"# Collective test (?:starting|concluded):\s*(?:\S*/)?([a-z]\w*?)_perf(?:_\w+)?\s*$")
_COMMAND = re.compile(r"""(?:^|[\s/'"])([a-z]\w*?)_perf(?:_\w+)?(?=["']?(?:\s+-{1,2}[a-zA-Z]|\s*[\\>|&]|\s*$))""")
_BUILDING = re.compile(r"^\s*(?:Compiling|Linking|make|nvcc|g\+\+|mpicxx)\b")
_VERDICT = re.compile(r"# Out of bounds values\s*:\s*\d+\s+(OK|FAILED)")
_FAILURE = re.compile(r"Test (?:[A-Z]+ )?failure\b.*|Test timeout.*")
_FAILURE_AROUND = re.compile(
    r"\b(?:Segmentation fault|oom-kill|MPI_ABORT was invoked|mpirun noticed|CANCELLED AT|Killed|Aborted)\b.*|"
    r"srun: error: .*|\bunhandled (?:cuda|system) error.*|slurmstepd: error: .*"
)
_NEXT = re.compile(r"# (?:nccl-tests version|Collective test starting)")


def read_runs(source: Source) -> list[Log]:
    """Return every run of a log or of a pasted table. Raises ImportFailed without a table of nccl-tests."""
    runs = [_read_run(lines, before) for lines, before in _split(source.labelled)]
    if not runs:
        reason = (
            "no line '# nThread ... nGpus ...' and no table (size count type ...), so this is not a log of nccl-tests"
        )
        raise source.fault(1, reason, "name its format")
    return runs


def _split(labelled: Sequence[Line]) -> list[tuple[list[Line], list[Line]]]:
    begins = {line.label for line in labelled if BEGIN.search(line.text)}
    if len(begins) < 2:  # one line's label says nothing
        return _of_one(labelled, labelled)
    runs = [run for label in begins for run in _of_one([line for line in labelled if line.label == label], labelled)]
    return sorted(runs, key=lambda run: run[0][0].number)


def _of_one(lines: Sequence[Line], everything: Sequence[Line]) -> list[tuple[list[Line], list[Line]]]:
    """Split the lines of one process at ``# nThread``, and at tables without such a line before."""
    starts: list[tuple[int, int]] = []
    seen = ""
    has_begin = False
    last = 0
    listed: int | None = None  # The first rank below the end of a run: the list belongs to the next run.
    for index, line in enumerate(lines):
        rows = ROW.match(line.text) is not None
        begins = BEGIN.search(line.text) is not None
        ends = {"", "end"} if has_begin else {"", "end", "rows"}  # a second table before the end is of another process
        if begins or (is_table(line.text) and seen in ends) or (rows and not seen):
            starts.append((index if begins or listed is None else listed, last))
            seen, has_begin, listed = "begin", begins, None
        elif seen == "end" and listed is None and _RANK.match(line.text):
            listed = index
        if rows:
            seen = "rows"
        is_end = line.text.startswith(("# Out of bounds", "# Avg bus", "# Collective test concluded"))
        if is_end and seen == "rows":
            seen = "end"
        if rows or is_end:
            last = line.number
    runs = []
    for (start, end), (until, _) in zip(starts, [*starts[1:], (len(lines), 0)], strict=False):
        stop = next((at for at in range(start + 1, until) if _NEXT.match(lines[at].text)), until)
        chosen = list(lines[start:stop])
        before = [line for line in everything if end < line.number < chosen[0].number]
        is_empty = not any(_RANK.match(line.text) or is_table(line.text) or ROW.match(line.text) for line in chosen)
        if until == len(lines) or not is_empty or _failure(chosen):  # an empty one is a line that was printed twice
            runs.append((chosen, before))
    return runs


def _read_run(lines: Sequence[Line], before: Sequence[Line]) -> Log:
    try:
        return _run(lines, before)
    except Unreadable as error:
        number, reason, remedy = error.args
        refused = Refused(line=number, text="the whole run", why=f"{reason}; {remedy}")
        return Log(points=(), line=lines[0].number, ranks=None, refused=(refused,))


def _run(lines: Sequence[Line], before: Sequence[Line]) -> Log:
    sure = [match[1] for line in (*before, *lines) if (match := _STARTED.search(line.text))]
    if len(set(sure)) > 1:
        reason = f"two programs in one run, {' and '.join(sorted(set(sure)))}"
        raise Unreadable(lines[0].number, reason, "give a file for each")
    command, command_line = ("", 0) if sure else _command([*before, *lines])
    verdict = "".join(match[1] for line in lines if (match := _VERDICT.search(line.text)))
    failure = None if verdict else _failure(lines)
    table = NcclTable.of(lines)
    points: list[LogPoint] = []
    refused: list[Refused] = []
    seen: dict[str, int] = {}
    notes = list(table.notes)
    half: Line | None = None  # A row that another message may have broken.
    for line in table.lines:
        plain = " ".join(line.text.split())
        try:
            row = list(table.points(line))
        except ValueError as error:
            row = table.joined(half, line) if half else []
            if half and row:
                notes.append(f"lines {half.number} and {line.number} are one row that another message broke")
                refused.pop()
                points += row
                half = None
                continue
            half = line if ROW.match(line.text) else None
            refused.append(Refused(line=line.number, text=plain, why=str(error)))
            continue
        half = None if row else half
        if row and seen.setdefault(plain, line.number) != line.number:
            notes.append(f"line {line.number} repeats line {seen[plain]} word by word: left out")
        else:
            points += row
    if failure and points:
        refused.append(replace(failure, why=f"the run failed here: rows after line {points[-1].line} are missing"))
    elif failure:
        raise Unreadable(failure.line, f"the run failed (line {failure.line}: {failure.text})", "run it again")
    elif not points and not refused:
        if odd := next((line for line in lines if re.match(r"\s*[|\d][\d,.| ]+\s[\w| ]", line.text)), None):
            raise Unreadable(
                odd.number, f"{odd.text.strip()!r:.60} is not a row", "give rows as nccl-tests prints them"
            )
        raise Unreadable(lines[-1].number, "the log ends before the first row of its table", "give the rest of it")
    if not verdict and not failure:
        notes.append("the log ends before its last lines")
    has_begin = any(BEGIN.search(line.text) for line in lines)
    ranks, complete, groups, listed = _ranks(lines if has_begin else [*before, *lines])
    return Log(
        points=tuple(points),
        line=lines[0].number,
        ranks=ranks,
        complete=complete,
        groups=groups,
        named="".join(sure[:1]) or command,
        named_line=command_line,
        columns=table.columns,
        units=table.units,
        deviations=table.deviations,
        cpu_time=table.cpu_time,
        verdict="FAILED" if "FAILED" in verdict else verdict[:2],
        refused=tuple(refused),
        notes=(*notes, *listed),
    )


def _command(lines: Iterable[Line]) -> tuple[str, int]:
    """Return the program of the last command before the table, and its line; empty for a line with several."""
    found = ("", 0)
    for line in lines:
        if is_table(line.text) or ROW.match(line.text):
            break
        names = set(_COMMAND.findall(line.text)) if not _BUILDING.match(line.text) else set()
        if names:
            found = (names.pop(), line.number) if len(names) == 1 else ("", 0)
    return found


def _failure(lines: Sequence[Line]) -> Refused | None:
    for pattern in (_FAILURE, _FAILURE_AROUND):
        for line in lines:
            if match := pattern.search(line.text):
                return Refused(line=line.number, text=match[0].strip(), why="")
    return None


def _ranks(lines: Sequence[Line]) -> tuple[int | None, bool, int, list[str]]:
    """Return ranks of the communicator, whether they are certain, groups, and notes.

    nccl-tests omits a part of the list of a process above 2 KiB, and people shorten it too.
    """
    of_rank: dict[int, str] = {}
    groups: dict[int, int] = {}
    processes: set[str] = set()
    is_cut = False
    around = above = ""
    for line in lines:
        text = line.text.strip()
        if match := _RANK.match(text) or _RANK_INSIDE.search(text):
            rank, text = int(match[1]), match.string[match.start() :].lstrip("# ")
            if of_rank.get(rank, text) != text:
                reason = f"rank {rank} is listed twice, so processes that each ran alone print into one table"
                raise Unreadable(line.number, reason, "build nccl-tests with MPI=1, or give the log of one process")
            of_rank[rank] = above = text
            groups[rank] = int(match[2] or 0)
            processes.add(f"{match[3]} {text.partition(' on ')[2].split()[:1]}")
        elif _RANK_LIKE.search(text) or (around in ("rank", "#") and _is_rest(text, around, above)):
            is_cut = True
        if match or text == "# Using devices":
            around = "rank"
        elif text.startswith("#") or not _MESSAGE.search(text):
            around = "#" if text == "#" and around == "rank" else ""
    if not of_rank:
        return None, False, 1, []
    begin = next((match for line in lines if (match := BEGIN.search(line.text))), None)
    least = max(max(of_rank) + 1, len(processes) * int(begin[1]) * int(begin[2]) if begin else 0)
    notes = [f"the list of ranks has {len(of_rank)} of {least}"] if least > len(of_rank) else []
    sizes = Counter(groups.values())
    if len(sizes) == 1:
        return least, not is_cut, 1, notes
    if len(set(sizes.values())) > 1 or least > len(of_rank) or is_cut:
        reason = f"{len(sizes)} groups of NCCL_TESTS_SPLIT whose ranks cannot be counted"
        raise Unreadable(lines[0].number, reason, "give the whole list of ranks")
    return max(sizes.values()), True, len(sizes), notes


def _is_rest(text: str, before: str, above: str) -> bool:
    """Return whether a line below a rank is the rest of another rank's line: neither heading nor message."""
    if before == "#":
        return text == "#"
    if text.startswith("#"):
        return not _HEADINGS.match(text)
    return not _MESSAGE.search(text) and above.endswith(text.rsplit(maxsplit=1)[-1])
