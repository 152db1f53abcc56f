"""Reports 000 (Open-Sora on S4000), 001 (Latte with DDP; under DeepSpeed, a heading without figures), 002 (FlagPerf's
LLaMA 2 on S4000) and 003 (OneFlow's GPT on V100).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from perfsuite.published.recipes.recipe import TEST, Recipe, layout, lines

_OPENSORA = {
    "strategy": "not named: 8.575 of the optimizer's GiB fall as 1/N and are 12 bytes for each of 760 million "
    "parameters, so the wide copy and both moments are spread; Open-Sora 1.0's public config has zero2",
    "dtype": "12 spread bytes for a parameter mean training in 16 bits; bf16 in Open-Sora 1.0's public config",
    "mesh": "memory falls with the cards as spread state does, and with nothing else",
    "checkpointing": "on in Open-Sora 1.0's public config",
    "sequence_length": "512 in the table of compute, of the same runs, and 2 latent frames of 16 x 16 patches are so "
    "many; a public program for this device passes 512 as a constant, and its 16 frames are 4096 patches",
    "micro_batch_size": "a batch of 1 in the table of compute, of the same runs",
    "num_micro_batches": "not named",
    "global_batch_size": "one clip for every card, by the batch of 1",
    "encoders": "13.312 GiB stay whole on every card: T5-XXL and VAE in 16 bits are 8.93 of them, and Open-Sora 1.0's "
    "train.py has both on the device",
    "ema": "2.83 of the 13.312 GiB: Open-Sora 1.0's train.py keeps a copy in fp32, whole, for its model_sharding "
    "leaves views of the whole parameters",
    "clip": "1.0 in Open-Sora 1.0's public config",
    "logs": "Open-Sora 1.0's train.py averages and reads the loss in every step",
    "data": "videos of noise and waves, which the case writes: the report's do not come with it",
    "num_workers": "4 in Open-Sora 1.0's public config",
}
_LATTE = {
    "sequence_length": "16 frames of 256 x 256, Latte's own; the report names no size",
    "dtype": "the forward runs on tensor cores with their fp16 peak, says the report's first paragraph; Latte's public "
    "train.py has fp32 with TF32 products, which is a recipe of its own",
    "num_workers": "16 where a row leaves them unsaid, as in the rows of the A6000: 8 and 16 made no difference",
    "dataset_samples": "704 videos, as the report has; its videos do not come with it",
    "data": "videos of noise and waves, which the case writes: the report's do not come with it",
    "checkpointing": "off in Latte's public configs",
    "encoders": "Latte's train.py encodes 16 frames by the VAE in every step",
    "ema": "Latte's train.py keeps one, in the dtype of the model",
    "clip": "0.1 in Latte's public configs, whose train.py takes the norm in every step",
    "loss_scale": "Latte's train.py has none; in fp16 small gradients vanish without",
    "logs": "Latte's train.py reads the loss in every step",
    "micro_batch_size": "global batch = local batch x cards: there is no accumulation",
    "num_micro_batches": "global batch = local batch x cards: there is no accumulation",
}
_LATTE_L = (  # local batch, workers, ranks, lines
    (1, 8, 1, (28,)),
    (1, 16, 1, (23, 29, 37)),
    (1, 16, 8, (24, 30)),
    (1, 16, 16, (25, 31)),
    (2, 16, 16, (26, 32)),
    (4, 16, 16, (33,)),
    (1, 16, 24, (34,)),
    (2, 16, 24, (35,)),
)
_LATTE_XL = tuple((2, 16, ranks, (line,)) for ranks, line in ((1, 52), (8, 53), (16, 54), (24, 55), (32, 56)))
_LATTE_PROGRAM = {"encoders": "sdvae", "ema": "fp32", "clip": 0.1, "logs": True}
_LEARNS: dict[str, Any] = {
    "dtype": "fp16",
    "data": "video",
    "program": _LATTE_PROGRAM,
    "builds": ("memory", "loss"),
    "loss_steps": 100,
    "target_loss": 0.9,  # a model that predicts nothing has a loss of 1; this Latte begins to learn
}


def opensora() -> Iterator[Recipe]:
    """Report 000: 512 tokens of a clip of 16 x 256 x 256, one clip per card."""
    for index, ranks in enumerate((1, 2, 4, 8)):
        yield Recipe(
            name=f"000-opensora-{layout(ranks)}",
            rows=tuple(
                row
                for table, first in (("overview", 8), ("compute", 18), ("time", 26), ("memory", 34))
                for row in lines(f"000/{table}", first + index)
            ),
            parameters={
                "model": "opensora",
                "overrides": {"frames": 2},  # 2 latent frames of 16 x 16 patches: the printed 512 tokens
                "strategy": "zero2",
                "micro_batch_size": 1,
                "dtype": "bf16",
                "checkpointing": "full",
                "data": "video",
                "num_workers": 4,
                "program": {"encoders": "t5xxl-sdvae", "ema": "fp32", "clip": 1.0, "logs": True},
                "builds": ("memory", "loss"),
            },
            world_size=ranks,
            own=_OPENSORA,
            small=f"test_perf/test_train_step.py::test_opensora[cpu-ws{ranks}-opensora-tiny]",
        )


def latte() -> Iterator[Recipe]:
    """Report 001: every local batch and number of cards, rows without figures too; DeepSpeed's empty section."""
    siblings = {batch: f"{TEST}[cpu-001-latte-tiny-ddp-b{batch}-w1-1x2]" for batch in (1, 2, 4)}
    for model, table, runs in (("latte-l", "001/latte-l", _LATTE_L), ("latte-xl", "001/latte-xl", _LATTE_XL)):
        for batch, workers, ranks, numbers in runs:
            parameters = {"model": model, "strategy": "ddp", "micro_batch_size": batch, "num_workers": workers}
            yield Recipe(
                name=f"001-{model}-b{batch}-w{workers}-{layout(ranks)}", rows=lines(table, *numbers),
                parameters={**parameters, **_LEARNS},
                world_size=ranks, own=_LATTE, small=siblings[batch],
            )  # fmt: skip
            if ranks <= 8:
                yield Recipe(
                    name=f"001-{model}-tf32-b{batch}-w{workers}-{layout(ranks)}", rows=(),
                    beside=f"001-{model}-b{batch}-w{workers}-{layout(ranks)}",
                    parameters={**parameters, **_LEARNS, "dtype": "tf32"},
                    world_size=ranks, own=_LATTE, small=siblings[batch],
                )  # fmt: skip
    for strategy in ("zero1", "zero2", "zero3"):
        parameters = {"model": "latte-l", "strategy": strategy, "micro_batch_size": 1, "num_workers": 16}
        yield Recipe(
            name=f"001d-latte-l-{strategy}-b1-w16-1x8", rows=(),
            parameters={**parameters, **_LEARNS},
            world_size=8, own=_LATTE, small=f"{TEST}[cpu-001d-latte-tiny-{strategy}-b1-w1-1x2]",
        )  # fmt: skip


# ---- language models ----

ONEFLOW_TEST = "test_perf/test_oneflow.py::test_oneflow"
_LLAMA2 = {
    "strategy": "DeepSpeed's ds_config.json is named, its ZeRO stage is not; stage 3 in FlagPerf's public one",
    "dtype": "amp is stated, which of the 16-bit types is not; fp16 in FlagPerf's public ds_config.json",
    "mesh": "DP = world size is stated below the batch sizes",
    "global_batch_size": "GBS = LBS x GAS x DP is stated, and 24 follows",
    "checkpointing": "named among the optimisations without saying of which blocks: every block",
    "clip": "1.0 in FlagPerf's public ds_config.json",
    "ema": "FlagPerf's run_pretraining.py keeps none",
    "loss_scale": "dynamic, as DeepSpeed's is where its file says nothing",
    "encoders": "token ids go straight into the model",
}
_ONEFLOW = {
    "strategy": "the degrees of dp, tp and pp are stated: strategy hybrid has all three",
    "data": "token ids at random; OneFlow's data set is not named",
    "data_axes": "OneFlow 0.3.5 copies parameters to every rank of dp",
    "sequence_parallel": "Megatron's first kind of tensor parallelism, in which ranks keep whole sequences",
    "schedule": "a pipeline's order is not stated: 1F1B",
    "attention": "OneFlow 0.3.5, of 2021, wrote all scores: plain products, and no fused kernel",
    "checkpointing": "on in the public source; without it the first case has 23.8 GiB on a card of 16",
}
_RUNS = (  # case, line, small case
    ("DP_1x1x1_2_1536x16", 110, "DP_1x1x1_2_64x4-math"),
    ("DP_8x1x1_16_1536x16", 111, "DP_8x1x1_16_64x4"),
    ("DP_16x1x1_32_1536x16", 112, "DP_8x1x1_16_64x4"),
    ("DP_32x1x1_64_1536x16", 113, "DP_8x1x1_16_64x4"),
    ("MP_1x1x1_8_768x12", 115, "MP_1x1x1_8_64x4"),
    ("MP_1x8x1_16_1536x16", 116, "MP_1x8x1_4_64x4"),
    ("MP_1x16x1_16_3072x16", 117, "MP_1x8x1_4_64x4"),
    ("MP_1x32x1_16_3072x32", 118, "MP_1x8x1_4_64x4"),
    ("2D_8x1x1_16_1536x16", 120, "2D_8x1x1_16_64x4"),
    ("2D_1x8x1_16_1536x16", 121, "2D_1x8x1_4_64x4"),
    ("2D_2x4x1_16_1536x16", 122, "2D_2x4x1_4_64x4"),
    ("2D_4x2x1_16_1536x16", 123, "2D_4x2x1_4_64x4"),
    ("2D_2x8x1_16_2304x24", 124, "2D_2x4x1_4_64x4"),
    ("2D_4x8x1_32_2304x24", 125, "2D_2x4x1_4_64x4"),
    ("DP_PP_8x1x4_512_1536x16", 127, "DP_PP_2x1x4_8_64x4"),
    ("MP_PP_1x8x4_512_2304x24", 128, "MP_PP_1x2x4_4_64x4"),
    ("2D_PP_2x4x4_512_2304x24", 129, "2D_PP_2x2x2_8_64x4-math"),
    ("2D_PP_2x8x2_512_2304x24", 130, "2D_PP_2x2x2_8_64x4-math"),
)


def llama2() -> Iterator[Recipe]:
    """Report 002: LBS 3, MPE 4096, GAS 1, DP 8; with FlagPerf's own settings, and as a variant with torch's FSDP."""
    common = {"model": "llama2-7b", "micro_batch_size": 3, "accumulation": 1, "checkpointing": "full",
              "program": {"clip": 1.0}, "builds": ("memory", "loss")}  # fmt: skip
    yield Recipe(
        name="002-llama2_7b-fp16-1x8", rows=lines("002/performance", 50),
        parameters={**common, "strategy": "zero3", "dtype": "fp16"},
        world_size=8, own=_LLAMA2, small=f"{TEST}[cpu-002-llama2-tiny-zero3-1x2]",
    )  # fmt: skip
    yield Recipe(
        name="002-llama2_7b-bf16-1x8", rows=(), beside="002-llama2_7b-fp16-1x8",
        parameters={**common, "strategy": "fsdp", "options": {"mixed_precision": True}, "dtype": "bf16"},
        world_size=8, own=_LLAMA2, small="test_perf/test_train_step.py::test_llama2[cpu-ws8-llama2-tiny-bf16]",
    )  # fmt: skip


def oneflow() -> Iterator[Recipe]:
    """Report 003: its 18 cases with OneFlow's plain attention, each with a variant whose kernel torch chooses."""
    for case, line, small in _RUNS:
        _, degrees, batch, shape = case.rsplit("_", 3)
        dp, tp, pp = map(int, degrees.split("x"))
        mesh = "-".join(f"{axis}{size}" for axis, size in (("pp", pp), ("dp", dp), ("tp", tp)) if size > 1)
        accumulation = 32 if pp > 1 else 1
        parameters = {"model": f"gpt-{shape}", "strategy": "hybrid", "mesh": mesh or "dp1",
                      "options": oneflow_options(dp, tp, pp), "micro_batch_size": int(batch) // (dp * accumulation),
                      "accumulation": accumulation, "global_batch_size": int(batch), "dtype": "fp16",
                      "checkpointing": "full", "builds": ("memory",)}  # fmt: skip
        for attention, end in (("math", ""), ("auto", "-auto")):
            as_printed = attention == "math"
            yield Recipe(
                name=f"003-{case}{end}", rows=lines("003/results", line) if as_printed else (),
                beside="" if as_printed else f"003-{case}", words=f"{case}-math" if as_printed else case,
                parameters={**parameters, "attention": attention}, world_size=dp * tp * pp, own=_ONEFLOW,
                test=ONEFLOW_TEST, small=f"{ONEFLOW_TEST}[cpu-{small if as_printed else small.removesuffix('-math')}]",
            )  # fmt: skip


def oneflow_options(dp: int, tp: int, pp: int) -> Mapping[str, Any]:
    """Return options of strategy hybrid for the axes with several ranks, as OneFlow has them."""
    return {
        **({"data": "replicate"} if dp > 1 else {}),
        **({"sequence_parallel": False} if tp > 1 else {}),
        **({"schedule": "1f1b"} if pp > 1 else {}),
    }
