"""Tables of report 004: data parallelism, memory, scaling, pipelines; model parallelism has :mod:`.parallel`."""

from __future__ import annotations

from collections.abc import Callable

from perfsuite.reports.tables import spec as c
from perfsuite.reports.tables.case import TableCase
from perfsuite.reports.tables.parallel import PARALLEL
from perfsuite.reports.tables.parallel_rows import of_constant_devices
from perfsuite.reports.tables.spec import ColumnSpec, Style, TableSpec, is_gpt, setting
from perfsuite.reports.tables.training import KERNELS

_PIPELINE = (
    setting("micro-batches", "num_micro_batches"),
    c.LAYOUT,
    c.MESH,
    setting("micro-batch", "micro_batch_size"),
    c.SAMPLES,
    ColumnSpec(title="bubble %", key="bubble_ratio", scale=100),
    ColumnSpec(title="bubble % (simulated)", key="simulated_bubble_ratio", scale=100),
    c.PEAK,
)
"""Columns of both tables of pipelines."""

# -- which cases -------------------------------------------------------------------------------------------------


_LARGEST = "LargestBatch"


def _strategy(*names: str) -> Callable[[TableCase], bool]:
    return lambda case: is_gpt(case) and case.settings.get("strategy") in names and case.workload != _LARGEST


def _pipelines(case: TableCase) -> bool:
    return "bubble_ratio" in case.values or (bool(case.missing) and "schedule" in case.settings)


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
            columns=(c.LAYOUT, c.LOCAL, c.GLOBAL, c.OPTIONS, c.SAMPLES, c.STEP_S, c.SPEED_UP, c.MFU, c.EXPOSED),
            notes=(c.NAMED_BASE, c.MFU_NOTE, c.COMMUNICATION),
        ),
        TableSpec(
            title="Data parallel, FSDP",
            select=_strategy("fsdp"),
            published=("004/fsdp", "004/multi-node"),
            per="model",
            columns=(c.LAYOUT, c.LOCAL, c.GLOBAL, c.OPTIONS, c.SAMPLES, c.STEP_S, c.PEAK, c.SPEED_UP, c.EXPOSED),
            notes=(c.NAMED_BASE, c.COMMUNICATION),
        ),
        TableSpec(
            title="ZeRO",
            select=_strategy("zero0", "zero1", "zero2", "zero3", "zero_redundancy"),
            per="model",
            columns=(c.STRATEGY, c.LAYOUT, c.LOCAL, c.OPTIONS, c.SAMPLES, c.PEAK, c.SPEED_UP),
        ),
        TableSpec(
            title="Memory per device",
            select=lambda case: (
                bool(case.model) and ("peak_gib" in case.values or "memory" in case.parameters.get("builds", ()))
            ),
            columns=(
                c.MODEL,
                c.STRATEGY,
                c.LAYOUT,
                c.MESH,
                c.LOCAL,
                c.OPTIONS,
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
                c.MODEL,
                c.STRATEGY,
                c.LAYOUT,
                c.OPTIONS,
                ColumnSpec(title="most samples per rank", key="largest_local_batch_samples"),
                c.PEAK,
                c.SAMPLES,
            ),
        ),
        TableSpec(
            title="Weak scaling",
            select=lambda case: is_gpt(case) and case.kind == "weak",
            published=("004/weak",),
            per="model",
            columns=(c.STRATEGY, c.LAYOUT, c.LOCAL, c.GLOBAL, c.OPTIONS, c.STEP_S, c.SPEED_UP, c.EFFICIENCY, c.EXPOSED),
            notes=(c.NAMED_BASE, c.COMMUNICATION),
        ),
        TableSpec(
            title="Strong scaling",
            select=lambda case: is_gpt(case) and case.kind == "strong",
            published=("004/strong",),
            per="model",
            columns=(c.STRATEGY, c.LAYOUT, c.LOCAL, c.GLOBAL, c.OPTIONS, c.STEP_S, c.SPEED_UP, c.EFFICIENCY),
            notes=(c.NAMED_BASE,),
        ),
        TableSpec(
            title="Pipeline schedules",
            select=_pipelines,
            published=("004/schedules",),
            per="model",
            pair_by=("schedule", "num_micro_batches"),
            columns=(c.SCHEDULE, c.STAGES, *_PIPELINE),
        ),
        TableSpec(
            title="Number of stages",
            select=lambda case: _pipelines(case) and str(case.settings.get("schedule", "")).lower() == "1f1b",
            published=("004/stages",),
            per="model",
            pair_by=("stages", "schedule"),
            rows=of_constant_devices,
            columns=(c.STAGES, setting("devices per stage", "devices_per_stage"), c.SCHEDULE, *_PIPELINE),
        ),
        *PARALLEL,
    ),
)
