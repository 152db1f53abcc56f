"""Cases that ``perfsuite calibrate`` needs besides kernels and collectives: depths, contention, groups along mesh
axes.

Steps of 1, 2 and 4 layers give the time of a block by their slope, and that of head, optimizer and host by the rest.
At the small scale all of them are extended cases.
"""

from __future__ import annotations

import pytest

from perfsuite import sizes, workloads
from perfsuite.base.mesh import MeshShape
from perfsuite.base.units import MIB

EXTENDED = pytest.mark.perf_extended
SMALL = ["dp2-tp2"]
FULL = ["dp2-tp4", "dp4-tp2", "pp2-dp2-tp2"]
BLOCKS = {
    "gpt2-tiny": {},
    "llama2-7b": {"dtype": "bf16", "overrides": {"sequence_length": 2048}},
    "gpt3-13b": {"dtype": "bf16"},
}
"""Settings of the models on one card."""


@EXTENDED
@sizes(param="model", full=["llama2-7b", "gpt3-13b"], small=["gpt2-tiny"])
@pytest.mark.parametrize("layers", [1, 2, 4], ids="l{}".format)
def test_depth(perf, model, layers, require_fit):
    """The same step with more and more layers on one card."""
    case = BLOCKS[model]
    overrides = {**case.get("overrides", {}), "layers": layers}
    workload = workloads.TrainStep(model=model, builds=("memory",), **{**case, "overrides": overrides})
    require_fit(workload, 1)
    perf(workload)


@EXTENDED
@sizes(param="model", full=["llama2-7b", "gpt3-13b"], small=["gpt2-tiny"])
@pytest.mark.parametrize("layers", [1, 2], ids="l{}".format)
def test_depth_of_larger_batches(perf, model, layers, require_fit):
    """The same with four times the batch: the part that does not grow is the optimizer's."""
    case = BLOCKS[model]
    overrides = {**case.get("overrides", {}), "layers": layers}
    workload = workloads.TrainStep(model=model, micro_batch_size=4, **{**case, "overrides": overrides})
    require_fit(workload, 1)
    perf(workload)


@EXTENDED
@sizes(param="side", full=[8192], small=[256])
@pytest.mark.parametrize("part", ["both", "products", "message"])
def test_contention(perf, side, part):
    """Products and an all-reduce at the same time, and each alone."""
    full = {"products": 16, "message_bytes": 256 * MIB, "dtype": "bf16"}
    small = {"products": 8, "message_bytes": MIB, "dtype": "fp32"}
    case = full if side == 8192 else small
    perf(workloads.MatmulBesideAllReduce(side=side, part=part, **case), on=2 if side == 256 else 8)


@EXTENDED
@sizes(param="mesh", full=FULL, small=SMALL, ranks=lambda mesh: MeshShape.parse(mesh).world_size)
@pytest.mark.parametrize("axis", ["dp", "tp"])
@pytest.mark.parametrize("message_bytes", [MIB, 64 * MIB], ids=["1MiB", "64MiB"])
def test_axis(perf, mesh, axis, message_bytes):
    """Groups along an axis, all at once; neighbours along dp are tp ranks apart."""
    workload = workloads.AxisCollective(collective="all_reduce", mesh=mesh, axis=axis, message_bytes=message_bytes)
    perf(workload, on=MeshShape.parse(mesh).world_size)
