"""Report 004: GPT-2 and GPT-3 over data, pipeline and tensor axes, weak and strong scaling."""

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
"""GPT-2 1.5B at the report's length, which its own 1024 positions do not have."""
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
            world_size=ranks,
            own=_DATA_PARALLEL,
            small=f"{_TRAINING}::test_ddp[cpu-ws{min(ranks, 8)}-gpt2-tiny]",
        )
    for ranks, line in zip((1, 2, 4, 8), range(236, 240), strict=True):
        yield Recipe(
            name=f"004-gpt2-xl-fsdp-b32-{layout(ranks)}",
            rows=lines("004/fsdp", line),
            parameters={**XL, **batch, "strategy": "fsdp", "options": {"mixed_precision": True}},
            world_size=ranks,
            own=_DATA_PARALLEL,
            small=f"{_TRAINING}::test_fsdp[cpu-ws{max(ranks, 2)}-gpt2-tiny]",
        )
    yield from _whole("gpt3-13b", "multi-node", ((8, 252), (16, 253), (32, 254)), micro=4, own=_13B)
    strong = ((8, 493), (16, 494), (32, 495), (64, 496), (128, 497))
    own = {**_13B, "strategy": "the batch of a device is 1024 over the devices: data parallel, its state spread"}
    yield from _whole("gpt3-175b", "strong", strong, micro=1, own=own)


def _whole(
    model: str, table: str, runs: tuple[tuple[int, int], ...], *, micro: int, own: dict[str, str]
) -> Iterator[Recipe]:
    """1024 samples on all devices together, everything spread."""
    for ranks, line in runs:
        parameters: dict[str, Any] = {
            "model": model,
            "strategy": "fsdp",
            "options": {"mixed_precision": True},
            "micro_batch_size": micro,
            "accumulation": 1024 // (ranks * micro),
            "global_batch_size": 1024,
            "dtype": "bf16",
            "checkpointing": "full",
            "builds": _NOTED,
        }
        yield Recipe(
            name=f"004-{table}-{model}-fsdp-{layout(ranks)}",
            rows=lines(f"004/{table}", line),
            parameters=parameters,
            world_size=ranks,
            own=own,
            small=f"{_TRAINING}::test_fsdp[cpu-ws8-gpt2-tiny]",
        )


def pipelines() -> Iterator[Recipe]:
    """Schedules on four stages of two devices, and 1F1B with more and more stages on sixteen."""
    own = {
        **_UNSAID,
        "strategy": "stages are a mesh's: strategy hybrid",
        "mesh": "two devices of a stage: each has samples of its own",
        "global_batch_size": "no batch is said: micro-batches of four samples",
        "num_micro_batches": "not said: 8, which sixteen stages fill half",
    }
    schedules = (("naive", 4, 271), ("gpipe", 8, 272), ("gpipe", 16, 273), ("1f1b", 8, 274), ("1f1b", 16, 275))
    for schedule, count, line in schedules:
        yield Recipe(
            name=f"004-gpt2-xl-{schedule}-m{count}-1x8",
            rows=lines("004/schedules", line),
            parameters=pipeline_parameters("pp4-dp2", XL, schedule, count, 4),
            world_size=8,
            own=own,
            test=f"{_PIPELINE}::test_schedules",
            words=f"pp4-dp2-{schedule}-m{count}",
            small=f"{_PIPELINE}::test_schedules[cpu-pp4-{schedule}-m{count}]",
        )
    model = {"model": "gpt3-13b", "dtype": "bf16"}
    for mesh, line in (("pp2-dp8", 288), ("pp4-dp4", 289), ("pp8-dp2", 290), ("pp16", 291)):
        yield Recipe(
            name=f"004-gpt3-13b-{mesh}-2x8",
            rows=lines("004/stages", line),
            parameters=pipeline_parameters(mesh, model, "1f1b", 8, 2),
            world_size=16,
            own={**own, "global_batch_size": "no batch is said: micro-batches of two samples"},
            test=f"{_PIPELINE}::test_stage_counts",
            words=mesh,
            small=f"{_PIPELINE}::test_stage_counts[cpu-pp4]",
        )


def pipeline_parameters(
    mesh: str, model: dict[str, Any], schedule: str, num_micro_batches: int, micro_batch_size: int
) -> dict[str, Any]:
    """A pipeline whose memory is looked at."""
    return {
        **model,
        "strategy": "hybrid",
        "mesh": mesh,
        "options": {"schedule": schedule},
        "micro_batch_size": micro_batch_size,
        "accumulation": num_micro_batches,
        "builds": ("memory",),
    }


_OF_TENSOR: dict[str, str] = {
    **_UNSAID,
    "strategy": "the degree of tp is said: strategy hybrid",
    "vocabulary": "50257 words padded to a multiple of 128 x tp, which tp divides",
    "global_batch_size": "a batch of 1024 is said: of all samples of a step",
}
_GPT3: dict[str, Any] = {
    "model": "gpt3-175b",
    "overrides": {"words_multiple": 128},
    "dtype": "bf16",
    "checkpointing": "full",
}


def tensor() -> Iterator[Recipe]:
    """175B on one to eight cards, none of which can hold it, and split three ways over 64."""
    for tp, line in ((1, 311), (2, 312), (4, 313), (8, 314)):
        yield Recipe(
            name=f"004-gpt3-175b-tp{tp}-1x{tp}",
            rows=lines("004/tensor", line),
            parameters={
                **_GPT3,
                "strategy": "hybrid",
                "mesh": f"tp{tp}",
                "micro_batch_size": 1,
                "accumulation": 1024,
                "global_batch_size": 1024,
                "builds": ("memory", "exposed", "traffic"),
            },
            world_size=tp,
            own=_OF_TENSOR,
            small=f"test_perf/test_tensor_parallel.py::test_tensor_parallel[cpu-ws{tp}-gpt2-tiny]",
        )
    yield from _on_64()


def _on_64() -> Iterator[Recipe]:
    batch = {"global_batch_size": "no batch is said: 128, as many samples as pipelines of 64 stages fill twice"}
    yield Recipe(
        name="004-gpt3-175b-dp64-8x8",
        rows=lines("004/3d", 426),
        parameters={**_GPT3, "strategy": "ddp", "global_batch_size": 128, "accumulation": 2, "builds": ("memory",)},
        world_size=64,
        own={**_OF_TENSOR, **batch, "strategy": "DP-only ran out of memory: every card has the whole model, DDP"},
        small=f"{_MESHES}[cpu-dp8]",
    )
    for mesh, line, small in (("pp64", 427, "pp8"), ("pp8-tp8", 429, "pp2-tp4"), ("pp8-dp2-tp4", 430, "pp2-dp2-tp2")):
        yield Recipe(
            name=f"004-gpt3-175b-{mesh}-8x8",
            rows=lines("004/3d", line),
            parameters={
                **_GPT3,
                "strategy": "hybrid",
                "mesh": mesh,
                "accumulation": 64 if "dp" in mesh else 128,
                "global_batch_size": 128,
                "builds": ("memory",),
            },
            world_size=64,
            own={**_OF_TENSOR, **batch},
            test=_MESHES,
            words=mesh,
            small=f"{_MESHES}[cpu-{small}]",
        )
