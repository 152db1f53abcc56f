"""Where the simulated device is as strict as a real one: what goes wrong there goes wrong here, on ranks."""

import dataclasses
import os
import signal
import threading

import pytest

from perfsuite.base.errors import RanksFailed
from perfsuite.platforms.accelerator import Accelerator
from perfsuite.platforms.base import DeviceCode
from perfsuite.platforms.host import Host
from perfsuite.record.workload import FunctionWorkload
from perfsuite.runtime.transports.local import LocalTransport
from perfsuite.runtime.transports.parents import ForkServer
from perfsuite.workloads import collective
from perfsuite.workloads.matmul import Matmul
from perfsuite.workloads.training.largest_batch import LargestBatch
from simmusa.costs import Costs
from simmusa.family import SimMusa
from simmusa.registered import VERSION
from test_correctness.helpers import simmusa_ranks as ranks
from test_correctness.helpers import steps
from test_correctness.helpers.local_driver import records
from test_correctness.helpers.simmusa_ranks import KERNELS, QUICK, TRAINING, measure_on, opened, require_built

PRICES = Costs(launch_ns=1_000, flops_per_s={"fp32": 10e12}, alpha_ns=20_000, link_bytes_per_s=100e9)
NO_ROOM = dataclasses.replace(PRICES, memory_bytes=64 << 20, communicator_bytes=48 << 20)
"""For a communicator, and not for two."""


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    with opened(PRICES, tmp_path_factory.mktemp("ranks"), KERNELS) as session:
        yield session


@pytest.mark.extended
def test_a_send_ends_when_it_is_received(session):
    """A pipeline that counts on sends to end by themselves would look faster than it is."""
    result = measure_on(session, ranks.sends_to_a_late_rank, 2, side=500)
    product_ns = PRICES.kernel_time_ns(flops=2 * 500**3)
    expected_ms = (2 * PRICES.launch_ns + product_ns - PRICES.launch_ns + PRICES.communication_time_ns(1024)) * 1e-6
    found = records(result.measurement)
    assert dict.fromkeys(("rank0_ms", "rank1_ms"), pytest.approx(expected_ms, rel=1e-12)) == found


@pytest.mark.extended
@pytest.mark.parametrize("batched", [(), (0,)], ids=["alone", "one in a batch"])
def test_two_ranks_that_both_send_first_wait_for_ever(session, batched):
    told = r"mccl::(send|recv) with rank [01] is called .* on a device both wait for ever"
    with pytest.raises(RanksFailed, match=told):
        measure_on(session, ranks.both_send_first, 2, batched=batched)


@pytest.mark.extended
def test_a_batch_sends_and_receives_at_once(session):
    measure_on(session, ranks.both_send_first, 2, batched=(0, 1))


@pytest.mark.extended
def test_a_probe_that_breaks_the_device_is_no_missing_kernel(session):
    with pytest.raises(RanksFailed, match="device-side assert triggered"):
        measure_on(session, ranks.asks_for_a_kernel_that_faults, 1)
    measure_on(session, collective.Barrier(), 2)


@pytest.mark.slow
def test_a_communicator_that_does_not_fit_is_out_of_memory(tmp_path):
    with opened(NO_ROOM, tmp_path, KERNELS) as session:
        assert "smoke" == measure_on(session, collective.AllReduce(message_bytes=1024), 2).outcome
        result = measure_on(session, ranks.sends_to_a_late_rank, 2, side=10)
    told = "OOM at 0.00 GiB of 0.06 GiB: Failed to MUSA calloc 50331648 bytes"
    assert ("out_of_memory", told) == (result.outcome, result.detail)


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "memory_mib"), [(1, 40), (2, 40 + 64)])
def test_the_largest_batch_of_a_small_memory_is_one_that_can_be_timed(tmp_path, world_size, memory_mib):
    costs = dataclasses.replace(PRICES, memory_bytes=memory_mib << 20, communicator_bytes=64 << 20)
    largest = LargestBatch(model="gpt2-tiny", strategy="ddp" if world_size > 1 else "single", most=64)
    budget = dataclasses.replace(QUICK, max_time_s=0.001, warmup_time_s=0.001)
    with opened(costs, tmp_path, TRAINING) as session:
        result = measure_on(session, largest, world_size, budget=budget)
    assert ("measured", "") == (result.outcome, result.detail)
    assert 1 <= result.metric("largest_local_batch_samples").value < 64


@pytest.mark.extended
def test_a_barrier_never_comes_first_in_the_group_of_a_case(session):
    """mccl would guess the device: rank % devices, which on the second of two hosts is another rank's."""
    measure_on(session, ranks.waits_first, 2, alone=False)
    with pytest.raises(RanksFailed, match="a barrier is the first communication of this group"):
        measure_on(session, ranks.waits_first, 2, alone=True)


@pytest.mark.extended
def test_streams_of_groups_are_used_again(session):
    results = [measure_on(session, steps.queue_of_messages, size) for size in (2, 3) * 2]
    streams = [records(result.measurement)["stream0"] for result in results]
    assert max(streams[2:]) <= max(streams[:2])


@pytest.mark.extended
@pytest.mark.parametrize("version", ["2.5.0", "2.7.1"])
def test_batches_are_pinned_whichever_torch_the_vendor_has(tmp_path, monkeypatch, version):
    monkeypatch.setenv(VERSION, version)
    with opened(PRICES, tmp_path / "logs", KERNELS) as session:
        result = measure_on(session, ranks.reads_a_dataset, 1, folder=str(tmp_path / "set"))
    assert 1.0 == records(result.measurement)["pinned"]


@pytest.mark.extended
@pytest.mark.parametrize(("version", "allowed"), [("2.5.0", "False"), ("2.7.1", "True")])
def test_tf32_is_on_at_first_only_where_the_version_turns_it_on(tmp_path, monkeypatch, version, allowed):
    monkeypatch.setenv(VERSION, version)
    with opened(PRICES, tmp_path, KERNELS) as session:
        assert allowed == session.driver.environment()["tf32"]


@pytest.mark.extended
def test_a_setting_of_the_library_is_read_and_an_unknown_one_is_refused(tmp_path, monkeypatch):
    slow = dataclasses.replace(PRICES, slow={"MCCL_PROTOS=2": 2.0})
    workload, took = collective.AllReduce(message_bytes=1 << 20), {}
    for value in ("1", "2"):
        monkeypatch.setenv("MCCL_PROTOS", value)
        with opened(slow, tmp_path / value, KERNELS) as session:
            took[value] = measure_on(session, workload, 2, budget=QUICK).median_s
    assert pytest.approx(2.0, rel=1e-3) == took["2"] / took["1"]
    monkeypatch.setenv("MCCL_PROTO", "2")
    with (
        opened(slow, tmp_path / "unknown", KERNELS) as session,
        pytest.raises(RanksFailed, match="no variable MCCL_PROTO"),
    ):
        measure_on(session, ranks.waits_first, 2, alone=False)


@pytest.mark.extended
def test_a_sustained_product_is_slower_than_a_burst(tmp_path):
    took = {}
    for sustained in (1.0, 1.25):
        costs = dataclasses.replace(PRICES, burst_ns=20_000, sustained=sustained)
        with opened(costs, tmp_path / str(sustained), KERNELS) as session:
            took[sustained] = measure_on(session, Matmul(m=256, n=256, k=256), 1, budget=QUICK).median_s
    assert pytest.approx(1.25, rel=1e-2) == took[1.25] / took[1.0]


def test_telemetry_has_clocks_and_processes_as_the_environment_says(tmp_path):
    require_built()
    (tmp_path / "0.7").touch()  # of a process that has ended: nobody holds a lock on it
    told = {"SIMMUSA_THROTTLE": "power cap,thermal", "SIMMUSA_STRANGERS": "2"}
    told |= {"SIMMUSA_SHARED": str(tmp_path), "SIMMUSA_DEVICES": "2"}
    for environ, reasons, strangers in (({"SIMMUSA_DEVICES": "2"}, (), 0), (told, ("power cap", "thermal"), 2)):
        readings = SimMusa(Host(environ=environ)).telemetry().read()
        assert [reasons] * 2 == [reading.throttle for reading in readings]
        assert [strangers] * 2 == [len(reading.processes) for reading in readings]


@pytest.fixture
def shared(tmp_path, monkeypatch):
    """A session on one device, which counts the memory of all its processes."""
    monkeypatch.setenv("SIMMUSA_DEVICES", "1")
    monkeypatch.setenv("SIMMUSA_SHARED", str(tmp_path / "processes"))
    costs = dataclasses.replace(PRICES, memory_bytes=64 << 20, context_bytes=20 << 20)
    with opened(costs, tmp_path, KERNELS) as session:
        yield session


@pytest.mark.extended
def test_ranks_that_share_a_device_share_its_memory(shared):
    assert "smoke" == measure_on(shared, ranks.takes_memory, 1, mib=40).outcome
    assert "smoke" == measure_on(shared, ranks.takes_memory, 2, mib=10).outcome
    (reading,) = shared.machine.family.telemetry().read()
    workers = shared._driver._transport._slots
    assert {workers[0].pid, workers[1].pid} == set(reading.processes)
    assert "out_of_memory" == measure_on(shared, ranks.takes_memory, 2, mib=40).outcome


@pytest.mark.extended
@pytest.mark.parametrize("awaited", [True, False])
def test_memory_of_a_killed_rank_is_free_when_its_process_has_ended(shared, monkeypatch, awaited):
    """A driver ends a context late; without a wait for it the next rank finds too little memory."""
    at_once, held = ForkServer.signal, []

    def late(server, children, number):
        asked = server, list(children), number
        for child in asked[1]:
            os.kill(child.pid, signal.SIGSTOP)  # it does not end by itself, as its connection is closed
        if awaited:
            threading.Timer(0.5, at_once, asked).start()
        else:
            held.append(asked)

    held_memory = FunctionWorkload(function=ranks.takes_memory, arguments={"mib": 40})
    assert "smoke" == measure_on(shared, held_memory, 1, fresh=True).outcome
    with monkeypatch.context() as patch:
        patch.setattr(ForkServer, "signal", late)
        if not awaited:
            patch.setattr(LocalTransport, "_await_killed", lambda transport, until: None)
        assert ("smoke" if awaited else "out_of_memory") == measure_on(shared, held_memory, 1, fresh=True).outcome
    for asked in held:
        at_once(*asked)


@pytest.mark.extended
@pytest.mark.parametrize("size", ["", "device"])
def test_the_yardstick_takes_a_device_s_bytes_where_asked(tmp_path, monkeypatch, size):
    monkeypatch.setenv("SIMMUSA_YARDSTICK", size)
    with opened(PRICES, tmp_path, KERNELS) as session:
        result = measure_on(session, ranks.tells_its_yardstick, 1)
    expected = Accelerator.yardstick_bytes if size else DeviceCode.yardstick_bytes
    assert records(result.measurement)["yardstick_bytes"] == expected
