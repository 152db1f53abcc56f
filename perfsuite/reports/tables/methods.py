"""Tables of report 004: data parallelism, memory, scaling, pipelines; model parallelism has :mod:`.parallel`."""

from __future__ import annotations

from collections.abc import Callable

from perfsuite.reports.tables.case import TableCase
from perfsuite.reports.tables.kernels import KERNELS
from perfsuite.reports.tables.parallel import PARALLEL
from perfsuite.reports.tables.parallel_rows import of_constant_devices
from perfsuite.reports.tables.spec import (
    COMMUNICATION,
    EFFICIENCY,
    EXPOSED,
    GLOBAL,
    LAYOUT,
    LOCAL,
    MESH,
    MFU,
    MFU_NOTE,
    MODEL,
    NAMED_BASE,
    OPTIONS,
    PEAK,
    SAMPLES,
    SCHEDULE,
    SPEED_UP,
    STAGES,
    STEP_S,
    STRATEGY,
    ColumnSpec,
    Style,
    TableSpec,
    is_gpt,
    setting,
)

_PIPELINE = (
    setting("micro-batches", "num_micro_batches"),
    LAYOUT,
    MESH,
    setting("micro-batch", "micro_batch_size"),
    SAMPLES,
    ColumnSpec(title="bubble %", key="bubble_ratio", scale=100),
    ColumnSpec(title="bubble % (simulated)", key="simulated_bubble_ratio", scale=100),
    PEAK,
)
"""What both tables of pipelines have."""

# -- which cases -------------------------------------------------------------------------------------------------


def _strategy(*names: str) -> Callable[[TableCase], bool]:
    def select(case: TableCase) -> bool:
        return is_gpt(case) and case.settings.get("strategy") in names and case.workload != _LARGEST

    return select


def _scales(kind: str) -> Callable[[TableCase], bool]:
    def select(case: TableCase) -> bool:
        return is_gpt(case) and case.kind == kind

    return select


_LARGEST = "LargestBatch"


def _pipelines(case: TableCase) -> bool:
    return "bubble_ratio" in case.values or (bool(case.missing) and "schedule" in case.settings)


def _one_f_one_b(case: TableCase) -> bool:
    return _pipelines(case) and str(case.settings.get("schedule", "")).lower() == "1f1b"


def _memory_build(case: TableCase) -> bool:
    return bool(case.model) and ("peak_gib" in case.values or "memory" in case.parameters.get("builds", ()))


# -- 004 methods -------------------------------------------------------------------------------------------------

METHODS = Style(
    name="methods",
    report="004",
    title="Methods",
    needs="pytest test_perf",
    applies=lambda case: not case.model or is_gpt(case) or "experts" in case.settings,
    environment=True,
    tables=(
        *KERNELS,
        TableSpec(
            title="Data parallel, DDP",
            select=_strategy("ddp"),
            published=("004/ddp",),
            per="model",
            columns=(LAYOUT, LOCAL, GLOBAL, OPTIONS, SAMPLES, STEP_S, SPEED_UP, MFU, EXPOSED),
            notes=(NAMED_BASE, MFU_NOTE, COMMUNICATION),
        ),
        TableSpec(
            title="Data parallel, FSDP",
            select=_strategy("fsdp"),
            published=("004/fsdp", "004/multi-node"),
            per="model",
            columns=(LAYOUT, LOCAL, GLOBAL, OPTIONS, SAMPLES, STEP_S, PEAK, SPEED_UP, EXPOSED),
            notes=(NAMED_BASE, COMMUNICATION),
        ),
        TableSpec(
            title="ZeRO",
            select=_strategy("zero0", "zero1", "zero2", "zero3", "zero_redundancy"),
            per="model",
            columns=(STRATEGY, LAYOUT, LOCAL, OPTIONS, SAMPLES, PEAK, SPEED_UP),
        ),
        TableSpec(
            title="Memory per device",
            select=_memory_build,
            columns=(
                MODEL,
                STRATEGY,
                LAYOUT,
                MESH,
                LOCAL,
                OPTIONS,
                ColumnSpec(title="weights GiB", key="weights_gib"),
                ColumnSpec(title="gradients GiB", key="gradients_gib"),
                ColumnSpec(title="optimizer GiB", key="optimizer_gib"),
                ColumnSpec(title="activations GiB", key="activations_gib"),
                ColumnSpec(title="peak activations GiB", key="peak_activations_gib", optional=True),
                ColumnSpec(title="untracked GiB", key="untracked_gib"),
                ColumnSpec(title="peak GiB", key="peak_gib"),
            ),
            notes=("untracked: allocated after a step beyond weights, gradients and optimizer",),
        ),
        TableSpec(
            title="Largest local batch",
            select=lambda case: case.workload == _LARGEST or "largest_local_batch_samples" in case.values,
            columns=(
                MODEL,
                STRATEGY,
                LAYOUT,
                OPTIONS,
                ColumnSpec(title="most samples per rank", key="largest_local_batch_samples"),
                PEAK,
                SAMPLES,
            ),
        ),
        TableSpec(
            title="Weak scaling",
            select=_scales("weak"),
            published=("004/weak",),
            per="model",
            columns=(STRATEGY, LAYOUT, LOCAL, GLOBAL, OPTIONS, STEP_S, SPEED_UP, EFFICIENCY, EXPOSED),
            notes=(NAMED_BASE, COMMUNICATION),
        ),
        TableSpec(
            title="Strong scaling",
            select=_scales("strong"),
            published=("004/strong",),
            per="model",
            columns=(STRATEGY, LAYOUT, LOCAL, GLOBAL, OPTIONS, STEP_S, SPEED_UP, EFFICIENCY),
            notes=(NAMED_BASE,),
        ),
        TableSpec(
            title="Pipeline schedules",
            select=_pipelines,
            published=("004/schedules",),
            per="model",
            pair_by=("schedule", "num_micro_batches"),
            columns=(SCHEDULE, STAGES, *_PIPELINE),
        ),
        TableSpec(
            title="Number of stages",
            select=_one_f_one_b,
            published=("004/stages",),
            per="model",
            pair_by=("stages", "schedule"),
            rows=of_constant_devices,
            columns=(STAGES, setting("devices per stage", "devices_per_stage"), SCHEDULE, *_PIPELINE),
        ),
        *PARALLEL,
    ),
)
