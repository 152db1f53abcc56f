"""The tables of published steps that are back-tested: what is fitted to each, which rows are left out, and why."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from perfsuite.platforms import DeviceModel, load_catalog
from perfsuite.projection.fit import Free
from perfsuite.projection.memory import MEMORY_LIMIT, USABLE, memory_of
from perfsuite.projection.published_rows import PublishedStep, published_steps
from perfsuite.projection.softwares import software_of
from perfsuite.units import GIB

_PLATFORMS = {"a100-40": "a100_40gb", "a100-pcie": "a100_pcie"}

MATMUL = Free(name="matmul", expected=0.7, spread=0.4, share=True)
MATMUL_8 = Free(name="matmul_fp8", expected=0.55, spread=0.4, share=True)
ATTENTION = Free(name="attention", expected=0.4, spread=0.5, share=True)
TRAFFIC = Free(name="traffic_ratio", expected=2.5, spread=0.3)
AUTOCAST = Free(name="traffic_ratio", expected=1.4, spread=0.3)
"""2.5 times the 96 bytes per token and width of a block in 16 bits, over the 172 of one under autocast."""
SCORES = Free(name="traffic_ratio", expected=1.2, spread=0.3)
KERNEL = Free(name="kernel_us", expected=5.0, spread=0.5)
OVERLAP = Free(name="overlap_ratio", expected=0.7, spread=1.0, share=True)
BESIDE_TENSOR = Free(name="tensor_overlap", expected=0.7, spread=1.0, share=True)
LINK = Free(name="link", expected=0.7, spread=0.4, share=True)
NETWORK = Free(name="network", expected=0.7, spread=0.5, share=True)
SPREAD = Free(name="rank_spread_ratio", expected=0.012, spread=0.5)


@dataclass(frozen=True, kw_only=True)
class BacktestTable:
    """One back-test."""

    name: str
    title: str
    file: str
    software: str
    free: tuple[Free, ...]
    budget: tuple[float, float, float]
    """Most that the median, 90th percentile and maximum of the absolute error may be, in percent."""
    noise: float = 0.04
    fixed: Mapping[str, float] = field(default_factory=dict)
    """Constants that are known from elsewhere."""
    leave_out: Callable[[PublishedStep], str] = lambda row: ""
    """Why a row is not predicted; empty where it is."""


def platform_of(row: PublishedStep) -> DeviceModel:
    """The device's row of platforms.toml."""
    return _catalog()[_PLATFORMS.get(row.device, row.device)]


@functools.lru_cache(maxsize=1)
def _catalog() -> Mapping[str, DeviceModel]:
    return load_catalog().models


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


def _foundry() -> tuple[BacktestTable, ...]:
    return tuple(
        BacktestTable(
            name=name,
            title=f"llm-foundry on {title}",
            file=name,
            software="llm-foundry",
            free=(MATMUL, ATTENTION, traffic, KERNEL, OVERLAP),
            fixed={"attention_backward": 0.65},
            leave_out=_near_memory,
            budget=budget,
        )
        for name, title, traffic, budget in (
            ("llm-foundry-h100", "H100", AUTOCAST, (3, 7, 10)),
            ("llm-foundry-a100", "A100", AUTOCAST, (3, 7, 10)),
            ("llm-foundry-a100-40", "A100-40", TRAFFIC, (3, 7, 14)),
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
            free=nemo,
            noise=0.025,
            budget=(3, 5, 6),
        ),
        BacktestTable(
            name="megatron-2022-a100",
            title="Megatron-LM 2022 on A100",
            file="megatron-2022-a100",
            software="megatron",
            free=(MATMUL, SCORES, LINK),
            noise=0.03,
            budget=(3, 5, 5),
        ),
        BacktestTable(
            name="oneflow-v100",
            title="OneFlow on V100",
            file="oneflow-v100",
            software="oneflow",
            free=(MATMUL, LINK, NETWORK, OVERLAP),
            noise=0.05,
            budget=(4, 12, 14),
        ),
        BacktestTable(
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


TABLES: Mapping[str, BacktestTable] = {table.name: table for table in (*_foundry(), *_others())}
"""Leave one model out."""


def kept(table: BacktestTable) -> list[PublishedStep]:
    """Rows that the table does not leave out."""
    return [row for row in published_steps(table.file) if not table.leave_out(row)]
