"""A projected step sends the bytes that the suite's own strategy counts, by collective and axis."""

import dataclasses
import itertools
import math
from collections import Counter

import pytest

from perfsuite.base.collectives import busbw_factor
from perfsuite.base.mesh import MeshShape
from perfsuite.platforms import load_catalog
from perfsuite.projection.calibration import Calibration, CollectiveLine, Constant
from perfsuite.projection.job import Node, TrainingJob
from perfsuite.projection.step import projector_of
from perfsuite.workloads.training.train_step import TrainStep

PER_NODE = 64
SENT = {"send": ("ring", "send_recv")}
"""By collective of the suite: those of a projection that have another name."""


def job_of(mesh, **case):
    step = TrainStep(**{"strategy": "hybrid", "mesh": mesh, **case})
    training = step.work(MeshShape.parse(mesh)).training
    return TrainingJob.of(training, load_catalog().find("a100")), step


def factor(collective, ranks):
    return 1.0 if collective in SENT["send"] else busbw_factor(collective, ranks)


def projected_bytes(job, collective, ranks, stride):
    """Bytes of one collective in one kind of group: nothing else takes time."""
    free = Constant(value=1e30, unit="", source="")
    names = [f"{kernel}_{job.training.dtype}_tflops" for kernel in ("matmul", "attention")]
    line = CollectiveLine(
        collective=collective, ranks=ranks, stride=stride, alpha_us=0.0, beta_gb_per_s=1e-9 * factor(collective, ranks)
    )
    others = tuple(
        dataclasses.replace(line, ranks=count, stride=apart, beta_gb_per_s=1e30)
        for count, apart in itertools.product((2, 4, 8), (1, 2, 4, 8))
        if (count, apart) != (ranks, stride)
    )
    known = Calibration(
        device="a100",
        constants=dict.fromkeys([*names, "memory_gb_per_s", "link_gb_per_s"], free),
        traits={"overlap_ratio": Constant(value=0.0, unit="", source="")},
        collectives=(line, *others),
    )
    parts = projector_of(dataclasses.replace(job, node=Node(devices=PER_NODE)), known).step(job.layout).parts
    return sum(seconds for _, resource, seconds in parts if resource == "link")


def counted_bytes(step, shape):
    """By axis and collective, of the rank that sends most."""
    most = {}
    for rank in range(shape.world_size):
        found = Counter()
        for call in step.find_strategy().traffic(step.plan(shape), shape, rank):
            if call.collective != "receive":
                found[call.axis, call.collective] += call.message_bytes
        most = {key: max(most.get(key, 0), found[key]) for key in {*most, *found}}
    return most


WORDS, FEW = {"words_multiple": 512}, {"words": 512}


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize(
    ("mesh", "case"),
    [
        ("dp4", {"model": "llama2-7b"}),
        ("dp4", {"model": "llama2-7b", "options": {"reshard": False}}),
        ("dp4", {"model": "llama2-7b", "strategy": "fsdp"}),
        ("dp4", {"model": "llama2-7b", "strategy": "fsdp", "options": {"reshard": False}}),
        ("dp4", {"model": "llama2-7b", "strategy": "ddp"}),
        ("dp_replicate2-dp_shard2", {"model": "llama2-7b"}),
        ("pp2-dp_replicate2-dp_shard2", {"model": "llama2-7b"}),
        ("tp2", {"model": "llama2-7b"}),
        ("tp4", {"model": "gpt2", "overrides": WORDS, "micro_batch_size": 2}),
        ("tp4", {"model": "gpt2", "overrides": WORDS, "options": {"sequence_parallel": False}}),
        ("cp2", {"model": "llama2-7b"}),
        ("cp4", {"model": "llama2-70b", "micro_batch_size": 2}),
        ("dp2-cp2-tp2", {"model": "llama2-7b"}),
        ("ep4", {"model": "mixtral-8x7b"}),
        ("ep4-tp2", {"model": "mixtral-8x7b"}),
        ("ep2-tp4", {"model": "mixtral-8x7b", "micro_batch_size": 2}),
        ("dp2-ep2-tp2", {"model": "mixtral-8x7b"}),
        ("ep2-cp2", {"model": "mixtral-8x7b"}),
        ("pp4", {"model": "llama2-7b"}),
        ("pp2-dp2-tp2", {"model": "llama2-7b"}),
        ("pp2-tp4", {"model": "gpt2", "overrides": FEW}),
        ("pp2-dp2", {"model": "gpt2", "overrides": FEW, "options": {"data": "replicate"}}),
        ("pp2-dp2", {"model": "gpt2", "overrides": FEW}),
    ],
    ids=str,
)
def test_bytes_of_every_collective_are_those_of_the_strategy(mesh, case, checkpointing, dtype):
    """Within a percent: a projection divides norms by tp, and leaves out the loads of experts, some KB."""
    job, step = job_of(mesh, dtype=dtype, checkpointing=checkpointing, accumulation=4, **case)
    shape, groups = job.layout.shape, job.layout.groups(PER_NODE)
    expected = counted_bytes(step, shape)
    found = {}
    for axis, collective in expected:
        names = axis.split("-")
        ranks, stride = math.prod(shape.size(name) for name in names), groups[names[-1]].stride
        kinds = SENT.get(collective, (collective,))
        found[axis, collective] = sum(projected_bytes(job, kind, ranks, stride) for kind in kinds)
    if job.architecture.tied and shape.size("pp") > 1:  # both ends send theirs
        found["pp", "send"] += projected_bytes(job, "all_reduce", 2, groups["pp"].stride)
    assert expected == pytest.approx(found, rel=0.01, abs=16_384)
