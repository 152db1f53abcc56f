"""Where ranks run: as a launcher left them unless pinning is asked for, with a fair share of the cores as threads."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.platforms import families
from perfsuite.runtime.driver import Driver, Job
from perfsuite.runtime.local import LocalTransport
from perfsuite.runtime.placement import allowed_cores, divide_cores
from perfsuite.workload import Budget, FunctionWorkload
from test_correctness import steps

ONCE = Budget(smoke=True, timeout_s=60.0)
HERE = allowed_cores()


@given(st.integers(1, 64), st.integers(1, 64))
def test_cores_are_divided_without_overlap(cores, ranks):
    places = [divide_cores(tuple(range(cores)), rank, ranks, pin=True) for rank in range(ranks)]
    assert len({place.threads for place in places}) == 1
    if ranks > cores:
        assert all(place.cores is None and place.threads == 1 for place in places)
    else:
        used = [core for place in places for core in place.cores]
        assert len(used) == len(set(used)) == ranks * (cores // ranks)
        assert all(len(place.cores) == place.threads for place in places)


@given(st.integers(1, 64), st.integers(1, 64))
def test_without_pinning_a_rank_has_the_same_threads_and_no_core_of_its_own(cores, ranks):
    free = divide_cores(tuple(range(cores)), 0, ranks)
    assert (divide_cores(tuple(range(cores)), 0, ranks, pin=True).threads, None) == (free.threads, free.cores)


class Bound(LocalTransport):
    """A launcher that bound ranks 0 and 1 to two cores each, or says so."""

    def place(self, slot):
        return dataclasses.replace(super().place(slot), cores=(2 * slot, 2 * slot + 1))


def run(logs, ranks, *, transport=LocalTransport, pin=False):
    """The ranks' facts, and the cores that each was allowed while it ran."""
    preload = ("torch", "torch.distributed", "perfsuite.runtime.worker")
    slots = transport(start_method="fork", preload=preload, log_directory=logs)
    root = Path(__file__).parent.parent
    driver = Driver(transport=slots, family=families()["cpu"], rootpath=root, device_count=1, pin=pin)
    try:
        measured = driver.run(Job(workload=FunctionWorkload(function=steps.allowed), world_size=ranks, budget=ONCE))
    finally:
        driver.close()
    allowed = {record.name: int(record.value) for record in measured.records}
    return measured.ranks, [allowed[f"cores{rank}"] for rank in range(ranks)]


def test_ranks_may_use_every_core_that_this_process_may(tmp_path):
    ranks, allowed = run(tmp_path, 2)
    assert [len(HERE)] * 2 == allowed
    assert [(max(1, len(HERE) // 2), None)] * 2 == [(rank.threads, rank.cores) for rank in ranks]


def test_a_binding_of_this_process_is_kept(tmp_path):
    os.sched_setaffinity(0, HERE[:1])
    try:
        ranks, allowed = run(tmp_path, 1)
    finally:
        os.sched_setaffinity(0, HERE)
    assert [1] == allowed
    assert [1] == [rank.threads for rank in ranks]


def test_cores_of_a_launchers_own_for_each_rank_are_not_divided(tmp_path):
    ranks, _ = run(tmp_path, 2, transport=Bound)
    assert [2, 2] == [rank.threads for rank in ranks]


@pytest.mark.skipif(len(HERE) < 2, reason="one core cannot be divided")
def test_pinned_ranks_have_cores_of_their_own(tmp_path):
    ranks, allowed = run(tmp_path, 2, pin=True)
    share = len(HERE) // 2
    assert [share] * 2 == allowed
    assert [HERE[:share], HERE[share : 2 * share]] == [rank.cores for rank in ranks]
