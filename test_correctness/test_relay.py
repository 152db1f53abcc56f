"""Another program between driver and agent, which passes both proofs on, changes nothing without being noticed."""

import contextlib
import dataclasses
import socket
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

from perfsuite.runtime.transports import door, star, wire
from perfsuite.runtime.transports.keys import Meeting
from test_correctness.helpers.agents import a_launch, launched, reach
from test_correctness.helpers.processes import gone, processes_with
from test_correctness.helpers.relay import Relay

KEY = b"0123456789abcdef"
NOTICED = "a frame from 127.0.0.[12] was changed on its way, or another program relays the connection"


@pytest.fixture
def beside(monkeypatch):
    """The driver listens on 127.0.0.1 alone, so that a relay can have its port on 127.0.0.2."""

    def listen(launch, meeting):
        port = door.candidate_ports(launch)[0]
        return socket.create_server(("127.0.0.1", port)), port

    monkeypatch.setattr(door, "_listen", listen)


@contextlib.contextmanager
def relayed(change):
    """(relay, the driver's net, the agent's link), with the relay between them."""
    launch = a_launch(local_world_size=1, master_addr="127.0.0.2")
    agent = dataclasses.replace(launch, rank=1, node_rank=1)
    port = door.candidate_ports(launch)[0]
    entrance = door.Door(launch, Meeting(key=KEY))
    relay = Relay(("127.0.0.2", port), ("127.0.0.1", port), change)
    try:
        with ThreadPoolExecutor(1) as pool:
            arriving = pool.submit(entrance.next_arrival, 30)
            other = door._knock(agent, port, KEY)
            other.send(star.greeting(agent, "there", 1))
            link, _ = arriving.result(30) or pytest.fail("the relay did not pass the handshake on")
        yield relay, link, other
    finally:
        relay.close()
        entrance.close()


COMMANDS = [{"verb": "start"}, {"verb": "send", "command": {"verb": "run", "function": "harmless"}}, {"verb": "leave"}]


def swapped(frame):
    return [frame.replace(b"harmless", b"harmful!")]


def flipped(frame):
    at = frame.find(b"harmless")
    return [frame[:at] + bytes([frame[at] ^ 1]) + frame[at + 1 :]] if at > 0 else [frame]


def replayed(frame):
    return [frame, frame] if b"harmless" in frame else [frame]


def dropped(frame):
    return [] if b"harmless" in frame else [frame]


def reordering():
    held = []

    def reordered(frame):
        if b"harmless" in frame:
            held.append(frame)
            return []
        return [frame, *held]

    return reordered


def injected(frame):
    mine = b'{"verb":"run"}'
    return [frame, len(mine).to_bytes(4, "big") + bytes(16) + mine + bytes(32)] if b"start" in frame else [frame]


def lengthened(frame):
    return [b"\x0f" + frame[1:]] if b"harmless" in frame else [frame]


@pytest.mark.usefixtures("beside")
@pytest.mark.parametrize(
    ("change", "read"),
    [
        (lambda frame: [frame], 3),
        (swapped, 1),
        (flipped, 1),
        (replayed, 2),
        (dropped, 1),
        (reordering(), 1),
        (injected, 1),
        (lengthened, 1),
    ],
    ids=["untouched", "swapped", "flipped", "replayed", "dropped", "reordered", "injected", "lengthened"],
)
def test_whatever_a_relay_does_to_frames_is_noticed_before_it_is_read(change, read):
    with relayed(change) as (relay, driver, agent):
        assert relay.met == 1, "both proofs were passed on"
        for command in COMMANDS:
            driver.send(command)
        heard = []
        with pytest.raises(wire.LinkLost, match=NOTICED) if read < 3 else contextlib.nullcontext():
            while len(heard) < 3 and agent.readable(30):
                frame = agent.receive_one()
                heard += [frame] if frame is not None else []
        assert heard == COMMANDS[: len(heard)]
        assert len(heard) <= read
        driver.close()
        agent.close()


def test_a_relay_on_another_port_of_the_driver_s_host_is_passed_over():
    """Both proofs cover the port: what listens on the first candidate cannot pass them on to the second."""
    launch = a_launch(local_world_size=1)
    agent = dataclasses.replace(launch, rank=1)
    first, second, *_ = door.candidate_ports(launch)
    relay = Relay(("127.0.0.1", first), ("127.0.0.1", second), lambda frame: [frame])
    entrance = door.Door(launch, Meeting(key=KEY))
    with ThreadPoolExecutor(1) as pool:
        try:
            assert entrance.address == second
            reaching = pool.submit(reach, agent, Meeting(key=KEY))
            link, _ = entrance.next_arrival(30) or pytest.fail("nobody came")
            link.send({"welcome": 1})
            other, _ = reaching.result(30)
            assert other.sock.getpeername()[1] == second
            assert (relay.met, entrance.turned_away) == (0, {"another key, launch or port": 1})
            link.close()
            other.close()
        finally:
            relay.close()
            entrance.close()


@pytest.mark.usefixtures("beside")
def test_a_command_that_a_relay_changed_ends_the_agent_and_starts_nothing(tmp_path, monkeypatch):
    token = uuid.uuid4().hex
    changed = token[::-1]
    relays = []
    before = door.Door.__init__

    def opened_beside_a_relay(self, *arguments):
        before(self, *arguments)
        change = lambda frame: [frame.replace(token.encode(), changed.encode())]  # noqa: E731
        relays.append(Relay(("127.0.0.2", self.address), ("127.0.0.1", self.address), change))

    monkeypatch.setattr(door.Door, "__init__", opened_beside_a_relay)
    try:
        with launched(2, tmp_path, monkeypatch, hosts=2) as run:
            ask = {"verb": "acquire", "id": 1, "fresh": False, "env": {"RELAYED": token}, "deadline_s": 60}
            run.transport._star.send([1], ask)
            assert "the agent of rank 1 on" in run.transport.await_loss(60.0)
            out, err = run.agents[1].communicate(timeout=30)
            assert (run.agents[1].returncode, out, err.count("\n")) == (1, "", 1)
            assert f"agent of rank 1 ends because the driver is gone: {NOTICED}".replace("[12]", "2") in err
        assert any(changed.encode() in frame for frame in relays[0].passed)
        assert gone(processes_with(f"RELAYED={changed}"), within_s=0)
    finally:
        for relay in relays:
            relay.close()
