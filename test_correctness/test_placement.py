"""Where ranks run: as a launcher left them unless pinning is asked for, with a fair share of the cores as threads."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.platforms import families
from perfsuite.runtime.driver import Driver, Job
from perfsuite.runtime.ranks.placement import allowed_cores, divide_cores
from perfsuite.runtime.transports.local import LocalTransport
from perfsuite.workload import Budget, FunctionWorkload
from test_correctness.helpers import steps

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


@contextlib.contextmanager
def started(logs):
    """A driver whose workers are children of this process as it is now."""
    preload = ("torch", "torch.distributed", "perfsuite.runtime.ranks.worker")
    transport = LocalTransport(start_method="fork", preload=preload, log_directory=logs)
    root = Path(__file__).parent.parent
    driver = Driver(transport=transport, family=families()["cpu"], rootpath=root, device_count=1)
    try:
        yield driver
    finally:
        driver.close()


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    with started(tmp_path_factory.mktemp("logs")) as driver:
        yield driver


def run(driver, ranks):
    """The ranks' facts, and the number of cores that each was allowed while it ran."""
    step = FunctionWorkload(function=steps.allowed)
    measured = driver.run(Job(workload=step, world_size=ranks, budget=ONCE, fresh=True))
    allowed = {record.name: int(record.value) for record in measured.records}
    return measured.ranks, [allowed[f"cores{rank}"] for rank in range(ranks)]


def test_ranks_may_use_every_core_that_this_process_may(driver):
    ranks, allowed = run(driver, 2)
    assert [len(HERE)] * 2 == allowed
    assert [(max(1, len(HERE) // 2), None)] * 2 == [(rank.threads, rank.cores) for rank in ranks]


@pytest.mark.usefixtures("cold")
def test_a_binding_of_this_process_is_kept(tmp_path):
    os.sched_setaffinity(0, HERE[:1])
    try:
        with started(tmp_path) as driver:
            ranks, allowed = run(driver, 1)
    finally:
        os.sched_setaffinity(0, HERE)
    assert [1] == allowed
    assert [1] == [rank.threads for rank in ranks]


def test_cores_of_a_launchers_own_for_each_rank_are_not_divided(driver, monkeypatch):
    real = driver._transport.place
    bound = {slot: (2 * slot, 2 * slot + 1) for slot in range(2)}
    monkeypatch.setattr(driver._transport, "place", lambda slot: dataclasses.replace(real(slot), cores=bound[slot]))
    ranks, _ = run(driver, 2)
    assert [2, 2] == [rank.threads for rank in ranks]


@pytest.mark.skipif(len(HERE) < 2, reason="one core cannot be divided")
def test_pinned_ranks_have_cores_of_their_own(driver, monkeypatch):
    monkeypatch.setattr(driver, "_pin", True)
    ranks, allowed = run(driver, 2)
    share = len(HERE) // 2
    assert [share] * 2 == allowed
    assert [HERE[:share], HERE[share : 2 * share]] == [rank.cores for rank in ranks]
