"""Pipelines: schedules and micro-batches, stage counts, interleaving, with data parallelism (report 004).

The bubble is measured in the timeline of torch's own runtime.  Emulated stages sleep instead of computing: they test
the measurement, also on a machine with two cores.
"""

from __future__ import annotations

import pytest

from perfsuite import sizes, workloads
from perfsuite.base.mesh import MeshShape
from perfsuite.published.recipes.report_004 import XL

TINY = {"layers": 8, "width": 64, "words": 128, "context": 32}
"""Overrides of gpt2-tiny: as many layers as the most stages of the small cases."""


def count_ranks(mesh):
    """Return the ranks of a mesh."""
    return MeshShape.parse(mesh).world_size


def pipeline(mesh, *, schedule, num_micro_batches, stages_per_rank=None, **case):
    """Return a case on this mesh and its ranks: models that fill the mesh's devices, a tiny one on few ranks."""
    ranks = count_ranks(mesh)
    full = {8: {**XL, "micro_batch_size": 4}, 16: {"model": "gpt3-13b", "dtype": "bf16"}}
    model = full.get(ranks, {"model": "gpt2-tiny", "overrides": TINY})
    options = {"schedule": schedule, **({"stages_per_rank": stages_per_rank} if stages_per_rank else {})}
    case = {"strategy": "hybrid", "options": options, "accumulation": num_micro_batches, **model, **case}
    return workloads.TrainStep(mesh=mesh, **case), ranks


def counts(schedule):
    """Return the micro-batches of a schedule; plain runs of the tiny model have the report's counts, and eight."""
    plain = (4, 8) if schedule == "naive" else (8,)
    marks = {count: () if count in plain else pytest.mark.perf_extended for count in (4, 8, 16)}
    return [pytest.param(schedule, count, id=f"{schedule}-m{count}", marks=marks[count]) for count in marks]


@sizes(param="mesh", full=["pp4-dp2"], small=["pp4"], ranks=count_ranks)
@pytest.mark.parametrize(
    ("schedule", "num_micro_batches"),
    [case for schedule in ("naive", "gpipe", "1f1b", "interleaved_1f1b") for case in counts(schedule)],
)
def test_schedules(perf, mesh, schedule, num_micro_batches, require_fit):
    """Report 004: throughput, bubble and memory by schedule and micro-batches, four stages."""
    # A memory build doubles the time, so the tiny model's counts that no report has are without it.
    unpublished = num_micro_batches == 4 and schedule != "naive"
    builds = () if mesh == "pp4" and unpublished else ("memory",)
    workload, ranks = pipeline(mesh, schedule=schedule, num_micro_batches=num_micro_batches, builds=builds)
    require_fit(workload, ranks)
    perf(workload, on=ranks)


@sizes(param="mesh", full=["pp4-dp2"], small=["pp2"], ranks=count_ranks)
@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param("looped_bfs", marks=pytest.mark.perf_extended),
        "interleaved_zero_bubble",
        "zbv",
        pytest.param("dualpipev", marks=pytest.mark.perf_extended),
    ],
)
def test_newer_schedules(perf, mesh, schedule, require_fit):
    """Effect of breadth first, split backwards and placement in a V."""
    workload, ranks = pipeline(mesh, schedule=schedule, num_micro_batches=8)
    require_fit(workload, ranks)
    perf(workload, on=ranks)


@sizes(
    param="mesh",
    full=["pp2-dp8", "pp4-dp4", "pp8-dp2", "pp16"],
    small=["pp2", "pp2-dp2", "pp4"],
    extended=["pp2-dp2"],
    ranks=count_ranks,
)
def test_stage_counts(perf, mesh, require_fit):
    """Report 004: 1F1B on the same devices with more and more stages."""
    workload, ranks = pipeline(mesh, schedule="1f1b", num_micro_batches=8, micro_batch_size=2, builds=("memory",))
    require_fit(workload, ranks)
    perf(workload, on=ranks)


@sizes(param="mesh", full=["pp4-dp2"], small=["pp2"], ranks=count_ranks)
@pytest.mark.parametrize("stages_per_rank", [2, 4], ids="v{}".format)
def test_interleaving(perf, mesh, stages_per_rank, require_fit):
    """More stages on each rank: a smaller bubble and more messages."""
    workload, ranks = pipeline(mesh, schedule="interleaved_1f1b", num_micro_batches=8, stages_per_rank=stages_per_rank)
    require_fit(workload, ranks)
    perf(workload, on=ranks)


@sizes(param="model", full=["llama2-7b"], small=["llama2-tiny"])
def test_beside_data_parallelism(perf, model, at_size, require_fit):
    """Two pipelines whose stages are spread over both."""
    layers = {"llama2-tiny": {"layers": 4}}.get(model, {})
    case = at_size("hybrid", {"schedule": "1f1b"})
    workload, ranks = pipeline("pp2-dp2", model=model, overrides=layers, schedule="1f1b", num_micro_batches=4, **case)
    require_fit(workload, ranks)
    perf(workload, on=ranks)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_emulated(perf, schedule):
    """Stages that sleep: measured bubble against simulated bubble, on busy cores too."""
    perf(workloads.EmulatedPipeline(mesh="pp4", schedule=schedule, num_micro_batches=8, action_ms=3), on=4)
