"""Where ranks run: as a launcher left them unless pinning is asked for, with a fair share of the cores as threads."""

import dataclasses
import os
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.base.errors import CaseError, UnsupportedCase
from perfsuite.platforms.host import Host
from perfsuite.runtime.ranks.placement import allowed_cores, divide_cores, nodes_of_devices, place_by_node, read_cores
from perfsuite.runtime.transports.cluster import ClusterTransport
from perfsuite.runtime.transports.star import AgentFacts
from test_correctness.helpers import machines, steps
from test_correctness.helpers.agents import a_launch
from test_correctness.helpers.local_driver import ONCE, driver_fixture, job, local_driver

HERE = allowed_cores()


@given(st.integers(1, 64), st.integers(1, 64))
def test_cores_are_divided_without_overlap(cores, ranks):
    places = [divide_cores(tuple(range(cores)), rank, ranks, pin=True) for rank in range(ranks)]
    assert len({place.threads for place in places}) == 1
    free = divide_cores(tuple(range(cores)), 0, ranks)
    assert (places[0].threads, None) == (free.threads, free.cores)
    if ranks > cores:
        assert all(place.cores is None and place.threads == 1 for place in places)
    else:
        used = [core for place in places for core in place.cores]
        assert len(used) == len(set(used)) == ranks * (cores // ranks)
        assert all(len(place.cores) == place.threads for place in places)


driver = driver_fixture()


def run(driver, ranks):
    """The ranks' facts, and the number of cores that each was allowed while it ran."""
    measured = driver.run(job(steps.allowed, ranks, budget=ONCE, fresh=True))
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
        with local_driver(tmp_path) as driver:
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
    monkeypatch.setattr(driver, "_pin", "cores")
    ranks, allowed = run(driver, 2)
    share = len(HERE) // 2
    assert [share] * 2 == allowed
    assert [HERE[:share], HERE[share : 2 * share]] == [rank.cores for rank in ranks]


@pytest.mark.skipif(len(HERE) < 2, reason="one core cannot be divided")
def test_ranks_without_a_device_divide_the_physical_cores(driver, monkeypatch):
    monkeypatch.setattr(driver, "_pin", "numa")
    ranks, allowed = run(driver, 2)
    cores = read_cores(Host(), HERE)
    if len(cores) > 1:
        assert not set(ranks[0].cores) & set(ranks[1].cores)
    assert [len(rank.cores) for rank in ranks] == allowed


def sysfs(root, *, cores=56):
    """Two sockets of 56 cores with hyper-threading: siblings are 112 apart; eight devices, half of them each."""
    total, files = 2 * cores, {}
    for index in range(total * 2):
        topology = f"sys/devices/system/cpu/cpu{index}/topology"
        files[f"{topology}/core_id"] = f"{index}\n"
        files[f"{topology}/thread_siblings_list"] = f"{index % total},{index % total + total}\n"
    for node, first in enumerate((0, cores)):
        text = f"{first}-{first + cores - 1},{first + total}-{first + total + cores - 1}\n"
        files[f"sys/devices/system/node/node{node}/cpulist"] = text
    files |= {numa_node(device): f"{device // 4}\n" for device in range(8)}
    return Host(root=machines.write(root, files))


def numa_node(device):
    return f"sys/bus/pci/devices/{address(device)}/numa_node"


def address(device):
    return f"0000:{0x1A + device:02x}:00.0"


def test_ranks_are_on_their_devices_sockets_and_share_no_core(tmp_path):
    host = sysfs(tmp_path)
    cores = read_cores(host, range(224))
    nodes = nodes_of_devices(host, cores, {rank: address(rank) for rank in range(8)})
    places = [place_by_node(cores, nodes, share) for share in range(8)]
    picked = [[places[rank].cores[at] for at in (0, 13, 14, -1)] for rank in (0, 4)]
    assert [[0, 13, 112, 125], [56, 69, 168, 181]] == picked
    used = [core for place in places for core in place.cores]
    assert len(used) == len(set(used)) == 224
    assert {place.threads for place in places} == {28}


def test_ranks_that_each_see_one_device_are_on_the_sockets_of_their_own(driver, monkeypatch, tmp_path):
    host = sysfs(tmp_path)
    cores = read_cores(host, range(224))
    assert [0, 1] == nodes_of_devices(host, cores, {0: address(0), 7: address(7)})
    real = driver._transport.place
    for names, shared in ((("GPU-a", "GPU-b"), False), (("GPU-a", "GPU-a"), True)):
        seen = [(name,) for name in names]
        monkeypatch.setattr(
            driver._transport, "place", lambda slot, seen=seen: dataclasses.replace(real(slot), devices=seen[slot])
        )
        monkeypatch.setattr(driver._family, "sharing_variables", {"SHARES": "1"}, raising=False)
        assert ({"SHARES": "1"} if shared else {}) == driver._environment_of(None, 2)
        assert [0, 0] == [driver._transport.place(slot).device(driver._device_count)[0] for slot in range(2)]


def test_devices_are_counted_over_all_agents_of_the_host_once_they_came(tmp_path):
    launch = a_launch(world_size=3, local_world_size=2)
    cluster = ClusterTransport(launch, start_method="fork", preload=(), log_directory=tmp_path, devices=("GPU-a",))
    here = socket.gethostname()

    def agent(rank, host, *devices):
        local = {"local_rank": rank % 2, "local_world_size": 2, "cores": (0,), "devices": devices}
        return AgentFacts(slot=rank, host=host, pid=1, **local)

    assert cluster.devices_here(1) is None
    for facts, count in (
        ({1: agent(1, here, "GPU-b"), 2: agent(2, "there", "GPU-c")}, 2),
        ({1: agent(1, here, "GPU-a"), 2: agent(2, "there", "GPU-c")}, 1),
    ):
        cluster._star.facts = facts
        assert count == cluster.devices_here(1)


def test_without_siblings_and_nodes_every_core_is_its_own_of_one_node(tmp_path):
    cores = read_cores(Host(root=tmp_path), range(8))
    assert {(core.node, len(core.logical)) for core in cores} == {(0, 1)}
    nodes = nodes_of_devices(Host(root=tmp_path), cores, dict.fromkeys(range(4), address(0)))
    assert (4, 5) == place_by_node(cores, nodes, 2).cores


def test_cores_of_a_launcher_are_not_widened(tmp_path):
    cores = read_cores(sysfs(tmp_path), (0, 1, 112))
    assert [(0, 112), (1,)] == [core.logical for core in cores]


def test_ranks_beyond_the_cores_of_their_node_use_all_of_it(tmp_path):
    cores = read_cores(sysfs(tmp_path, cores=1), range(4))
    places = [place_by_node(cores, [0, 0, 0], share) for share in range(3)]
    assert [((0, 2), 1)] * 3 == [(place.cores, place.threads) for place in places]


@pytest.mark.parametrize("told", ["", "0000:99:00.0", address(0)])
def test_a_device_of_an_unknown_node_is_refused_where_there_are_several(tmp_path, told):
    host = sysfs(tmp_path)
    machines.write(tmp_path, {numa_node(0): "-1\n"})  # as some firmware says it
    with pytest.raises(UnsupportedCase, match=r"2 memory nodes has the device of rank 3.*run without --perf-pin=numa"):
        nodes_of_devices(host, read_cores(host, range(224)), {3: told})


def test_a_kernel_that_refuses_is_quoted_in_one_line(driver, monkeypatch):
    real = driver._transport.place
    monkeypatch.setattr(driver._transport, "place", lambda slot: dataclasses.replace(real(slot), cores=(4000,)))
    monkeypatch.setattr(driver, "_pin", "cores")
    refused = r"rank 0 on \S+: the kernel refuses to pin this rank to cores 4000 \(.*\); run without --perf-pin"
    with pytest.raises(CaseError, match=f"^{refused}$"):
        run(driver, 1)
