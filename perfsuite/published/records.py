"""Records and reader of the files under ``baselines/published/``: reports, tables, columns, rows, labels.

Each error in a file is a BaselineError that names file, place and reason.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from perfsuite.base.errors import BaselineError
from perfsuite.base.files import shipped
from perfsuite.published.numbers import Interval, PrintedCell, printed
from perfsuite.record.codec import from_json, read_json


@dataclass(frozen=True)
class Role:
    """Meaning of the figures of a column."""

    about: str
    dimension: Literal[
        "text", "count", "number", "time", "rate", "memory", "share", "flops", "bandwidth", "size", "message"
    ]
    kind: Literal["configuration", "measured", "derived", "other"] = "other"
    """``configuration`` distinguishes runs, ``measured`` is from a clock or an allocator, ``derived`` is computed."""

    @property
    def exact(self) -> bool:
        """Whether figures are exact: counts are, all others are rounded."""
        return self.dimension == "count"


ROLES: Mapping[str, Role] = MappingProxyType(
    {
        "case": Role("name of the row; says nothing about the configuration by itself", "text"),
        "config": Role("any other setting that distinguishes rows", "text", "configuration"),
        "device": Role("device model", "text", "configuration"),
        "model": Role("model", "text", "configuration"),
        "strategy": Role("kind of parallelism", "text", "configuration"),
        "schedule": Role("pipeline schedule: naive, gpipe, 1f1b, interleaved, ...", "text", "configuration"),
        "collective": Role("collective that the communication time is spent in", "text", "configuration"),
        "dtype": Role("dtype of the weights", "text", "configuration"),
        "devices": Role("n, devices of the run", "count", "configuration"),
        "nodes": Role("hosts of the run", "count", "configuration"),
        "devices_per_node": Role("devices of each host", "count", "configuration"),
        "local_batch_size": Role("samples per device and step", "count", "configuration"),
        "micro_batch_size": Role("samples per micro-batch", "count", "configuration"),
        "num_micro_batches": Role("micro-batches per step (accumulation steps)", "count", "configuration"),
        "global_batch_size": Role("samples per step over all devices", "count", "configuration"),
        "batch_size": Role("samples per step, per device or not is not said", "count", "configuration"),
        "sequence_length": Role("tokens per sample", "count", "configuration"),
        "hidden_size": Role("width of the model", "count", "configuration"),
        "num_layers": Role("layers of the model", "count", "configuration"),
        "num_heads": Role("attention heads", "count", "configuration"),
        "num_workers": Role("data-loader processes", "count", "configuration"),
        "dp": Role("data-parallel degree", "count", "configuration"),
        "tp": Role("tensor-parallel degree", "count", "configuration"),
        "pp": Role("pipeline-parallel degree", "count", "configuration"),
        "cp": Role("context-parallel degree", "count", "configuration"),
        "sp": Role("sequence-parallel degree", "count", "configuration"),
        "ep": Role("expert-parallel degree", "count", "configuration"),
        "stages": Role("p, pipeline stages", "count", "configuration"),
        "virtual_stages": Role("v, stages per device in an interleaved schedule", "count", "configuration"),
        "experts": Role("experts per layer", "count", "configuration"),
        "top_k": Role("experts per token", "count", "configuration"),
        "parameters": Role("parameters of the model", "size", "configuration"),
        "active_parameters": Role("parameters that each token passes", "size", "configuration"),
        "message_size": Role(
            "size of the message of a collective, as nccl-tests counts it", "message", "configuration"
        ),
        "setting": Role("a number that no rule looks at", "number"),
        "note": Role("a remark", "text"),
        "throughput": Role("samples per second of all devices", "rate", "measured"),
        "throughput_per_device": Role("samples per second of one device", "rate", "measured"),
        "tokens_per_s": Role("tokens per second of all devices", "rate", "measured"),
        "tokens_per_s_per_device": Role("tokens per second of one device", "rate", "measured"),
        "iterations_per_s": Role("steps per second", "rate", "measured"),
        "latency": Role("time of a step", "time", "measured"),
        "training_time": Role("time of a whole training run", "time", "measured"),
        "whole": Role("time that the parts make up", "time", "measured"),
        "part": Role("a part of the step", "time", "measured"),
        "data_time": Role("part of the step: loading data", "time", "measured"),
        "forward_time": Role("part of the step: forward", "time", "measured"),
        "backward_time": Role("part of the step: backward", "time", "measured"),
        "optimizer_time": Role("part of the step: optimizer", "time", "measured"),
        "compute_time": Role("part of the step: computation", "time", "measured"),
        "communication_time": Role("part of the step: communication", "time", "measured"),
        "remainder_time": Role("rest of the step besides its other parts", "time", "derived"),
        "loss": Role("loss", "number", "measured"),
        "memory": Role("peak memory of a device", "memory", "measured"),
        "memory_baseline": Role("peak memory of a device without the feature under test", "memory", "measured"),
        "memory_final": Role("memory of a device that stays after the step", "memory", "measured"),
        "memory_weights": Role("memory of a device: weights", "memory", "measured"),
        "memory_gradients": Role("memory of a device: gradients", "memory", "measured"),
        "memory_optimizer": Role("memory of a device: optimizer state", "memory", "measured"),
        "memory_activations": Role("memory of a device: activations", "memory", "measured"),
        "memory_fragmentation": Role("memory of a device: reserved, not allocated", "memory", "measured"),
        "memory_remainder": Role("memory of a device that no other column holds", "memory", "derived"),
        "memory_host": Role("memory of the host process", "memory", "measured"),
        "bandwidth": Role("bytes per second of a communication", "bandwidth", "measured"),
        "algbw": Role("message size over time, as nccl-tests prints it", "bandwidth", "measured"),
        "busbw": Role("algbw x factor of the collective, as nccl-tests prints it", "bandwidth", "measured"),
        "speedup": Role("ratio to the smallest run", "number", "derived"),
        "efficiency": Role("speed-up over the ratio of devices", "share", "derived"),
        "mfu": Role("model FLOPs over peak", "share", "derived"),
        "tflops": Role("achieved operations per second of one device", "flops", "derived"),
        "bubble": Role("share of a pipeline's time that is idle", "share", "measured"),
        "communication_share": Role("share of the step spent in communication", "share", "measured"),
        "share": Role("share of a row in the total", "share", "derived"),
        "overhead": Role("time added, over the run without it", "share", "derived"),
        "peak_tflops": Role("dense peak of one device for the run's dtype", "flops"),
        "stated_peak_tflops": Role("peak of one device as the table states it", "flops"),
        "dense_peak_tflops": Role("dense peak of one device by its maker", "flops"),
        "flops_per_sample": Role("model FLOPs of one sample, forward and backward", "number"),
        "memory_capacity": Role("memory of one device", "memory"),
        "model_size": Role("size of the model's weights", "memory"),
        "available_devices": Role("devices of the largest machine that was there", "count"),
    }
)
"""Roles of columns."""

PARTS = (
    "part", "data_time", "forward_time", "backward_time", "optimizer_time", "compute_time", "communication_time",
    "remainder_time",
)  # fmt: skip
"""Roles of the parts of a step."""

DEGREES = ("dp", "tp", "pp", "cp", "sp", "ep")  # Roles of the sizes of a mesh

NEVER_ZERO = frozenset(
    {
        *("devices", "nodes", "devices_per_node", "sequence_length", "batch_size"),
        *("local_batch_size", "micro_batch_size", "global_batch_size", "num_micro_batches"),
        *("throughput", "throughput_per_device", "tokens_per_s", "tokens_per_s_per_device", "iterations_per_s"),
        *("latency", "training_time", "whole", "memory", "bandwidth", "algbw", "busbw", "tflops"),
    }
)
"""Roles for which 0 is not a figure: the run failed, or the value is below the printed digits."""

_K, _M, _G = Fraction(10**3), Fraction(10**6), Fraction(10**9)

# a printed MB or GB is as often a power of two as of ten: either counts
_BYTES = {"B": (1,), "KiB": (2**10,), "MiB": (2**20,), "GiB": (2**30,), "MB": (_M, 2**20), "GB": (_G, 2**30)}
SCALES: Mapping[str, Mapping[str, tuple[Fraction | int, ...]]] = MappingProxyType(
    {
        "time": {"us": (1 / _M,), "ms": (1 / _K,), "s": (1,), "min": (60,), "h": (3600,), "days": (86400,)},
        "memory": _BYTES,
        "share": {"": (1,), "%": (Fraction(1, 100),)},
        "flops": {"GFLOPS": (_G,), "TFLOPS": (_G * _K,), "PFLOPS": (_G * _M,)},
        "size": {"": (1,), "M": (_M,), "B": (_G,), "T": (_G * _K,)},
        "bandwidth": {"MB/s": (_M,), "GB/s": (_G,), "Gb/s": (_G / 8,)},
        "message": {**_BYTES, "KB": (_K, 2**10)},
    }
)
"""Factors to SI by dimension and unit, two for an ambiguous unit; dimensions without an entry are not scaled."""

DEFAULT_UNITS: Mapping[str, str] = MappingProxyType(
    {"time": "s", "memory": "GB", "share": "", "flops": "TFLOPS", "bandwidth": "GB/s", "size": "", "message": "B"}
)
"""Unit of a column without one."""


def scale(dimension: str, unit: str) -> Interval:
    """Return the factor from a unit to SI; an interval for an ambiguous unit (GB).  Raises KeyError for an unknown
    unit.

    >>> scale("time", "ms").low == scale("time", "ms").high == Fraction(1, 1000)
    True
    """
    if dimension not in SCALES:
        return Interval.exactly(Fraction(1))
    factors = SCALES[dimension][unit or DEFAULT_UNITS[dimension]]
    return Interval(low=Fraction(min(factors)), high=Fraction(max(factors)))


SCHEMA = 1  # Version of the files; a higher one is refused

Label = Literal["M", "M?", "R", "X"]
LABELS: tuple[Label, ...] = ("M", "M?", "R", "X")
"""Measured; measured but mislabelled or anomalous; only ratios usable; contradictory.  From best to worst."""

Basis = Literal["rules", "outside"]
Kind = Literal["result", "claim", "configuration", "environment", "advice"]


@dataclass(frozen=True, kw_only=True)
class LabelJudgement:
    """A label and its reason."""

    label: Label
    reason: str
    basis: Basis = "rules"  # ``rules``: the audit finds it; ``outside``: it needs knowledge that the report lacks


@dataclass(frozen=True, kw_only=True)
class Stated:
    """A fact about a whole table or row: printed around it, or from another source."""

    role: str
    text: str  # As printed
    unit: str = ""
    line: int = 0  # Line of the report; 0 for facts from another source
    source: str = ""  # The other source


@dataclass(frozen=True, kw_only=True)
class PublishedColumn:
    """One column: its printed title and the real meaning of its figures."""

    name: str
    role: str = "setting"  # Meaning by the report: a role of the audit
    title: str = ""  # As printed
    unit_published: str = ""
    unit: str = ""  # The real unit; empty: as published
    convention: str = ""  # How the figure was counted
    metric: str = ""  # perfsuite's metric of the same meaning; empty: none
    scale: float = 1.0  # Figure x scale is in the metric's unit
    of: str = ""  # Column whose cells have this second number
    index: int = 0  # Number of the figure in the cell
    prose: bool = False  # Whether the cells are sentences, which are not copied
    judgement: LabelJudgement | None = None  # Where it differs from the table's


@dataclass(frozen=True, kw_only=True)
class PublishedRow:
    """One row."""

    line: int  # Line of the report
    cells: tuple[Any, ...]  # By printed column: null, text, or [text, number or numbers]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Configuration of the run, by audit role or workload parameter."""
    added_facts: tuple[Stated, ...] = ()
    judgement: LabelJudgement | None = None  # Where it differs from the table's
    cell_judgements: Mapping[str, LabelJudgement] = field(default_factory=dict)
    """Column -> judgement, where it differs from the row's."""


@dataclass(frozen=True, kw_only=True)
class PublishedTable:
    """One table, or one block of figures."""

    id: str
    title: str
    columns: tuple[PublishedColumn, ...]
    rows: tuple[PublishedRow, ...]
    kind: Kind = "result"
    layout: Literal["table", "lines"] = "table"
    """``lines``: figures from lines of text; the first column is perfsuite's name for each."""
    heading: str = ""  # Nearest heading of the report
    line: int = 0  # Line of the report with the column titles
    platforms: tuple[str, ...] = ()  # Platforms of the figures; several if the report does not say which
    hardware: str = ""
    model: str = ""
    workload: str = ""  # Workload in snake case, such as train_step
    parameters: Mapping[str, Any] = field(default_factory=dict)  # Configuration of every run of the table
    stated: tuple[Stated, ...] = ()  # Facts printed above or below the table
    added_facts: tuple[Stated, ...] = ()  # Facts from another source
    run_set: str = ""  # Tables with the same run set describe the same runs
    judgement: LabelJudgement = LabelJudgement(label="M", reason="")
    digest: str = ""  # SHA-256 of the cells, see :func:`digest`

    @property
    def printed_columns(self) -> tuple[PublishedColumn, ...]:
        """Columns that the report prints, in its order."""
        return tuple(column for column in self.columns if not column.of)

    def cell(self, row: PublishedRow, column: PublishedColumn) -> PrintedCell | None:
        """Return the printed cell; None for an empty one."""
        names = [column.name for column in self.printed_columns]
        raw = row.cells[names.index(column.of or column.name)]
        return printed(raw if isinstance(raw, str) else raw[0]) if raw is not None else None

    def judge(self, row: PublishedRow | None = None, column: PublishedColumn | None = None) -> LabelJudgement:
        """Return the label of a cell, a row, a column or the table: the nearest one wins."""
        if row and column and column.name in row.cell_judgements:
            return row.cell_judgements[column.name]
        return (row and row.judgement) or (column and column.judgement) or self.judgement


@dataclass(frozen=True, kw_only=True)
class PublishedReport:
    """One report."""

    schema: int
    report: str  # Number of three digits
    file: str
    title: str
    tables: tuple[PublishedTable, ...]
    sha256: str = ""  # SHA-256 of the report's file


def digest(table: PublishedTable) -> str:
    """Return the SHA-256 of the printed cells: columns joined by a bar, rows by a newline, sentences as empty text."""
    rows = [
        ["" if raw is None else raw if isinstance(raw, str) else str(raw[0]) for raw in row.cells] for row in table.rows
    ]
    return hashlib.sha256("\n".join(map("|".join, rows)).encode()).hexdigest()


def read_report(path: Path) -> PublishedReport:
    """Return one report's file; raises BaselineError, with file, place and reason, if it is damaged or newer."""
    plain = read_json(path, BaselineError, "restore the file, or give a file of tables")
    schema = plain.get("schema") if isinstance(plain, dict) else None
    if not isinstance(schema, int) or isinstance(schema, bool) or "tables" not in plain:
        raise BaselineError(f"{path}: not a file of published tables (it lacks schema and tables); give such a file")
    if schema > SCHEMA:
        raise BaselineError(f"{path}: schema {schema} is newer than {SCHEMA}; update perfsuite to read it")
    try:
        report = from_json(PublishedReport, plain)
        for table in report.tables:
            _check(table)
    except ValueError as error:
        raise BaselineError(f"{path}: {error}; restore the file") from None
    return report


def _check(table: PublishedTable) -> None:
    """Raise ValueError unless roles, cells, numbers and digest of a table fit together."""
    names = [column.name for column in table.columns]
    for column in table.columns:
        if column.role not in ROLES:
            raise ValueError(f"table {table.id}: column {column.name} has the unknown role {column.role!r}")
        if column.of and column.of not in names:
            raise ValueError(f"table {table.id}: column {column.name} is part of {column.of!r}, which is not a column")
    if len(set(names)) != len(names):
        raise ValueError(f"table {table.id}: two columns have one name")
    for stated in (*table.stated, *table.added_facts, *(fact for row in table.rows for fact in row.added_facts)):
        if stated.role not in ROLES:
            raise ValueError(f"table {table.id}: {stated.text!r} is stated for the unknown role {stated.role!r}")
    for row in table.rows:
        _check_row(table, row)
    if table.digest and table.digest != digest(table):
        raise ValueError(f"table {table.id}: the cells do not match their digest")


def _check_row(table: PublishedTable, row: PublishedRow) -> None:
    where = f"table {table.id}, row of line {row.line}"
    if len(row.cells) != len(table.printed_columns):
        raise ValueError(f"{where}: {len(row.cells)} cells for {len(table.printed_columns)} columns")
    for name in row.cell_judgements:
        if name not in {column.name for column in table.columns}:
            raise ValueError(f"{where}: a label for {name!r}, which is not a column")
    for column, raw in zip(table.printed_columns, row.cells, strict=True):
        if raw is None or isinstance(raw, str):
            continue
        if not isinstance(raw, list) or len(raw) != 2 or not isinstance(raw[0], str):
            raise ValueError(f"{where}: {column.name} is {raw!r:.60}, not null, text or [text, number]")
        numbers = [float(number.value) for number in printed(raw[0]).numbers]
        if raw[1] != (numbers if len(numbers) > 1 else numbers[0] if numbers else None):
            raise ValueError(f"{where}: {column.name} prints {raw[0]!r:.60}, which is not {raw[1]!r:.60}")


def directory() -> Path:
    """Return the folder of the shipped tables; raises BaselineError if it is missing."""
    return shipped("baselines/published", "published", "*.json", BaselineError)


def read_all(place: Path) -> tuple[PublishedReport, ...]:
    """Return every report of a directory, by name."""
    return tuple(read_report(path) for path in sorted(place.glob("*.json")))
