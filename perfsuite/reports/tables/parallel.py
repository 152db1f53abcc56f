"""Tables of report 004 about model parallelism: tensor, sequence, context, expert parallelism, and their products."""

from __future__ import annotations

from perfsuite.reports.tables import spec as c
from perfsuite.reports.tables.case import TableCase
from perfsuite.reports.tables.parallel_rows import (
    claimed,
    component_rows,
    of_several_lengths,
    of_several_meshes,
    of_several_methods,
    step_remarks,
    traffic_rows,
)
from perfsuite.reports.tables.spec import ColumnSpec, TableSpec, setting

REPLAYED = ColumnSpec(title="communication % (replayed)", key="communication_percent")
_COMPUTE = ColumnSpec(title="compute ms", key="compute_time_s", scale=1000)
_COMMUNICATION_MS = ColumnSpec(title="communication ms", key="communication_time_s", scale=1000)
_TOTAL = ColumnSpec(title="total ms", key="step_time_s", scale=1000)
_IMBALANCE = ColumnSpec(title="most over mean rows of an expert", key="expert_imbalance")
_DROPPED = ColumnSpec(title="dropped %", key="dropped_percent")
_TOKENS_PER_S = ColumnSpec(title="tokens/s (all devices)", key="tokens_per_s")

REPLAY_NOTE = "replayed: everything that the step sends, sent again by itself, over that and the step's computation"


def _trains_a_language_model(case: TableCase) -> bool:
    return case.workload == "TrainStep" and "vocabulary" in case.settings


def _size(case: TableCase, axis: str) -> int:
    return int(case.settings.get(axis, 1))


def _compares_experts(case: TableCase) -> bool:
    """Models with experts, and the dense ones of equal active parameters, spread over samples and experts alone."""
    of_kind = "experts" in case.settings or case.model.endswith("-dense")
    return case.workload == "TrainStep" and of_kind and all(_size(case, axis) == 1 for axis in ("pp", "cp", "tp"))


PARALLEL = (
    TableSpec(
        title="Tensor parallel",
        select=lambda case: bool(case.model) and str(case.settings.get("mesh", "")).rstrip("0123456789") == "tp",
        published=("004/tensor",),
        pair_by=("tp",),
        columns=(c.MODEL, c.TP, c.LAYOUT, c.OPTIONS, c.SAMPLES, c.PEAK, c.EXPOSED, REPLAYED, c.MFU),
        notes=(c.COMMUNICATION, REPLAY_NOTE, c.MFU_NOTE),
    ),
    TableSpec(
        title="Column and row parallel layer",
        select=lambda case: case.workload == "TensorLinear",
        published=("004/column-row",),
        pair_by=("split",),
        columns=(
            setting("features", "features"),
            setting("split", "split"),
            c.LAYOUT,
            c.DTYPE,
            _COMPUTE,
            _COMMUNICATION_MS,
            _TOTAL,
            ColumnSpec(title="bytes", key="communication_bytes"),
            ColumnSpec(title="busbw GB/s", key="tp_busbw_gb_per_s"),
        ),
        notes=(
            "forward and backward of one linear layer; none: on one rank",
            "column leaves its output split; column_gather adds the all-gather that the report omits, and its output "
            "equals that of row; row_scatter leaves each rank whole rows, as sequence parallelism does",
            "bytes: S of nccl-tests over all messages of a rank",
        ),
    ),
    TableSpec(
        title="Long sequences",
        select=lambda case: _trains_a_language_model(case) and (_size(case, "cp") > 1 or _size(case, "tp") > 1),
        rows=of_several_lengths,
        published=("004/long-sequences",),
        pair_by=("sequence_length",),
        columns=(
            c.MODEL,
            setting("split by", "sequence_split"),
            c.LENGTH,
            c.LAYOUT,
            c.GLOBAL,
            ColumnSpec(title="peak GiB without sequence parallelism", key="peak_without_gib"),
            c.PEAK,
            c.SAMPLES,
            _TOKENS_PER_S,
            ColumnSpec(title="times without, same length", key="speedup_same_length"),
        ),
        notes=("peaks are per device; without: as many ranks, each keeping whole sequences between the products",),
    ),
    TableSpec(
        title="Ring attention",
        select=lambda case: _trains_a_language_model(case) and case.settings.get("attention", "auto") != "auto",
        rows=of_several_methods,
        published=("004/ring-attention",),
        pair_by=("method",),
        columns=(
            c.MODEL,
            c.LENGTH,
            setting("attention", "method"),
            c.LAYOUT,
            c.PEAK,
            c.SAMPLES,
            c.EXPOSED,
            REPLAYED,
            ColumnSpec(title="communication overhead %", key="communication_overhead", scale=100),
        ),
        notes=(c.COMMUNICATION, REPLAY_NOTE, "overhead: exposed communication over the rest of the step"),
    ),
    TableSpec(
        title="Experts and dense",
        select=_compares_experts,
        published=("004/moe",),
        pair_by=("experts",),
        columns=(
            setting("experts", "experts"),
            c.MODEL,
            c.EP,
            c.LAYOUT,
            c.OPTIONS,
            c.SAMPLES,
            c.PEAK,
            ColumnSpec(title="MFU % by active parameters", key="mfu_percent"),
            ColumnSpec(title="parameters 1e9", key="parameters", value=False, scale=1e-9),
            ColumnSpec(title="active 1e9", key="active_parameters", value=False, scale=1e-9),
            _IMBALANCE,
            _DROPPED,
        ),
        notes=("experts 0: dense",),
        remarks=claimed,
    ),
    TableSpec(
        title="Routing",
        select=lambda case: case.workload == "MoeLayer",
        published=("004/router",),
        pair_by=("batch_size",),
        columns=(
            setting("batch", "batch_size"),
            setting("top-k", "top_k"),
            ColumnSpec(title="capacity", key="capacity_factor", value=False, optional=True),
            ColumnSpec(title="skew", key="skew", value=False, optional=True),
            ColumnSpec(title="layer of", key="implementation", value=False, optional=True),
            c.LAYOUT,
            c.MESH,
            setting("experts", "experts"),
            ColumnSpec(title="all-to-all ms", key="communication_time_s", scale=1000),
            _COMPUTE,
            _TOTAL,
            ColumnSpec(title="all-to-all %", key="communication_percent"),
            _IMBALANCE,
            _DROPPED,
        ),
        notes=(
            "forward and backward of one layer",
            "all-to-all: until the last row has come, so with the wait for ranks whose experts compute longer",
        ),
    ),
    TableSpec(
        title="Meshes",
        select=lambda case: bool(case.model) and case.workload == "TrainStep",
        rows=of_several_meshes,
        published=("004/3d",),
        pair_by=("dp", "pp", "tp"),
        columns=(c.MODEL, setting("axes", "axes"), *c.AXES, c.LAYOUT, c.GLOBAL, c.SAMPLES, c.MFU, c.PEAK),
        notes=(c.MFU_NOTE,),
    ),
    TableSpec(
        title="Components of a step",
        select=lambda case: bool(case.components),
        rows=component_rows,
        published=("004/5d",),
        pair_by=("component", "top_k"),
        columns=(
            c.MODEL,
            c.MESH,
            setting("component", "component"),
            c.LAYOUT,
            _COMPUTE,
            _COMMUNICATION_MS,
            ColumnSpec(title="share %", key="component_share", scale=100),
        ),
        notes=(
            "computation on the rank that has most, without its messages; communication when nothing else runs: in a "
            "step the two overlap, so their sum is not the step",
        ),
        remarks=step_remarks,
    ),
    TableSpec(
        title="Traffic",
        select=lambda case: bool(case.traffic),
        rows=traffic_rows,
        columns=(
            c.MODEL,
            c.MESH,
            setting("axis", "axis"),
            setting("collective", "collective"),
            setting("part", "part"),
            c.LAYOUT,
            ColumnSpec(title="calls", key="calls"),
            ColumnSpec(title="bytes", key="message_bytes"),
            ColumnSpec(title="bytes by closed form", key="expected_bytes"),
            ColumnSpec(title="ms", key="message_time_s", scale=1000),
            ColumnSpec(title="busbw GB/s", key="message_busbw_gb_per_s"),
        ),
        notes=(
            "of one step, on the rank that has most; bytes and busbw as nccl-tests counts them (docs metrics), "
            "times when nothing else runs; perfsuite docs model-parallel derives the closed forms",
            "uneven: the bytes of a rank depend on its data; the closed form is the mean of all ranks",
        ),
    ),
)
