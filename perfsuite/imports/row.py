"""What an imported figure is, and what a format is that reads them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from perfsuite.base.errors import ImportFailed
from perfsuite.imports.lines import Line, labelled_lines, split_lines
from perfsuite.record.own_metrics import Better


@dataclass(frozen=True, kw_only=True)
class ImportedRow:
    """One figure."""

    name: str
    """What was measured, as a person finds it; figures of one run have the same."""
    metric: str
    """Ours where it means the same, else the tool's own name; ends in its unit."""
    value: float
    unit: str
    better: Better
    printed: str
    """The figure as its source has it, before anything was converted."""
    source: str
    """File, as given."""
    line: int
    """In that file, from 1."""
    tool: str
    convention: str
    """How it was counted, and what was converted."""
    collective: str = ""
    """As perfsuite calls it; empty for anything else."""
    message_bytes: float | None = None
    """Size S of the collective."""
    dtype: str = ""
    ranks: int | None = None
    platform: str = ""
    """As whoever imported it says."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """What else the source says of the run."""


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A figure that was left out."""

    line: int
    text: str
    why: str
    """The rule that it breaks, and what to do."""


@dataclass(frozen=True, kw_only=True)
class Imported:
    """What one file gave."""

    source: str
    tool: str
    rows: tuple[ImportedRow, ...]
    refused: tuple[Refused, ...] = ()
    notes: tuple[str, ...] = ()
    """What a reader must know of all rows."""


@dataclass(frozen=True, kw_only=True)
class Told:
    """What whoever imports says beside the file."""

    platform: str = ""
    collective: str = ""
    """Of a log that does not name its own."""
    ranks_per_node: int | None = None
    """Of a log whose bandwidth was counted with it."""
    ranks: int | None = None
    """Ranks of a collective whose log does not list them."""
    dtype: str = ""
    """Of a log that does not say its own."""
    run: int | None = None
    """The run to read of a file with several, from 1."""


Meaning = tuple[str, str, Better]
"""Metric, unit and direction of a figure."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file to import, and its format."""

    path: Path
    text: str
    told: Told = field(default_factory=Told)
    tool: str = ""
    """Name of the format."""

    @cached_property
    def lines(self) -> list[str]:
        """Lines without ends and without the prefixes of launchers, containers and time stamps."""
        return [line.text for line in self.labelled]

    @cached_property
    def labelled(self) -> list[Line]:
        """The same lines, each with the rank or host that its prefix names."""
        return labelled_lines(split_lines(self.text))

    @cached_property
    def json(self) -> Any:
        """The whole file as JSON; None where it is none.  ImportFailed for NaN and infinities."""
        try:
            return json.loads(self.text, parse_constant=self._refuse_constant)
        except ValueError:
            return None
        except RecursionError:
            raise self.fault(1, "brackets are nested too deep", "give what the tool wrote") from None

    def _refuse_constant(self, name: str) -> float:
        raise self.fault(self.line_of(name), f"{name} is no figure", "remove it, or run the tool again")

    def line_of(self, needle: str, nth: int = 0) -> int:
        """Line of the ``nth`` place that a text stands at, from 1; the first line where it stands nowhere."""
        at = -1
        for _ in range(nth + 1):
            at = self.text.find(needle, at + 1)
        return self.text.count("\n", 0, max(at, 0)) + 1

    def row(
        self, line: int, name: str, meaning: Meaning, value: float, *, printed: str, convention: str, **more: Any
    ) -> ImportedRow:
        """A figure of a line; ``more`` are fields of ImportedRow that not every figure has."""
        metric, unit, better = meaning
        return ImportedRow(
            name=name,
            metric=metric,
            value=value,
            unit=unit,
            better=better,
            printed=printed,
            source=str(self.path),
            line=line,
            tool=self.tool,
            convention=convention,
            platform=self.told.platform,
            **more,
        )

    def imported(
        self, rows: Iterable[ImportedRow], *, refused: Iterable[Refused] = (), notes: Iterable[str] = ()
    ) -> Imported:
        """What the file gave."""
        return Imported(
            source=str(self.path), tool=self.tool, rows=tuple(rows), refused=tuple(refused), notes=tuple(notes)
        )

    def fault(self, line: int, reason: str, remedy: str) -> ImportFailed:
        """What is wrong with a line."""
        return ImportFailed(f"{self.path}:{line}: {reason}; {remedy}")

    def number(self, line: int, text: object, what: str) -> float:
        """A figure of a line; ImportFailed for what is none."""
        try:
            value = float(str(text).replace(",", ""))
        except ValueError:
            value = math.nan
        if isinstance(text, bool) or not math.isfinite(value):
            raise self.fault(line, f"{what} is {str(text)!r:.40}, no finite number", "remove the line, or run again")
        return value

    def whole(self, line: int, text: object, what: str, least: int = 0) -> int:
        """A count of a line, a size or a rank; ImportFailed for what is none, or is below ``least``."""
        value = self.number(line, text, what)
        if value != int(value) or not least <= value < 2**63:
            reason = f"{what} is {str(text)!r:.40}, no whole number from {least} on"
            raise self.fault(line, reason, "remove the line, or run again")
        return int(value)


@dataclass(frozen=True, kw_only=True)
class Format:
    """What one tool writes."""

    name: str
    """As the command line has it."""
    about: str
    """One line."""
    recognises: Callable[[Source], bool]
    """Whether a file is of this format."""
    read: Callable[[Source], Imported]
    """All figures; raises ImportFailed naming line, reason and remedy."""
