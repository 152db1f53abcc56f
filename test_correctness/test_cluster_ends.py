"""How the processes of a launch end: by dismissal, by signal, with their launcher or their driver."""

import contextlib
import os
import signal
import socket
import time

import pytest

from perfsuite.base.errors import AgentLost, CaseStopped
from perfsuite.runtime.transports import cluster, exchange
from test_correctness.helpers import steps
from test_correctness.helpers.agents import AGENT, environ_of, launched, started
from test_correctness.helpers.local_driver import PRELOAD, job
from test_correctness.helpers.processes import descendants, gone, listening_on

pytestmark = pytest.mark.usefixtures("cold")
GATHERED = """
import os, pathlib, sys, time
from perfsuite.runtime.transports.cluster import ClusterTransport
from perfsuite.runtime.transports.launchers import detect_launch
transport = ClusterTransport(
    detect_launch(os.environ), start_method="fork", preload=(), log_directory=pathlib.Path(sys.argv[1])
)
transport.gather()
"""
DRIVER = f"""{GATHERED}
transport.acquire(3, fresh=False, env={{}}, deadline_s=60)
print("acquired", flush=True)
time.sleep(3600)
"""
LAUNCHER = "import subprocess, sys; subprocess.call([sys.executable, '-c', sys.argv[1]])"


def loss(transport):
    """How the loss of an agent is told, up to what to do."""
    events = [event for _ in range(10) for event in transport.poll(0.1)]
    assert [event.kind for event in events] == ["agent_lost"]
    return events[0].text.partition(";")[0]


@pytest.mark.extended
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


@pytest.mark.extended
def test_agents_beside_the_driver_are_the_runs_own_whatever_launched_them(tmp_path, monkeypatch):
    """Their core time is nobody else's; mpirun and srun set none of the variables that torchrun does."""
    with launched(3, tmp_path, monkeypatch) as run:
        pids = {agent.pid for agent in run.agents.values()}
        assert run.transport.agents_here() == pids
        run.agents[2].kill()
        assert "the agent of rank 2" in run.transport.await_loss(30.0)
        assert run.transport.agents_here() == pids, "what it took was the run's own"


@pytest.mark.extended
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


@pytest.mark.extended
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


HASTY = AGENT.replace(
    "sys.exit(",
    """
from perfsuite.runtime.transports import agent, wire
def hasty(before):
    def told(*arguments, **named):
        os.kill(os.getpid(), 15)
        return before(*arguments, **named)
    return told
class Hasty(wire.socket.socket):
    def send(self, data):
        sent = super().send(data)
        os.kill(os.getpid(), 15)
        return sent
class HastyLink(wire.Link):
    def __init__(self, sock, *keys):
        super().__init__(Hasty(fileno=sock.detach()), *keys)
if sys.argv[1] == "hello":
    from perfsuite.runtime.transports import door
    door.Link = HastyLink
elif sys.argv[1] == "welcome":
    wire.Link.receive = hasty(wire.Link.receive)
else:
    agent.OneSlot.__init__ = hasty(agent.OneSlot.__init__)
sys.exit(""",
)
"""Told to end when it has just said hello, when the driver's welcome is there and not read, or read and nothing is
served yet."""


@pytest.mark.parametrize("moment", ["hello", "welcome", "slot"])
def test_an_agent_that_is_told_to_end_before_it_serves_says_so(tmp_path, monkeypatch, moment):
    """The launcher tells all to end when one has died: what it told to is not named in its place."""
    with launched(2, tmp_path, monkeypatch, agent=(HASTY, moment)) as run:
        assert "it got SIGTERM" in run.transport.await_loss(30.0)
        assert run.agents[1].wait(30) == 128 + signal.SIGTERM


IMPATIENT = AGENT.replace("PATIENCE_S = 60", "PATIENCE_S = 0.1")


def test_ctrl_c_ends_an_agent_that_nobody_drives(tmp_path):
    """Its shell has left-over variables; with a driver Ctrl-C is the driver's."""
    with started(IMPATIENT, {**environ_of(0, 2, tmp_path), "RANK": "1", "LOCAL_RANK": "1"}) as alone:
        assert "rank 1 of 2 (env) waits for rank 0" in alone.stderr.readline()
        alone.send_signal(signal.SIGINT)
        assert alone.communicate(timeout=30) == ("", "")
        assert alone.returncode == 128 + signal.SIGINT


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


def test_an_agent_that_does_not_answer_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "_ANSWER_S", 0.5)
    with launched(2, tmp_path, monkeypatch, agent=(DEAF,)) as run:
        with pytest.raises(AgentLost, match=r"rank 1 on .*it sent no answer within 1 s"):
            run.transport.acquire(2, fresh=False, env={}, deadline_s=0.5)
        assert [event.kind for event in run.transport.poll(0)] == ["agent_lost"]
        assert run.agents[1].wait(30) != 0


DEAF = f"""
import signal
from perfsuite.runtime.transports import agent
agent.OneSlot.acquire = lambda *_, **__: signal.pause()
{AGENT}"""
OFTEN = """
from perfsuite.runtime.transports import exchange
exchange.BEAT_S, exchange.SILENCE_S = 0.1, 2.5
"""
LIVELY = OFTEN + AGENT
"""Beats so often that a test need not wait for ten seconds; the driver's side is set alike."""


@pytest.fixture
def lively(monkeypatch):
    monkeypatch.setattr(exchange, "BEAT_S", 0.1)
    monkeypatch.setattr(exchange, "SILENCE_S", 2.5)


@pytest.mark.extended
@pytest.mark.usefixtures("lively")
@pytest.mark.parametrize(
    ("hosts", "why"),
    [
        (1, r"its process is stopped by a signal; kill -CONT continues it \(state T\)"),
        (2, r"its host answers, so its process is stopped \(SIGSTOP\) or hangs"),
    ],
)
def test_an_agent_that_is_stopped_is_given_up_whatever_the_driver_waits_for(tmp_path, monkeypatch, hosts, why):
    with launched(2, tmp_path, monkeypatch, hosts=hosts, agent=(LIVELY,)) as run:
        run.agents[1].send_signal(signal.SIGSTOP)
        with pytest.raises(AgentLost, match=rf"rank 1 on .* is lost: it has sent nothing for 2.5 s: {why}"):
            run.transport.acquire(2, fresh=False, env={}, deadline_s=3600)
        assert [event.kind for event in run.transport.poll(0)] == ["agent_lost"]
        run.agents[1].send_signal(signal.SIGCONT)
        assert run.agents[1].wait(30) != 0


BROKEN = f"""
from perfsuite.runtime.transports import exchange
def turn(self):
    raise RuntimeError("out of luck")
exchange.Exchange.turn = turn
{AGENT}"""


def test_an_agent_that_cannot_serve_its_link_any_more_ends(tmp_path, monkeypatch):
    with launched(2, tmp_path, monkeypatch, agent=(BROKEN,)) as run:
        assert run.agents[1].wait(30) != 0
        assert "the agent of rank 1" in run.transport.await_loss(30.0)
        assert "ends because the driver is gone: its link cannot be served: RuntimeError" in run.agents[1].stderr.read()


PAUSED_DRIVER = f"""{OFTEN}
from perfsuite.runtime.transports import star
star.PATIENCE_S = 60
{GATHERED}
transport.acquire(2, fresh=False, env={{}}, deadline_s=60)
print("acquired", flush=True)  # the agent has answered: it no longer looks for its driver
sys.stdin.readline()
acquired = transport.acquire(2, fresh=False, env={{}}, deadline_s=60)
print(acquired, [event.kind for event in transport.poll(0)], flush=True)
transport.close()
"""


@pytest.mark.extended
@pytest.mark.parametrize("with_agent", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_driver_that_was_stopped_itself_loses_nobody(tmp_path, with_agent):
    environ = environ_of(0, 2, tmp_path)
    with (
        started(PAUSED_DRIVER, environ, str(tmp_path / "logs")) as driver,
        started(LIVELY, {**environ, "RANK": "1", "LOCAL_RANK": "1"}) as agent,
    ):
        stopped = [driver, agent] if with_agent else [driver]
        assert driver.stdout.readline() == "acquired\n"
        for process in stopped:
            process.send_signal(signal.SIGSTOP)
        if with_agent:
            time.sleep(4.0)
        else:
            assert "agent of rank 1 waits for the driver: it has sent nothing for 2.5 s" in agent.stderr.readline()
        for process in stopped:
            process.send_signal(signal.SIGCONT)
        out, err = driver.communicate("go on\n", timeout=60)
        assert (out, err) == ("False []\n", ""), "the same processes go on"
        out, err = agent.communicate(timeout=30)
        assert (agent.returncode, out, err) == (0, "", "")


@pytest.mark.extended
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_sigterm_and_sighup_end_an_agent_and_its_workers(tmp_path, monkeypatch, number):
    with launched(2, tmp_path, monkeypatch) as run:
        run.transport.acquire(2, fresh=False, env={}, deadline_s=60)
        workers = descendants(run.agents[1].pid)
        run.agents[1].send_signal(number)
        assert run.agents[1].wait(30) == 128 + number
        assert gone(workers)
        assert loss(run.transport).endswith(f"is lost: it got {number.name}")


@pytest.mark.extended
def test_an_agent_ends_with_its_launcher(tmp_path, monkeypatch):
    with launched(2, tmp_path, monkeypatch, agent=(LAUNCHER, AGENT)) as run:
        run.transport.acquire(2, fresh=False, env={}, deadline_s=60)
        below = descendants(run.agents[1].pid)
        assert len(below) >= 3, "agent, forkserver, worker"
        run.agents[1].kill()
        assert gone(below)
        assert loss(run.transport).endswith("is lost: its launcher is gone")


@pytest.mark.extended
def test_a_killed_driver_leaves_nothing_behind(tmp_path):
    environ = environ_of(0, 3, tmp_path)
    others = [{**environ, "RANK": rank, "LOCAL_RANK": rank} for rank in "12"]
    with contextlib.ExitStack() as stack:
        driver = stack.enter_context(started(DRIVER, environ, str(tmp_path / "logs")))
        agents = [stack.enter_context(started(AGENT, other)) for other in others]
        assert driver.stdout.readline() == "acquired\n"
        pids = [pid for each in (driver, *agents) for pid in (each.pid, *descendants(each.pid))]
        assert len(pids) >= 9
        driver.kill()
        driver.wait()
        for agent in agents:
            out, err = agent.communicate(timeout=30)
            assert (agent.returncode, out, err.count("\n")) == (1, "", 1)
            assert "ends because the driver is gone" in err
        assert gone(pids)
