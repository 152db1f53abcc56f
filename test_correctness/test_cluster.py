"""Driver and agents with real processes: what a case on them brings back, and what every loss becomes.

Launches on "several hosts" are several hosts to perfsuite only: all processes run here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from perfsuite.errors import AgentLost, CaseStopped, LaunchError, RanksFailed
from perfsuite.platforms import families
from perfsuite.runtime.driver import Driver, Job
from perfsuite.runtime.transports import cluster
from perfsuite.runtime.transports.cluster import ClusterTransport
from perfsuite.runtime.transports.launchers import detect_launch, launcher_variables
from perfsuite.workload import Budget, FunctionWorkload
from test_correctness.helpers import steps
from test_correctness.helpers.processes import descendants, gone, listening_on

ROOT = Path(__file__).parent.parent
PRELOAD = ("torch", "torch.distributed", "perfsuite.runtime.ranks.worker")
QUICK = Budget(min_rounds=3, max_time_s=0.05, warmup_time_s=0.02, timeout_s=60.0)
AGENT = """
import os, sys
from perfsuite.runtime.transports.agent import serve_agent
from perfsuite.runtime.transports.launchers import detect_launch
sys.exit(serve_agent(detect_launch(os.environ), deadline_s=60))
"""
DRIVER = """
import os, pathlib, sys, time
from perfsuite.runtime.transports.cluster import ClusterTransport
from perfsuite.runtime.transports.launchers import detect_launch
transport = ClusterTransport(
    detect_launch(os.environ), start_method="fork", preload=(), log_directory=pathlib.Path(sys.argv[1])
)
transport.gather()
transport.acquire(3, fresh=False, env={}, deadline_s=60)
print("acquired", flush=True)
time.sleep(3600)
"""
COLD = pytest.mark.usefixtures("cold")
"""Of the tests of how processes end, which stand last: it lasts until the end of the file."""
LAUNCHER = "import subprocess, sys; subprocess.call([sys.executable, '-c', sys.argv[1]])"


def environ_of(rank: int, world_size: int, directory: Path, *, hosts: int = 1) -> dict[str, str]:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    kept = {name: value for name, value in os.environ.items() if name not in launcher_variables(os.environ)}
    ours = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % (world_size // hosts)),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size // hosts),
        "MASTER_ADDR": "127.0.0.1" if hosts == 1 else "127.0.0.2",
        "MASTER_PORT": str(port),
        "TMPDIR": str(directory),
    }
    return {**kept, **ours, **({"PERFSUITE_KEY": "a key for tests alone"} if hosts > 1 else {})}


def start(script: str, environ: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@dataclass
class Launched:
    transport: ClusterTransport
    agents: dict[int, subprocess.Popen[str]]
    directory: Path

    def driver(self) -> Driver:
        return Driver(transport=self.transport, family=families()["cpu"], rootpath=ROOT, device_count=1)


@contextlib.contextmanager
def launched(
    world_size: int, directory: Path, monkeypatch: pytest.MonkeyPatch, *, hosts: int = 1, preload=(), agent=(AGENT,)
) -> Iterator[Launched]:
    environ = environ_of(0, world_size, directory, hosts=hosts)
    monkeypatch.setattr("tempfile.tempdir", str(directory))
    others = {}
    for rank in range(1, world_size):
        local_rank = str(rank % (world_size // hosts))
        others[rank] = start(agent[0], {**environ, "RANK": str(rank), "LOCAL_RANK": local_rank}, *agent[1:])
    launch = detect_launch(environ)
    assert launch is not None
    transport = ClusterTransport(
        launch,
        start_method="fork",
        preload=preload,
        log_directory=directory / "logs",
        deadline_s=60,
        environ=environ,
    )
    try:
        transport.gather()
        yield Launched(transport=transport, agents=others, directory=directory)
    finally:
        transport.close()
        for process in others.values():
            process.kill()
            process.wait()
            process.stdout.close()
            process.stderr.close()


def loss(transport: ClusterTransport) -> str:
    """How the loss of an agent is told, up to what to do."""
    events = [event for _ in range(10) for event in transport.poll(0.1)]
    assert [event.kind for event in events] == ["agent_lost"]
    return events[0].text.partition(";")[0]


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    directory = tmp_path_factory.mktemp("three")
    with pytest.MonkeyPatch.context() as monkeypatch, launched(3, directory, monkeypatch, preload=PRELOAD) as run:
        yield run


@pytest.fixture(scope="module")
def driver(three):
    return three.driver()


def job(function, world_size, *, budget=QUICK, fresh=False, **arguments):
    workload = FunctionWorkload(function=function, arguments=arguments)
    return Job(workload=workload, world_size=world_size, budget=budget, fresh=fresh)


def test_a_case_runs_on_the_agents_as_it_does_locally(driver, three):
    measurement = driver.run(job(steps.add_up, 3))
    assert [rank.rank for rank in measurement.ranks] == [0, 1, 2]
    assert len(measurement.samples) >= 3
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
    assert len(driver.run(job(steps.add_up, 3)).samples) >= 3


def test_an_agent_answers_while_its_worker_hangs(driver):
    budget = Budget(min_rounds=3, max_time_s=0.05, warmup_time_s=0.02, timeout_s=1.5)
    with pytest.raises(RanksFailed) as failure:
        driver.run(job(steps.hanging, 3, budget=budget, culprit=2))
    first_line = str(failure.value).splitlines()[0]
    assert "rank 2 on " in first_line
    assert "hung at" in first_line
    assert "steps.py" in first_line
    assert "was waiting for the others in all_reduce" in str(failure.value)
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


# -- how processes end ----------------------------------------------------------------------------------------------


@COLD
def test_agents_that_are_dismissed_end_before_the_driver_and_leave_nothing(tmp_path, monkeypatch):
    with launched(3, tmp_path, monkeypatch) as run:
        run.transport.acquire(3, fresh=False, env={}, deadline_s=60)
        pids = [pid for agent in run.agents.values() for pid in descendants(agent.pid)]
        assert len(pids) >= 4, "a forkserver and a worker each"
        for agent in run.agents.values():
            agent.send_signal(signal.SIGINT)  # Ctrl-C belongs to the driver
        run.transport.close()
        assert gone([*pids, *(agent.pid for agent in run.agents.values())], within_s=5.0)
        run.transport.close()
        for agent in run.agents.values():
            assert agent.communicate(timeout=30) == ("", "")
            assert agent.returncode == 0
    assert list((tmp_path / f"perfsuite-{os.getuid()}").iterdir()) == [], "the key of the launch is removed"


@COLD
def test_several_hosts_use_the_key_and_keep_their_logs_to_themselves(tmp_path, monkeypatch):
    with launched(2, tmp_path, monkeypatch, hosts=2, preload=PRELOAD) as run:
        measurement = run.driver().run(job(steps.add_up, 2))
        assert len(measurement.ranks) == 2
        address, port = run.transport.open_store(30)
        assert address == "127.0.0.2", "the address that the agents came to"
        listeners = [listening_on(pid) for pid in descendants(os.getpid())]
        assert [each[port] for each in listeners if port in each] == [address], "and no other"
        assert len(list(tmp_path.glob("perfsuite-agent-*/rank1.log"))) == 1
        run.transport.close()
        assert run.agents[1].wait(30) == 0
        assert list(tmp_path.glob("perfsuite-agent-*")) == []


@COLD
def test_a_killed_agent_is_named_once_and_its_workers_end(tmp_path, monkeypatch):
    with launched(3, tmp_path, monkeypatch) as run:
        transport = run.transport
        transport.acquire(3, fresh=False, env={}, deadline_s=60)
        workers = descendants(run.agents[2].pid)
        run.agents[2].kill()
        events = [event for _ in range(3) for event in transport.poll(10.0 if not _ else 0.2)]
        assert [(event.slot, event.kind) for event in events] == [(2, "agent_lost")]
        here = socket.gethostname()
        assert f"the agent of rank 2 on {here} (pid {run.agents[2].pid}) is lost" in events[0].text
        assert gone(workers)
        with pytest.raises(AgentLost, match="the agent of rank 2 on"):
            transport.acquire(2, fresh=False, env={}, deadline_s=60)
        with pytest.raises(AgentLost):
            transport.send(2, {"verb": "leave"})
        transport.kill([0, 1, 2])
        assert transport.log_tail(2) == ""
        assert 2 not in transport.dump([2], 1.0)


@COLD
def test_an_agent_that_was_told_to_end_is_not_named_for_one_that_was_killed(tmp_path, monkeypatch):
    with launched(3, tmp_path, monkeypatch) as run:
        run.agents[2].terminate()
        assert run.agents[2].wait(30) == 128 + signal.SIGTERM
        assert "the agent of rank 2" in run.transport.await_loss(30.0)
        run.agents[1].kill()
        run.agents[1].wait(30)
        assert "the agent of rank 1" in run.transport.await_loss(30.0)
        with pytest.raises(AgentLost, match=r"^the agent of rank 1 on .*launcher$"):
            run.transport.acquire(3, fresh=False, env={}, deadline_s=60)


@COLD
def test_a_loss_that_a_signal_kept_from_being_told_is_named_all_the_same(tmp_path, monkeypatch):
    with launched(2, tmp_path, monkeypatch) as run:
        receive = run.transport._star.receive

        def interrupted(timeout_s, also=()):
            if any(arrival.frame is None for arrival in receive(timeout_s, also)):
                raise CaseStopped("SIGTERM")
            return []

        run.agents[1].kill()
        monkeypatch.setattr(run.transport._star, "receive", interrupted)
        with pytest.raises(CaseStopped):
            run.transport.await_loss(30.0)
        monkeypatch.setattr(run.transport._star, "receive", receive)
        assert "the agent of rank 1" in run.transport.await_loss(0.0)


@COLD
def test_an_agent_that_is_stopped_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "_ANSWER_S", 0.5)
    with launched(2, tmp_path, monkeypatch) as run:
        run.agents[1].send_signal(signal.SIGSTOP)
        with pytest.raises(AgentLost, match=r"rank 1 on .*it gave no answer within 1 s"):
            run.transport.acquire(2, fresh=False, env={}, deadline_s=0.5)
        assert [event.kind for event in run.transport.poll(0)] == ["agent_lost"]
        run.agents[1].send_signal(signal.SIGCONT)
        assert run.agents[1].wait(30) != 0


@COLD
def test_sigterm_ends_an_agent_and_its_workers(tmp_path, monkeypatch):
    with launched(2, tmp_path, monkeypatch) as run:
        run.transport.acquire(2, fresh=False, env={}, deadline_s=60)
        workers = descendants(run.agents[1].pid)
        run.agents[1].terminate()
        assert run.agents[1].wait(30) == 128 + signal.SIGTERM
        assert gone(workers)
        assert loss(run.transport).endswith("is lost: it got SIGTERM")


@COLD
def test_an_agent_ends_with_its_launcher(tmp_path, monkeypatch):
    with launched(2, tmp_path, monkeypatch, agent=(LAUNCHER, AGENT)) as run:
        run.transport.acquire(2, fresh=False, env={}, deadline_s=60)
        below = descendants(run.agents[1].pid)
        assert len(below) >= 3, "agent, forkserver, worker"
        run.agents[1].kill()
        assert gone(below)
        assert loss(run.transport).endswith("is lost: its launcher is gone")


@COLD
def test_a_killed_driver_leaves_nothing_behind(tmp_path):
    environ = environ_of(0, 3, tmp_path)
    driver = start(DRIVER, environ, str(tmp_path / "logs"))
    agents = [start(AGENT, {**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in (1, 2)]
    try:
        assert driver.stdout.readline() == "acquired\n"
        pids = [pid for each in (driver, *agents) for pid in (each.pid, *descendants(each.pid))]
        assert len(pids) >= 9
        driver.kill()
        driver.wait()
        for agent in agents:
            out, err = agent.communicate(timeout=30)
            assert agent.returncode == 1
            assert out == ""
            assert err.count("\n") == 1
            assert "ends because the driver is gone" in err
        assert gone(pids)
    finally:
        for process in (driver, *agents):
            process.kill()
            process.communicate()


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
    assert err.startswith("perfsuite: rank 1 found no driver on ports ")
