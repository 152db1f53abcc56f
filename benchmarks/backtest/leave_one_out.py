"""How far projections are off on published steps that they were not fitted to.

A table fits its few constants on all models but one and predicts that one.  Shares are of the platform's peaks.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.backtest.fit import Constants, fit
from benchmarks.backtest.rows import PublishedStep, published_steps
from benchmarks.backtest.tables import BacktestTable, platform_of
from perfsuite.models.decoder import Decoder
from perfsuite.projection.calibration import TYPICAL, Calibration, Constant, KernelPoint, achieved
from perfsuite.projection.engine import Projector, StepTime
from perfsuite.projection.implementation import Implementation, implementation_of, on_family
from perfsuite.projection.softwares import constants_of
from perfsuite.record.step import Training

_LINKS_BY_GROUP = {2: 25.0, 4: 100.0, 8: 150.0}
"""GB/s of a V100's mesh by ranks of a group, as report 003's machine has it."""


class Error(NamedTuple):
    """One row, predicted without its model."""

    row: PublishedStep
    predicted_s: float

    @property
    def percent(self) -> float:
        """100 x (predicted / measured - 1)."""
        return 100 * (self.predicted_s / self.row.step_time_s - 1)


class MemoryRow(NamedTuple):
    """One row's allocated memory."""

    row: PublishedStep
    predicted_gib: float

    @property
    def percent(self) -> float:
        """100 x (predicted / measured - 1)."""
        assert self.row.memory_gib is not None, "only rows with a memory are tested"
        return 100 * (self.predicted_gib / self.row.memory_gib - 1)


@dataclass(frozen=True, kw_only=True)
class Backtested:
    """The errors of one back-test."""

    name: str
    title: str
    errors: tuple[Error | MemoryRow, ...]
    left_out: Mapping[str, str]
    """Why, by row."""
    beside: tuple[Error, ...] = ()
    """Of rows that are left out, predicted alike."""
    constants: Constants
    """Fitted on all rows."""
    budget: tuple[float, float, float]

    @property
    def summary(self) -> tuple[float, float, float]:
        """Median, 90th percentile and maximum of the absolute error, percent."""
        return summary([error.percent for error in self.errors])

    @property
    def every(self) -> tuple[float, float, float]:
        """The same with the rows that are left out."""
        return summary([error.percent for error in (*self.errors, *self.beside)])

    @property
    def within_budget(self) -> bool:
        """Whether there are rows, and every figure, as printed, is at most its budget."""
        if not self.errors:
            return False
        return all(round(value, 1) <= most for value, most in zip(self.summary, self.budget, strict=True))


def summary(percents: Sequence[float]) -> tuple[float, float, float]:
    """Median, 90th percentile and maximum of absolute values.

    >>> summary([1.0, -2.0, 3.0])
    (2.0, 3.0, 3.0)
    """
    sizes = sorted(abs(percent) for percent in percents)
    return statistics.median(sizes), sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))], sizes[-1]


def calibration_for(row: PublishedStep, values: Constants, kernels: tuple[KernelPoint, ...] = ()) -> Calibration:
    """Return a calibration of shares of the device's peaks and of traits; missing ones are typical."""
    device, values = platform_of(row), {"matmul_fp8": 0.55, **values}
    constants = constants_of(device, values, source="back-test", network_gb_per_s=row.network_gb_per_s)
    if row.device == "v100":
        share = values.get("link", TYPICAL["link"].value)
        for ranks, rate in _LINKS_BY_GROUP.items():
            constants[f"link_{ranks}_gb_per_s"] = Constant(value=share * rate, unit="GB/s", source="back-test")
    return Calibration(device=device.name, constants=constants, kernels=kernels)


def predict(
    rows: Sequence[PublishedStep], software: str, values: Constants, kernels: tuple[KernelPoint, ...] = ()
) -> list[float]:
    """Step times of rows."""
    return [step.seconds for step in steps_of(rows, software, values, kernels)]


def steps_of(
    rows: Sequence[PublishedStep], software: str, values: Constants, kernels: tuple[KernelPoint, ...] = ()
) -> list[StepTime]:
    """Projected steps of rows."""
    projectors: dict[object, Projector] = {}
    found = []
    for row in rows:
        key = (row.architecture, row.dtype, row.device, row.network_gb_per_s, row.gradients_in_fp32)
        if key not in projectors:
            projectors[key] = Projector(
                model=row.architecture,
                code=_code(software, row, values),
                calibration=calibration_for(row, values, kernels),
                devices_per_node=row.devices_per_node,
                dtype=row.dtype,
            )
        found.append(projectors[key].step(row.layout, simulated=False))
    return found


def own_step(row: PublishedStep) -> float:
    """Seconds of a row's step as ``perfsuite project`` has it without a software: data sheet, perfsuite's modules."""
    shape, layout, device = row.architecture, row.layout, platform_of(row)
    model = Decoder(
        name=shape.name, layers=shape.layers, width=shape.width, heads=shape.heads, kv_heads=shape.key_heads,
        hidden=shape.hidden, words=shape.vocabulary, sequence_length=shape.tokens, context=shape.positions,
        gated=shape.gated, tied=shape.tied, layer_norms=not shape.gated, experts=shape.experts, top_k=shape.top_k,
        expert_hidden=shape.expert_hidden, shared_hidden=shape.shared_hidden, dense_layers=shape.dense_layers,
        head_width=shape.head_width, query_rank=shape.query_rank, key_rank=shape.key_rank,
        rope_width=shape.rope_width, value_width=shape.value_width if shape.key_rank else 0,
    )  # fmt: skip
    training = Training(
        model=shape.name,
        layout=str(layout),
        strategy="hybrid",
        dtype=row.dtype,
        narrow=True,
        gradient_dtype="fp16" if row.dtype == "fp16" else "bf16",
        sharding=layout.sharding,
        checkpointing=layout.checkpointing,
        num_micro_batches=layout.num_micro_batches,
    )
    calibration = Calibration.from_platform(device)
    if row.network_gb_per_s:
        calibration = calibration.with_network(achieved("network", row.network_gb_per_s, "the table"))
    projector = Projector(
        model=shape,
        code=on_family(implementation_of(model, training), model, training, device.family),
        calibration=calibration,
        devices_per_node=row.devices_per_node,
        dtype=row.dtype,
    )
    return projector.step(layout, simulated=False).seconds


def _code(software: str, row: PublishedStep, values: Constants) -> Implementation:
    code = row.implementation(software)
    if "tensor_overlap" in values:
        code = dataclasses.replace(code, tensor_overlap=values["tensor_overlap"])
    return code


def fitted(table: BacktestTable, rows: Sequence[PublishedStep], start: Constants | None = None) -> dict[str, float]:
    """The table's constants from these rows, those that it takes from elsewhere included."""
    fixed = {**table.fixed, **table.derived(rows)}
    found = fit(
        table.free,
        lambda values: predict(rows, table.software, {**fixed, **values}),
        [row.step_time_s for row in rows],
        noise=table.noise,
        start=start,
        rounds=2 if start else 10,
    )
    return {**fixed, **found}


def run(table: BacktestTable) -> Backtested:
    """Predict every model of the table from the others; rows that are left out are predicted and never fitted."""
    rows, left_out = table.split()
    every = [row for row in published_steps(table.file) if table.among(row)]
    everything = fitted(table, rows)
    errors: list[Error] = []
    for model in sorted({row.model for row in every}):
        values = fitted(table, [row for row in rows if row.model != model], start=everything)
        own = [row for row in every if row.model == model]
        errors += map(Error, own, predict(own, table.software, values))
    return Backtested(
        name=table.name,
        title=table.title,
        errors=tuple(error for error in errors if error.row.id not in left_out),
        left_out=left_out,
        beside=tuple(error for error in errors if error.row.id in left_out),
        constants=everything,
        budget=table.budget,
    )
