"""Reports 002 (FlagPerf's LLaMA 2 on S4000) and 003 (OneFlow's GPT on V100)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from perfsuite.published.recipes.recipe import Recipe, lines

ONEFLOW_TEST = "test_perf/test_oneflow.py::test_oneflow"
_LLAMA2 = {
    "strategy": "DeepSpeed's ds_config.json is named, its ZeRO stage is not; FlagPerf's public one has stage 3, which "
    "FSDP is in torch",
    "mixed_precision": "amp is said: parameters are gathered in 16 bits",
    "dtype": "amp is said, which of the 16-bit types is not; S4000 has both",
    "mesh": "DP = world size is said below the batch sizes",
    "global_batch_size": "GBS = LBS x GAS x DP is said, and 24 follows",
    "checkpointing": "named among the optimisations, of what is not: every block",
}
_ONEFLOW = {
    "strategy": "the degrees of dp, tp and pp are said: strategy hybrid has all three",
    "data": "token ids at random; OneFlow's data set is not named",
    "data_axes": "OneFlow 0.3.5 copies parameters to every rank of dp",
    "sequence_parallel": "Megatron's first kind of tensor parallelism, in which ranks keep whole sequences",
    "schedule": "a pipeline's order is not said: 1F1B",
    "checkpointing": "on in the public source; without it the first case has 23.8 GiB on a card of 16",
}
_RUNS = (  # case, line, small case
    ("DP_1x1x1_2_1536x16", 110, "DP_1x1x1_2_64x4"),
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
    ("2D_PP_2x4x4_512_2304x24", 129, "2D_PP_2x2x2_8_64x4"),
    ("2D_PP_2x8x2_512_2304x24", 130, "2D_PP_2x2x2_8_64x4"),
)


def llama2() -> Iterator[Recipe]:
    """Report 002: LBS 3, MPE 4096, GAS 1, DP 8."""
    yield Recipe(
        name="002-llama2_7b-bf16-1x8",
        rows=lines("002/performance", 50),
        parameters={
            "model": "llama2-7b",
            "strategy": "fsdp",
            "options": {"mixed_precision": True},
            "micro_batch_size": 3,
            "accumulation": 1,
            "dtype": "bf16",
            "checkpointing": "full",
            "builds": ("memory", "loss"),
        },
        world_size=8,
        own=_LLAMA2,
        small="test_perf/test_train_step.py::test_llama2[cpu-ws8-llama2-tiny-bf16]",
    )


def oneflow() -> Iterator[Recipe]:
    """Report 003: its 18 cases."""
    for case, line, small in _RUNS:
        _, degrees, batch, size = case.rsplit("_", 3)
        dp, tp, pp = map(int, degrees.split("x"))
        accumulation = 32 if pp > 1 else 1
        yield Recipe(
            name=f"003-{case}",
            rows=lines("003/results", line),
            parameters={
                "model": f"gpt-{size}",
                "strategy": "hybrid",
                "mesh": "-".join(f"{axis}{n}" for axis, n in (("pp", pp), ("dp", dp), ("tp", tp)) if n > 1) or "dp1",
                "options": oneflow_options(dp, tp, pp),
                "micro_batch_size": int(batch) // (dp * accumulation),
                "accumulation": accumulation,
                "global_batch_size": int(batch),
                "dtype": "fp16",
                "checkpointing": "full",
                "builds": ("memory",),
            },
            world_size=dp * tp * pp,
            own=_ONEFLOW,
            test=ONEFLOW_TEST,
            words=case,
            small=f"{ONEFLOW_TEST}[cpu-{small}]",
        )


def oneflow_options(dp: int, tp: int, pp: int) -> Mapping[str, Any]:
    """Of strategy hybrid, those of the axes that there are, as OneFlow has them."""
    return {
        **({"data": "replicate"} if dp > 1 else {}),
        **({"sequence_parallel": False} if tp > 1 else {}),
        **({"schedule": "1f1b"} if pp > 1 else {}),
    }
