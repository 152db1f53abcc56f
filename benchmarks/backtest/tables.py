"""The tables of published steps of the back-test: fitted constants of each, rows that are left out, and reasons."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.backtest.fit import Constants, Free
from benchmarks.backtest.rows import PublishedStep, published_steps
from perfsuite.base.units import GIB
from perfsuite.platforms import DeviceModel, load_catalog
from perfsuite.projection.memory import MEMORY_LIMIT, USABLE, memory_of

CLEARLY = 1.05
"""Single measurements of one step scatter by less."""
_PLATFORMS = {"a100-40": "a100_40gb"}

MATMUL = Free(name="matmul", expected=0.7, spread=0.4, share=True)
MATMUL_8 = Free(name="matmul_fp8", expected=0.55, spread=0.4, share=True)
ATTENTION = Free(name="attention", expected=0.4, spread=0.5, share=True)
TRAFFIC = Free(name="traffic_ratio", expected=1.5, spread=0.3)
"""Elementwise kernels reach less of the memory's rate than a copy."""
SCORES = Free(name="traffic_ratio", expected=1.2, spread=0.3)
KERNEL = Free(name="kernel_us", expected=5.0, spread=0.5)
OVERLAP = Free(name="overlap_ratio", expected=0.7, spread=1.0, share=True)
BESIDE_TENSOR = Free(name="tensor_overlap", expected=0.7, spread=1.0, share=True)
LINK = Free(name="link", expected=0.7, spread=0.4, share=True)
NETWORK = Free(name="network", expected=0.7, spread=0.5, share=True)
CLUSTER = Free(name="network", expected=0.5, spread=1.0, share=True)
"""Share of the adapters' rate, for a cluster with unknown wiring."""
SPREAD = Free(name="rank_spread_ratio", expected=0.012, spread=0.5)


@dataclass(frozen=True, kw_only=True)
class BacktestTable:
    """One back-test."""

    name: str
    title: str
    file: str
    software: str
    free: tuple[Free, ...]
    release: str
    """Of the program, in the words of the command."""
    variant: str = ""
    """The device of the rows in words, where no row of platforms.toml has its figures."""
    held_out: tuple[str, ...] = ()
    """Files with steps of other releases, or of models that are in no fit: they widen the band and are never fitted."""
    budget: tuple[float, float, float]
    """Most that the median, 90th percentile and maximum of the absolute error may be, in percent."""
    noise: float = 0.04
    fixed: Mapping[str, float] = field(default_factory=dict)
    """Constants that are known from elsewhere."""
    derived: Callable[[Sequence[PublishedStep]], Constants] = lambda rows: {}
    """Constants from other sources, given the rows that are not predicted."""
    among: Callable[[PublishedStep], bool] = lambda row: True
    """Whether it is about a row at all."""
    leave_out: Callable[[PublishedStep], str] = lambda row: ""
    """Why a row neither fits nor counts; empty where it does."""

    def split(self) -> tuple[list[PublishedStep], dict[str, str]]:
        """Its rows, and why others, by their ids, are left out."""
        rows = [row for row in published_steps(self.file) if self.among(row)]
        left_out = {row.id: why for row in rows if (why := self.leave_out(row))}
        return [row for row in rows if row.id not in left_out], left_out


def platform_of(row: PublishedStep) -> DeviceModel:
    """The device's row of platforms.toml; torchtitan's H100 has another memory and the same nominal peaks."""
    if row.device == "h100-96":
        h100 = _catalog()["h100"]
        assert h100.memory is not None
        assert h100.memory_bandwidth is not None
        memory, bandwidth = (
            dataclasses.replace(peak, value=value, source="torchtitan's benchmarks/")
            for peak, value in ((h100.memory, 96.0 * 1e9 / GIB), (h100.memory_bandwidth, 2400.0))
        )
        return dataclasses.replace(h100, memory=memory, memory_bandwidth=bandwidth)
    return _catalog()[_PLATFORMS.get(row.device, row.device)]


@functools.lru_cache(maxsize=1)
def _catalog() -> Mapping[str, DeviceModel]:
    return load_catalog().models


def memory_share(software: str, row: PublishedStep) -> float:
    """Of the card, by estimate."""
    capacity = platform_of(row).memory
    assert capacity is not None, f"{row.device} has a memory"
    total = memory_of(row.architecture, row.layout, row.implementation(software)).total
    return total / GIB / (USABLE * capacity.value)


def _odd_among_its_own(row: PublishedStep) -> str:
    """Return why a row of llm-foundry does not count: memory at its limit, or its table contradicts it."""
    if row.dtype == "fp8":
        return "fp8: 7 rows among rows in bf16, with an efficiency of their own"
    share = memory_share("llm-foundry", row)
    if share > MEMORY_LIMIT:
        return f"{100 * share:.0f} % of the card by estimate"
    other = contradicting(row, published_steps(f"llm-foundry-{row.device}"))
    if other is None:
        return ""
    faster = 100 * (other.tokens_per_s / row.tokens_per_s - 1)
    return f"{other.id} does no less for a token and has {faster:.0f} % more of them a second"


def contradicting(row: PublishedStep, rows: Sequence[PublishedStep]) -> PublishedStep | None:
    """The fastest row that does at least as much for every token and yet has clearly more of them a second and device.

    It has the same model, no shorter sequences, no more tokens in a micro-batch or a device's step, no fewer devices.
    """

    def load(step: PublishedStep) -> tuple[int, ...]:
        tokens = step.layout.micro_batch_size * step.architecture.tokens
        length, world = step.architecture.tokens, step.layout.world_size
        return length, world, -tokens, -tokens * step.layout.num_micro_batches

    def alike(step: PublishedStep) -> tuple[str, ...]:
        return step.model, step.dtype, step.layout.checkpointing

    harder = [
        other
        for other in rows
        if alike(other) == alike(row)
        and all(more >= own for more, own in zip(load(other), load(row), strict=True))
        and other.tokens_per_s > CLEARLY * row.tokens_per_s
    ]
    return max(harder, key=lambda other: other.tokens_per_s, default=None)


def _foundry() -> tuple[BacktestTable, ...]:
    return tuple(
        BacktestTable(
            name=name,
            title=f"llm-foundry on {title}",
            file=name,
            software="llm-foundry",
            release="2023-04 and 2023-10",
            held_out=(f"{name}-held-out",) if name == "llm-foundry-h100" else (),
            free=(MATMUL, ATTENTION, TRAFFIC, KERNEL, CLUSTER),
            fixed={"attention_backward": 0.65},
            leave_out=_odd_among_its_own,
            noise=0.02,
            budget=(3, 7, 10),
        )
        for name, title in (
            ("llm-foundry-h100", "H100"),
            ("llm-foundry-a100", "A100"),
            ("llm-foundry-a100-40", "A100-40"),
        )
    )


def _others() -> tuple[BacktestTable, ...]:
    nemo = (MATMUL, MATMUL_8, ATTENTION, BESIDE_TENSOR, SPREAD, KERNEL)
    return (
        BacktestTable(
            name="nemo-h100",
            title="NeMo on H100, bf16 and fp8",
            file="nemo-h100",
            software="nemo",
            release="24.09 and 24.12",
            held_out=("nemo-h100-fp8", "nemo-h100-held-out"),
            free=nemo,
            noise=0.025,
            budget=(3, 5, 6),
        ),
        BacktestTable(
            name="megatron-2022-a100",
            title="Megatron-LM 2022 on A100",
            file="megatron-2022-a100",
            software="megatron",
            release="2022",
            free=(MATMUL, SCORES, LINK),
            noise=0.03,
            budget=(3, 5, 5),
        ),
        BacktestTable(
            name="oneflow-v100",
            title="OneFlow on V100",
            file="oneflow-v100",
            software="oneflow",
            release="of report 003",
            free=(MATMUL, LINK, NETWORK, OVERLAP),
            noise=0.05,
            budget=(4, 12, 14),
        ),
        BacktestTable(
            name="bloom-a100",
            title="BLOOM on A100",
            file="bloom-a100",
            software="megatron-deepspeed",
            release="2022",
            free=(MATMUL, SCORES, LINK),
            noise=0.05,
            budget=(5, 10, 12),
            leave_out=_odd_heads,
        ),
    )


def _odd_heads(row: PublishedStep) -> str:
    features = row.architecture.features
    return f"heads of {features} features leave the matrix units" if features % 8 else ""


TABLES: Mapping[str, BacktestTable] = {table.name: table for table in (*_foundry(), *_others())}
"""Leave one model out."""

TORCHTITAN = BacktestTable(
    name="torchtitan-h100-96",
    title="torchtitan on H100 of 96 GB HBM2e",
    file="torchtitan-h100-96",
    software="torchtitan",
    release="2024-12 and 2025-06",
    variant="H100 of 96 GB HBM2e (2.4 TB/s, 500 W), whose peak its authors do not know",
    held_out=("torchtitan-held-out",),
    free=(MATMUL, MATMUL_8, ATTENTION, TRAFFIC, KERNEL),
    noise=0.05,
    budget=(10, 25, 30),
)
"""Its device is not a platform: the command takes its traits, and the shares of other programs on the same chip."""


def kept(table: BacktestTable) -> list[PublishedStep]:
    """Rows that the table does not leave out."""
    return table.split()[0]


def held_out(table: BacktestTable) -> list[PublishedStep]:
    """Rows of the table's software that no constant is fitted to."""
    return [row for file in table.held_out for row in published_steps(file)]
