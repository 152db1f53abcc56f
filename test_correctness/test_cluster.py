"""Cases on agents, and on local ranks where the same holds: what a case brings back, and what every loss becomes."""

import os
import re
import signal
import time

import pytest

from perfsuite.base.errors import AgentLost, RanksFailed
from perfsuite.record.workload import Budget
from test_correctness.helpers import steps
from test_correctness.helpers.agents import launched
from test_correctness.helpers.local_driver import PRELOAD, driver_fixture, job
from test_correctness.helpers.processes import gone


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    directory = tmp_path_factory.mktemp("three")
    with pytest.MonkeyPatch.context() as monkeypatch, launched(3, directory, monkeypatch, preload=PRELOAD) as run:
        yield run


@pytest.fixture(scope="module")
def driver(three):
    return three.driver()


def test_a_case_runs_on_the_agents_as_it_does_locally(driver, three):
    measurement = driver.run(job(steps.add_up, 3))
    assert [rank.rank for rank in measurement.ranks] == [0, 1, 2]
    assert len(measurement.times_s) >= 3
    assert measurement.transport == "env"
    assert driver.capacity == 3
    assert three.transport.place(2).local_rank == 2
    assert three.transport.place(2).local_world_size == 3


# -- what holds for local ranks too ------------------------------------------------------------------------------------


local = driver_fixture()


@pytest.fixture(params=["local", "agents"])
def either(request, monkeypatch):
    """A driver of local ranks, and one of agents."""
    monkeypatch.setattr("perfsuite.runtime.driver.GRACE_S", 0.5)
    return request.getfixturevalue("local" if request.param == "local" else "driver")


def processes_of(measurement):
    return {record.value for record in measurement.records if record.name.startswith("process_of_")}


def test_every_world_size_gets_its_own_group_and_environment_and_sees_nothing_of_a_launcher(either):
    for world_size in (1, 3, 2):
        records = {record.name: record.value for record in either.run(job(steps.surroundings, world_size)).records}
        assert records["world"] == records["group"] == world_size
        assert records["rank_sum"] == (world_size - 1) / 2
        assert records["leaked"] == 0
        assert records["threads"] >= 1


def test_workers_are_reused_and_replaced_when_asked(either):
    first, again, anew = (either.run(job(steps.surroundings, 2, fresh=fresh)) for fresh in (False, False, True))
    assert [each.process for each in (first, again, anew)] == ["reused", "reused", "fresh"]
    assert len(processes_of(first)) == 2
    assert processes_of(first) == processes_of(again)
    assert not processes_of(first) & processes_of(anew)
    assert gone([int(pid) for pid in processes_of(first)], within_s=10.0)


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (steps.raising, {"culprit": 2}, "rank 2 on .* raised ValueError: bad luck on purpose, rank 2 .*checking"),
        (steps.raising, {"everywhere": True}, "rank 0 on .*; so did ranks 1, 2"),
        (steps.dying, {"culprit": 1, "how": "kill"}, "rank 1 on .* died: killed by SIGKILL"),
        (steps.dying, {"culprit": 2, "how": "exit"}, "rank 2 on .* died: exit code 3"),
        (steps.dying, {"culprit": 1, "how": "sys.exit"}, "rank 1 on .* raised SystemExit: a workload called sys.exit"),
    ],
)
def test_a_failing_rank_is_named_and_the_next_case_runs(either, function, arguments, message):
    with pytest.raises(RanksFailed, match=message) as failure:
        either.run(job(function, 3, **arguments))
    assert "waiting" not in str(failure.value).splitlines()[0]
    if function is steps.dying:
        assert either.log_tails()[arguments["culprit"]] == "last words of the culprit"
    assert len(either.run(job(steps.add_up, 3)).times_s) >= 3


@pytest.mark.extended
def test_a_hang_is_named_with_its_stack_within_the_limit(either):
    """An agent answers while its worker hangs."""
    budget = Budget(min_rounds=3, max_time_s=0.05, warmup_time_s=0.02, timeout_s=1.5)
    with pytest.raises(RanksFailed) as failure:
        either.run(job(steps.hanging, 3, budget=budget, culprit=2))
    first, _, others = str(failure.value).partition("\n")
    assert re.search(r"^rank 2 on .*hung at .*steps\.py.*limit 1\.5 s", first)
    assert re.search(r"rank 0 on .*was waiting for the other ranks in all_reduce", others)
    assert either.run(job(steps.add_up, 3)).world_size == 3


# -- what becomes of agents --------------------------------------------------------------------------------------------


def test_what_a_killed_worker_said_is_never_delivered(driver, three):
    driver.run(job(steps.add_up, 3))
    transport = three.transport
    for _ in range(20):
        transport.acquire(2, fresh=False, env={}, deadline_s=60)
        transport.send(1, {"verb": "leave"})
        transport.kill([0, 1])
    transport.acquire(2, fresh=False, env={}, deadline_s=60)
    transport.send(1, {"verb": "facts", "family": "cpu"})
    events = []
    until = time.monotonic() + 60
    while not events and time.monotonic() < until:
        events = [event for event in transport.poll(1.0) if event.message is None or "phase" not in event.message]
    assert ["torch" in event.message["done"] for event in events] == [True]
    assert transport.poll(0.2) == []
    transport.kill([0, 1])


def killing_its_agent(rank, agent_pid):
    """Rank 1 ends the process that serves it."""

    def run():
        if rank.rank == 1:
            os.kill(agent_pid, signal.SIGKILL)
        time.sleep(3600)

    return run


@pytest.mark.extended
def test_an_agent_lost_during_a_case_ends_the_case(tmp_path, monkeypatch):
    with launched(2, tmp_path, monkeypatch, preload=PRELOAD) as run:
        driver = run.driver()
        with pytest.raises(AgentLost, match=r"the agent of rank 1 on .* is lost: its connection closed"):
            driver.run(job(killing_its_agent, 2, agent_pid=run.agents[1].pid))
        with pytest.raises(AgentLost):
            driver.run(job(steps.add_up, 1))
