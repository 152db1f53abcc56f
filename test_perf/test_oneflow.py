"""Report 003: OneFlow's GPT, 18 cases of data, tensor, 2D and pipeline parallelism, named by their settings.

``2D_2x4x1_16_1536x16`` is in group 2D, has dp 2, tp 4 and pp 1, a global batch of 16, 16 layers of 1536 features.  2048
tokens, words padded to 128 x tp, activations computed again, 16 bits; the micro-batch is the report's.  Torch chooses
the kernel of attention.  A name with ``-math`` computes it by plain products, as OneFlow 0.3.5 did: the report's run.
"""

from __future__ import annotations

import math

from perfsuite import sizes, workloads
from perfsuite.base.mesh import MeshShape
from perfsuite.published.recipes import find, recipes
from perfsuite.published.recipes.reports_000_to_003 import ONEFLOW_TEST, oneflow_options

_RECIPES = [recipe for recipe in recipes() if recipe.test == ONEFLOW_TEST]
NAMES = [recipe.words for recipe in _RECIPES if recipe.beside]
"""Names of the report's cases."""
FULL = [*NAMES, *(recipe.words for recipe in _RECIPES if not recipe.beside)]
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
    "DP_1x1x1_2_64x4-math",
    "2D_PP_2x2x2_8_64x4-math",
]
"""The report's cases of at most eight ranks, and its pipelines on eight; a plain run has those of one rank."""


def ranks(case):
    """Return the ranks of a case: dp x tp x pp."""
    return math.prod(map(int, case.rsplit("_", 3)[1].split("x")))


@sizes(param="case", full=FULL, small=SMALL, extended=[case for case in SMALL if ranks(case) > 1], ranks=ranks)
def test_oneflow(perf, case, scale, require_fit):
    """One case of the report, or a small one named by the same rule."""
    plain, _, attention = case.partition("-")
    if scale == "full":
        recipe = find(f"003-{plain}" if attention else f"003-{plain}-auto")
        step = workloads.TrainStep(**recipe.parameters)
        require_fit(step, recipe.world_size)
        perf(step, on=recipe.world_size)
        return
    from perfsuite.reports.tables.case_names import case_name  # collecting needs no tables

    name = case_name(plain)
    accumulation = name.pp  # as many micro-batches as stages; more would only add messages
    shape = MeshShape.of(pp=name.pp, dp=name.dp, tp=name.tp)
    workload = workloads.TrainStep(
        model=f"gpt-{name.width}x{name.layers}",
        strategy="hybrid",
        mesh="-".join(f"{axis}{size}" for axis, size in shape.axes if size > 1) or "dp1",
        options=oneflow_options(name.dp, name.tp, name.pp),
        micro_batch_size=name.batch // (name.dp * accumulation),
        accumulation=accumulation,
        global_batch_size=name.batch,
        attention=attention or "auto",
        checkpointing="full",
        builds=("memory",),
    )
    require_fit(workload, shape.world_size)
    perf(workload, on=shape.world_size)
