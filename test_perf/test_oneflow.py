"""Report 003: OneFlow's GPT, 18 cases of data, tensor, 2D and pipeline parallelism, each called by what it is.

``2D_2x4x1_16_1536x16`` is of group 2D, has dp 2, tp 4 and pp 1, a global batch of 16, 16 layers of 1536 features.  2048
tokens, words padded to 128 x tp, activations computed again, 16 bits; the micro-batch is the report's.
"""

from __future__ import annotations

from perfsuite import sizes
from perfsuite.mesh import MeshShape
from perfsuite.reports.tables.case_names import case_name
from perfsuite.workloads.training.train_step import TrainStep

FULL = [
    "DP_1x1x1_2_1536x16",
    "DP_8x1x1_16_1536x16",
    "DP_16x1x1_32_1536x16",
    "DP_32x1x1_64_1536x16",
    "MP_1x1x1_8_768x12",
    "MP_1x8x1_16_1536x16",
    "MP_1x16x1_16_3072x16",
    "MP_1x32x1_16_3072x32",
    "2D_8x1x1_16_1536x16",
    "2D_1x8x1_16_1536x16",
    "2D_2x4x1_16_1536x16",
    "2D_4x2x1_16_1536x16",
    "2D_2x8x1_16_2304x24",
    "2D_4x8x1_32_2304x24",
    "DP_PP_8x1x4_512_1536x16",
    "MP_PP_1x8x4_512_2304x24",
    "2D_PP_2x4x4_512_2304x24",
    "2D_PP_2x8x2_512_2304x24",
]
SMALL = [
    "DP_1x1x1_2_64x4",
    "MP_1x1x1_8_64x4",
    "DP_8x1x1_16_64x4",
    "MP_1x8x1_4_64x4",
    "2D_8x1x1_16_64x4",
    "2D_1x8x1_4_64x4",
    "2D_2x4x1_4_64x4",
    "2D_4x2x1_4_64x4",
    "DP_PP_2x1x4_8_64x4",
    "MP_PP_1x2x4_4_64x4",
    "2D_PP_2x2x2_8_64x4",
    "2D_PP_1x4x2_4_64x4",
]
"""The report's cases of at most eight ranks, and its pipelines on eight; a plain run has those of one rank."""
ACCUMULATION = {"full": 32, "small": 4}
"""Micro-batches of a pipeline; without stages there is one."""


@sizes(param="case", full=FULL, small=SMALL, extended=SMALL[2:])
def test_oneflow(perf, case, scale):
    """One case of the report, or a small one called by its rule."""
    name = case_name(case)
    accumulation = ACCUMULATION[scale] if name.pp > 1 else 1
    shape = MeshShape.of(pp=name.pp, dp=name.dp, tp=name.tp)
    workload = TrainStep(
        model=f"gpt-{name.width}x{name.layers}",
        strategy="hybrid",
        mesh="-".join(f"{axis}{size}" for axis, size in shape.axes if size > 1) or "dp1",
        micro_batch_size=name.batch // (name.dp * accumulation),
        accumulation=accumulation,
        global_batch_size=name.batch,
        dtype="fp16" if scale == "full" else "fp32",
        checkpointing="full",
        builds=("memory",),
    )
    perf(workload, on=shape.world_size)
