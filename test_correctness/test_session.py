"""The session without pytest: results, runs once more, the journal."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from perfsuite.errors import InvalidParameter, JournalError, RanksFailed
from perfsuite.journal import Header, JournalWriter, read_journal
from perfsuite.platforms import detect_machine, load_catalog
from perfsuite.records import Work
from perfsuite.session import Case, PerfSession
from perfsuite.workload import Budget, Workload
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


def session(script=measurement, name="cpu") -> tuple[PerfSession, ScriptedDriver]:
    driver = ScriptedDriver(script)
    made = PerfSession(
        id="s1",
        machine=detect_machine(load_catalog(), name),
        fingerprint="cpu-x",
        open_driver=lambda: driver,
        read_environment=lambda worker: {"kernel": "5.4", "worker": worker},
    )
    return made, driver


def case(workload: Workload, name: str = "test_it.py::test_it[cpu]", **changes) -> Case:
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
    made.journal = JournalWriter(
        tmp_path / "j", Header(session="s1", fingerprint="cpu-x", platform="cpu", started_at="")
    )
    first = made.run(case(Product()))
    driver.script = lambda job: measurement(job, (2.0,) * 3)
    again, reused = made.rerun(first.case), made.rerun(first.case, fresh=False)
    assert (again.median_s, again.measurement.process) == (2.0, "fresh")
    assert reused.measurement.process == "reused"
    assert made.results[first.case] is first
    made.close()
    assert list(read_journal(tmp_path / "j").results.values()) == [first]


def test_a_failed_case_is_in_the_journal(tmp_path):
    def script(job):
        raise RanksFailed("rank 0 died")

    made, _ = session(script)
    made.journal = JournalWriter(
        tmp_path / "j", Header(session="s1", fingerprint="cpu-x", platform="cpu", started_at="")
    )
    with pytest.raises(RanksFailed):
        made.run(case(Product()))
    made.close()
    assert read_journal(tmp_path / "j").failures == {"test_it.py::test_it[cpu]": "rank 0 died"}
    assert made.results == {}


def test_a_measured_case_is_not_lost_because_the_environment_is_unknown(monkeypatch):
    made, driver = session()

    def fail():
        raise RanksFailed("rank 0 did not start\nwith a log")

    monkeypatch.setattr(driver, "environment", fail)
    result = made.run(case(Product()))
    assert result.environment == {"kernel": "5.4", "worker": {"problem": "rank 0 did not start"}}
    assert result.median_s == 0.5


def test_a_journal_of_other_hardware_is_refused(tmp_path):
    writer = JournalWriter(tmp_path / "j", Header(session="s0", fingerprint="cpu-y", platform="cpu", started_at=""))
    writer.failure("a", "rank 1 died")
    writer.close()
    made, _ = session()
    with pytest.raises(
        JournalError, match="was measured on cpu-y, this machine is cpu-x; a run resumes only on the same"
    ):
        made.resume(read_journal(tmp_path / "j"))


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
