"""Tables of single kernels, and of reports 000 to 002: Open-Sora, Latte, FlagPerf's LLaMA 2."""

from __future__ import annotations

from perfsuite.reports.tables import spec as c
from perfsuite.reports.tables.case import TableCase
from perfsuite.reports.tables.spec import ColumnSpec, Style, TableSpec, setting, trains

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


# -- 000 Open-Sora -----------------------------------------------------------------------------------------------

OPENSORA = Style(
    name="opensora",
    report="000",
    title="Open-Sora training",
    needs="pytest test_perf -k opensora",
    applies=trains("opensora"),
    words=("opensora",),
    tables=(
        TableSpec(
            title="Overview",
            select=trains("opensora"),
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
        TableSpec(
            title="Compute",
            select=trains("opensora"),
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
        TableSpec(
            title="Time",
            select=trains("opensora"),
            published=("000/time",),
            columns=(
                c.LAYOUT,
                c.VARIANT,
                ColumnSpec(title="data ms", key="data_ms"),
                ColumnSpec(title="encoders ms", key="encoders_ms", optional=True),
                ColumnSpec(title="forward ms", key="forward_ms"),
                ColumnSpec(title="backward + optimizer ms", key="backward_with_optimizer_ms"),
                ColumnSpec(title="backward ms", key="backward_ms"),
                ColumnSpec(title="optimizer ms", key="optimizer_ms"),
                ColumnSpec(title="EMA ms", key="ema_ms", optional=True),
                ColumnSpec(title="logging ms", key="logging_ms", optional=True),
                ColumnSpec(title="remainder ms", key="remainder_ms"),
                ColumnSpec(title="step ms", key="step_time_s", scale=1000),
            ),
            notes=("the report's backward holds the optimizer: it stands under backward + optimizer",),
        ),
        TableSpec(
            title="Memory per device",
            select=trains("opensora"),
            published=("000/memory",),
            columns=(
                c.LAYOUT,
                c.VARIANT,
                ColumnSpec(title="weights GiB", key="weights_gib"),
                ColumnSpec(title="gradients GiB", key="gradients_gib"),
                ColumnSpec(title="optimizer GiB", key="optimizer_gib"),
                ColumnSpec(title="encoders GiB", key="encoders_gib", optional=True),
                ColumnSpec(title="EMA GiB", key="ema_gib", optional=True),
                ColumnSpec(title="activations GiB", key="activations_gib"),
                ColumnSpec(title="peak GiB", key="peak_gib"),
                ColumnSpec(title="fragmentation GiB", key="fragmentation_gib"),
                ColumnSpec(title="final (device) GiB", key="final_device_gib"),
                ColumnSpec(title="final (host) GiB", key="final_host_gib"),
            ),
            notes=("the report's weights and gradients are a parameter count, no bytes, and are left out",),
        ),
    ),
)

# -- 001 Latte ---------------------------------------------------------------------------------------------------

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

# -- 002 FlagPerf ------------------------------------------------------------------------------------------------

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
