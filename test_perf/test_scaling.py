"""Report 004's scaling tables: GPT with DDP on more and more ranks, with a fixed batch per rank (weak) or in all
(strong).

The terminal's report and ``perfsuite report`` show speed-up and efficiency over the smallest number of ranks.
"""

from __future__ import annotations

import os

import pytest

from perfsuite import sizes, workloads, world_sizes

BATCH = {"full": 256, "small": 16}
MOST_AT_ONCE = {"full": 8, "small": 16}


@pytest.fixture(autouse=True)
def cores_for_all(ranks, platform):
    """Skip a case with more ranks than cores on a CPU, because more ranks then add no hardware."""
    cores = len(os.sched_getaffinity(0))
    if platform.family == "cpu" and ranks.world_size > cores:
        pytest.skip(f"{ranks.world_size} ranks would share {cores} cores, which cannot show scaling")


# test_published.py has GPT-2 1.5B on the report's numbers of ranks.
@sizes(param="model", full=["gpt2"], small=["gpt2-tiny"])
@world_sizes(1, 2, 4, 8, more=True)
def test_weak_scaling(perf, ranks, model, at_size, require_fit):
    """Eight samples on every rank: twice the ranks do twice the work."""
    case = at_size("ddp", checkpointing="none")
    workload = workloads.TrainStep(model=model, micro_batch_size=8, builds=("exposed",), **case)
    require_fit(workload, ranks.world_size)
    perf(workload, on=ranks)


@sizes(param="model", full=["gpt2", "gpt2-xl"], small=["gpt2-tiny"])
@world_sizes(1, 2, 4, 8, more=True)
def test_strong_scaling(perf, ranks, model, scale, *, at_size, require_fit):
    """A fixed number of samples on all ranks, at most eight at a time: twice the ranks do half the work each."""
    batch = BATCH[scale]
    if batch % ranks.world_size:
        pytest.skip(f"{batch} samples do not divide by {ranks.world_size} ranks; choose a divisor of {batch}")
    accumulation = max(1, batch // ranks.world_size // MOST_AT_ONCE[scale])
    workload = workloads.TrainStep(
        model=model, global_batch_size=batch, accumulation=accumulation, builds=("exposed",), **at_size("ddp")
    )
    require_fit(workload, ranks.world_size)
    perf(workload, on=ranks)
