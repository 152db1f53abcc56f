"""Report 004: GPT-2 and GPT-3 over data, pipeline, tensor, sequence and expert axes, weak and strong scaling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from perfsuite.published.recipes.recipe import Recipe, layout, lines

_TRAINING = "test_perf/test_train_step.py"
_PIPELINE = "test_perf/test_pipeline.py"
_MESHES = "test_perf/test_meshes.py::test_meshes"
_16_BITS = "MFU is over the peak of 16 bits (312 TFLOPS), so products are in 16 bits; bf16 needs no scaled loss"
_UNSAID: dict[str, str] = {
    "dtype": _16_BITS,
    "sequence_length": "2048, as in the block of DDP and in GPT-3",
    "checkpointing": "not named; without it the activations of 32 samples fill a card several times",
    "mixed_precision": "as in the dtype",
    "micro_batch_size": "samples per forward are not named: as many as fit",
    "num_micro_batches": "follows from the micro-batch",
}
_DATA_PARALLEL = {
    **_UNSAID,
    "strategy": "data parallel over all devices by the batches; DDP as in the block of that name",
    "global_batch_size": "a batch of 32 on every device, as the blocks of FSDP and of weak scaling say it",
    "mesh": "every device has samples of its own: dp",
}
_13B = {
    **_UNSAID,
    "strategy": "no strategy is named: 13B with its state is 208 GB, on 8 cards of 80 only spread: FSDP",
    "mesh": "every device has samples of its own: dp",
}
XL = {"model": "gpt2-xl", "overrides": {"context": 2048}, "dtype": "bf16"}
"""GPT-2 1.5B at the report's length, which exceeds its own 1024 positions."""
_NOTED = ("memory", "exposed")


def data_parallel() -> Iterator[Recipe]:
    """DDP, and weak scaling beyond one node: 32 samples of GPT-2 1.5B on every device; FSDP likewise; 13B on nodes."""
    batch = {"micro_batch_size": 8, "accumulation": 4, "checkpointing": "full", "builds": _NOTED}
    ddp = dict(zip((1, 2, 4, 8), lines("004/ddp", 218, 219, 220, 221), strict=True))
    for ranks, weak in zip((1, 2, 4, 8, 16, 32, 64), range(472, 479), strict=True):
        yield Recipe(
            name=f"004-gpt2-xl-ddp-b32-{layout(ranks)}",
            rows=(*([ddp[ranks]] if ranks in ddp else []), ("004/weak", weak)),
            parameters={**XL, **batch, "strategy": "ddp"},
            world_size=ranks, own=_DATA_PARALLEL, small=f"{_TRAINING}::test_ddp[cpu-ws{min(ranks, 8)}-gpt2-tiny]",
        )  # fmt: skip
    for ranks, line in zip((1, 2, 4, 8), range(236, 240), strict=True):
        yield Recipe(
            name=f"004-gpt2-xl-fsdp-b32-{layout(ranks)}", rows=lines("004/fsdp", line),
            parameters={**XL, **batch, "strategy": "fsdp", "options": {"mixed_precision": True}},
            world_size=ranks, own=_DATA_PARALLEL, small=f"{_TRAINING}::test_fsdp[cpu-ws{max(ranks, 2)}-gpt2-tiny]",
        )  # fmt: skip
    yield from _whole("gpt3-13b", "multi-node", ((8, 252), (16, 253), (32, 254)), micro=4, own=_13B)
    strong = ((8, 493), (16, 494), (32, 495), (64, 496), (128, 497))
    own = {**_13B, "strategy": "the batch of a device is 1024 over the devices: data parallel, its state spread"}
    yield from _whole("gpt3-175b", "strong", strong, micro=1, own=own)


def _whole(
    model: str, table: str, runs: tuple[tuple[int, int], ...], *, micro: int, own: dict[str, str]
) -> Iterator[Recipe]:
    """1024 samples on all devices together, everything spread."""
    for ranks, line in runs:
        yield Recipe(
            name=f"004-{table}-{model}-fsdp-{layout(ranks)}", rows=lines(f"004/{table}", line),
            parameters={"model": model, "strategy": "fsdp", "options": {"mixed_precision": True},
                        "micro_batch_size": micro, "accumulation": 1024 // (ranks * micro), "global_batch_size": 1024,
                        "dtype": "bf16", "checkpointing": "full", "builds": _NOTED},
            world_size=ranks, own=own, small=f"{_TRAINING}::test_fsdp[cpu-ws8-gpt2-tiny]",
        )  # fmt: skip


def pipelines() -> Iterator[Recipe]:
    """Schedules on four stages of two devices, and 1F1B with more and more stages on sixteen."""
    own = {
        **_UNSAID,
        "strategy": "stages are a mesh's: strategy hybrid",
        "mesh": "two devices of a stage: each has samples of its own",
        "global_batch_size": "no batch is stated: micro-batches of four samples",
        "num_micro_batches": "not stated: 8, which sixteen stages fill half",
    }
    schedules = (("naive", 4, 271), ("gpipe", 8, 272), ("gpipe", 16, 273), ("1f1b", 8, 274), ("1f1b", 16, 275))
    for schedule, count, line in schedules:
        yield Recipe(
            name=f"004-gpt2-xl-{schedule}-m{count}-1x8", rows=lines("004/schedules", line),
            parameters={**XL, "strategy": "hybrid", "mesh": "pp4-dp2", "options": {"schedule": schedule},
                        "micro_batch_size": 4, "accumulation": count, "builds": ("memory",)},
            world_size=8, own=own, test=f"{_PIPELINE}::test_schedules", words=f"pp4-dp2-{schedule}-m{count}",
            small=f"{_PIPELINE}::test_schedules[cpu-pp4-{schedule}-m{count}]",
        )  # fmt: skip
    for mesh, line in (("pp2-dp8", 288), ("pp4-dp4", 289), ("pp8-dp2", 290), ("pp16", 291)):
        yield Recipe(
            name=f"004-gpt3-13b-{mesh}-2x8", rows=lines("004/stages", line),
            parameters={"model": "gpt3-13b", "dtype": "bf16", "strategy": "hybrid", "mesh": mesh,
                        "options": {"schedule": "1f1b"}, "micro_batch_size": 2, "accumulation": 8,
                        "builds": ("memory",)},
            world_size=16, own={**own, "global_batch_size": "no batch is stated: micro-batches of two samples"},
            test=f"{_PIPELINE}::test_stage_counts", words=mesh, small=f"{_PIPELINE}::test_stage_counts[cpu-pp4]",
        )  # fmt: skip


_OF_TENSOR: dict[str, str] = {
    **_UNSAID,
    "strategy": "the degree of tp is stated: strategy hybrid",
    "vocabulary": "50257 words padded to a multiple of 128 x tp, which tp divides",
    "global_batch_size": "a batch of 1024 is stated: of all samples of a step",
}
_GPT3: dict[str, Any] = {
    "model": "gpt3-175b",
    "overrides": {"words_multiple": 128},
    "dtype": "bf16",
    "checkpointing": "full",
}


def tensor() -> Iterator[Recipe]:
    """175B on one to eight cards, which cannot hold it, and split in three ways over 64."""
    for tp, line in ((1, 311), (2, 312), (4, 313), (8, 314)):
        yield Recipe(
            name=f"004-gpt3-175b-tp{tp}-1x{tp}", rows=lines("004/tensor", line),
            parameters={**_GPT3, "strategy": "hybrid", "mesh": f"tp{tp}", "micro_batch_size": 1, "accumulation": 1024,
                        "global_batch_size": 1024, "builds": ("memory", "exposed", "traffic")},
            world_size=tp, own=_OF_TENSOR,
            small=f"test_perf/test_tensor_parallel.py::test_tensor_parallel[cpu-ws{tp}-gpt2-tiny]",
        )  # fmt: skip
    batch = {"global_batch_size": "no batch is stated: 128, as many samples as pipelines of 64 stages fill twice"}
    yield Recipe(
        name="004-gpt3-175b-dp64-8x8", rows=lines("004/3d", 426),
        parameters={**_GPT3, "strategy": "ddp", "global_batch_size": 128, "accumulation": 2, "builds": ("memory",)},
        world_size=64,
        own={**_OF_TENSOR, **batch, "strategy": "DP-only ran out of memory: every card has the whole model, DDP"},
        small=f"{_MESHES}[cpu-dp8]",
    )  # fmt: skip
    for mesh, line, small in (("pp64", 427, "pp8"), ("pp8-tp8", 429, "pp2-tp4"), ("pp8-dp2-tp4", 430, "pp2-dp2-tp2")):
        yield Recipe(
            name=f"004-gpt3-175b-{mesh}-8x8", rows=lines("004/3d", line),
            parameters={**_GPT3, "strategy": "hybrid", "mesh": mesh, "accumulation": 64 if "dp" in mesh else 128,
                        "global_batch_size": 128, "builds": ("memory",)},
            world_size=64, own={**_OF_TENSOR, **batch}, test=_MESHES, words=mesh, small=f"{_MESHES}[cpu-{small}]",
        )  # fmt: skip


# ---- one layer split, long sequences, ways to attend over a split one, experts, five axes at once ----

_LINEAR = "test_perf/test_tensor_parallel.py::test_column_and_row"
_LONG = "test_perf/test_long_sequences.py"
_EXPERTS = "test_perf/test_experts.py"
_COMPONENTS = "test_perf/test_meshes.py::test_components"
_HEADS = "its 25 heads do not divide by four, which the rows need: 20 of 80 features"
_ATTENTION = {
    "dtype": "not named: bf16, in which flash attention runs",
    "strategy": "sequences are split along an axis of a mesh: strategy hybrid",
    "num_heads": _HEADS,
    "vocabulary": "padded to a multiple of 128, which four ranks divide",
    "checkpointing": "not named: every block, as 32768 tokens need",
    "micro_batch_size": "not named: one sample at a time",
    "num_micro_batches": "follows from the micro-batch",
    "global_batch_size": "a batch of 16 is stated: of all samples of a step",
    "devices": "four, as the block says of its longest sequence",
    "mesh": "four devices share a sequence",
    "sequence_parallel": "the block is about it",
    "context": "as in the row's name",
}
_XL = {"model": "gpt2-xl", "dtype": "bf16", "checkpointing": "full", "strategy": "hybrid"}


def split_layer() -> Iterator[Recipe]:
    """Y = X W of 8192 x 8192 on one card, by columns and by rows on four."""
    own = {
        "mesh": "every card has a part: tp",
        "rows": "not stated: as many as features",
        "dtype": "not stated: bf16, as the products of the other blocks",
    }
    for split, line in (("none", 329), ("column", 330), ("row", 331)):
        ranks = 1 if split == "none" else 4
        yield Recipe(
            name=f"004-linear-8192x8192-{split}-1x{ranks}", rows=lines("004/column-row", line),
            workload="tensor_linear",
            parameters={"split": split, "mesh": "1" if ranks == 1 else f"tp{ranks}", "features_in": 8192,
                        "features_out": 8192, "rows": 8192, "dtype": "bf16"},
            world_size=ranks, own=own, test=_LINEAR, words=f"8192x8192-{split}",
            small=f"{_LINEAR}[cpu-512x512-{split}]",
        )  # fmt: skip


def _overrides(length: int) -> dict[str, int]:
    return {"heads": 20, "words_multiple": 128, "context": length, "sequence_length": length}


def sequences() -> Iterator[Recipe]:
    """2048 to 32768 tokens with sequence parallelism, and three ways to attend over 16384."""
    for index, length in enumerate((2048, 4096, 8192, 16384, 32768)):
        yield Recipe(
            name=f"004-gpt2-xl-s{length}-1x4", rows=lines("004/long-sequences", 350 + index),
            parameters={**_XL, "overrides": _overrides(length), "global_batch_size": 16, "mesh": "tp4",
                        "accumulation": 16, "options": {"sequence_parallel": True}, "builds": ("memory",)},
            world_size=4, own=_ATTENTION, test=f"{_LONG}::test_long_sequences", words=f"{length}-sequence",
            small=f"{_LONG}::test_long_sequences[cpu-{256 << index}-sequence]",
        )  # fmt: skip
    ways = (("standard", "dp4", "math", 369), ("flash", "dp4", "flash", 370), ("ring", "cp4", "flash", 371))
    for method, mesh, attention, line in ways:
        yield Recipe(
            name=f"004-gpt2-xl-s16384-{method}-1x4", rows=lines("004/ring-attention", line),
            parameters={**_XL, "overrides": _overrides(16384), "global_batch_size": 16, "mesh": mesh,
                        "accumulation": 16 if mesh == "cp4" else 4, "attention": attention,
                        "options": {"context": "ring"} if mesh == "cp4" else {},
                        "builds": ("memory", "exposed", "traffic")},
            world_size=4, own={**_ATTENTION, "mesh": "ring attention shares a sequence, the others have whole ones"},
            test=f"{_LONG}::test_attention", words=f"16384-{method}",
            small=f"{_LONG}::test_attention[cpu-1024-{method}]",
        )  # fmt: skip


def experts() -> Iterator[Recipe]:
    """A dense model and 64 experts of as many active parameters; one layer's routing by batch; all five axes."""
    own = {
        "dtype": "not named: bf16, over whose peak MFU is",
        "strategy": "every card has samples of its own, and experts: strategy hybrid",
        "sequence_length": "not named: 2048, GPT-3's",
        "micro_batch_size": "no batch is stated: one sample",
        "num_micro_batches": "no batch is stated",
        "global_batch_size": "no batch is stated: one sample on every card",
        "checkpointing": "not named",
        "mesh": "not named: state over all cards, experts over the eight of a node",
    }
    training = {"strategy": "hybrid", "dtype": "bf16", "checkpointing": "full", "builds": ("memory",)}
    runs = (("gpt3-175b", "dp32", 32, 388, "moe-tiny-dense"), ("moe-1.3t", "dp8-ep8", 64, 390, "moe-tiny-64"))
    for model, mesh, ranks, line, small in runs:
        yield Recipe(
            name=f"004-{model}-{mesh}-{layout(ranks)}", rows=lines("004/moe", line),
            parameters={**training, "model": model, "mesh": mesh},
            world_size=ranks, own=own, small=f"{_EXPERTS}::test_experts_and_dense[cpu-{small}]",
        )  # fmt: skip
    yield Recipe(
        name="004-moe-1.6t-pp8-dp2-ep2-cp2-tp4-32x8", rows=lines("004/5d", 444, 445, 446, 447, 448, 450),
        parameters={**training, "model": "moe-1.6t", "mesh": "pp8-dp2-ep2-cp2-tp4", "accumulation": 32,
                    "builds": ("traffic",)},
        world_size=256, own=own, test=_COMPONENTS, words="pp8-dp2-ep2-cp2-tp4",
        small=f"{_COMPONENTS}[cpu-pp2-ep2-cp2-tp2]",
    )  # fmt: skip


def routing() -> Iterator[Recipe]:
    """One layer of 64 experts on eight cards, top 2, by samples of a batch."""
    own = {
        "mesh": "eight experts on every card: ep",
        "experts": "eight on each of eight cards, as the block says",
        "sequence_length": "not stated: 2048",
        "width": "not stated: Mixtral's",
        "hidden": "not stated: Mixtral's",
        "dtype": "not stated: bf16",
        "implementation": "perfsuite's layer",
    }
    for index, batch in enumerate((32, 64, 128, 256)):
        yield Recipe(
            name=f"004-routing-b{batch}-1x8", rows=lines("004/router", 404 + index), workload="moe_layer",
            parameters={"mesh": "ep8", "batch_size": batch, "sequence_length": 2048, "width": 4096, "hidden": 14336,
                        "experts": 64, "top_k": 2, "dtype": "bf16", "implementation": "perfsuite"},
            world_size=8, own=own, test=f"{_EXPERTS}::test_routing", words=f"{batch}x2048x4096x14336-top2",
            small=f"{_EXPERTS}::test_routing[cpu-{batch}x16x64x128-top2]",
        )  # fmt: skip
