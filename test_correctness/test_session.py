"""The session without pytest: results, runs once more, the journal."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest

from perfsuite.base.errors import InvalidParameter, OutOfMemory, RanksFailed
from perfsuite.platforms import detect_machine, load_catalog
from perfsuite.record.journal import read_journal
from perfsuite.record.journal_writer import JournalWriter
from perfsuite.record.result import Peak, Peaks, Record, Work
from perfsuite.record.workload import Budget, Workload
from perfsuite.run.session import Case, PerfSession, deadline_s
from test_correctness.helpers.runs import HEADER
from test_correctness.helpers.scripted_driver import ScriptedDriver, measurement


@dataclass(frozen=True, kw_only=True)
class Product(Workload):
    """A kernel with operations."""

    side: int = 64
    metrics = ("tflops",)

    def work(self, shape):
        return Work(flops={"exact": 2.0 * self.side**3}, dtype="fp32")

    def build(self, rank):
        raise AssertionError


@dataclass(frozen=True, kw_only=True)
class Shift(Workload):
    """A collective that no table knows."""

    metrics = ("latency_us",)

    def work(self, shape):
        return Work(collective="neighbour_shift", message_bytes=1e6)

    def build(self, rank):
        raise AssertionError


@dataclass(frozen=True, kw_only=True)
class Watched(Product):
    """With builds that are never timed."""

    def untimed(self):
        return ("memory", "loss")


@dataclass(frozen=True, kw_only=True)
class Sought(Product):
    """Looks at one build, times two others and is the first of them."""

    def settle(self, probe):
        probe(self, "memory")
        found = dataclasses.replace(self, side=48)
        probe(found, "time")
        probe(dataclasses.replace(self, side=32), "time")
        return found, ()


def measurement_of_side(job):
    """A script whose times tell the workload apart."""
    return measurement(job, times_s=[job.workload.side / 100] if isinstance(job.workload, Sought) else (0.5,))


def session(script=measurement, name="cpu"):
    driver = ScriptedDriver(script)
    made = PerfSession(
        id="s1",
        machine=detect_machine(load_catalog(), name),
        fingerprint="cpu-x",
        open_driver=lambda: driver,
        read_environment=lambda worker: {"kernel": "5.4", "worker": worker},
    )
    return made, driver


def case(workload, name="test_it.py::test_it[cpu]", **changes):
    return Case(id=name, workload=workload, world_size=1, budget=Budget(), platform="cpu", **changes)


def test_a_result_has_all_that_is_known():
    made, _ = session()
    result = made.run(case(Product()))
    assert (result.case, result.workload) == ("test_it.py::test_it[cpu]", f"{__name__}:Product")
    assert (result.outcome, result.median_s, result.parameters) == ("measured", 0.5, {"side": 64})
    assert (result.fingerprint, result.session, result.simulated) == ("cpu-x", "s1", False)
    assert result.environment == {"kernel": "5.4", "worker": {"torch": "scripted"}}
    assert result.started_at.endswith("+00:00")
    assert made.results == {result.case: result}


def test_a_collective_that_no_table_knows_is_refused_before_anything_runs():
    made, driver = session()
    with pytest.raises(InvalidParameter, match="collective 'neighbour_shift' has no entry"):
        made.run(case(Shift()))
    assert driver.jobs == []


def test_a_case_can_be_run_again_in_fresh_processes(tmp_path):
    made, driver = session()
    made.journal = JournalWriter(tmp_path / "j", HEADER)
    first = made.run(case(Product()))
    driver.script = lambda job: measurement(job, (2.0,) * 3)
    again, reused = made.rerun(first.case), made.rerun(first.case, fresh=False)
    assert (again.median_s, again.measurement.process) == (2.0, "fresh")
    assert reused.measurement.process == "reused"
    assert made.results[first.case] is first
    made.close()
    assert list(read_journal(tmp_path / "j").results.values()) == [first]


def failing_in(purpose, error):
    """A script whose build for one purpose raises; the others record their purpose."""

    def script(job):
        if job.purpose == purpose:
            raise error
        records = () if job.purpose == "time" else (Record(name=job.purpose, value=1.0, unit="", reduce="equal"),)
        return dataclasses.replace(measurement(job), records=records)

    return script


def test_what_a_workload_timed_to_find_itself_is_its_result():
    made, driver = session(measurement_of_side)
    result = made.run(case(Sought()))
    assert [("memory", True), ("time", False), ("time", False)] == [
        (job.purpose, job.budget.smoke) for job in driver.jobs if isinstance(job.workload, Sought)
    ]
    assert 0.48 == result.median_s


def test_the_deadline_of_a_workload_that_finds_itself_is_that_of_what_it_found(monkeypatch):
    monkeypatch.setattr("perfsuite.run.session.deadline_s", lambda budget, work, *_, **__: work.flops["exact"])
    made, driver = session(measurement_of_side)
    made.run(case(Sought()))
    assert [2.0 * 64**3, 2.0 * 48**3, 2.0 * 32**3] == [job.budget.timeout_s for job in driver.jobs[:3]]


def test_a_build_goes_on_where_the_one_before_was_but_for_memory():
    made, driver = session()
    made.run(case(Watched(), fresh=True))
    assert [(job.purpose, job.fresh, job.continues) for job in driver.jobs[:3]] == [
        ("time", True, False),
        ("memory", True, False),
        ("loss", True, True),
    ]


def test_a_build_that_cannot_be_had_leaves_the_timed_result_and_the_other_builds():
    made, _ = session(failing_in("memory", OutOfMemory("OOM at 79 GiB of 80")))
    result = made.run(case(Watched()))
    assert (result.outcome, result.median_s) == ("measured", 0.5)
    assert result.measurement.failed_builds == {"memory": "OOM at 79 GiB of 80"}
    assert [record.name for record in result.measurement.records] == ["loss"]


@pytest.mark.parametrize("error", [RanksFailed("rank 1 died\nits log"), KeyboardInterrupt()], ids=["died", "Ctrl-C"])
def test_what_was_timed_is_kept_when_a_later_build_fails_the_case(tmp_path, error):
    made, driver = session(failing_in("memory", error))
    made.journal = JournalWriter(tmp_path / "j", HEADER)
    with pytest.raises(type(error)):
        made.run(case(Watched()))
    made.close()
    (kept,) = read_journal(tmp_path / "j").results.values()
    assert (kept.median_s, list(kept.measurement.failed_builds)) == (0.5, ["memory"])
    assert made.results == {kept.case: kept}
    again, driver = session(failing_in("", error))
    again.resume(read_journal(tmp_path / "j"))
    assert not again.run(case(Watched())).measurement.failed_builds, "a resumed run measures it again"
    assert [job.purpose for job in driver.jobs][:3] == ["time", "memory", "loss"]


PEAKS = Peaks(
    tflops={"bf16": Peak(value=100.0, unit="TFLOPS", kind="published", source="")},
    memory_bandwidth=Peak(value=768.0, unit="GB/s", kind="published", source=""),
)
STEP = Work(flops={"6N": 3.4e15}, dtype="bf16")
"""17 s at the peak of two devices."""


def test_a_build_may_take_what_its_work_needs_on_the_device():
    limit_s = deadline_s(Budget(timeout_s=120.0), STEP, PEAKS, devices=2, purpose="time")
    assert limit_s == pytest.approx(120.0 + 20 * 17.0 * 5)
    copy = Work(bytes_moved=768e9, memory_path="device")
    assert deadline_s(Budget(timeout_s=120.0), copy, PEAKS, devices=8, purpose="memory") == pytest.approx(120 + 10 * 5)


@pytest.mark.parametrize(("ranks_per_core", "limit_s"), [(0.5, 120.0), (2.0, 120.0), (4.0, 240.0), (64.0, 480.0)])
def test_ranks_that_share_a_core_may_take_longer(ranks_per_core, limit_s):
    budget = Budget(timeout_s=120.0)
    assert limit_s == deadline_s(budget, Work(), Peaks(), devices=1, purpose="time", ranks_per_core=ranks_per_core)


@pytest.mark.parametrize(
    ("budget", "peaks"), [(Budget(timeout_s=9.0, fixed_timeout=True), PEAKS), (Budget(timeout_s=9.0), Peaks())]
)
def test_a_limit_that_was_asked_for_or_an_unknown_device_is_waited_for_no_longer(budget, peaks):
    assert deadline_s(budget, STEP, peaks, devices=2, purpose="time") == 9.0


def test_a_measured_case_is_not_lost_because_the_environment_is_unknown(monkeypatch):
    made, driver = session()

    def fail():
        raise RanksFailed("rank 0 did not start\nwith a log")

    monkeypatch.setattr(driver, "environment", fail)
    result = made.run(case(Product()))
    assert result.environment == {"kernel": "5.4", "worker": {"problem": "rank 0 did not start"}}
    assert result.median_s == 0.5


def test_nothing_is_started_before_the_first_case_and_close_is_idempotent():
    made, driver = session()
    assert not made.started
    made.close()
    assert driver.closed == 0
    made.start()
    made.start()
    made.close()
    made.close()
    assert (driver.started, made.started) == (1, True)
