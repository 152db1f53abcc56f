"""Keys, ports, handshakes and frames between the driver and its agents, over real sockets."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import tempfile
import threading
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

import pytest

from perfsuite.errors import LaunchError
from perfsuite.runtime.transports import keys, star, wire
from perfsuite.runtime.transports.launchers import Launch

KEY = b"0123456789abcdef"


@pytest.fixture(autouse=True)
def _private_temporary_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def a_launch(rank: int = 0, world_size: int = 2, *, local_world_size: int | None = None, run_id: str = "") -> Launch:
    local_world_size = local_world_size or world_size
    return Launch(
        launcher="env",
        rank=rank,
        local_rank=rank % local_world_size,
        world_size=world_size,
        local_world_size=local_world_size,
        node_rank=0,
        master_addr="127.0.0.1",
        master_port=None,
        run_id=run_id or uuid.uuid4().hex,
    )


def an_agent(launch: Launch, rank: int) -> Launch:
    return a_launch(rank, launch.world_size, local_world_size=launch.local_world_size, run_id=launch.run_id)


@pytest.fixture
def pool():
    with ThreadPoolExecutor(8) as threads:
        yield threads


def knock(pool: ThreadPoolExecutor, launch: Launch, key: bytes = KEY, *, deadline_s: float = 30.0) -> Future:
    hello = star.greeting(launch, "here", 1)
    return pool.submit(
        wire.reach_driver, launch, lambda: key, hello, farewell={}, deadline_s=deadline_s, alive=lambda: True
    )


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=30)


@contextlib.contextmanager
def joined(pool: ThreadPoolExecutor):
    """(the driver's end, the agent's end) of a fresh link."""
    launch = a_launch()
    door = wire.Door(launch, KEY)
    agent = knock(pool, an_agent(launch, 1))
    link, _ = door.next_arrival(30) or pytest.fail("nobody came")
    link.send({"welcome": True})
    other, _ = agent.result(30)
    try:
        yield link, other
    finally:
        for each in (door, link, other):
            each.close()


def test_ports_are_the_same_on_all_ranks_and_differ_between_launches():
    launch = a_launch()
    assert wire.candidate_ports(launch) == wire.candidate_ports(an_agent(launch, 1))
    ports = {wire.candidate_ports(a_launch())[0] for _ in range(64)}
    assert len(ports) > 32
    assert all(20000 <= port < 32768 for port in ports)


def test_a_user_key_is_the_same_for_driver_and_agents(tmp_path):
    file = tmp_path / "key"
    file.write_bytes(KEY + b"\n")
    file.chmod(0o600)
    launch = a_launch(local_world_size=1)
    for environ in ({"PERFSUITE_KEY": KEY.decode()}, {"PERFSUITE_KEY_FILE": str(file)}):
        offered = keys.offer_key(launch, environ)
        assert offered.key == KEY == keys.find_key(an_agent(launch, 1), environ)
        offered.discard()
    assert file.exists(), "a key of the user's is not ours to remove"


def test_on_one_host_the_driver_makes_the_key_and_removes_it(tmp_path):
    launch, agent = a_launch(), None
    agent = an_agent(launch, 1)
    assert keys.find_key(agent, {}) is None
    killed_before = keys.offer_key(launch, {})
    offered = keys.offer_key(launch, {})
    assert offered.key == keys.find_key(agent, {}) != killed_before.key
    assert offered.file is not None
    assert (offered.file.stat().st_mode & 0o777, offered.file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    killed_before.discard()
    assert offered.file.exists(), "it belongs to the later launch"
    offered.discard()
    offered.discard()
    assert list(offered.file.parent.iterdir()) == []


def test_several_hosts_without_a_key_are_refused():
    launch = a_launch(local_world_size=1)
    for ask in (keys.offer_key, keys.find_key):
        with pytest.raises(LaunchError, match=r"several hosts, and neither PERFSUITE_KEY nor.*token_hex"):
            ask(launch, {})


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o604])
def test_a_key_file_that_others_can_read_is_refused(tmp_path, mode):
    file = tmp_path / "key"
    file.write_bytes(KEY)
    file.chmod(mode)
    with pytest.raises(LaunchError, match=rf"has mode {mode:04o}: others could read.*chmod 0600"):
        keys.offer_key(a_launch(), {"PERFSUITE_KEY_FILE": str(file)})


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_a_key_file_of_somebody_else_is_refused(tmp_path):
    file = tmp_path / "key"
    file.write_bytes(KEY)
    file.chmod(0o600)
    os.chown(file, 12345, -1)
    with pytest.raises(LaunchError, match=r"belongs to user id 12345"):
        keys.offer_key(a_launch(), {"PERFSUITE_KEY_FILE": str(file)})


def test_short_missing_and_unkeepable_keys_are_refused(tmp_path):
    with pytest.raises(LaunchError, match=r"PERFSUITE_KEY has 3 characters: a key needs at least 16"):
        keys.offer_key(a_launch(), {"PERFSUITE_KEY": "abc"})
    with pytest.raises(LaunchError, match=r"PERFSUITE_KEY_FILE=.*nothing cannot be read \(No such file"):
        keys.find_key(a_launch(), {"PERFSUITE_KEY_FILE": str(tmp_path / "nothing")})
    (tmp_path / f"perfsuite-{os.getuid()}").mkdir(mode=0o755)
    with pytest.raises(LaunchError, match=r"has mode 0755: others could read or replace the key"):
        keys.offer_key(a_launch(), {})
    (tmp_path / f"perfsuite-{os.getuid()}").rmdir()
    (tmp_path / f"perfsuite-{os.getuid()}").write_text("")
    with pytest.raises(LaunchError, match=r"is no directory"):
        keys.offer_key(a_launch(), {})


def test_an_unwritable_temporary_directory_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(LaunchError, match=r"no key can be written under .*missing \(No such file"):
        keys.offer_key(a_launch(), {})


def test_frames_of_every_size_arrive_whole_in_both_directions(pool):
    with joined(pool) as (driver, agent):
        for size in (0, 100, 20_000, 8 << 20):
            text = "é" * size
            sent = pool.submit(driver.send, {"text": text})
            assert {"text": text} == agent.receive()
            sent.result(30)
            sent = pool.submit(agent.send, {"text": text})
            assert {"text": text} == driver.receive()
            sent.result(30)


@pytest.mark.parametrize("frame", [pickle.dumps({"verb": "dismiss"}), b"[1, 2]", b"{", b"\xff\xfe"])
def test_anything_but_a_json_object_breaks_the_link(pool, frame):
    with joined(pool) as (driver, agent):
        with Connection(os.dup(agent.fileno())) as raw:
            raw.send_bytes(frame)
        with pytest.raises(wire.LinkLost, match="broke"):
            driver.receive()


def test_a_frame_beyond_the_limit_breaks_the_link(pool, monkeypatch):
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 1000)
    with joined(pool) as (driver, agent):
        agent.send({"text": "x" * 2000})
        with pytest.raises(wire.LinkLost):
            driver.receive()


def test_the_end_of_the_other_side_is_a_lost_link(pool):
    with joined(pool) as (driver, agent):
        agent.close()
        assert driver.readable(30)
        with pytest.raises(wire.LinkLost, match="closed"):
            driver.receive()
        with contextlib.suppress(wire.LinkLost):
            driver.send({})  # the first frame may still leave
        with pytest.raises(wire.LinkLost, match="cannot send"):
            driver.send({})


def test_strangers_without_the_key_are_turned_away(pool):
    launch = a_launch()
    door = wire.Door(launch, KEY)
    with connect(door.port) as sock:
        sock.setblocking(True)
        with Connection(sock.detach()) as stranger, pytest.raises(AuthenticationError):
            answer_challenge(stranger, b"another key of 16")
    with connect(door.port) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
    agent = knock(pool, an_agent(launch, 1))
    link, hello = door.next_arrival(30) or pytest.fail("nobody came")
    assert hello["rank"] == 1
    link.send({})
    agent.result(30)[0].close()
    door.close()
    link.close()
    assert sorted(door.turned_away) == ["another key", "no handshake"]


def test_silent_strangers_hold_nobody_up(pool, monkeypatch):
    monkeypatch.setattr(wire, "HANDSHAKE_S", 600.0)
    launch = a_launch()
    door = wire.Door(launch, KEY)
    with contextlib.ExitStack() as strangers:
        for _ in range(20):
            strangers.enter_context(connect(door.port))
        agent = knock(pool, an_agent(launch, 1))
        link, _ = door.next_arrival(60) or pytest.fail("the agent had to wait for the strangers")
        link.send({})
        agent.result(30)[0].close()
        link.close()
        monkeypatch.setattr(wire, "HANDSHAKE_S", 1.0)
        door.close()


def test_a_stranger_who_drips_bytes_is_cut_off(monkeypatch):
    monkeypatch.setattr(wire, "HANDSHAKE_S", 1.0)
    door = wire.Door(a_launch(), KEY)
    done = threading.Event()
    with connect(door.port) as stranger:

        def drip() -> None:
            with contextlib.suppress(OSError):
                stranger.sendall(b"\0\0\1\0")
                while not done.wait(0.1):
                    stranger.sendall(b"x")

        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            while stranger.recv(4096):  # the challenge, then the end
                pass
        except ConnectionResetError:
            pass
        finally:
            done.set()
            dripping.join()
    door.close()
    assert door.turned_away == ["no handshake"]


def test_an_agent_with_the_wrong_key_says_so_at_its_deadline(pool):
    launch = a_launch()
    door = wire.Door(launch, KEY)
    agent = knock(pool, an_agent(launch, 1), b"another key of 16", deadline_s=1.0)
    with pytest.raises(LaunchError, match=rf"rank 1 found no driver.*\(port {door.port} has another key\)"):
        agent.result(30)
    assert door.next_arrival(0) is None
    door.close()


def test_an_agent_without_a_launcher_stops_looking(pool):
    launch = an_agent(a_launch(), 1)
    with pytest.raises(LaunchError, match="nobody listens"):
        wire.reach_driver(launch, lambda: KEY, {}, farewell={}, deadline_s=3600, alive=lambda: False)


def test_a_driver_that_does_not_know_the_key_gets_no_agent(pool, monkeypatch):
    monkeypatch.setattr(wire, "HANDSHAKE_S", 2.0)
    launch = a_launch()
    with socket.create_server(("127.0.0.1", wire.candidate_ports(launch)[0])) as impostor:
        agent = knock(pool, an_agent(launch, 1), deadline_s=1.0)
        sock, _ = impostor.accept()
        with Connection(sock.detach()) as connection:
            connection.send_bytes(b"#CHALLENGE#" + b"x" * 20)
            connection.recv_bytes(256)
            connection.send_bytes(b"#WELCOME#")
            with pytest.raises(AuthenticationError):
                deliver_challenge(connection, b"another key of 16")
        impostor.close()
        with pytest.raises(LaunchError, match="found no driver"):
            agent.result(60)


def test_taken_ports_are_passed_over_by_both_sides(pool, monkeypatch):
    monkeypatch.setattr(wire, "HANDSHAKE_S", 1.0)
    launch = a_launch()
    first, second, third, *_ = wire.candidate_ports(launch)
    with socket.create_server(("127.0.0.1", first)), socket.create_server(("127.0.0.1", second)):
        door = wire.Door(launch, KEY)
        assert third <= door.port
        agent = knock(pool, an_agent(launch, 1))
        link, _ = door.next_arrival(60) or pytest.fail("nobody came")
        link.send({})
        agent.result(30)[0].close()
        door.close()
        link.close()


def test_all_ports_in_use_is_one_line():
    launch = a_launch()
    with contextlib.ExitStack() as taken:
        for port in wire.candidate_ports(launch):
            with contextlib.suppress(OSError):
                taken.enter_context(socket.create_server(("127.0.0.1", port)))
        with pytest.raises(LaunchError, match=r"ports \d+-\d+ of this host are all in use: .*ss -ltnp") as refused:
            wire.Door(launch, KEY)
    assert "\n" not in str(refused.value)


def test_several_hosts_are_listened_to_on_every_address(pool):
    launch = a_launch(local_world_size=1)
    door = wire.Door(launch, KEY)
    address = socket.gethostbyname(socket.gethostname())
    socket.create_connection((address, door.port), timeout=30).close()
    door.close()


def gathering(pool: ThreadPoolExecutor, launch: Launch, deadline_s: float = 30.0) -> Future:
    return pool.submit(star.gather, launch, KEY, deadline_s, {"hello": "all"})


def test_gathering_brings_every_agent_and_its_facts(pool):
    launch = a_launch(world_size=4)
    gathered = gathering(pool, launch)
    agents = [knock(pool, an_agent(launch, rank)) for rank in (3, 1, 2)]
    links = [agent.result(30) for agent in agents]
    assert [welcome for _, welcome in links] == [{"hello": "all"}] * 3
    net = gathered.result(30)
    assert sorted(net.ranks) == [1, 2, 3]
    assert (net.facts[2].host, net.facts[2].local_rank, net.facts[2].local_world_size) == ("here", 2, 4)
    for link, _ in links:
        link.close()
    net.dismiss(30)


def test_ranks_that_do_not_come_are_named(pool):
    launch = a_launch(world_size=8)
    gathered = gathering(pool, launch, deadline_s=3.0)
    agents = [knock(pool, an_agent(launch, rank), deadline_s=3600) for rank in (2, 6)]
    stranger = knock(pool, an_agent(launch, 1), b"another key of 16", deadline_s=1.0)
    with pytest.raises(
        LaunchError, match=r"rank 1, 3-5, 7 of 8 did not come within 3 s \(ranks came from here; \d+ con"
    ):
        gathered.result(60)
    for agent in agents:
        with pytest.raises(LaunchError, match=r"the driver gave this launch up: rank 1, 3-5, 7 of 8 did not come"):
            agent.result(60)
    with pytest.raises(LaunchError, match="another key"):
        stranger.result(60)


def test_agents_of_another_launch_or_with_a_taken_rank_are_refused(pool):
    launch = a_launch(world_size=3)
    gathered = gathering(pool, launch)
    good = wire._knock("127.0.0.1", _open_port(launch), KEY, star.greeting(an_agent(launch, 1), "there", 1))
    hello = star.greeting(an_agent(launch, 1), "there", 2)
    odd = [{**hello, "run_id": "another"}, {**hello, "protocol": 0}, {**hello, "rank": 3}, {**hello, "pid": None}]
    for each in odd:
        with pytest.raises(LaunchError, match="refused"):
            wire.reach_driver(an_agent(launch, 1), lambda: KEY, each, farewell={}, deadline_s=0.3, alive=lambda: True)
    with pytest.raises(LaunchError, match="rank 1 is taken by rank 1 on"):
        wire.reach_driver(an_agent(launch, 1), lambda: KEY, hello, farewell={}, deadline_s=0.3, alive=lambda: True)
    last = knock(pool, an_agent(launch, 2))
    net = gathered.result(30)
    last.result(30)[0].close()
    good.close()
    net.dismiss(30)


def test_an_agent_that_leaves_while_others_are_awaited_is_named(pool):
    launch = a_launch(world_size=3)
    gathered = gathering(pool, launch)
    link = wire._knock("127.0.0.1", _open_port(launch), KEY, star.greeting(an_agent(launch, 2), "there", 77))
    link.close()
    with pytest.raises(LaunchError, match=r"rank 2 on there \(pid 77\) ended before all ranks were there"):
        gathered.result(60)


def _open_port(launch: Launch) -> int:
    while True:
        for port in wire.candidate_ports(launch):
            with contextlib.suppress(OSError):
                connect(port).close()
                return port
