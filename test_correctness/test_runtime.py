"""Driver, workers and local transport with real processes: what is measured, and what every fault becomes."""

import contextlib
import dataclasses
import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest

from perfsuite.base.errors import CaseError, ExpectedFailure, InvalidParameter, RanksFailed, UnsupportedCase
from perfsuite.base.mesh import MeshShape
from perfsuite.record.workload import Budget
from perfsuite.runtime.driver import Job
from perfsuite.runtime.transports.local import STORE
from perfsuite.workloads.axis_collective import AxisCollective
from test_correctness.helpers import steps
from test_correctness.helpers.local_driver import QUICK, driver_fixture, job
from test_correctness.helpers.processes import gone, listening_on, own_address

pytestmark = pytest.mark.usefixtures("cold")
HASTY = dataclasses.replace(QUICK, timeout_s=1.5)

driver = driver_fixture()


def pids_of(measurement_driver):
    return [child.pid for slot, child in measurement_driver._transport._slots.items() if slot >= 0]


def test_a_case_brings_back_samples_of_every_rank(driver):
    measurement = driver.run(job(steps.add_up, 2))
    assert len(measurement.times_s) >= 3
    assert [rank.rank for rank in measurement.ranks] == [0, 1]
    assert all(time_s > 0 for time_s in measurement.times_s)
    assert measurement.iterations >= 1
    assert measurement.backend == "gloo"
    assert measurement.transport == "local"
    assert measurement.process == "reused"
    # the maximum over ranks is never below what any single rank saw
    assert measurement.median_s >= min(rank.min_s for rank in measurement.ranks)


def test_the_store_of_a_local_run_is_out_of_reach_of_other_hosts(driver):
    driver.run(job(steps.add_up, 2))
    address, port = driver._transport.open_store(30)
    assert listening_on(driver._transport._slots[STORE].pid) == {port: address} == {port: "127.0.0.1"}
    if (mine := own_address()) is not None:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((mine, port), timeout=30)


@pytest.mark.extended
def test_a_further_build_of_a_case_keeps_its_processes_and_groups(driver):
    case = job(steps.meshed, 4, fresh=True, shape=MeshShape.parse("dp2-tp2"))
    first, kept, formed = driver.run(case), pids_of(driver), driver._generation
    further = driver.run(dataclasses.replace(case, continues=True))
    assert (pids_of(driver), driver._generation) == (kept, formed)
    assert further.records[0].value == first.records[0].value == 2 + 3  # of the groups along both axes
    driver.run(case)
    assert not set(pids_of(driver)) & set(kept)
    assert driver.run(job(steps.surroundings, 4)).world_size == 4  # the group was re-formed after the sub-groups


@pytest.mark.parametrize(
    ("collective", "axis"), [("all_reduce", "dp"), ("all_gather", "tp"), ("reduce_scatter", "dp"), ("all_to_all", "tp")]
)
def test_collectives_of_all_groups_along_an_axis_are_checked_and_timed(driver, collective, axis):
    workload = AxisCollective(collective=collective, mesh="dp2-tp2", axis=axis, message_bytes=1 << 10)
    along = Job(workload=workload, world_size=4, budget=QUICK, shape=MeshShape.parse("dp2-tp2"))
    assert driver.run(along).times_s


def test_an_injected_delay_is_measured_and_its_rank_named(driver):
    budget = Budget(min_rounds=5, max_time_s=0.2, warmup_time_s=0.05)
    delayed = driver.run(job(steps.late_rank, 3, budget=budget, late=2, delay_s=0.05))
    assert delayed.arrival.late_rank == 2
    assert 0.001 < delayed.arrival.lag_s < 10  # the exact figure, which load changes, is in benchmarks/truth.py
    assert delayed.median_s >= 0.05


def test_spans_partition_the_step(driver):
    measurement = driver.run(job(steps.spans, 2))
    spans = {span.name: span for span in measurement.spans}
    assert set(spans) == {"a", "b", "inside b", "remainder"}
    assert spans["b"].count == 2
    assert spans["a"].time_s >= 0.004
    assert spans["b"].time_s >= spans["inside b"].time_s >= 0.008
    assert spans["remainder"].time_s >= 0.004
    records = {(record.name, record.value, record.unit) for record in measurement.records}
    assert records == {("loss", 0.5, "nats"), ("rank", 1.0, "")}


def test_ranks_that_disagree_about_an_equal_record_fail(driver):
    with pytest.raises(CaseError, match="ranks disagree about loss"):
        driver.run(job(steps.disagreeing, 2))


def test_a_mesh_of_another_size_is_refused(driver):
    with pytest.raises(InvalidParameter, match="mesh dp2-tp2 has 4 ranks, the case 2"):
        driver.run(job(steps.add_up, 2, shape=MeshShape.parse("dp2-tp2")))


def test_what_a_case_preloads_is_there_in_workers_started_since(driver):
    ask = job(steps.imported, 1, module="wave")
    assert driver.run(ask).records[0].value == 0
    driver._transport.preload(("wave", "no_such_module"))
    assert driver.run(ask).records[0].value == 0  # this worker is older
    assert driver.run(dataclasses.replace(ask, fresh=True)).records[0].value == 1


def test_smoke_runs_one_iteration(driver):
    measurement = driver.run(job(steps.add_up, 2, budget=Budget(smoke=True)))
    assert measurement.smoke
    assert len(measurement.times_s) == 1


def test_a_yardstick_is_timed_beside_every_sample(driver):
    budget = Budget(min_rounds=3, max_time_s=0.05, warmup_time_s=0.02, yardstick=True, cache_flush=True)
    measurement = driver.run(job(steps.add_up, 2, budget=budget))
    assert len(measurement.yardsticks_s) == len(measurement.times_s)
    assert all(time_s > 0 for time_s in measurement.yardsticks_s)


def test_a_step_is_closed(driver, tmp_path):
    driver.run(job(steps.closing, 1, file=str(tmp_path / "closed")))
    assert (tmp_path / "closed").read_text() == "closed\n"


def test_what_is_no_step_is_named(driver):
    with pytest.raises(InvalidParameter, match="not_a_step returned 42; return a callable"):
        driver.run(job(steps.not_a_step, 2))
    with pytest.raises(InvalidParameter, match=r"Plain\.build returned None; return a callable"):
        driver.run(Job(workload=steps.Plain(made=None), world_size=1, budget=QUICK))


def test_a_build_may_return_a_plain_callable_as_a_function_may(driver):
    assert driver.run(Job(workload=steps.Plain(made="list"), world_size=1, budget=QUICK)).times_s


@pytest.fixture
def group():
    """A control group of 64 MiB; skips where this user can make none."""
    parent, limit = next(
        (
            (Path(parent), limit)
            for parent, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max"))
            if os.access(parent, os.W_OK)
        ),
        (None, ""),
    )
    if parent is None:
        pytest.skip("this user can make no control group: no folder of them is writable")
    made = parent / f"perfsuite-test-{os.getpid()}"
    made.mkdir()
    try:
        if not (made / limit).exists():
            pytest.skip("control groups of this host limit no memory")
        (made / limit).write_text(str(64 << 20))
        yield made
    finally:
        for _ in range(100):  # its last process may not be reaped yet
            with contextlib.suppress(OSError):
                made.rmdir()
                break
            time.sleep(0.05)


def test_a_rank_that_the_kernel_kills_for_memory_says_so(driver, monkeypatch, group):
    monkeypatch.setattr("perfsuite.runtime.driver.GRACE_S", 0.5)
    told = (
        r"rank 1 on .* died: killed by SIGKILL: the kernel's OOM killer ended \d+ process(es)? of this "
        r"(host|control group) since this rank's process began"
    )
    with pytest.raises(RanksFailed, match=told):
        driver.run(job(steps.filling_its_group, 3, group=str(group)))
    assert len(driver.run(job(steps.add_up, 3)).times_s) >= 3
    with pytest.raises(RanksFailed, match=r"died: killed by SIGKILL \("):  # that was another one's end
        driver.run(job(steps.dying, 3))


@pytest.mark.parametrize(
    ("how", "phase", "said"),
    [
        ("fail", "run", "raised Failed: not today .while checking before timing"),
        ("fail", "build", "raised Failed: not today .while building"),
        ("exit", "run", "raised Exit: enough"),
        ("KeyboardInterrupt", "run", "raised KeyboardInterrupt .while checking before timing"),
        ("GeneratorExit", "build", "raised GeneratorExit .while building"),
        ("Unheard", "run", "raised Unheard .while checking before timing"),
    ],
)
def test_whatever_a_rank_raises_is_named_with_its_place(driver, how, phase, said):
    with pytest.raises(RanksFailed, match=f"^rank 0 on .* {said}") as failure:
        driver.run(job(steps.leaving, 1, how=how, phase=phase))
    assert "steps.py" in str(failure.value)


def test_a_skip_of_some_ranks_is_one_of_the_case(driver, monkeypatch):
    monkeypatch.setattr("perfsuite.runtime.driver.GRACE_S", 0.2)
    with pytest.raises(UnsupportedCase, match=r"^rank 1 on .* skipped: no luck today$"):
        driver.run(job(steps.leaving, 3, how="skip", culprits=(1,)))
    with pytest.raises(ExpectedFailure, match=r"^rank 0 on .* expected to fail: known since long$"):
        driver.run(job(steps.leaving, 2, how="xfail", culprits=(0, 1)))
    with pytest.raises(RanksFailed, match=r"^rank 1 on .* raised ZeroDivisionError") as failure:
        driver.run(job(steps.leaving, 2, how=("skip", "error"), culprits=(0, 1)))
    assert isinstance(failure.value, ZeroDivisionError)
    assert "rank 0 on" in str(failure.value)
    assert "skipped: no luck today" in str(failure.value)


def test_a_message_of_megabytes_is_cut(driver):
    with pytest.raises(RanksFailed, match=r"^rank 0 on .* raised ValueError: begin xxx") as failure:
        driver.run(job(steps.shouting, 1, characters=5_000_000))
    assert isinstance(failure.value, ValueError)
    report = str(failure.value)
    assert len(report) < 50_000
    assert "characters left out" in report.splitlines()[0]
    assert "in run" in report
    tail = driver.log_tails()[0]
    assert len(tail) < 50_000
    assert "bytes before this left out" in tail
    assert tail.endswith("yyy")


@pytest.mark.parametrize(("world_size", "culprit", "when"), [(2, 1, 1), (2, 0, 3), (1, 0, 3), (2, 1, "close")])
def test_a_rank_that_ends_the_process_group_is_named(driver, monkeypatch, world_size, culprit, when):
    monkeypatch.setattr("perfsuite.runtime.driver.GRACE_S", 0.2)
    with pytest.raises(RanksFailed, match=rf"^rank {culprit} on .*called torch\.distributed\.destroy_process_group"):
        driver.run(job(steps.destroying, world_size, culprit=culprit, when=when))
    assert driver.run(job(steps.add_up, world_size)).world_size == world_size


def test_groups_wait_longer_than_any_case_whatever_the_case_before(driver):
    driver.run(job(steps.surroundings, 4, budget=dataclasses.replace(QUICK, smoke=True)))
    measurement = driver.run(job(steps.patience, 4, shape=MeshShape.parse("dp2-tp2")))
    assert {record.name for record in measurement.records} == {"world", "mesh", "own"}
    assert all(record.value > 10 * 24 * 3600 for record in measurement.records)


def test_a_store_out_of_reach_is_told_at_once_by_its_address(driver, monkeypatch):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = unused.getsockname()
        monkeypatch.setattr(driver._transport, "open_store", lambda deadline_s: address)
        with pytest.raises(CaseError, match=rf"^rank . on .* cannot reach the rendezvous store at \S+:{address[1]}, "):
            driver.run(job(steps.add_up, 2, fresh=True))
    monkeypatch.undo()
    assert driver.run(job(steps.add_up, 2)).world_size == 2


def test_a_host_whose_loopback_is_down_says_so(driver):
    with pytest.raises((CaseError, UnsupportedCase)) as failure:
        driver.run(job(steps.unplugged, 1))
    if failure.type is UnsupportedCase:
        pytest.skip(str(failure.value))
    assert "cannot connect to itself at 127.0.0.1" in str(failure.value).splitlines()[0]


def test_a_product_that_outlasts_the_limit_is_slow_and_does_not_hang(driver):
    with pytest.raises(RanksFailed) as failure:
        driver.run(job(steps.computing, 1, budget=HASTY))
    first, advice, *_ = str(failure.value).splitlines()
    assert re.search(r"rank 0 on \S+ was still working at \S+steps.py:\d+ in <lambda> .*limit 1.5 s", first)
    assert advice == "it computes: if it is only slow, choose a longer --perf-timeout or a smaller size"


@pytest.mark.extended
def test_a_stopped_rank_is_named_with_what_the_kernel_says_of_it(driver):
    told = r"rank 1 on .*\(no Python stack\): its process is stopped by a signal; kill -CONT continues it \(state T\)"
    with pytest.raises(RanksFailed, match=f"^.*{told}"):
        driver.run(job(steps.dying, 2, budget=HASTY, how="stop"))


@pytest.mark.extended
@pytest.mark.parametrize("unread", [b"", b"a request"])
def test_a_killed_forkserver_fails_the_case_and_is_replaced(driver, unread):
    driver.run(job(steps.add_up, 2))
    server = driver._transport._servers[0].process.pid
    workers = [driver._transport._slots[0].pid]
    if unread:
        os.kill(server, signal.SIGSTOP)
        driver._transport._servers[0].control.send(unread)
    os.kill(server, signal.SIGKILL)
    assert gone(workers, within_s=10.0)
    assert driver.run(job(steps.add_up, 2)).world_size == 2
    assert driver._transport._servers[0].process.pid != server
