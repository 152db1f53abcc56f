"""Tables of nccl-tests and its forks: the names of the columns, their units and the rows.

A row is read from its right end: newer versions added columns on the left, and a blank operation shifts them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from perfsuite.base.collectives import busbw_factor
from perfsuite.imports.lines import Line

KINDS = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter", "broadcast", "reduce", "sendrecv",
)  # fmt: skip
_WHOLE = frozenset({"broadcast", "reduce", "sendrecv"})
"""Their factor is 1, of a single rank as well.  Source: nccl-tests, doc/PERFORMANCE.md."""
_REDUCING = frozenset({"all_reduce", "reduce", "reduce_scatter"})  # Collectives with a printed operation.
_ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})
_SPELLINGS: Mapping[str, str] = MappingProxyType(
    {
        "allreduce": "all_reduce",
        "allgather": "all_gather",
        "reducescatter": "reduce_scatter",
        "alltoall": "all_to_all",
        "alltoallsingle": "all_to_all",
    }
)


def collective_named(text: str) -> str:
    """Return perfsuite's name of a collective from any tool's spelling; empty if it is unknown.

    >>> collective_named("AllReduce"), collective_named("reduce_scatter_tensor"), collective_named("memcpy")
    ('all_reduce', 'reduce_scatter', '')
    """
    flat = "".join(letter for letter in text.lower() if letter.isalpha())
    for ending in ("perfmpi", "perf", "intotensor", "tensor", "base"):
        flat = flat.removesuffix(ending)
    name = _SPELLINGS.get(flat, flat)
    return name if name in KINDS else ""


def factor(collective: str, ranks: int) -> float:
    """busbw / algbw.

    >>> factor("all_reduce", 8), factor("broadcast", 8)
    (1.75, 1.0)
    """
    return 1.0 if collective in _WHOLE else busbw_factor(collective, 2) * 2 * (ranks - 1) / ranks


def possible(*, operation: bool, root: int | None, columns: frozenset[str] | None, unchecked: bool) -> tuple[str, ...]:
    """Return the collectives that print rows such as these.

    ``operation``: one is printed; ``root``: None without a column; ``columns``: those of redop and root in the table,
    None where unknown; ``unchecked``: out of place was checked, in place was not, as only all_to_all and sendrecv do.
    sendrecv loops over operations as if it reduced, and had neither column before both were in every table.

    >>> possible(operation=True, root=-1, columns=frozenset({"redop", "root"}), unchecked=False)
    ('all_reduce', 'reduce_scatter', 'sendrecv')
    >>> possible(operation=True, root=None, columns=frozenset({"redop"}), unchecked=False)
    ('all_reduce', 'reduce_scatter')
    """
    names = [
        name
        for name in KINDS
        if ((name in _REDUCING) == operation or name == "sendrecv")
        and (root is None or (root >= 0) == (name in _ROOTED))
        and not (unchecked and name not in ("all_to_all", "sendrecv"))
        and not (name == "sendrecv" and columns is not None and len(columns) == 1)
        and not (name in _ROOTED and columns is not None and "root" not in columns)
    ]
    return tuple(names)


@dataclass(frozen=True, kw_only=True)
class LogPoint:
    """One size in one mode (out of place or in place)."""

    line: int
    size: int
    count: int | None = None  # Number of elements, if the log has it.
    dtype: str
    operation: str  # Empty without a printed operation.
    root: int | None
    in_place: bool
    time_us: float
    printed: tuple[str, str, str]  # Time, algbw, busbw.
    time_unit_us: int = 1  # Microseconds per unit of the printed time: 1,000 before NCCL 2.5.
    wrong: str  # Number of wrong values, or the largest deviation; N/A without a check.


_NAME = re.compile(r"#?[a-z][a-z0-9_]*%?")
ROW = re.compile(r"^\s*\d+\s+\d+\s+[a-z]\w*\s")
_INSIDE = re.compile(r"(?<=\s)\d+\s+\d+\s+(?:u?int\d*|float\w*|double|half|bfloat16|f8\w+|fp8\w*)\s.*$")
"""A row after another process's message on the same line."""
_STAMP = re.compile(r"\s+\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d\S*\s*$")
"""Time stamp of option -S: newer versions print it after a row, older ones before."""
_FIGURE = re.compile(r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|N/A|[-+]?nan|[-+]?inf", re.IGNORECASE)
_OPERATIONS = frozenset({"sum", "prod", "max", "min", "avg", "mulsum", "none"})
_FIRST_HALF = re.compile(
    rf"\s*\d+\s+\d+\s+[a-z]\w*(?=\s)(?:\s+(?:{'|'.join(sorted(_OPERATIONS))})(?=\s))?"
    r"(?:\s+(?:-1(?!\d)|\d+(?:\.\d+)?(?=\s|$)))*"
)
"""The beginning of a row up to the message that broke it; -1 is the last figure that a message may touch."""
_UNITS = frozenset({"B", "elements", "us", "GB/s", "%"})
_OLDEST = ["bytes", "N", "type"]  # Names of the first columns before NCCL 2.5, whose times are in ms.
_NO_UNITS = "the units are not stated: us and GB/s, because size over time gives algbw"


class Unreadable(Exception):
    """Raised for a run without figures: line, reason and remedy."""


def is_table(line: str) -> bool:
    """Return whether a line consists of the names of the table's columns."""
    words = line.lstrip("# ").split()
    is_named = words[:3] in (["size", "count", "type"], _OLDEST) and words.count("algbw") == words.count("busbw") > 0
    return is_named and all(word == "N" or _NAME.fullmatch(word) for word in words)


def is_row(line: str) -> bool:
    """Return whether a line is a complete row with both sides."""
    words = line.split()
    return ROW.match(line) is not None and 11 <= len(words) <= 13 and all(map(_FIGURE.fullmatch, words[-8:]))


@dataclass(frozen=True, kw_only=True)
class NcclTable:
    """The columns of a run's table, and its lines."""

    lines: tuple[Line, ...]
    side: int = 4  # Columns of each side: 4, or 8 with the extremes of single iterations (``-I 1``).
    has_one: bool = False  # The names are of out of place only, as in a shortened table.
    columns: frozenset[str] | None = None
    units: bool = False
    deviations: bool = False
    cpu_time: bool = False
    time_unit_us: int = 1
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, lines: Sequence[Line]) -> NcclTable:
        """Find the header. Raises Unreadable for other units."""
        at = next((index for index, line in enumerate(lines) if is_table(line.text)), None)
        if at is None:
            return cls(lines=tuple(lines), notes=(f"no line with the names of the columns; {_NO_UNITS}",))
        words = lines[at].text.lstrip("# ").split()
        below = lines[at + 1] if at + 1 < len(lines) else lines[at]
        units = set(re.findall(r"\(([^()\s]+)\)", below.text)) if below.text.startswith("#") else set()
        if units - _UNITS:
            others = ", ".join(sorted(units - _UNITS))
            reason = f"the units below the columns' names are not us and GB/s, but {others}"
            raise Unreadable(below.number, reason, "give the log as nccl-tests printed it")
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
        """Return the figures of two halves of one row; empty if they do not form a whole row."""
        first = _FIRST_HALF.match(half.text)
        try:
            return list(self.points(replace(half, text=f"{first[0]} {rest.text}"))) if first else []
        except ValueError:
            return []

    def points(self, line: Line) -> Iterator[LogPoint]:
        """Yield the figures of a row, none for another line. Raises ValueError for a broken row."""
        text = _STAMP.sub("", line.text)
        if not ROW.match(text):
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
        """Raise ValueError for a row whose columns differ from the header."""
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
                raise ValueError("a bandwidth is N/A although there is a time; remove the row, or run again")
