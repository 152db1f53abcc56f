"""Keys, sockets, handshakes and links between the driver and its agents, over real sockets."""

import contextlib
import pickle
import socket
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from perfsuite.base.errors import LaunchError
from perfsuite.runtime.transports import door, star, wire
from perfsuite.runtime.transports.keys import Meeting
from test_correctness.helpers import agents
from test_correctness.helpers.agents import a_launch, an_agent

KEY = b"0123456789abcdef"
OTHER_KEY = b"another key of 16"


@pytest.fixture(autouse=True)
def _private_temporary_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def between_hosts(rank=0, world_size=2):
    return a_launch(rank, world_size, local_world_size=1)


@pytest.fixture
def pool():
    with ThreadPoolExecutor(8) as threads:
        yield threads


def meeting(key=KEY):
    return Meeting(key=key, socket=Path(tempfile.gettempdir()) / "socket")


def reach(launch, key=KEY, hello=None, **limits):
    return agents.reach(launch, meeting(key), hello, **limits)


def knock(pool, launch, key=KEY, *, deadline_s=30.0):
    return pool.submit(reach, launch, key, deadline_s=deadline_s)


def connect(port):
    return socket.create_connection(("127.0.0.1", port), timeout=30)


def opened(launch):
    """The door of a launch, which is closed at the end."""
    return contextlib.closing(door.Door(launch, meeting()))


def let_in(entrance, *, within_s=60.0):
    """Welcome the next agent."""
    link, _ = entrance.next_arrival(within_s) or pytest.fail("nobody came")
    link.send({})
    return link


def an_agent_gets_in(pool, launch, entrance, *, within_s=60.0):
    """It is welcomed, and both ends are closed."""
    agent = knock(pool, an_agent(launch, 1), deadline_s=within_s)
    link = let_in(entrance, within_s=within_s)
    agent.result(30)[0].close()
    link.close()


def next_frame(link):
    while (frame := link.receive_one()) is None:
        link.readable(30)
    return frame


@pytest.fixture(params=[a_launch, between_hosts])
def pair(request, pool):
    """(the driver's end, the agent's end) of a fresh link, on one host and between hosts."""
    launch = request.param()
    with opened(launch) as entrance:
        agent = knock(pool, an_agent(launch, 1))
        link = let_in(entrance)
        other, _ = agent.result(30)
        yield link, other
        link.close()
        other.close()


def test_ports_are_the_same_on_all_ranks_and_differ_between_launches():
    launch = a_launch()
    assert door.candidate_ports(launch) == door.candidate_ports(an_agent(launch, 1))
    ports = {door.candidate_ports(a_launch())[0] for _ in range(64)}
    assert len(ports) > 32
    assert all(20000 <= port < 32768 for port in ports)


def test_frames_of_every_size_arrive_whole_in_both_directions(pair, pool):
    for sender, receiver in (pair, pair[::-1]):
        for size in (0, 100, 20_000, 1 << 20):
            text = "é" * size
            arriving = pool.submit(next_frame, receiver)
            sender.send({"text": text})
            while sender.has_outgoing:
                sender.flush()
            assert {"text": text} == arriving.result(30)


@pytest.mark.parametrize("payload", [pickle.dumps({"verb": "dismiss"}), b"[1, 2]", b"{", b"\xff\xfe", b"[" * 100_000])
def test_anything_but_a_json_object_breaks_the_link(pair, payload):
    driver, agent = pair
    agent.sock.sendall(agent._sealer.seal(payload))
    with pytest.raises(wire.LinkLost, match="broke"):
        next_frame(driver)


def test_a_frame_beyond_the_limit_is_not_sent(pair, monkeypatch):
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 1000)
    with pytest.raises(wire.LinkLost, match="a frame of 0 MiB is longer than 0 MiB"):
        pair[1].send({"text": "x" * 2000})


def test_the_end_of_the_other_side_is_a_lost_link_after_its_last_words(pair):
    driver, agent = pair
    driver.send({"unread": "so the kernel resets the connection"})
    agent.send({"leaving": "now"})
    agent.close()
    for _ in range(3):
        driver.send({"to": "nobody"})
    assert next_frame(driver) == {"leaving": "now"}
    with pytest.raises(wire.LinkLost, match="its connection closed"):
        next_frame(driver)


def test_a_connection_that_ends_in_the_middle_of_a_frame_says_so(pair):
    driver, agent = pair
    agent.sock.sendall(agent._sealer.seal(b'{"half": "of this"}')[:30])
    agent.close()
    with pytest.raises(wire.LinkLost, match="its connection closed in the middle of a frame"):
        next_frame(driver)


def test_strangers_without_the_key_are_turned_away(pool):
    launch = between_hosts()
    with opened(launch) as entrance, connect(entrance.address) as browser, connect(entrance.address) as old:
        browser.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        old.sendall(wire._OPENING.pack(b"perfsuite", 2, 1, bytes(32)))
        stranger = knock(pool, an_agent(launch, 1), OTHER_KEY, deadline_s=0.5)
        agent = knock(pool, an_agent(launch, 1))
        link = let_in(entrance)
        agent.result(30)[0].close()
        while not stranger.done():
            assert entrance.next_arrival(0.1) is None
        with pytest.raises(LaunchError, match=rf"port {entrance.address}: it has another key or serves another launch"):
            stranger.result(30)
        assert old.recv(4096)[:11] == b"perfsuite\0\3", "an agent of another version is told so"
        link.close()
    assert entrance.turned_away.keys() == {"another key, launch or port", "no handshake"}


def test_silent_strangers_hold_nobody_up(pool, monkeypatch):
    monkeypatch.setattr(door, "HANDSHAKE_S", 600.0)
    launch = between_hosts()
    with contextlib.ExitStack() as strangers:
        entrance = strangers.enter_context(opened(launch))
        for _ in range(20):
            strangers.enter_context(connect(entrance.address))
        an_agent_gets_in(pool, launch, entrance)


def test_thousands_of_connections_cost_neither_files_nor_the_launch(pool):
    launch = between_hosts()
    with contextlib.ExitStack() as strangers:
        entrance = strangers.enter_context(opened(launch))
        for _ in range(1500):
            sock = strangers.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(("127.0.0.1", entrance.address))
        an_agent_gets_in(pool, launch, entrance, within_s=600)
        assert len(entrance._visits) <= 256


def test_a_stranger_who_drips_bytes_is_cut_off(monkeypatch, pool):
    monkeypatch.setattr(door, "HANDSHAKE_S", 0.3)
    done = threading.Event()
    with opened(between_hosts()) as entrance, connect(entrance.address) as stranger:

        def drip():
            with contextlib.suppress(OSError):
                for byte in b"perfsuite\0\3" + bytes(1000):
                    stranger.sendall(bytes([byte]))
                    if done.wait(0.1):
                        return

        dripping = pool.submit(drip)
        while not entrance.turned_away:
            assert entrance.next_arrival(0.1) is None
        done.set()
        dripping.result(30)
        assert entrance.turned_away == {"no handshake": 1}


def test_an_agent_without_a_launcher_stops_looking():
    for launch in (a_launch(1), between_hosts(1)):
        with pytest.raises(LaunchError, match="no process listens there"):
            reach(launch, deadline_s=3600, alive=lambda: False)
        with pytest.raises(LaunchError, match="no process listens there"):
            reach(launch, deadline_s=0.1)


def test_a_driver_that_does_not_know_the_key_gets_no_agent(pool, monkeypatch):
    monkeypatch.setattr(door, "HANDSHAKE_S", 2.0)
    launch = between_hosts()
    with socket.create_server(("127.0.0.1", door.candidate_ports(launch)[0])) as impostor:
        agent = knock(pool, an_agent(launch, 1), deadline_s=1.0)
        sock, _ = impostor.accept()
        with sock:
            opening = sock.recv(100)
            sock.sendall(wire._ANSWER.pack(b"perfsuite", wire.PROTOCOL, opening[-32:]))
            sock.sendall(sock.recv(100))  # the agent's own proof
            assert sock.recv(100) == b"", "it sends no frame"
        impostor.close()
        with pytest.raises(LaunchError, match="found no driver"):
            agent.result(60)


@pytest.mark.extended
def test_taken_ports_are_passed_over_by_both_sides(pool, monkeypatch):
    monkeypatch.setattr(door, "HANDSHAKE_S", 1.0)
    launch = between_hosts()
    first, second, third, *_ = door.candidate_ports(launch)
    with contextlib.ExitStack() as stack:
        for port in (first, second):
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
        entrance = stack.enter_context(opened(launch))
        assert third <= entrance.address
        an_agent_gets_in(pool, launch, entrance)


def test_all_ports_in_use_is_one_line():
    launch = between_hosts()
    with contextlib.ExitStack() as taken:
        for port in door.candidate_ports(launch):
            with contextlib.suppress(OSError):
                taken.enter_context(socket.create_server(("127.0.0.1", port)))
        with pytest.raises(LaunchError, match=r"ports \d+-\d+ of this host are all in use: .*ss -ltnp") as refused:
            door.Door(launch, meeting())
    assert "\n" not in str(refused.value)


def test_several_hosts_are_listened_to_on_every_address():
    with opened(between_hosts()) as entrance:
        address = socket.gethostbyname(socket.gethostname())
        socket.create_connection((address, entrance.address), timeout=30).close()


def test_one_host_meets_at_a_socket_however_long_its_path_and_at_no_port(pool, tmp_path, monkeypatch):
    deep = tmp_path / ("a directory with a long name " * 6) / "b"
    deep.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    launch = a_launch()
    assert len(str(deep)) > 108
    with opened(launch) as entrance:
        agent = knock(pool, an_agent(launch, 1))
        link = let_in(entrance)
        assert (link.sock.family, link.peer, link.local_host()) == (socket.AF_UNIX, "this host", "127.0.0.1")
        agent.result(30)[0].close()
        link.close()


def test_a_place_that_holds_no_socket_is_one_line(tmp_path):
    told = r"no socket can be made in /proc/self \(.*\): .*set TMPDIR to a directory of"
    with pytest.raises(LaunchError, match=told):
        door.Door(a_launch(), Meeting(key=KEY, socket=Path("/proc/self/socket")))


def gathering(pool, launch, deadline_s=30.0):
    return pool.submit(star.gather, launch, meeting(), deadline_s, {"hello": "all"})


def test_gathering_brings_every_agent_and_its_facts(pool):
    launch = a_launch(world_size=4)
    gathered = gathering(pool, launch)
    knocking = [knock(pool, an_agent(launch, rank)) for rank in (3, 1, 2)]
    links = [agent.result(30) for agent in knocking]
    assert [welcome for _, welcome in links] == [{"hello": "all"}] * 3
    net = gathered.result(30)
    assert sorted(net.ranks) == [1, 2, 3]
    assert (net.facts[2].host, net.facts[2].local_rank, net.facts[2].local_world_size) == ("here", 2, 4)
    for link, _ in links:
        link.close()
    net.dismiss(30)
    net.dismiss(30)
    assert net.receive(0) == []


def test_a_driver_that_cannot_serve_its_links_any_more_says_so(pool, monkeypatch):
    def turn(self):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(star.Exchange, "turn", turn)
    launch = a_launch()
    gathered = gathering(pool, launch)
    over = threading.Event()
    agent = pool.submit(reach, an_agent(launch, 1), deadline_s=3600, alive=lambda: not over.is_set())
    net = gathered.result(30)
    (loss,) = net.receive(30)
    assert (loss.rank, loss.frame) == (1, None)
    assert loss.reason == "the driver cannot serve its link: RuntimeError('out of luck')"
    net.dismiss(0)
    over.set()
    with pytest.raises(LaunchError):
        agent.result(30)


def test_frames_that_come_with_the_welcome_are_kept(pool):
    launch = a_launch()
    with opened(launch) as entrance:
        agent = knock(pool, an_agent(launch, 1))
        link, _ = entrance.next_arrival(30) or pytest.fail("nobody came")
        link._outgoing.append(link._sealer.seal(b'{"welcome": 1}'))
        link.send({"verb": "start"})
        other, welcome = agent.result(30)
        assert (welcome, next_frame(other)) == ({"welcome": 1}, {"verb": "start"})
        link.close()
        other.close()


@pytest.mark.extended
def test_ranks_that_do_not_come_are_named(pool):
    launch = a_launch(world_size=8)
    gathered = gathering(pool, launch, deadline_s=3.0)
    knocking = [knock(pool, an_agent(launch, rank), deadline_s=3600) for rank in (2, 6)]
    stranger = knock(pool, an_agent(launch, 1), OTHER_KEY, deadline_s=1.0)
    told = r"rank 1, 3-5, 7 of 8 did not come within 3 s \(ranks came from here; \d+ con.*another key"
    with pytest.raises(LaunchError, match=told):
        gathered.result(60)
    for agent in knocking:
        with pytest.raises(LaunchError, match=r"the driver gave this launch up: rank 1, 3-5, 7 of 8 did not come"):
            agent.result(60)
    with pytest.raises(LaunchError, match="another key"):
        stranger.result(60)


@pytest.mark.extended
def test_agents_of_another_launch_or_with_a_taken_rank_are_refused(pool):
    launch = between_hosts(world_size=3)
    gathered = gathering(pool, launch)
    mine = an_agent(launch, 1)
    hello = star.greeting(mine, "there", 1)
    good = door._knock(mine, _open_port(launch), KEY)
    good.send(hello)
    odd = [
        ({**hello, "rank": True}, "refused"),
        ({**hello, "pid": None}, "refused"),
        ({**hello, "cores": 7}, "its greeting is incomplete"),
        ({**hello, "also": 7}, "its greeting is incomplete"),
        ({**hello, "rank": 2}, "its connection closed"),
        (hello, "rank 1 is taken by rank 1 on"),
    ]
    for each, why in odd:
        with pytest.raises(LaunchError, match=why):
            reach(mine, hello=each, deadline_s=0.3)
    beyond = a_launch(3, 4, local_world_size=1, run_id=launch.run_id)
    with pytest.raises(LaunchError, match="it has another key or serves another launch"):
        reach(beyond, hello=hello, deadline_s=0.3)
    last = knock(pool, an_agent(launch, 2))
    net = gathered.result(30)
    last.result(30)[0].close()
    good.close()
    net.dismiss(30)


def test_an_agent_that_leaves_while_others_are_awaited_is_named(pool):
    launch = between_hosts(world_size=3)
    gathered = gathering(pool, launch)
    agent = an_agent(launch, 2)
    link = door._knock(agent, _open_port(launch), KEY)
    link.send(star.greeting(agent, "there", 77))
    link.close()
    with pytest.raises(LaunchError, match=r"rank 2 on there \(pid 77\) ended before all ranks were there"):
        gathered.result(60)


def _open_port(launch):
    while True:
        for port in door.candidate_ports(launch):
            with contextlib.suppress(OSError):
                connect(port).close()
                return port
