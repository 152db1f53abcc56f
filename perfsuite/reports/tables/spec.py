"""The parts of a report's table: cases, columns and published rows.

A column names a setting or a value of :class:`~perfsuite.reports.tables.case.TableCase`; its title has the unit and
says per device or all devices where a report was not clear.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from perfsuite.reports.tables.case import TableCase


@dataclass(frozen=True, kw_only=True)
class ColumnSpec:
    """One column."""

    title: str  # With its unit.
    key: str
    """Name of a setting, or of a value: then a metric, under the name that published figures have too.  One in GiB is
    shown in the unit that the column reads best in, and has GiB in its title, or in MiB where the title says that."""
    scale: float = 1.0  # Factor from the value to the unit of the title.
    value: bool = True  # False for a setting.
    optional: bool = False  # Left out where no case of the table has it.

    def __post_init__(self) -> None:
        of_size = self.value and self.key.endswith("_gib")
        assert "iB" in self.title or not of_size, f"column {self.title} of {self.key} does not name its unit"

    @property
    def in_gib(self) -> bool:
        """Whether its values are sizes, shown in the unit that they read best in."""
        return self.value and self.key.endswith("_gib") and "GiB" in self.title


@dataclass(frozen=True, kw_only=True)
class TableSpec:
    """One table of a report."""

    title: str  # Heading of the table.
    columns: tuple[ColumnSpec, ...]  # Left to right. Rows are sorted by the settings, those left of the layout first.
    select: Callable[[TableCase], bool]  # Which cases are its rows.
    published: tuple[str, ...] = ()  # Published tables whose rows are added, ``report/id``.
    pair_by: tuple[str, ...] = ("ranks",)  # Settings that a published row shares with its measured row.
    notes: tuple[str, ...] = ()  # Notes for any results.
    per: str = ""  # A table for each value of this setting.
    rows: Callable[[Sequence[TableCase]], Sequence[TableCase]] = tuple
    """From the selected cases to the rows, where a row is not a case: parts of a case, or a case and its sibling."""
    remarks: Callable[[Sequence[TableCase]], Iterable[str]] = lambda rows: ()
    """Returns further notes on the measured rows."""


@dataclass(frozen=True, kw_only=True)
class Style:
    """The tables of one report."""

    name: str
    report: str  # Three digits.
    title: str
    tables: tuple[TableSpec, ...]
    needs: str  # Cases that it is made of, for errors: what to run.
    applies: Callable[[TableCase], bool]
    """Whether a measured case makes this the style of a run, where none was asked for."""
    words: tuple[str, ...] = ()
    """Words that ids of its cases have; a case without any style's words belongs to a style without words."""
    environment: bool = False  # Begins with the machine and its software.
    peaks: bool = False  # Begins with the peaks of the platforms.


def setting(title: str, key: str) -> ColumnSpec:
    """A column of a setting."""
    return ColumnSpec(title=title, key=key, value=False)


def parts(unit: str, *names: str) -> tuple[ColumnSpec, ...]:
    """Return a column for each part of a step's time or memory in this unit; ``?`` ends the name of an optional one.

    >>> [(column.title, column.key, column.optional) for column in parts("GiB", "EMA?")]
    [('EMA GiB', 'ema_gib', True)]
    """
    columns = []
    for name in names:
        title = f"{name.removesuffix('?')} {unit}"
        key = title.lower().replace(" ", "_")
        columns.append(ColumnSpec(title=title, key=key, optional=name.endswith("?")))
    return tuple(columns)


def trains(*prefixes: str) -> Callable[[TableCase], bool]:
    """Return a selection of cases of models whose name begins with a prefix."""
    return lambda case: bool(case.model) and case.model.startswith(prefixes)


def is_gpt(case: TableCase) -> bool:
    """Whether a case trains a GPT."""
    return case.model.startswith("gpt")


# -- columns that several tables have ----------------------------------------------------------------------------

CASE = setting("case", "case_token")  # The case of a row; for tables in which rows have equal settings.
OPTIONS = ColumnSpec(title="options", key="options", value=False, optional=True)
VARIANT = ColumnSpec(title="variant", key="variant", value=False, optional=True)
LAYOUT = setting("nodes x ranks", "layout")
MESH = ColumnSpec(title="mesh", key="mesh", value=False, optional=True)
MODEL = setting("model", "model")
LOSS_STEPS = ColumnSpec(title="loss after steps", key="loss_steps", value=False, optional=True)
TARGET = ColumnSpec(title="target loss", key="target_loss", value=False, optional=True)
LOCAL = setting("local batch", "local_batch_size")
GLOBAL = setting("global batch", "global_batch_size")
LENGTH = setting("sequence length", "sequence_length")
SAMPLES = ColumnSpec(title="samples/s (all devices)", key="samples_per_s")
SPEED_UP = ColumnSpec(title="speed-up", key="speedup")
EFFICIENCY = ColumnSpec(title="efficiency %", key="scaling_efficiency", scale=100)
STEP_S = ColumnSpec(title="step s", key="step_time_s")
PEAK = ColumnSpec(title="peak GiB per device", key="peak_gib")
MFU = ColumnSpec(title="MFU %", key="mfu_percent")
EXPOSED = ColumnSpec(title="communication % of step", key="communication_share", scale=100)
DTYPE = setting("dtype", "dtype")
STRATEGY = setting("strategy", "strategy")
SCHEDULE, STAGES = setting("schedule", "schedule"), setting("stages", "stages")
DP, PP, TP, CP, EP = AXES = tuple(setting(axis, axis) for axis in ("dp", "pp", "tp", "cp", "ep"))

NAMED_BASE = "speed-up and efficiency are relative to the smallest number of ranks that was measured"
MFU_NOTE = "MFU here counts every product once (convention exact); perfsuite's JSON has the other conventions"
COMMUNICATION = (
    "communication is the exposed part: the time of the step that is not overlapped; in brackets its 95 % interval, "
    "which reaches below 0 on a busy machine; on one rank it is 0 by definition"
)
