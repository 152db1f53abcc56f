"""Text of nccl-tests and of its forks, of all ages: the runs of a log, their ranks and the rows of their tables.

A row is read from its right end, because columns were added on the left and a blank operation shifts them.  A line
that is cut or broken by another message is refused alone.  Sources: nccl-tests 925a705 (2017) to a0b82b2 (2.19.6).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from perfsuite.imports.lines import Line
from perfsuite.imports.row import Refused, Source


@dataclass(frozen=True, kw_only=True)
class LogPoint:
    """One size, one side."""

    line: int
    size: int
    count: int | None = None
    """Elements, where the log has them."""
    dtype: str
    operation: str
    """Empty where none is printed."""
    root: int | None
    in_place: bool
    time_us: float
    printed: tuple[str, str, str]
    """Time, algbw, busbw."""
    time_unit_us: int = 1
    """Microseconds per unit of the printed time: 1,000 before NCCL 2.5."""
    wrong: str
    """Wrong values, or the largest deviation; N/A where nothing was checked."""


@dataclass(frozen=True, kw_only=True)
class Log:
    """One run of nccl-tests."""

    points: tuple[LogPoint, ...]
    line: int = 1
    """Line that the run begins at."""
    ranks: int | None
    """Ranks of the communicator (of one of ``groups``); None where the log does not say."""
    complete: bool = True
    """Whether ``ranks`` is certain; else it is the least possible."""
    groups: int = 1
    named: str = ""
    """The program, where the log names it; else empty."""
    named_line: int = 0
    """Line of the command that names the program; 0 where nccl-tests itself does."""
    columns: frozenset[str] | None = None
    """Those of redop and root that the table has; None where this is unknown."""
    units: bool = True
    """Whether the table states its units."""
    deviations: bool = False
    """The last column is the largest deviation (before August 2022), not a count of wrong values."""
    cpu_time: bool = False
    """The time is that of the CPU (option -C); bandwidths are not counted from it."""
    verdict: str = ""
    """OK or FAILED, as the last lines say."""
    settings: Mapping[str, str] = field(default_factory=dict)
    refused: tuple[Refused, ...] = ()
    notes: tuple[str, ...] = ()


BEGIN = re.compile(r"\bnThread\s+(\d+)\s+nGpus\s+(\d+)\s+minBytes")
_RANK = re.compile(
    r"(?:#\s*(?=Rank)|(?=Rank\s+\d+\s+(?:Group|Pid)\s))Rank\s+(\d+)\s+(?:Group\s+(\d+)\s+)?(?:Pid\s+(\d+)\s+)?(\S)"
)
_RANK_INSIDE = re.compile(r"Rank\s+(\d+)\s+(?:Group\s+(\d+)\s+)?Pid\s+(\d+)\s+(on)\s.*")
"""A rank behind the message of another process on one line."""
_RANK_LIKE = re.compile(r"\bdevice\s+\d+\s+\[[0-9a-f:.x]|\bPid\s+\d+\s+on\s")
_MESSAGE = re.compile(r"^$|[NRM]CCL|WARN|INFO|:\d+:\d+ |\w *: ")
_HEADINGS = re.compile(
    r"#(?:$|.*(?:out-of-place|size|\(B\)|Using devices|Out of bounds|Collective test|nThread|bandwidth))"
)
_STARTED = re.compile(r"# Collective test (?:starting|concluded):\s*(?:\S*/)?([a-z]\w*?)_perf(?:_\w+)?\s*$")
_COMMAND = re.compile(r"""(?:^|[\s/'"])([a-z]\w*?)_perf(?:_\w+)?(?=["']?(?:\s+-{1,2}[a-zA-Z]|\s*[\\>|&]|\s*$))""")
_BUILDING = re.compile(r"^\s*(?:Compiling|Linking|make|nvcc|g\+\+|mpicxx)\b")
_NAME = re.compile(r"#?[a-z][a-z0-9_]*%?")
_ROW = re.compile(r"^\s*\d+\s+\d+\s+[a-z]\w*\s")
_INSIDE = re.compile(r"(?<=\s)\d+\s+\d+\s+(?:u?int\d*|float\w*|double|half|bfloat16|f8\w+|fp8\w*)\s.*$")
"""A row behind the message of another process on one line."""
_STAMP = re.compile(r"\s+\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d\S*\s*$")
"""Option -S of newer versions prints it after a row; older ones print it before."""
_VERDICT = re.compile(r"# Out of bounds values\s*:\s*\d+\s+(OK|FAILED)")
_FAILURE = re.compile(r"Test (?:[A-Z]+ )?failure\b.*|Test timeout.*")
_FAILURE_AROUND = re.compile(
    r"\b(?:Segmentation fault|oom-kill|MPI_ABORT was invoked|mpirun noticed|CANCELLED AT|Killed|Aborted)\b.*|"
    r"srun: error: .*|\bunhandled (?:cuda|system) error.*|slurmstepd: error: .*"
)
_NEXT = re.compile(r"# (?:nccl-tests version|Collective test starting)")
_FIGURE = re.compile(r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|N/A|[-+]?nan|[-+]?inf", re.IGNORECASE)
_OPERATIONS = frozenset({"sum", "prod", "max", "min", "avg", "mulsum", "none"})
_FIRST_HALF = re.compile(
    rf"\s*\d+\s+\d+\s+[a-z]\w*(?=\s)(?:\s+(?:{'|'.join(sorted(_OPERATIONS))})(?=\s))?"
    r"(?:\s+(?:-1(?!\d)|\d+(?:\.\d+)?(?=\s|$)))*"
)
"""The beginning of a row up to the message that broke it; -1 is the last figure that a message may touch."""
_UNITS = frozenset({"B", "elements", "us", "GB/s", "%"})
_OLDEST = ["bytes", "N", "type"]
"""Names of the first columns before NCCL 2.5, whose times are in ms."""
_NO_UNITS = "the units are not stated: us and GB/s, because size over time gives algbw"


class _Unreadable(Exception):
    """Raised for a run without figures: line, reason and remedy."""


def read_runs(source: Source) -> list[Log]:
    """Return every run of a log, or of a pasted table; ImportFailed where there is no table of nccl-tests."""
    runs = [_read_run(lines, before) for lines, before in _split(source.labelled)]
    if not runs:
        reason = "no line '# nThread ... nGpus ...' and no table (size count type ...), so this is no log of nccl-tests"
        raise source.fault(1, reason, "name its format")
    return runs


def is_table(line: str) -> bool:
    """Return whether a line has the names of the table's columns, and no word of a message."""
    words = line.lstrip("# ").split()
    is_named = words[:3] in (["size", "count", "type"], _OLDEST) and words.count("algbw") == words.count("busbw") > 0
    return is_named and all(word == "N" or _NAME.fullmatch(word) for word in words)


def is_row(line: str) -> bool:
    """Return whether a line has the columns of a whole row, both sides of it."""
    words = line.split()
    return _ROW.match(line) is not None and 11 <= len(words) <= 13 and all(map(_FIGURE.fullmatch, words[-8:]))


def _split(labelled: Sequence[Line]) -> list[tuple[list[Line], list[Line]]]:
    """Return the lines of each run, and those between it and the run before."""
    begins = {line.label for line in labelled if BEGIN.search(line.text)}
    if len(begins) < 2:  # one line's label says nothing
        return _of_one(labelled, labelled)
    runs = [run for label in begins for run in _of_one([line for line in labelled if line.label == label], labelled)]
    return sorted(runs, key=lambda run: run[0][0].number)


def _of_one(lines: Sequence[Line], everything: Sequence[Line]) -> list[tuple[list[Line], list[Line]]]:
    """Split the lines of one process at ``# nThread``, and at tables that no such line precedes."""
    starts: list[tuple[int, int]] = []
    seen = ""
    has_begin = False
    last = 0
    for index, line in enumerate(lines):
        rows = _ROW.match(line.text) is not None
        begins = BEGIN.search(line.text) is not None
        ends = {"", "end"} if has_begin else {"", "end", "rows"}  # a second table before the end is of another process
        if begins or (is_table(line.text) and seen in ends) or (rows and not seen):
            starts.append((index, last))
            seen, has_begin = "begin", begins
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
        is_empty = not any(_RANK.match(line.text) or is_table(line.text) or _ROW.match(line.text) for line in chosen)
        if until == len(lines) or not is_empty or _failure(chosen):  # an empty one is a line that was printed twice
            runs.append((chosen, before))
    return runs


def _read_run(lines: Sequence[Line], before: Sequence[Line]) -> Log:
    try:
        return _run(lines, before)
    except _Unreadable as error:
        number, reason, remedy = error.args
        refused = Refused(line=number, text="the whole run", why=f"{reason}; {remedy}")
        return Log(points=(), line=lines[0].number, ranks=None, refused=(refused,))


def _run(lines: Sequence[Line], before: Sequence[Line]) -> Log:
    sure = [match[1] for line in (*before, *lines) if (match := _STARTED.search(line.text))]
    if len(set(sure)) > 1:
        reason = f"two programs in one run, {' and '.join(sorted(set(sure)))}"
        raise _Unreadable(lines[0].number, reason, "give a file for each")
    command, command_line = ("", 0) if sure else _command([*before, *lines])
    verdict = "".join(match[1] for line in lines if (match := _VERDICT.search(line.text)))
    failure = None if verdict else _failure(lines)
    table = _Table.of(lines)
    points: list[LogPoint] = []
    refused: list[Refused] = []
    seen: dict[str, int] = {}
    notes = list(table.notes)
    half: Line | None = None
    """A row that another message may have broken, until its rest or a whole row comes."""
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
            half = line if _ROW.match(line.text) else None
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
        raise _Unreadable(failure.line, f"the run failed (line {failure.line}: {failure.text})", "run it again")
    elif not points and not refused:
        raise _Unreadable(lines[-1].number, "the log ends before the first row of its table", "give the rest of it")
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
    """Return the program of the last command before the table, and its line; empty where a line has several."""
    found = ("", 0)
    for line in lines:
        if is_table(line.text) or _ROW.match(line.text):
            break
        names = set(_COMMAND.findall(line.text)) if not _BUILDING.match(line.text) else set()
        if names:
            found = (names.pop(), line.number) if len(names) == 1 else ("", 0)
    return found


def _failure(lines: Sequence[Line]) -> Refused | None:
    """Return the first line that says how the run failed."""
    for pattern in (_FAILURE, _FAILURE_AROUND):
        for line in lines:
            if match := pattern.search(line.text):
                return Refused(line=line.number, text=match[0].strip(), why="")
    return None


def _ranks(lines: Sequence[Line]) -> tuple[int | None, bool, int, list[str]]:
    """Return ranks of the communicator, whether they are certain, groups, and notes.

    nccl-tests itself elides the list of a process with more than 2 KiB of it, and people elide it too.
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
                raise _Unreadable(line.number, reason, "build nccl-tests with MPI=1, or give the log of one process")
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
        raise _Unreadable(lines[0].number, reason, "give the whole list of ranks")
    return max(sizes.values()), True, len(sizes), notes


def _is_rest(text: str, before: str, above: str) -> bool:
    """Return whether a line below a rank is neither a heading nor a message: the rest of another rank's line."""
    if before == "#":
        return text == "#"
    if text.startswith("#"):
        return not _HEADINGS.match(text)
    return not _MESSAGE.search(text) and above.endswith(text.rsplit(maxsplit=1)[-1])


@dataclass(frozen=True, kw_only=True)
class _Table:
    """The columns of a run's table, and its lines."""

    lines: tuple[Line, ...]
    side: int = 4
    """Columns of each side: 4, or 8 with the extremes of single iterations (``-I 1``)."""
    has_one: bool = False
    """The names are of out of place only, as where a table was shortened."""
    columns: frozenset[str] | None = None
    units: bool = False
    deviations: bool = False
    cpu_time: bool = False
    time_unit_us: int = 1
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, lines: Sequence[Line]) -> _Table:
        """Find the header; _Unreadable where its units are others."""
        at = next((index for index, line in enumerate(lines) if is_table(line.text)), None)
        if at is None:
            return cls(lines=tuple(lines), notes=(f"no line with the names of the columns; {_NO_UNITS}",))
        words = lines[at].text.lstrip("# ").split()
        below = lines[at + 1] if at + 1 < len(lines) else lines[at]
        units = set(re.findall(r"\(([^()\s]+)\)", below.text)) if below.text.startswith("#") else set()
        if units - _UNITS:
            others = ", ".join(sorted(units - _UNITS))
            reason = f"the units below the columns' names are not us and GB/s, but {others}"
            raise _Unreadable(below.number, reason, "give the log as nccl-tests printed it")
        sides = [index for index, word in enumerate(words) if word == "algbw"]
        stated = {"B", "us", "GB/s"} <= units
        return cls(
            lines=tuple(lines[at + 1 :]),
            side=sides[1] - sides[0] if len(sides) == 2 else 4,
            has_one=len(sides) == 1,
            columns=frozenset({"redop", "root"} & {"redop" if word == "op" else word for word in words}),
            units=stated,
            deviations="error" in words or "res" in words,
            cpu_time="cputime" in words,
            time_unit_us=1_000 if words[:3] == _OLDEST else 1,
            notes=() if stated else (_NO_UNITS.replace("us and", "ms and") if words[:3] == _OLDEST else _NO_UNITS,),
        )

    def joined(self, half: Line, rest: Line) -> list[LogPoint]:
        """Return the figures of two lines that make one whole row; none where they do not."""
        first = _FIRST_HALF.match(half.text)
        try:
            return list(self.points(replace(half, text=f"{first[0]} {rest.text}"))) if first else []
        except ValueError:
            return []

    def points(self, line: Line) -> Iterator[LogPoint]:
        """Return the figures of a row, none for another line; ValueError says how the row is broken."""
        text = _STAMP.sub("", line.text)
        if not _ROW.match(text):
            inside = _INSIDE.search(text)
            words = text.split()
            if inside is None:
                if len(words) >= 3 and all(_FIGURE.fullmatch(word) for word in words):
                    raise ValueError("the rest of a row that another message broke; remove it, or run again")
                return
            text = inside[0]
        words = text.split()
        sides = (False,) if self.has_one and len(words) <= self.side + 5 else (False, True)
        split = len(words) - len(sides) * self.side
        left, right = words[: max(0, split)], words[max(0, split) :]
        self._check(left, right, len(words))
        size, count = int(left[0]), int(left[1])
        names = left[3:]
        root = int(names.pop()) if names and re.fullmatch(r"-?\d{1,7}", names[-1]) else None
        for in_place in sides:
            time, algbw, busbw, wrong = right[self.side * in_place :][:4]
            if time == "N/A":
                continue
            yield LogPoint(
                line=line.number,
                size=size,
                count=count,
                dtype=left[2],
                operation="".join(names).replace("none", ""),
                root=root,
                in_place=in_place,
                time_us=self.time_unit_us * float(time),
                time_unit_us=self.time_unit_us,
                printed=(time, algbw, busbw),
                wrong=wrong,
            )

    def _check(self, left: Sequence[str], right: Sequence[str], words: int) -> None:
        """Raise ValueError for a row that does not have the columns of the header."""
        broken = f"the row has {words} columns"
        if not 3 <= len(left) <= 5:
            raise ValueError(
                f"{broken}, not {2 * self.side + 3} to {2 * self.side + 5}: it is cut; remove it, or run again"
            )
        if not all(word.isascii() and 0 < len(word) < 19 for word in left[:2]):
            raise ValueError(f"size {left[0]:.40} is not a number of bytes; remove the row, or run again")
        has_root = len(left) > 3 and re.fullmatch(r"-?\d{1,7}", left[-1]) is not None
        operations = left[3 : len(left) - has_root]
        if self.columns is not None and has_root != ("root" in self.columns):
            raise ValueError(f"{broken}, which do not fit the names above: it is cut; remove it, or run again")
        if len(operations) > 1 or not set(operations) <= _OPERATIONS:
            raise ValueError(f"{' '.join(operations)!r:.40} is not an operation; remove the row, or run again")
        for word in right:
            if not _FIGURE.fullmatch(word):
                raise ValueError(f"{word!r:.40} is not a figure: the row is broken; remove it, or run again")
            if word != "N/A" and not math.isfinite(float(word)):
                raise ValueError(f"{word!r:.40} is not a finite number; remove the row, or run again")
        for start in range(0, len(right), self.side):
            if "N/A" in right[start : start + 3] and right[start] != "N/A":
                raise ValueError("a bandwidth is N/A beside a time; remove the row, or run again")
