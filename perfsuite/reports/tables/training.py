"""Tables of single kernels, and of reports 000 to 002: Open-Sora, Latte, FlagPerf's LLaMA 2."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

from perfsuite.base.text import code_text
from perfsuite.reports.tables import spec as c
from perfsuite.reports.tables.case import TableCase
from perfsuite.reports.tables.case_names import case_name
from perfsuite.reports.tables.spec import ColumnSpec, Style, TableSpec, parts, setting, trains

_STREAMS = ("MemoryCopy", "MemoryTriad", "HostDeviceCopy")

KERNELS = (
    TableSpec(
        title="Matrix products",
        select=lambda case: case.workload == "Matmul" or "tflops" in case.values,
        columns=(
            c.LAYOUT,
            setting("size m x k x n", "size"),
            c.DTYPE,
            ColumnSpec(title="TFLOPS (integers: TOPS)", key="tflops"),
            ColumnSpec(title="ms", key="median_s", scale=1000),
        ),
    ),
    TableSpec(
        title="Memory bandwidth",
        select=lambda case: case.workload in _STREAMS or "gb_per_s" in case.values,
        columns=(
            c.LAYOUT,
            setting("kernel", "kernel"),
            setting("buffer", "size"),
            ColumnSpec(title="GB/s", key="gb_per_s"),
            ColumnSpec(title="bandwidth of", key="residence", value=False, optional=True),
            ColumnSpec(title="ms", key="median_s", scale=1000),
        ),
    ),
    TableSpec(
        title="Collectives",
        select=lambda case: (
            case.workload != "Pairs" and ("collective" in case.settings or "busbw_gb_per_s" in case.values)
        ),
        columns=(
            setting("collective", "kernel"),
            c.LAYOUT,
            setting("size", "size"),
            c.DTYPE,
            ColumnSpec(title="us", key="median_us"),
            ColumnSpec(title="algbw GB/s", key="algbw_gb_per_s"),
            ColumnSpec(title="busbw GB/s", key="busbw_gb_per_s"),
        ),
        notes=("sizes, algbw and busbw as nccl-tests counts them; 1 GB/s is 1e9 bytes/s",),
    ),
    TableSpec(
        title="Pairs of ranks",
        select=lambda case: case.workload == "Pairs",
        columns=(
            setting("directions", "directions"),
            c.LAYOUT,
            setting("size", "size"),
            c.DTYPE,
            ColumnSpec(title="median pair us", key="pair_us", optional=True),
            ColumnSpec(title="slowest pair us", key="slowest_pair_us", optional=True),
            ColumnSpec(title="median pair GB/s", key="pair_gb_per_s", optional=True),
            ColumnSpec(title="slowest pair GB/s", key="slowest_pair_gb_per_s", optional=True),
        ),
        notes=("per direction; messages of a pair follow each other",),
    ),
)


_of_opensora = functools.partial(TableSpec, select=trains("opensora"))
OPENSORA = Style(
    name="opensora",
    report="000",
    title="Open-Sora training",
    needs="pytest test_perf -k opensora",
    applies=trains("opensora"),
    words=("opensora",),
    tables=(
        _of_opensora(
            title="Overview",
            published=("000/overview",),
            columns=(
                c.LAYOUT,
                c.VARIANT,
                c.MODEL,
                ColumnSpec(title="videos/s (all devices)", key="samples_per_s"),
                ColumnSpec(title="videos/s per device", key="samples_per_s_per_device"),
                ColumnSpec(title="tokens/s per device", key="tokens_per_s_per_device"),
                ColumnSpec(title="final loss", key="final_loss"),
                c.LOSS_STEPS,
            ),
        ),
        _of_opensora(
            title="Compute",
            published=("000/compute",),
            columns=(
                c.LAYOUT,
                c.VARIANT,
                c.LOCAL,
                c.LENGTH,
                ColumnSpec(title="TFLOPS per device (ColossalAI)", key="colossalai_tflops_per_device"),
                ColumnSpec(title="TFLOPS per device (Megatron)", key="megatron_tflops_per_device"),
                ColumnSpec(title="TFLOPS per device (exact)", key="tflops_per_device"),
                c.STEP_S,
            ),
        ),
        _of_opensora(
            title="Time",
            published=("000/time",),
            columns=(
                c.LAYOUT,
                c.VARIANT,
                *parts("ms", "data", "encoders?", "forward"),
                ColumnSpec(title="backward + optimizer ms", key="backward_with_optimizer_ms"),
                *parts("ms", "backward", "optimizer", "EMA?", "logging?", "remainder"),
                ColumnSpec(title="step ms", key="step_time_s", scale=1000),
            ),
            notes=("the report's backward holds the optimizer: it stands under backward + optimizer",),
        ),
        _of_opensora(
            title="Memory per device",
            published=("000/memory",),
            columns=(
                c.LAYOUT,
                c.VARIANT,
                *parts("GiB", "weights", "gradients", "optimizer", "encoders?", "EMA?", "activations", "peak"),
                *parts("GiB", "fragmentation"),
                ColumnSpec(title="final (device) GiB", key="final_device_gib"),
                ColumnSpec(title="final (host) GiB", key="final_host_gib"),
            ),
            notes=("the report's weights and gradients are a parameter count, no bytes, and are left out",),
        ),
    ),
)


_LATTE_COLUMNS = (
    c.PEAK,
    c.LOCAL,
    c.GLOBAL,
    setting("workers", "num_workers"),
    ColumnSpec(title="iter/s", key="iterations_per_s"),
    c.SAMPLES,
    c.SPEED_UP,
    ColumnSpec(title="steps/epoch", key="steps_per_epoch"),
    c.TARGET,
    ColumnSpec(title="time to target loss s", key="time_to_target_s"),
    c.LOSS_STEPS,
    ColumnSpec(title="final loss", key="final_loss", optional=True),
)
_trains_latte = trains("latte")


def _copies_all(case: TableCase) -> bool:
    return case.settings.get("strategy", "single") in ("ddp", "single")


LATTE = Style(
    name="latte",
    report="001",
    title="Latte training with DDP",
    needs="pytest test_perf -k latte",
    applies=trains("latte"),
    words=("latte",),
    peaks=True,
    tables=(
        TableSpec(
            title="DDP",
            select=lambda case: _trains_latte(case) and _copies_all(case),
            published=("001/latte-l", "001/latte-xl"),
            per="model",
            columns=(c.LAYOUT, *_LATTE_COLUMNS),
            notes=(c.NAMED_BASE,),
        ),
        TableSpec(
            title="DeepSpeed and others",
            select=lambda case: _trains_latte(case) and not _copies_all(case),
            per="model",
            columns=(c.STRATEGY, c.LAYOUT, *_LATTE_COLUMNS),
            notes=(c.NAMED_BASE, "the report has a heading DeepSpeed and no figures below it"),
        ),
        TableSpec(
            title="Largest local batch",
            select=lambda case: _trains_latte(case) and "largest_local_batch_samples" in case.values,
            columns=(
                c.LAYOUT,
                c.MODEL,
                c.DTYPE,
                c.STRATEGY,
                c.VARIANT,
                setting("checkpointing", "checkpointing"),
                ColumnSpec(title="largest local batch", key="largest_local_batch_samples"),
                c.PEAK,
            ),
            notes=("the report says of Latte-XL: 2 on an RTX 6000 Ada, and that a 4090 cannot hold it",),
        ),
    ),
)


FLAGPERF = Style(
    name="flagperf",
    report="002",
    title="FlagPerf, LLaMA 2",
    needs="pytest test_perf -k llama2",
    applies=trains("llama2"),
    words=("llama2",),
    environment=True,
    tables=(
        TableSpec(
            title="Batch",
            select=trains("llama2"),
            columns=(
                c.LAYOUT,
                c.MODEL,
                setting("LBS (local batch)", "micro_batch_size"),
                setting("MPE (sequence length)", "sequence_length"),
                setting("GAS (accumulation)", "num_micro_batches"),
                setting("DP", "dp"),
                setting("GBS = LBS x GAS x DP", "global_batch_size"),
                c.DTYPE,
                setting("activation checkpointing", "checkpointing"),
                setting("attention", "attention"),
                c.STRATEGY,
                c.VARIANT,
                setting("data", "data"),
            ),
        ),
        TableSpec(
            title="Performance",
            select=trains("llama2"),
            published=("002/performance",),
            columns=(
                c.LAYOUT,
                c.DTYPE,
                setting("LBS", "micro_batch_size"),
                setting("GAS", "num_micro_batches"),
                setting("fix_hp", "fix_hp"),
                ColumnSpec(title="tokens/s per device", key="tokens_per_s_per_device"),
                ColumnSpec(title="loss", key="final_loss"),
                c.LOSS_STEPS,
                ColumnSpec(title="memory used GiB (whole device)", key="whole_device_gib"),
                setting("of GiB", "memory_there"),
                ColumnSpec(title="memory peak GiB (allocated)", key="peak_gib"),
                ColumnSpec(title="MFU % (PaLM)", key="mfu_palm_percent"),
                ColumnSpec(title="MFU % (FlagPerf)", key="tokens_per_s_per_device", scale=100 * 6 * 7e9 / 98e12),
            ),
            notes=(
                "in the report loss and memory stand in each other's column; here each stands under its own name",
                "fix_hp: fields of the model that were changed; / for none",
                "MFU as in the PaLM paper: 6 N + 12 L H Q T operations per token over the dense peak of the dtype",
                "MFU as FlagPerf's run_pretraining.py has it for S4000: 6 x 7e9 operations per token over 98 TFLOPS, "
                "of any model and device",
            ),
        ),
        *KERNELS,
    ),
)


def _is_of_grid(case: TableCase) -> bool:
    """Whether the id of a case is named as in report 003: DP_8x1x1_16_1536x16."""
    return "case_name" in case.settings


def _contradictions(case: TableCase) -> Iterator[str]:
    settings = case.settings
    ranks, dp, tp, pp = (int(settings.get(name, 1)) for name in ("ranks", "dp", "tp", "pp"))
    if dp * tp * pp != ranks:
        yield f"dp {dp} is not ranks {ranks} / (tp {tp} x pp {pp})"
    micro = case.parameters.get("micro_batch_size") or settings.get("micro_batch_size", 1)
    steps, batch = settings.get("num_micro_batches", 1), settings.get("global_batch_size")
    if batch is not None and micro * dp * steps != batch:
        yield f"accumulation {steps} is not batch {batch} / (micro {micro} x dp {dp})"
    name = case_name(str(settings.get("case_name", "")))
    if name is None:
        return
    sizes = {"width": settings["hidden_size"], "layers": settings["num_layers"]}
    ran = {"dp": dp, "tp": tp, "pp": pp, "batch": batch, **sizes}
    for what, value in ran.items():
        if value is not None and getattr(name, what) != value:
            yield f"its name says {what} {getattr(name, what)}, and it ran with {value}"


def _checked(rows: Sequence[TableCase]) -> Iterator[str]:
    rule = "dp = ranks / (tp x pp) and accumulation = global batch / (micro-batch x dp)"
    wrong = {case.case: "; ".join(_contradictions(case)) for case in rows}
    if not any(wrong.values()):
        yield f"checked: {rule} in every row"
    for case, errors in wrong.items():
        if errors:
            yield f"CONTRADICTION in {code_text(case)}: {errors}"


_GROUP, _CASE = setting("group", "group"), setting("case", "case_name")
_ATTENTION = setting("attention", "attention")
_WHOLE_CARD = ColumnSpec(title="memory MiB (whole card)", key="whole_device_gib", scale=1024)
_of_grid = functools.partial(TableSpec, select=_is_of_grid, published=("003/results",), pair_by=("dp", "tp", "pp"))

ONEFLOW = Style(
    name="oneflow",
    report="003",
    title="OneFlow GPT",
    needs="pytest test_perf -k oneflow, or cases of your own that are called by its rule (2D_2x4x1_16_1536x16)",
    applies=_is_of_grid,
    words=("oneflow",),
    environment=True,
    tables=(
        _of_grid(
            title="Cases",
            columns=(
                _GROUP,
                _CASE,
                c.LAYOUT,
                setting("nodes", "nodes"),
                setting("devices per node", "devices_per_node"),
                c.DP,
                c.TP,
                c.PP,
                setting("micro-batch", "micro_batch_size"),
                setting("micro-batch x dp", "micro_times_dp"),
                setting("accumulation", "num_micro_batches"),
                c.GLOBAL,
                setting("hidden size", "hidden_size"),
                setting("heads", "num_heads"),
                setting("layers", "num_layers"),
                _ATTENTION,
            ),
            remarks=_checked,
        ),
        _of_grid(
            title="Results",
            columns=(
                _GROUP,
                _CASE,
                c.LAYOUT,
                _ATTENTION,
                ColumnSpec(title="latency ms", key="step_time_s", scale=1000),
                _WHOLE_CARD,
                ColumnSpec(title="memory peak GiB (allocated)", key="peak_gib"),
                c.SAMPLES,
            ),
        ),
        _of_grid(
            title="Logs",
            columns=(_GROUP, _CASE, c.LAYOUT, _ATTENTION, setting("log, as OneFlow calls it", "log_name")),
            notes=("OneFlow's program writes a log of this name for the same case",),
        ),
    ),
)
