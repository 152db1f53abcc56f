"""How far projections are off on published steps that they were not fitted to.

A table fits its few constants on all models but one and predicts that one.  Shares are of the platform's peaks.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from perfsuite.platforms import DeviceModel, load_catalog
from perfsuite.projection.calibration import TYPICAL, Calibration, Constant, KernelPoint
from perfsuite.projection.engine import Projector, StepTime
from perfsuite.projection.fit import Constants, Free, fit
from perfsuite.projection.memory import MEMORY_LIMIT, USABLE, memory_of
from perfsuite.projection.published_rows import PublishedStep, published_steps
from perfsuite.projection.softwares import software_of
from perfsuite.projection.traffic import Implementation
from perfsuite.units import GIB

_PLATFORMS = {"a100-40": "a100_40gb", "a100-pcie": "a100_pcie"}
_LINKS_BY_GROUP = {2: 25.0, 4: 100.0, 8: 150.0}
"""GB/s of a V100's mesh by ranks of a group, as report 003's machine has it."""

MATMUL = Free(name="matmul", expected=0.7, spread=0.4, share=True)
MATMUL_8 = Free(name="matmul_fp8", expected=0.55, spread=0.4, share=True)
ATTENTION = Free(name="attention", expected=0.4, spread=0.5, share=True)
TRAFFIC = Free(name="traffic_ratio", expected=2.5, spread=0.3)
SCORES = Free(name="traffic_ratio", expected=1.2, spread=0.3)
KERNEL = Free(name="kernel_us", expected=5.0, spread=0.5)
OVERLAP = Free(name="overlap_ratio", expected=0.7, spread=1.0, share=True)
BESIDE_TENSOR = Free(name="tensor_overlap", expected=0.7, spread=1.0, share=True)
LINK = Free(name="link", expected=0.7, spread=0.4, share=True)
NETWORK = Free(name="network", expected=0.7, spread=0.5, share=True)
SPREAD = Free(name="rank_spread_ratio", expected=0.012, spread=0.5)


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
class Table:
    """One back-test."""

    name: str
    title: str
    file: str
    software: str
    free: tuple[Free, ...]
    budget: tuple[float, float, float]
    """Most that the median, 90th percentile and maximum of the absolute error may be, in percent."""
    noise: float = 0.04
    fixed: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Constants that are known from elsewhere."""
    leave_out: Callable[[PublishedStep], str] = lambda row: ""
    """Why a row is not predicted; empty where it is."""


@dataclass(frozen=True, kw_only=True)
class Backtested:
    """What a back-test found."""

    name: str
    title: str
    errors: tuple[Error | MemoryRow, ...]
    left_out: tuple[tuple[str, str], ...]
    """(row, why)."""
    constants: Constants
    """Fitted on all rows."""
    budget: tuple[float, float, float]

    @property
    def summary(self) -> tuple[float, float, float]:
        """Median, 90th percentile and maximum of the absolute error, percent."""
        return summary([error.percent for error in self.errors])

    @property
    def within_budget(self) -> bool:
        """Whether every figure, as printed, is at most its budget."""
        return all(round(value, 1) <= most for value, most in zip(self.summary, self.budget, strict=True))


def summary(percents: Sequence[float]) -> tuple[float, float, float]:
    """Median, 90th percentile and maximum of absolute values.

    >>> summary([1.0, -2.0, 3.0])
    (2.0, 3.0, 3.0)
    """
    sizes = sorted(abs(percent) for percent in percents)
    return statistics.median(sizes), sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))], sizes[-1]


def platform_of(row: PublishedStep) -> DeviceModel:
    """The device's row of platforms.toml."""
    return _catalog()[_PLATFORMS.get(row.device, row.device)]


@functools.lru_cache(maxsize=1)
def _catalog() -> Mapping[str, DeviceModel]:
    return load_catalog().models


def calibration_for(row: PublishedStep, values: Constants, kernels: tuple[KernelPoint, ...] = ()) -> Calibration:
    """Shares of the device's peaks, and traits as they are, as a calibration; what is not given is typical."""
    device = platform_of(row)

    def of(name: str) -> float:
        return values.get(name, TYPICAL[name].value if name in TYPICAL else 0.0)

    wide = "fp16" if row.dtype == "fp16" else "bf16"
    sixteen = device.tflops[wide].value
    numbers = {
        f"matmul_{wide}_tflops": of("matmul") * sixteen,
        f"attention_{wide}_tflops": of("attention") * sixteen,
        f"attention_backward_{wide}_tflops": of("attention") * values.get("attention_backward", 1.0) * sixteen,
        "link_gb_per_s": of("link") * (device.link.value if device.link else 0.0),
        "network_gb_per_s": of("network") * row.network_gb_per_s,
        "memory_gb_per_s": of("memory") * (device.memory_bandwidth.value if device.memory_bandwidth else 0.0),
        **{name: of(name) for name in ("kernel_us", "link_us", "network_us", "wave_outputs")},
    }
    if "fp8" in device.tflops:
        numbers["matmul_fp8_tflops"] = values.get("matmul_fp8", 0.55) * device.tflops["fp8"].value
    if row.device == "v100":
        numbers.update({f"link_{ranks}_gb_per_s": of("link") * rate for ranks, rate in _LINKS_BY_GROUP.items()})
    for name in ("traffic_ratio", "in_situ_ratio", "overlap_ratio", "rank_spread_ratio", "host_step_s"):
        if name in values:
            numbers[name] = values[name]
    constants = {name: Constant(value=value, unit="", source="back-test") for name, value in numbers.items()}
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
                simulated=False,
            )
        found.append(projectors[key].step(row.layout))
    return found


def _code(software: str, row: PublishedStep, values: Constants) -> Implementation:
    code = software_of(software, row)
    if "tensor_overlap" in values:
        code = dataclasses.replace(code, tensor_overlap=values["tensor_overlap"])
    return code


def fitted(table: Table, rows: Sequence[PublishedStep], start: Constants | None = None) -> dict[str, float]:
    """The table's constants from these rows, its fixed ones included."""
    found = fit(
        table.free,
        lambda values: predict(rows, table.software, {**table.fixed, **values}),
        [row.step_time_s for row in rows],
        noise=table.noise,
        start=start,
        rounds=2 if start else 10,
    )
    return {**table.fixed, **found}


def run(table: Table) -> Backtested:
    """Every model of the table from the others."""
    rows, left_out = [], []
    for row in published_steps(table.file):
        why = table.leave_out(row)
        (left_out.append((row.id, why)) if why else rows.append(row))
    everything = fitted(table, rows)
    errors = []
    for model in sorted({row.model for row in rows}):
        values = fitted(table, [row for row in rows if row.model != model], start=everything)
        own = [row for row in rows if row.model == model]
        times = predict(own, table.software, values)
        errors += [Error(row, time) for row, time in zip(own, times, strict=True)]
    return Backtested(
        name=table.name,
        title=table.title,
        errors=tuple(errors),
        left_out=tuple(left_out),
        constants=everything,
        budget=table.budget,
    )


def memory_share(software: str, row: PublishedStep) -> float:
    """Of the card, by estimate."""
    capacity = platform_of(row).memory
    assert capacity is not None, f"{row.device} has a memory"
    total = memory_of(row.architecture, row.layout, software_of(software, row)).total
    return total / GIB / (USABLE * capacity.value)


def _near_memory(row: PublishedStep) -> str:
    if row.dtype == "fp8":
        return "fp8 beside bf16: an efficiency of its own on 7 rows"
    share = memory_share("llm-foundry", row)
    return f"{100 * share:.0f} % of the card by estimate" if share > MEMORY_LIMIT else ""


def _tables() -> tuple[Table, ...]:
    foundry = tuple(
        Table(
            name=name,
            title=f"llm-foundry on {title}",
            file=name,
            software="llm-foundry",
            free=(MATMUL, ATTENTION, TRAFFIC, KERNEL, OVERLAP),
            fixed={"attention_backward": 0.65},
            leave_out=_near_memory,
            budget=budget,
        )
        for name, title, budget in (
            ("llm-foundry-h100", "H100", (3, 7, 10)),
            ("llm-foundry-a100", "A100", (3, 7, 10)),
            ("llm-foundry-a100-40", "A100-40", (3, 7, 14)),
        )
    )
    nemo = (MATMUL, MATMUL_8, ATTENTION, BESIDE_TENSOR, SPREAD, KERNEL)
    return (
        *foundry,
        Table(
            name="nemo-h100",
            title="NeMo on H100, bf16 and fp8",
            file="nemo-h100",
            software="nemo",
            free=nemo,
            noise=0.025,
            budget=(3, 5, 6),
        ),
        Table(
            name="megatron-2022-a100",
            title="Megatron-LM 2022 on A100",
            file="megatron-2022-a100",
            software="megatron",
            free=(MATMUL, SCORES, LINK),
            noise=0.03,
            budget=(3, 5, 5),
        ),
        Table(
            name="oneflow-v100",
            title="OneFlow on V100",
            file="oneflow-v100",
            software="oneflow",
            free=(MATMUL, LINK, NETWORK, OVERLAP),
            noise=0.05,
            budget=(4, 12, 14),
        ),
        Table(
            name="bloom-a100",
            title="BLOOM on A100",
            file="bloom-a100",
            software="bloom",
            free=(MATMUL, SCORES, LINK),
            noise=0.05,
            budget=(5, 10, 12),
            leave_out=_odd_heads,
        ),
    )


def _odd_heads(row: PublishedStep) -> str:
    features = row.architecture.features
    return f"heads of {features} features leave the matrix units" if features % 8 else ""


TABLES: Mapping[str, Table] = {table.name: table for table in _tables()}
"""Leave one model out."""


def kept(table: Table) -> list[PublishedStep]:
    """Rows that the table does not leave out."""
    return [row for row in published_steps(table.file) if not table.leave_out(row)]
