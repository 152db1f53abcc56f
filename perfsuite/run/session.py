"""One run of the suite without pytest: keeps every case's workload and world size, runs it, and can run it again.

A :class:`Case` goes to the driver, comes back as a Measurement, and becomes a :class:`~perfsuite.record.result.Result`
with metrics from the work model and the platform's peaks, the hardware's fingerprint and the environment. It is
written to the journal before reports and gate get it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from perfsuite.base.collectives import require_known
from perfsuite.base.errors import (
    CaseError,
    CaseStopped,
    JournalError,
    OutOfMemory,
    PerfsuiteError,
    UnsupportedCase,
    first_line,
)
from perfsuite.base.masking import masked_value
from perfsuite.base.mesh import MeshShape
from perfsuite.metrics import derive, rederive
from perfsuite.platforms import Machine
from perfsuite.record.journal_writer import JournalWriter
from perfsuite.record.result import Measurement, Peaks, Record, Result, Work
from perfsuite.record.run import GateRecord, Projected, RunEnd, RunRecord
from perfsuite.record.workload import Budget, Purpose, Workload
from perfsuite.run.measured_peaks import MeasuredPeaks
from perfsuite.runtime.driver import Driver, Job
from perfsuite.runtime.own_tree import own_modules, require_own_modules
from perfsuite.runtime.values import describe, recorded, recorded_defaults

_SHARE_OF_PEAK = 0.2  # Least share of the device's peak for which a case gets extra time.
_ITERATIONS: Mapping[Purpose, int] = {"time": 20, "exposed": 40, "traffic": 40}
"""Most iterations of a slow step in a build: checks, warm-up, samples, arrivals; pairs of steps; replays."""
_OTHERWISE = 10
_RANKS_OF_A_CORE = 2.0  # Ranks per core within the normal limit; more of them wait in every message.
_MOST_TURNS = 4.0  # Largest factor on the normal time limit.


def deadline_s(
    budget: Budget, work: Work, peaks: Peaks, *, devices: int, purpose: Purpose, ranks_per_core: float = 1.0
) -> float:
    """Return the deadline of one build in seconds; the budget's own if it is fixed, or if there are no peaks."""
    if budget.fixed_timeout:
        return budget.timeout_s
    turns = min(_MOST_TURNS, max(1.0, ranks_per_core / _RANKS_OF_A_CORE))
    compute = peaks.tflops.get(work.dtype)
    memory = peaks.memory_bandwidth if work.memory_path == "device" else peaks.host_link
    at_best_s = max(  # of one iteration at the peaks; quantities without a peak count 0
        max(work.flops.values(), default=0.0) / (compute.value * 1e12 * devices) if compute else 0.0,
        work.bytes_moved / (memory.value * 1e9) if memory else 0.0,
        work.message_bytes / (peaks.link.value * 1e9) if peaks.link else 0.0,
    )
    return turns * budget.timeout_s + _ITERATIONS.get(purpose, _OTHERWISE) * at_best_s / _SHARE_OF_PEAK


def _with_builds(
    timed: Measurement, settled: tuple[Record, ...], done: Sequence[Measurement], failed: Mapping[str, str]
) -> Measurement:
    """Return the timed measurement with the results of untimed builds: memory, FLOPs, losses, traffic, ..."""
    records = {record.name: record for record in timed.records}
    for record in itertools.chain(() if timed.smoke else settled, *(build.records for build in done)):
        records.setdefault(record.name, record)
    return dataclasses.replace(
        timed,
        records=tuple(records.values()),
        traffic=tuple(entry for build in done for entry in build.traffic),
        components=tuple(component for build in done for component in build.components),
        failed_builds=failed,
    )


_Limits = Callable[[Work, Purpose], float]  # Returns the deadline of a build in seconds from its work and purpose.


@dataclass(frozen=True, kw_only=True)
class Case:
    """One test's workload and its ranks: all data that a further run needs."""

    id: str  # pytest node id.
    workload: Workload
    world_size: int
    budget: Budget
    platform: str
    fresh: bool = False  # Whether it has rank processes of its own.
    test_module: str = ""  # Module of the test, which may hold a decorated function.


class PerfSession:
    """The cases of one run, in the order in which they ran."""

    def __init__(
        self,
        *,
        id: str,
        machine: Machine,
        fingerprint: str,
        open_driver: Callable[[], Driver],
        read_environment: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    ) -> None:
        """``read_environment`` makes the environment of this run from a worker's versions."""
        self.id = id
        self.machine = machine
        self.fingerprint = fingerprint
        self.journal: JournalWriter | None = None  # Writer of finished cases; None while no case is collected.
        self.results: dict[str, Result] = {}  # The first result of each case, by node id.
        self.cases: dict[str, Case] = {}
        self.interrupted: dict[str, str] = {}  # By case: the signal that ended the run while it was running.
        self.reused: set[str] = set()  # Cases whose results come from the resumed journal.
        self._resumed: RunRecord | None = None
        self._open_driver = open_driver
        self._read_environment = read_environment
        self._driver: Driver | None = None
        self._environment: Mapping[str, Any] | None = None
        self.measured_peaks = MeasuredPeaks(lambda job: self.driver.run(job))  # noqa: PLW0108  made at first use

    def resume(self, journal: RunRecord) -> None:
        """Take finished cases from ``journal``; raise JournalError if it is of other hardware."""
        if journal.fingerprint != self.fingerprint:
            raise JournalError(
                f"journal {journal.path} was measured on {journal.fingerprint}, this machine is "
                f"{self.fingerprint}; a run resumes only on the same hardware: start a new one without --perf-resume"
            )
        self._resumed = journal
        if journal.peaks is not None:
            self.measured_peaks.know(journal.peaks)

    def start(self) -> None:
        """Begin to start rank processes, so that they are ready after collection."""
        if self._driver is None:
            self._driver = self._open_driver()
            self._driver.start()

    @property
    def driver(self) -> Driver:
        """Driver of the session, made at first use."""
        self.start()
        assert self._driver is not None
        return self._driver

    @property
    def started(self) -> bool:
        """Whether there is a driver with processes."""
        return self._driver is not None

    def run(self, case: Case) -> Result:
        """Run ``case`` or take it from the resumed journal; raises like Driver.run, but OutOfMemory is a result."""
        self.cases[case.id] = case
        result = self._from_journal(case)
        if result is None:
            began_s = time.monotonic()
            try:
                result = self._measure(case, fresh=case.fresh)
                result = dataclasses.replace(result, took_s=round(time.monotonic() - began_s, 2))
            except CaseError as error:
                message = str(error)
                self._write(lambda journal: journal.failure(case.id, message))
                raise
            except (CaseStopped, KeyboardInterrupt) as stopped:
                signal = stopped.signal if isinstance(stopped, CaseStopped) else "SIGINT"
                self.interrupted[case.id] = signal
                self._write(lambda journal: journal.interrupted(case.id, signal))
                raise
        self._keep(result)
        return result

    def _keep(self, result: Result) -> None:
        self._write(lambda journal: journal.result(result))
        self.results[result.case] = result

    def rerun(self, case_id: str, *, fresh: bool = True) -> Result:
        """Run a case once more, by default in new rank processes, as evidence for the gate; it is not stored."""
        return self._measure(self.cases[case_id], fresh=fresh, keep=False)

    def deadline_s(self, case_id: str) -> float:
        """Return the seconds that all builds of a case of this session may take together."""
        case = self.cases[case_id]
        purposes: tuple[Purpose, ...] = ("time", *case.workload.untimed())
        return sum(self._deadline_s(case, case.workload.work(_shape_of(case)), purpose) for purpose in purposes)

    def _deadline_s(self, case: Case, work: Work, purpose: Purpose) -> float:
        family = self.machine.family
        devices, shared = (1, case.world_size / family.host.cores()) if family.shareable else (case.world_size, 1.0)
        return deadline_s(
            case.budget, work, self.machine.peaks(), devices=devices, purpose=purpose, ranks_per_core=shared
        )

    def skip(self, case_id: str, reason: str) -> None:
        """Note in the journal, for its reports, that a case was not run."""
        self._write(lambda journal: journal.skip(case_id, reason))

    def project(self, record: Projected) -> None:
        """Write a projected case to the journal; it is not a result of this session."""
        self._write(lambda journal: journal.projected(record))

    def finish(self) -> None:
        """After the last case: measure the needed peaks again, and compute all shares from the better peaks."""
        if not self.measured_peaks.measure_again():
            return
        peaks = self.measured_peaks.complete(self.machine.peaks())
        self._write(lambda journal: journal.peaks(peaks))
        self.results = {case: rederive(result, peaks) for case, result in self.results.items()}

    def log_tails(self) -> dict[int, str]:
        """Return the last lines of each rank's log of the last failed case, by rank."""
        return self._driver.log_tails() if self._driver else {}

    def end(self, gate: GateRecord | None, last: RunEnd) -> None:
        """Write the gate's record and the end of the run, as the last entries of this run."""
        if gate is not None:
            self._write(lambda journal: journal.judged(gate))
        self._write(lambda journal: journal.ended(last))

    @property
    def journal_problem(self) -> str:
        """Why the journal in its place is incomplete, and where how many cases are; empty if it is complete."""
        return self.journal.problem if self.journal is not None else ""

    def close(self) -> None:
        """End every process and close the journal. Idempotent."""
        try:
            if self._driver is not None:
                self._driver.close()
        finally:
            if self.journal is not None:
                self.journal.close()

    def _from_journal(self, case: Case) -> Result | None:
        """Return the resumed journal's result of this case; None if the case has changed or has none."""
        old = self._resumed.results.get(case.id) if self._resumed else None
        if old is None or case.budget.smoke or old.outcome == "smoke":
            return None
        now = _settings(case.workload)
        same = (
            old.workload == describe(case.workload)
            and {**old.defaults, **old.parameters} == {**now["defaults"], **now["parameters"]}
            and old.world_size == case.world_size
            and old.platform == case.platform
            and not (old.measurement and old.measurement.failed_builds)
        )
        if not same:
            return None
        self.reused.add(case.id)
        return old

    def _measure(self, case: Case, *, fresh: bool, keep: bool = True) -> Result:
        """Run a case; with ``keep`` its timed build is stored even if another build fails."""
        started_at = datetime.now(timezone.utc).isoformat(timespec="seconds")
        workload, shape = case.workload, _shape_of(case)
        result = Result(
            case=case.id,
            workload=describe(workload),
            **_settings(workload),
            platform=case.platform,
            world_size=case.world_size,
            outcome="smoke" if case.budget.smoke else "measured",
            work=workload.work(shape),
            fingerprint=self.fingerprint,
            simulated=self.machine.simulated,
            session=self.id,
            started_at=started_at,
        )
        require_known(result.work.collective)
        job = Job(
            workload=workload,
            world_size=case.world_size,
            budget=case.budget,
            shape=shape,
            fresh=fresh,
            test_module=case.test_module,
        )
        require_own_modules()
        limits = functools.partial(self._deadline_s, case)
        try:
            job, records, timed = self._settle(job, limits)
        except OutOfMemory as error:
            return dataclasses.replace(
                result, outcome="out_of_memory", detail=str(error), environment=self.environment_now()
            )
        if records:
            result = dataclasses.replace(result, work=job.workload.work(shape))
        result = dataclasses.replace(result, environment=self.environment_now())
        done: list[Measurement] = []
        failed: dict[str, str] = {}
        try:
            self._build_untimed(done, failed, job, result.work, limits)
        except BaseException:
            if keep:
                peaks = self.measured_peaks.complete(self.machine.peaks())
                self._keep(_complete(result, workload, _with_builds(timed, records, done, failed), peaks))
            raise
        measured = _with_builds(timed, records, done, failed)
        return _complete(result, workload, measured, self._peaks(result, timed))

    def _settle(self, job: Job, limits: _Limits) -> tuple[Job, tuple[Record, ...], Measurement]:
        """Return the job with the final parameters of the workload, the records of the search, and the measurement.

        A workload that was timed in the search is not timed again: near the memory limit it might not fit again.
        """
        shape = job.shape
        assert shape is not None
        timed: list[tuple[Workload, Measurement]] = []  # a list, because some workloads cannot be hashed

        def probe(workload: Workload, purpose: Purpose) -> Measurement:
            tried = dataclasses.replace(job, workload=workload)
            limit_s = limits(workload.work(shape), purpose)
            if purpose != "time":
                return self._untimed(tried, purpose, limit_s)
            timed.append((workload, self.driver.run(_limited(tried, limit_s))))
            return timed[-1][1]

        workload, records = (job.workload, ()) if job.budget.smoke else job.workload.settle(probe)
        if workload not in [each for each, _ in timed]:
            probe(workload, "time")
        measurement = next(measurement for each, measurement in reversed(timed) if each == workload)
        return dataclasses.replace(job, workload=workload), records, measurement

    def _untimed(self, job: Job, purpose: Purpose, limit_s: float) -> Measurement:
        budget = dataclasses.replace(job.budget, smoke=True)
        return self.driver.run(_limited(dataclasses.replace(job, purpose=purpose, budget=budget), limit_s))

    def _build_untimed(
        self, done: list[Measurement], failed: dict[str, str], job: Job, work: Work, limits: _Limits
    ) -> None:
        """Run the untimed builds. Note one that is impossible here; raise the error of one that fails."""
        for purpose in () if job.budget.smoke else job.workload.untimed():
            try:
                # A process with libraries loaded by earlier builds would show too little memory in this one.
                further = dataclasses.replace(job, continues=purpose != "memory")
                done.append(self._untimed(further, purpose, limits(work, purpose)))
            except (OutOfMemory, UnsupportedCase) as error:
                failed[purpose] = first_line(error)
            except BaseException as error:
                failed[purpose] = first_line(error)
                raise

    def _peaks(self, result: Result, measurement: Measurement) -> Peaks:
        peaks = self.machine.peaks()
        if measurement.smoke or self.machine.family.name != "cpu":
            return peaks
        if self.measured_peaks.need(peaks, result.work, measurement):
            completed = self.measured_peaks.complete(peaks)
            self._write(lambda journal: journal.peaks(completed))
        return self.measured_peaks.complete(peaks)

    def environment_now(self) -> Mapping[str, Any]:
        """Return the environment, read once. A worker's failure to report it loses no case."""
        if self._environment is None:
            try:
                worker = self.driver.environment()
            except PerfsuiteError as error:
                return self._read_environment({"problem": first_line(error)})
            self._environment = self._read_environment(worker)
        return self._environment

    def _write(self, write: Callable[[JournalWriter], None]) -> None:
        if self.journal is not None:
            write(self.journal)


def new_session_id() -> str:
    """Return UTC time and process id: unique among the runs of one host, and sortable by time."""
    return f"{datetime.now(timezone.utc).strftime('%Y%m%dT%H%M%S.%fZ')}-{os.getpid()}"


def _complete(result: Result, workload: Workload, measurement: Measurement, peaks: Peaks) -> Result:
    metrics = derive(workload.metrics, work=result.work, measurement=measurement, peaks=peaks)
    if here := own_modules():
        measurement = dataclasses.replace(measurement, imports={**here, **measurement.imports})
    return dataclasses.replace(result, measurement=measurement, metrics=metrics)


def _settings(workload: Workload) -> dict[str, Any]:
    both = {"parameters": recorded(workload.parameters()), "defaults": recorded_defaults(workload.defaults())}
    return {name: masked_value(values) for name, values in both.items()}


def _shape_of(case: Case) -> MeshShape:
    return MeshShape.on(case.world_size, case.workload.layout())


def _limited(job: Job, limit_s: float) -> Job:
    return dataclasses.replace(job, budget=dataclasses.replace(job.budget, timeout_s=limit_s))
