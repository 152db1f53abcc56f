"""Near the end of a device's memory: cases find the same with and without the gate's yardstick and the cache flush."""

import contextlib
import dataclasses

import pytest
import torch

from perfsuite.base.units import GIB, MIB, gib
from perfsuite.record.workload import CallableStep, FunctionWorkload
from perfsuite.run.session import Case
from perfsuite.workloads.memory_capacity import MemoryCapacity
from perfsuite.workloads.training.largest_batch import LargestBatch
from simmusa.costs import Costs
from test_correctness.helpers import large_yardstick, simmusa_ranks
from test_correctness.helpers.simmusa_ranks import QUICK, TRAINING, opened, require_built

PRICES = Costs(kernel_ns=1_000_000, memory_bytes=GIB)
ONE = dataclasses.replace(QUICK, min_rounds=1, max_rounds=1, warmup_time_s=0.001)


@contextlib.contextmanager
def opened_with(memory_bytes, logs):
    require_built()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simmusa_ranks, "FAMILY", large_yardstick.FAMILY)
        costs = dataclasses.replace(PRICES, memory_bytes=memory_bytes)
        with opened(costs, logs, TRAINING) as session:
            yield session


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    with opened_with(PRICES.memory_bytes, tmp_path_factory.mktemp("ranks")) as session:
        yield session


def found(session, workload, metric, **changes):
    budget = dataclasses.replace(ONE, **changes)
    name = f"{type(workload).__name__} {changes}"
    result = session.run(Case(id=name, workload=workload, world_size=1, budget=budget, platform="s4000"))
    assert ("measured", "") == (result.outcome, result.detail)
    return next(each.value for each in result.metrics if each.name == metric), result


@pytest.mark.extended
@pytest.mark.parametrize("changes", [{}, {"yardstick": True}, {"yardstick": True, "cache_flush": True}])
def test_the_capacity_is_that_of_the_device(session, changes):
    block = 256 * MIB
    assert gib(PRICES.memory_bytes) == found(session, MemoryCapacity(block_bytes=block), "capacity_gib", **changes)[0]


@pytest.mark.slow
def test_the_largest_batch_is_the_same_under_the_gate(tmp_path):
    with opened_with(64 * MIB, tmp_path) as session:
        plain, gated = (
            found(session, LargestBatch(model="gpt2-tiny"), "largest_local_batch_samples", yardstick=yardstick)[0]
            for yardstick in (False, True)
        )
    assert plain == gated


def _allocates(rank):
    block = torch.zeros(64 * MIB // 4, device=rank.device)
    return CallableStep(lambda: block.add_(1.0))


@pytest.mark.extended
def test_the_peak_of_a_case_is_without_the_yardstick(session):
    peaks = [
        found(session, FunctionWorkload(function=_allocates), "latency_us", yardstick=yardstick)[1]
        for yardstick in (False, True)
    ]
    assert [64 * MIB] * 2 == [result.measurement.peak_memory_bytes for result in peaks]
