"""Cases on agents with real processes: what a case brings back, and what every loss becomes."""

import os
import signal
import time

import pytest

from perfsuite.base.errors import AgentLost, LaunchError, RanksFailed
from perfsuite.record.workload import Budget
from perfsuite.runtime.transports.cluster import ClusterTransport
from perfsuite.runtime.transports.launchers import detect_launch
from test_correctness.helpers import steps
from test_correctness.helpers.agents import AGENT, PRELOAD, environ_of, job, launched, start


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


def test_cases_of_fewer_ranks_see_nothing_of_the_launcher(driver):
    for world_size in (2, 3, 1):
        records = {record.name: record.value for record in driver.run(job(steps.surroundings, world_size)).records}
        assert records["world"] == records["group"] == world_size
        assert records["rank_sum"] == (world_size - 1) / 2
        assert records["leaked"] == 0


def test_workers_are_reused_and_replaced_when_asked(driver):
    first, again, anew = (driver.run(job(steps.surroundings, 2, fresh=fresh)) for fresh in (False, False, True))
    assert [each.process for each in (first, again, anew)] == ["reused", "reused", "fresh"]
    pids = [
        {record.value for record in each.records if record.name.startswith("process_of_")}
        for each in (first, again, anew)
    ]
    assert len(pids[0]) == 2
    assert pids[0] == pids[1]
    assert not pids[0] & pids[2]


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (steps.raising, {"culprit": 2}, "rank 2 on .* raised ValueError: bad luck on purpose, rank 2"),
        (steps.raising, {"culprit": 0}, "rank 0 on .* raised ValueError: bad luck on purpose, rank 0"),
        (steps.dying, {"culprit": 1, "how": "kill"}, "rank 1 on .* died: killed by SIGKILL"),
        (steps.dying, {"culprit": 2, "how": "exit"}, "rank 2 on .* died: exit code 3"),
    ],
)
def test_a_failing_rank_is_named_and_the_next_case_runs(driver, function, arguments, message):
    with pytest.raises(RanksFailed, match=message):
        driver.run(job(function, 3, **arguments))
    if function is steps.dying:
        assert driver.log_tails()[arguments["culprit"]] == "last words of the culprit"
    assert len(driver.run(job(steps.add_up, 3)).times_s) >= 3


def test_an_agent_answers_while_its_worker_hangs(driver):
    budget = Budget(min_rounds=3, max_time_s=0.05, warmup_time_s=0.02, timeout_s=1.5)
    told = r"^rank 2 on .*hung at .*steps\.py[\s\S]*was waiting for the other ranks in all_reduce"
    with pytest.raises(RanksFailed, match=told):
        driver.run(job(steps.hanging, 3, budget=budget, culprit=2))
    assert driver.run(job(steps.add_up, 3)).world_size == 3


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


def test_an_agent_lost_during_a_case_ends_the_case(tmp_path, monkeypatch):
    with launched(2, tmp_path, monkeypatch, preload=PRELOAD) as run:
        driver = run.driver()
        with pytest.raises(AgentLost, match=r"the agent of rank 1 on .* is lost: its connection closed"):
            driver.run(job(killing_its_agent, 2, agent_pid=run.agents[1].pid))
        with pytest.raises(AgentLost):
            driver.run(job(steps.add_up, 1))


def test_a_driver_without_agents_names_them(tmp_path, monkeypatch):
    environ = environ_of(0, 3, tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    transport = ClusterTransport(
        detect_launch(environ), start_method="fork", preload=(), log_directory=tmp_path, deadline_s=0.5, environ=environ
    )
    with pytest.raises(LaunchError, match=r"rank 1-2 of 3 did not come within 0.5 s \(no other rank came\)"):
        transport.gather()
    transport.close()
    assert list((tmp_path / f"perfsuite-{os.getuid()}").iterdir()) == []


def test_an_agent_without_a_driver_says_so_in_one_line(tmp_path):
    environ = {**environ_of(1, 2, tmp_path), "PERFSUITE_KEY": "a key for tests alone"}
    agent = start(AGENT.replace("deadline_s=60", "deadline_s=0.5"), environ)
    out, err = agent.communicate(timeout=60)
    assert (agent.returncode, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("perfsuite: rank 1 found no driver on this host within 0.5 s (no process listens there)")
