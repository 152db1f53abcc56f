"""One run of the suite as reports see it, whether it just ended or is read from a journal or a baseline file.

The projection of a case is a record of its own kind that baselines, the gate and A/B do not use.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from perfsuite.base.errors import first_line
from perfsuite.record.result import SCHEMA, Metric, Peaks, Result
from perfsuite.record.step import Training
from perfsuite.record.verdict import Verdict, VerdictName


@dataclass(frozen=True, kw_only=True)
class Projected:
    """The projected figures of a case, or the reason why there are none."""

    kind: Literal["projected"]
    case: str  # pytest node id: a measured and a projected one of a case have the same.
    platform: str
    world_size: int
    workload: str = ""  # ``package.module:TrainStep``.
    parameters: Mapping[str, Any] = field(default_factory=dict)  # Fields of the workload, as a result has them.
    reason: str = ""  # Why nothing is projected; empty for a projection.
    not_measured: str = ""  # Why the case was skipped; empty where it was measured.
    training: Training | None = None
    step_time_s: float = 0.0
    low_s: float = 0.0
    high_s: float = 0.0  # Ends of the 80 % band.
    metrics: tuple[Metric, ...] = ()
    memory_bytes: float = 0.0  # Allocated at most, on the fullest rank.
    seconds: Mapping[str, float] = field(default_factory=dict)  # Seconds of the step by the resource that it waits for.
    binding: str = ""  # The resource that most of the step waits for.
    regime: str = ""
    band_source: str = ""  # Where the band comes from.
    calibration: str = ""  # Where the constants come from.
    flags: tuple[str, ...] = ()
    lower_bound: bool = False  # The step takes this long or longer.
    simulated: bool = False  # Of a simulated device.

    def value(self, metric: str) -> float | None:
        """Return the value of a metric by name; None if it is not projected."""
        return next((one.value for one in self.metrics if one.name == metric), None)


XFAILED = "xfailed: "
INSTRUMENTED = "the ranks were instrumented: "
NOT_QUIET = "the machine is not quiet: "
THROTTLED = "throttled: "  # Warnings that leave little to trust begin with one of these three.


@dataclass(frozen=True, kw_only=True)
class Revision:
    """The revision of the measured code; all empty outside of git."""

    commit: str = ""  # Full hash.
    branch: str = ""  # Empty on a detached head that no CI service names.
    dirty: bool = False  # Whether tracked files differ from the commit.
    subject: str = ""  # First line of the commit's message.
    problem: str = ""  # Why git could not be read, in one line; empty if it could, and outside of git.


@dataclass(frozen=True, kw_only=True)
class GateRecord:
    """The verdicts of the gate in one run."""

    gate: bool  # Whether verdicts failed their cases (``--perf-gate``).
    fail_on: tuple[str, ...] = ()  # Verdicts that failed.
    verdicts: tuple[Verdict, ...] = ()  # Of every judged case, with its findings.
    suite: VerdictName | None = None  # Verdict on the suite as a whole; None where it is not slower.
    suite_line: str = ""  # The same in words.
    banner: tuple[str, ...] = ()  # Lines on the session as a whole.

    @functools.cached_property
    def by_case(self) -> Mapping[str, Verdict]:
        """Verdicts by node id."""
        return {verdict.case: verdict for verdict in self.verdicts}

    def fails(self, verdict: VerdictName) -> bool:
        """Whether a verdict failed its case in this run."""
        return self.gate and verdict in self.fail_on


_INTERRUPTED = 2  # pytest's exit status.


@dataclass(frozen=True, kw_only=True)
class RunEnd:
    """How a run ended; a run without one was killed."""

    at: str  # UTC, ISO 8601.
    took_s: float  # Seconds from the first case to the end.
    exit_status: int  # pytest's, as far as it was known when the journal was closed.
    warnings: tuple[str, ...] = ()  # Reasons to doubt the figures.
    failed: Mapping[str, str] = field(default_factory=dict)
    """Message of each case that failed by anything but its verdict."""
    verdict: str = ""
    """PASS or FAIL of an acceptance run (``--perf-expect``), with its reasons; empty without one."""
    remarks: tuple[str, ...] = ()
    """Sentences of ``--perf-expect``: slow devices and links after SLOW, and cases that passed in a fresh run."""


@dataclass(frozen=True, kw_only=True)
class Header:
    """Facts about a run at its start."""

    session: str  # Identifier of the pytest session.
    fingerprint: str  # Key of the hardware; a run resumes only on the same.
    platform: str  # Name of the platform that ran the cases.
    started_at: str  # UTC, ISO 8601.
    versions: Mapping[str, Any] = field(default_factory=dict)
    """Versions of Python, perfsuite, pytest, pytest-benchmark and torch."""
    revision: Revision = field(default_factory=Revision)  # The code that is measured.
    arguments: tuple[str, ...] = ()  # pytest's command-line arguments.
    host: str = ""  # Name of the driver's host; empty in journals that do not have it.
    boot: str = ""
    """Boot of that host, see :func:`perfsuite.platforms.host.boot_of`; host names may repeat, boots do not."""
    schema: int = SCHEMA  # Version of the journal's form.


@dataclass(frozen=True, kw_only=True)
class RunRecord(Header):
    """A run, as a journal holds it."""

    name: str  # Session, or the file's name.
    results: Mapping[str, Result]  # The newest result of each case, by node id.
    session: str = ""
    started_at: str = ""
    failures: Mapping[str, str] = field(default_factory=dict)
    """Message of each case that failed by anything but its verdict."""
    interrupted: Mapping[str, str] = field(default_factory=dict)
    """Signal that ended the run while this case was running."""
    skips: Mapping[str, str] = field(default_factory=dict)
    """Reason of each case that was skipped; of one that failed as its mark expects it begins with XFAILED."""
    gate: GateRecord | None = None  # None without a verdict.
    end: RunEnd | None = None  # None for a run that was killed.
    peaks: Peaks | None = None
    """The peaks that had to be measured, in the newest version; shares of them are in the metrics of the results."""
    projections: Mapping[str, Projected] = field(default_factory=dict)  # Projections of cases by node id.
    path: Path | None = None  # The journal that the run was read from.
    truncated: bool = False  # The journal's last line was not complete and is left out.
    measured: Counter[str] = field(default_factory=Counter)  # Number of results that the journal has of each case.
    case_errors: Mapping[str, str] = field(default_factory=dict)
    """Whole message of each case that the ranks failed and that was not measured later."""

    @property
    def was_interrupted(self) -> bool:
        """Whether a signal or a lost agent ended the run before its last case."""
        return bool(self.interrupted) or (self.end is not None and self.end.exit_status == _INTERRUPTED)

    @property
    def cut(self) -> str:
        """How the run ended too early; empty if it did not, or if the count of interrupted cases says it."""
        if self.end is None and self.path is not None:
            return "the run did not end"
        return "the run was interrupted" if self.was_interrupted and not self.interrupted else ""

    @functools.cached_property
    def missing(self) -> Mapping[str, str]:
        """Why a case has no result, by node id: failed, interrupted or skipped."""
        missing = {case: f"failed: {first_line(message)}" for case, message in self.failures.items()}
        missing.update({case: f"interrupted by {signal}" for case, signal in self.interrupted.items()})
        missing.update({case: f"skipped: {reason}" for case, reason in self.skips.items()})
        return missing

    @functools.cached_property
    def environment(self) -> Mapping[str, Any]:
        """The environment of the newest result; empty without any result."""
        newest = max(reversed([*self.results.values()]), key=lambda result: result.started_at, default=None)
        return newest.environment if newest is not None else {}

    @property
    def hostname(self) -> str:
        """Name of the driver's host; empty if unknown."""
        return self.host or str(self.environment.get("hostname") or "")

    @property
    def simulated(self) -> bool:
        """Whether any result is of a simulated device."""
        return any(result.simulated for result in self.results.values())

    @property
    def hardware(self) -> str:
        """Return ``cpu (cpu-amd-epyc-2c)``."""
        return f"{self.platform} ({self.fingerprint})" if self.fingerprint else self.platform

    @property
    def torch(self) -> str:
        """Return torch's version; empty if unknown."""
        return str(self.versions.get("torch") or (self.environment.get("packages") or {}).get("torch") or "")
