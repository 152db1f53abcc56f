"""Report 004's scaling tables: GPT with DDP on more and more ranks, each batch fixed (weak) or all of it (strong).

Speed-up and efficiency over the smallest number of ranks stand in the terminal's report and in ``perfsuite report``.
"""

from __future__ import annotations

import os

import pytest

from perfsuite import sizes, workloads, world_sizes

BATCH = {"full": 256, "small": 16}
MOST_AT_ONCE = {"full": 8, "small": 16}


@pytest.fixture(autouse=True)
def cores_for_all(ranks, platform):
    """Skip what would measure how ranks share cores: on a CPU more ranks than cores bring no more hardware."""
    cores = len(os.sched_getaffinity(0))
    if platform.family == "cpu" and ranks.world_size > cores:
        pytest.skip(f"{ranks.world_size} ranks would share {cores} cores: that is no scaling")


# GPT-2 1.5B on every number of ranks that the report has is test_published.py's.
@sizes(param="model", full=["gpt2"], small=["gpt2-tiny"])
@world_sizes(1, 2, 4, 8, more=True)
def test_weak_scaling(perf, ranks, model, at_size, require_fit):
    """Eight samples on every rank, whatever their number: twice the ranks do twice the work."""
    case = at_size("ddp", checkpointing="none")
    workload = workloads.TrainStep(model=model, micro_batch_size=8, builds=("exposed",), **case)
    require_fit(workload, ranks.world_size)
    perf(workload, on=ranks)


@sizes(param="model", full=["gpt2", "gpt2-xl"], small=["gpt2-tiny"])
@world_sizes(1, 2, 4, 8, more=True)
def test_strong_scaling(perf, ranks, model, scale, *, at_size, require_fit):
    """So many samples on all ranks together, eight at a time at most: twice the ranks do half of them each."""
    batch = BATCH[scale]
    if batch % ranks.world_size:
        pytest.skip(f"{batch} samples on {ranks.world_size} ranks are not as many on each; choose a divisor of {batch}")
    accumulation = max(1, batch // ranks.world_size // MOST_AT_ONCE[scale])
    workload = workloads.TrainStep(
        model=model, global_batch_size=batch, accumulation=accumulation, builds=("exposed",), **at_size("ddp")
    )
    require_fit(workload, ranks.world_size)
    perf(workload, on=ranks)
