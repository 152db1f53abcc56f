"""Imported figures, and the description of a format."""

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
    """Human-readable subject of the measurement; figures of one run share it."""
    metric: str
    """perfsuite's metric if the meaning is the same, else the tool's name; it ends in the unit."""
    value: float
    unit: str
    better: Better
    printed: str
    """The figure before any conversion, as printed in the source."""
    source: str
    line: int
    """Line in the file, from 1."""
    tool: str
    convention: str
    """Definition of the figure, and conversions."""
    collective: str = ""
    """perfsuite's name of the collective; empty for other figures."""
    message_bytes: float | None = None
    dtype: str = ""
    ranks: int | None = None
    platform: str = ""
    """The option --platform."""
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A figure that was not imported."""

    line: int
    text: str
    why: str
    """The broken rule and the remedy."""


@dataclass(frozen=True, kw_only=True)
class Imported:
    """The figures, refusals and notes of one file."""

    source: str
    tool: str
    rows: tuple[ImportedRow, ...]
    refused: tuple[Refused, ...] = ()
    notes: tuple[str, ...] = ()
    """Remarks on all rows."""


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """The options of the command; each applies if the file does not contain the fact itself."""

    platform: str = ""
    collective: str = ""
    """Collective of the log."""
    ranks_per_node: int | None = None
    """Ranks per node with which a bandwidth was computed."""
    ranks: int | None = None
    """Number of ranks of the collective."""
    dtype: str = ""
    """dtype of the figures."""
    run: int | None = None
    """The run to read of a file with several, from 1."""


Meaning = tuple[str, str, Better]
"""Metric, unit and direction of a figure."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file to import, with its format."""

    path: Path
    text: str
    options: ImportOptions = field(default_factory=ImportOptions)
    tool: str = ""

    @cached_property
    def lines(self) -> list[str]:
        """Return the lines without ends and prefixes of launchers, containers and time stamps."""
        return [line.text for line in self.labelled]

    @cached_property
    def labelled(self) -> list[Line]:
        """Return the same lines, each with the rank or host in its prefix."""
        return labelled_lines(split_lines(self.text))

    @cached_property
    def json(self) -> Any:
        """Return the whole file as JSON; None for other files. Raises ImportFailed for NaN and infinities."""
        try:
            return json.loads(self.text, parse_constant=self._refuse_constant)
        except ValueError:
            return None
        except RecursionError:
            raise self.fault(1, "brackets are nested too deep", "give the output of the tool") from None

    def _refuse_constant(self, name: str) -> float:
        raise self.fault(self.line_of(name), f"{name} is not a figure", "remove it, or run the tool again")

    def line_of(self, needle: str, nth: int = 0) -> int:
        """Return the line of the ``nth`` occurrence of a text, from 1; the first line without any."""
        at = -1
        for _ in range(nth + 1):
            at = self.text.find(needle, at + 1)
        return self.text.count("\n", 0, max(at, 0)) + 1

    def row(
        self, line: int, name: str, meaning: Meaning, value: float, *, printed: str, convention: str, **more: Any
    ) -> ImportedRow:
        """Return a figure of a line; ``more`` are optional fields of ImportedRow."""
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
            platform=self.options.platform,
            **more,
        )

    def imported(
        self, rows: Iterable[ImportedRow], *, refused: Iterable[Refused] = (), notes: Iterable[str] = ()
    ) -> Imported:
        """Return the result of the file."""
        return Imported(
            source=str(self.path), tool=self.tool, rows=tuple(rows), refused=tuple(refused), notes=tuple(notes)
        )

    def fault(self, line: int, reason: str, remedy: str) -> ImportFailed:
        """Return the error of a line."""
        return ImportFailed(f"{self.path}:{line}: {reason}; {remedy}")

    def number(self, line: int, text: object, what: str) -> float:
        """Return a finite number of a line. Raises ImportFailed for other text."""
        try:
            value = float(str(text).replace(",", ""))
        except ValueError:
            value = math.nan
        if isinstance(text, bool) or not math.isfinite(value):
            raise self.fault(line, f"{what} is {str(text)!r:.40}, no finite number", "remove the line, or run again")
        return value

    def whole(self, line: int, text: object, what: str, least: int = 0) -> int:
        """Return a whole number of a line, a size or a rank. Raises ImportFailed for other text and below ``least``."""
        value = self.number(line, text, what)
        if value != int(value) or not least <= value < 2**63:
            reason = f"{what} is {str(text)!r:.40}, no whole number from {least} on"
            raise self.fault(line, reason, "remove the line, or run again")
        return int(value)


@dataclass(frozen=True, kw_only=True)
class Format:
    """The output of one tool."""

    name: str
    """Name on the command line."""
    about: str
    recognises: Callable[[Source], bool]
    read: Callable[[Source], Imported]
    """Returns all figures. Raises ImportFailed with line, reason and remedy."""
    options: tuple[str, ...] = ()
    """Fields of :class:`ImportOptions` that it uses, without platform and dtype, which apply to all formats."""
