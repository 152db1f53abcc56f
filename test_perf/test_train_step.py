"""Training steps as in the reference reports: Open-Sora (000), Latte (001), LLaMA 2 (002), data-parallel GPT (004).

test_published.py has the runs of the reports; here are their small siblings, other numbers of ranks, and models without
a report.  ``--perf-data DIR`` reads a user's data sets, one folder per model (``DIR/latte-l/dataset.json``); losses on
different data sets are not comparable.
"""

from __future__ import annotations

import pytest

from perfsuite import dtypes, sizes, workloads, world_sizes

TARGET_LOSS = 5.6
"""Target of the tiny GPT, whose loss of 512 words starts at ln 512 = 6.24."""

every_rank = world_sizes(2, more="whole")
PUBLISHED = {
    "opensora": "000-opensora-1x8",
    "latte-l": "001-latte-l-b1-w16-1x8",
    "latte-xl": "001-latte-xl-b2-w16-1x8",
    "gpt2-xl": "004-gpt2-xl-fsdp-b32-1x8",
}
"""Recipe of a full-size model; cases on other numbers of ranks have its settings."""


@sizes(param="model", full=["opensora"], small=["opensora-tiny"])
@world_sizes(1, 2, 4, 8, extended=[4, 8], more=True, full=[])
def test_opensora(perf, ranks, model, data_for, *, as_published, require_fit):
    """Report 000: one video per card; optimizer state and gradients spread."""
    if model in PUBLISHED:
        workload = as_published(PUBLISHED[model])
    else:
        workload = workloads.TrainStep(
            model=model, strategy="fsdp", options={"reshard": False}, data=data_for(model), builds=("memory", "loss")
        )
    require_fit(workload, ranks.world_size)
    perf(workload, on=ranks)


@sizes(param="model", full=["opensora"], small=["opensora-tiny"])
@every_rank
def test_opensora_encoders(perf, ranks, model, at_size, require_fit):
    """A step with frozen encoders and no other part of a training program."""
    encoders = "t5xxl-sdvae" if model == "opensora" else "tiny-text-picture"
    case = at_size("fsdp", {"reshard": False}, checkpointing="none")
    workload = workloads.TrainStep(model=model, program={"encoders": encoders}, builds=("memory",), **case)
    require_fit(workload, ranks.world_size)
    perf(workload, on=ranks)


@sizes(param="model", full=["latte-l", "latte-xl"], small=["latte-tiny"])
@world_sizes(1, 2, 4, 8, extended=[4, 8], full=[2, 4])
def test_latte(perf, ranks, model, data_for, *, as_published, require_fit):
    """Report 001: DDP, one video per card."""
    if model in PUBLISHED:
        workload = as_published(PUBLISHED[model])
    else:
        workload = workloads.TrainStep(
            model=model, strategy="ddp", data=data_for(model), num_workers=1, builds=("memory",)
        )
    require_fit(workload, ranks.world_size)
    perf(workload, on=ranks)


@sizes(param="model", full=["latte-l"], small=["latte-tiny"])
@pytest.mark.parametrize("num_workers", [0, 2, 8, 16], ids="workers{}".format)
def test_latte_loaders(perf, model, num_workers, data_for, platform, *, as_published, require_fit):
    """Report 001: effect of the number of processes that decode the videos; at full size in the report's dtype."""
    if platform.family == "cpu" and num_workers > 2:
        pytest.skip(f"{num_workers} loader processes and the step would share the cores of one CPU")
    dtype = as_published(PUBLISHED[model]).dtype if model in PUBLISHED else "fp32"
    program = {"encoders": "sdvae" if model in PUBLISHED else "tiny-picture"}
    data = data_for(model, "video")
    workload = workloads.TrainStep(model=model, dtype=dtype, program=program, data=data, num_workers=num_workers)
    require_fit(workload, 1)
    perf(workload)


@sizes(param="model", full=["llama2-7b"], small=["llama2-tiny"])
@dtypes("bf16", "fp32")
@world_sizes(2, 4, 8, extended=[4, 8], more=True, full=[2, 4])
def test_llama2(perf, ranks, model, dtype, data_for, *, require_fit):
    """Report 002: LBS 3, MPE 4096, GAS 1, GBS = LBS x GAS x DP; mixed precision, full checkpointing, state spread."""
    workload = workloads.TrainStep(
        model=model,
        strategy="fsdp",
        options={"mixed_precision": dtype != "fp32"},
        micro_batch_size=3,
        accumulation=1,
        global_batch_size=3 * ranks.world_size,
        dtype=dtype,
        checkpointing="full",
        data=data_for(model),
        builds=("memory", "loss"),
    )
    require_fit(workload, ranks.world_size)
    perf(workload, on=ranks)


@sizes(param="model", full=["llama2-7b"], small=["llama2-tiny"])
@world_sizes(2, extended=[2], full=[8], more="whole")
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_llama2_deepspeed(perf, ranks, model, strategy, *, at_size, require_fit):
    """Report 002's model and local batch under every ZeRO stage that spreads state."""
    workload = workloads.TrainStep(model=model, micro_batch_size=3, builds=("memory",), **at_size(strategy))
    require_fit(workload, ranks.world_size)
    perf(workload, on=ranks)


@sizes(param="model", full=["gpt2-xl"], small=["gpt2-tiny"])
@world_sizes(1, 2, 4, 8, extended=[8], full=[])
def test_ddp(perf, ranks, model, at_size, require_fit):
    """Report 004: weak scaling of the 1.5B GPT, and the cost of its communication."""
    workload = workloads.TrainStep(model=model, micro_batch_size=4, builds=("exposed",), **at_size("ddp"))
    require_fit(workload, ranks.world_size)
    perf(workload, on=ranks)


@sizes(param="model", full=["gpt2-xl"], small=["gpt2-tiny"])
@world_sizes(1, 2, 4, 8)
def test_ddp_strong(perf, ranks, model, scale, *, at_size, require_fit):
    """Report 004: the same batch on more and more cards; at full size four samples at a time."""
    accumulation = 1 if scale == "small" else max(1, 32 // ranks.world_size // 4)
    workload = workloads.TrainStep(model=model, global_batch_size=32, accumulation=accumulation, **at_size("ddp"))
    require_fit(workload, ranks.world_size)
    perf(workload, on=ranks)


@sizes(param="model", full=["gpt2-xl"], small=["gpt2-tiny"])
@world_sizes(2, 4, 8, extended=[4, 8], more=True, full=[])
def test_fsdp(perf, ranks, model, as_published, require_fit):
    """Report 004: everything spread."""
    if model in PUBLISHED:
        workload = as_published(PUBLISHED[model])
    else:
        workload = workloads.TrainStep(model=model, strategy="fsdp", micro_batch_size=4, builds=("memory", "exposed"))
    require_fit(workload, ranks.world_size)
    perf(workload, on=ranks)


@sizes(param="model", full=["gpt2-xl"], small=["gpt2-tiny"])
@world_sizes(2, 4, extended=[4], more="whole")
def test_zero_redundancy(perf, ranks, model, at_size, require_fit):
    """Optimizer state spread by torch alone."""
    workload = workloads.TrainStep(model=model, micro_batch_size=4, builds=("memory",), **at_size("zero_redundancy"))
    require_fit(workload, ranks.world_size)
    perf(workload, on=ranks)


@sizes(param="model", full=["gpt2-xl"], small=["gpt2-tiny"])
@every_rank
@pytest.mark.parametrize("strategy", ["zero0", "zero1", "zero2", "zero3"])
def test_deepspeed(perf, ranks, model, strategy, *, at_size, require_fit):
    """Every stage of ZeRO."""
    workload = workloads.TrainStep(model=model, micro_batch_size=4, builds=("memory",), **at_size(strategy))
    require_fit(workload, ranks.world_size)
    perf(workload, on=ranks)


@sizes(param="model", full=["llama2-7b"], small=["llama2-tiny"])
@every_rank
@pytest.mark.parametrize("accumulation", [1, 4], ids="gas{}".format)
def test_accumulation(perf, ranks, model, accumulation, *, at_size, require_fit):
    """Gradients are exchanged once per step, for any number of micro-batches."""
    workload = workloads.TrainStep(model=model, accumulation=accumulation, **at_size("fsdp"))
    require_fit(workload, ranks.world_size)
    perf(workload, on=ranks)


@sizes(param="model", full=["gpt2"], small=["gpt2-micro"])
@pytest.mark.parametrize(
    "compiled",
    [pytest.param(False, id="eager"), pytest.param(True, id="compiled", marks=pytest.mark.perf_extended)],
)
def test_compiled(perf, model, compiled, narrow, require_fit):
    """Speed-up by torch.compile on every block on one card; the small model is its own twin and compiles once."""
    workload = workloads.TrainStep(model=model, micro_batch_size=2, dtype=narrow, compiled=compiled)
    require_fit(workload, 1)
    perf(workload)


@sizes(param="model", full=["gpt2-tiny"], small=["gpt2-tiny"])
@world_sizes(2)
def test_time_to_target(perf, ranks, model, require_fit):
    """Time to a loss from seeded values; the model is small at either scale, because losses of sizes differ."""
    workload = workloads.TrainStep(
        model=model,
        strategy="ddp",
        micro_batch_size=4,
        learning_rate=1e-3,
        builds=("loss",),
        loss_steps=20,
        target_loss=TARGET_LOSS,
    )
    require_fit(workload, ranks.world_size)
    perf(workload, on=ranks)
