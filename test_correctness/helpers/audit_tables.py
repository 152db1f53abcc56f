"""Small tables for the audit's tests: written out by hand, or built from a consistent model of a training run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from perfsuite.audit.audit import audit
from perfsuite.audit.table import AuditColumn, AuditTable, Fact, Row
from perfsuite.published.numbers import printed


def table(header: str, *rows: str, name: str = "t", simulated: bool = False, **facts: str) -> AuditTable:
    """A table from words: ``name=role:unit`` or ``role`` per column, ``_`` for an empty cell, facts ``value unit``."""
    columns = []
    for word in header.split():
        title, _, meaning = word.rpartition("=")
        role, _, unit = meaning.partition(":")
        columns.append(AuditColumn(name=title or role, role=role, unit=unit))
    body = []
    for index, line in enumerate(rows):
        cells = {
            column.name: printed(cell.replace("~", " "))
            for column, cell in zip(columns, line.split(), strict=True)
            if cell != "_"
        }
        body.append(Row(name=f"row {index + 1}", cells=cells, index={name: index}))
    known = {role: Fact(text=text.partition(" ")[0], unit=text.partition(" ")[2]) for role, text in facts.items()}
    return AuditTable(name=name, columns=tuple(columns), rows=tuple(body), facts=known, simulated=simulated)


def with_cell(source: AuditTable, row: int, column: str, text: str) -> AuditTable:
    """The table with one cell printed differently."""
    rows = list(source.rows)
    rows[row] = replace(rows[row], cells={**rows[row].cells, column: printed(text)})
    return replace(source, rows=tuple(rows))


def text(source: AuditTable, row: int, column: str) -> str:
    """What a cell prints."""
    return source.rows[row].cells[column].text


def scaled(factor: float) -> Callable[[str], str]:
    """Prints a cell's number times ``factor``, to five digits."""
    return lambda old: significant(float(printed(old).numbers[0].value) * factor, 5)


def rules_of(*tables: AuditTable) -> set[str]:
    """The rules that the audit finds broken."""
    return {finding.rule for finding in audit(tables)}


def significant(value: float, digits: int) -> str:
    """A number rounded to so many digits, never in powers of ten, trailing zeros kept."""
    if value == 0:
        return "0"
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])
    decimals = max(digits - 1 - exponent, 0)
    return f"{round(value, digits - 1 - exponent):.{decimals}f}"


@dataclass(frozen=True, kw_only=True)
class Run:
    """A consistent training run on n devices."""

    devices: int
    batch: int
    """Global."""
    step_s: float
    memory: dict[str, float]
    """GiB by role."""


HEADER = (
    "devices global_batch_size local_batch_size latency:ms throughput tokens_per_s tokens_per_s_per_device "
    "throughput_per_device iterations_per_s speedup efficiency:% mfu:% tflops communication_share:% loss memory:GiB "
    "memory_weights:GiB memory_optimizer:GiB memory_activations:GiB data_time:ms forward_time:ms backward_time:ms "
    "optimizer_time:ms"
)
PEAK_TFLOPS = 312.0


@dataclass(frozen=True, kw_only=True)
class Model:
    """What every run of a table shares."""

    parameters: int
    layers: int
    width: int
    sequence: int
    digits: int

    @property
    def flops(self) -> float:
        """Per sample."""
        attention = 12 * self.layers * self.width * self.sequence**2
        return 6.0 * self.parameters * self.sequence + attention


def scaling_table(model: Model, runs: list[Run], shares: list[tuple[float, float, float, float]]) -> AuditTable:
    """Every figure that follows from the runs, each printed to the model's digits."""

    def show(value: float) -> str:
        return significant(value, model.digits)

    base, lines = runs[0], []
    for index, (run, parts) in enumerate(zip(runs, shares, strict=True)):
        rate = run.batch / run.step_s
        ratio = rate / (base.batch / base.step_s) if run is not base else 1.0
        tflops = rate * model.flops / run.devices / 1e12
        figures = [
            run.step_s * 1e3,
            rate,
            rate * model.sequence,
            rate * model.sequence / run.devices,
            rate / run.devices,
            1 / run.step_s,
            ratio,
            100 * ratio * base.devices / run.devices,
            100 * tflops / PEAK_TFLOPS,
            tflops,
            3.0 + 5.11 * index,
            2.7 + 0.137 * index,
            *run.memory.values(),
            *(part / sum(parts) * run.step_s * 1e3 for part in parts),
        ]
        lines.append(" ".join([f"{run.devices} {run.batch} {run.batch // run.devices}", *map(show, figures)]))
    return table(
        HEADER,
        *lines,
        parameters=str(model.parameters),
        num_layers=str(model.layers),
        hidden_size=str(model.width),
        sequence_length=str(model.sequence),
        peak_tflops=f"{PEAK_TFLOPS:g} TFLOPS",
        memory_capacity="1000000 GiB",
    )


@st.composite
def scaling_tables(draw: st.DrawFn) -> AuditTable:
    """Strong or weak scaling of a random model; every doubling costs 2 to 12 %, states shard or do not."""
    model = Model(
        parameters=draw(st.integers(10**8, 10**10)),
        layers=draw(st.integers(4, 96)),
        width=64 * draw(st.integers(4, 128)),
        sequence=draw(st.sampled_from([128, 512, 2048, 4096])),
        digits=draw(st.integers(3, 6)),
    )
    weak, sharded = draw(st.booleans()), draw(st.booleans())
    local = draw(st.integers(1, 16))
    speed = draw(st.floats(0.1, 0.6)) * PEAK_TFLOPS * 1e12
    cost, runs, shares = 1.0, [], []
    activations = draw(st.floats(0.2, 3.0)) * model.parameters * 16 / 2**30
    for devices in [2**power for power in range(draw(st.integers(2, 6)))]:
        cost *= draw(st.floats(1.02, 1.12)) if devices > 1 else 1.0
        batch = local * devices if weak else local * 64
        each = batch // devices
        split = devices if sharded else 1
        weights, optimizer = (model.parameters * width / split / 2**30 for width in (4, 12))
        held = activations * each / (local if weak else local * 64)
        spare = 1.03 + 0.011 * devices
        runs.append(
            Run(
                devices=devices,
                batch=batch,
                step_s=each * model.flops / speed * cost,
                memory={"all": (weights + optimizer + held) * spare, "w": weights, "o": optimizer, "a": held},
            )
        )
        parts = st.floats(0.05, 1.0)
        shares.append((draw(parts), draw(parts), draw(parts), draw(parts)))
    return scaling_table(model, runs, shares)


@st.composite
def pipeline_tables(draw: st.DrawFn) -> AuditTable:
    """Schedules on random stages and micro-batches: bubbles at or above their bounds, 1F1B memory that stays."""
    stages, digits = draw(st.sampled_from([2, 4, 8, 16])), draw(st.integers(3, 5))
    memory, lines = draw(st.floats(4.0, 60.0)), []
    micro_batches = draw(st.lists(st.integers(1, 16), min_size=1, max_size=4, unique=True))
    for schedule in draw(st.lists(st.sampled_from(["naive", "gpipe", "1f1b"]), min_size=1, unique=True)):
        for count in micro_batches:
            m = count * stages
            bound = (stages - 1) / stages if schedule == "naive" else (stages - 1) / (m + stages - 1)
            bubble = 100 * (bound + draw(st.floats(0, 1)) * (1 - bound) * 0.5)
            held = memory * (1 + 0.2 * count if schedule == "gpipe" else 1 + 0.001 * count)
            lines.append(f"{schedule} {m} {significant(bubble, digits)} {significant(held, digits)}")
    return table("schedule num_micro_batches bubble:% memory:GB", *lines, stages=str(stages), devices=str(stages))
