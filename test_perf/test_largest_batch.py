"""Largest number of samples that fit on one card, and the step's speed (the batch columns of reports 001 and 004)."""

from __future__ import annotations

import pytest

from perfsuite import sizes, workloads, world_sizes
from perfsuite.base.units import MIB, parse_bytes
from perfsuite.plugin.state import suite_of
from perfsuite.published.recipes import find

PUBLISHED = {"latte-xl": "001-latte-xl-b2-w16-1x1"}
"""Recipe with the dtype, strategy and program of a model; report 001 prints the samples that fit on a card."""
CPU_BUDGET_BYTES = 16 * MIB
"""Budget of a rank on a CPU, and of a simulated device, which computes on one. It is fixed, because a share of the
host's memory would give every host another result."""


@pytest.fixture
def budget_bytes(request, platform):
    """Return the bytes that a rank may allocate: --perf-memory-budget, else 16 MiB on a CPU, None elsewhere."""
    written = request.config.getoption("perf_memory_budget")
    if written is None:
        machine = suite_of(request.config).machine
        on_cores = platform.family == "cpu" or (machine.simulated and platform.name == machine.name)
        return CPU_BUDGET_BYTES if on_cores else None
    return parse_bytes(written)


@sizes(param="model", full=["gpt2", "gpt2-xl", "latte-xl"], small=["gpt2-tiny"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_largest_batch(perf, model, checkpointing, *, budget_bytes, narrow, require_fit):
    """Samples gained by computing activations again."""
    if model in PUBLISHED:
        recipe = find(PUBLISHED[model]).parameters
        case = {name: recipe[name] for name in ("dtype", "strategy", "program")}
    else:
        case = {"dtype": narrow}
    workload = workloads.LargestBatch(
        model=model, checkpointing=checkpointing, memory_budget_bytes=budget_bytes, **case
    )
    require_fit(workload, 1)
    perf(workload)


@sizes(param="model", full=["gpt2-xl", "llama2-7b"], small=["gpt2-tiny"])
@world_sizes(2, more="whole")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_largest_batch_spread(perf, ranks, model, strategy, *, budget_bytes, at_size, require_fit):
    """Samples gained by spreading the state over the cards."""
    workload = workloads.LargestBatch(model=model, memory_budget_bytes=budget_bytes, **at_size(strategy))
    require_fit(workload, ranks.world_size)
    perf(workload, on=ranks)
