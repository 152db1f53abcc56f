"""The stored summary of a run, and the identity of its case."""

from __future__ import annotations

import fnmatch
import functools
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any, Literal

from perfsuite.base.errors import BaselineError, ConfigurationError
from perfsuite.base.units import plural
from perfsuite.record.own_metrics import Better, OwnMetric
from perfsuite.record.step import Training

_MOST_DAYS = 36_500
QUANTILES = (0.05, 0.25, 0.50, 0.75, 0.95)  # Stored quantiles of the samples.
MIN_CLEAN = 10
"""A run with fewer clean samples is unstable, unless it has few samples and at least half of them are clean."""
CLEAN_RUNS = 5  # Fewest runs with enough clean samples for a comparison of clean samples only.
DISTURBED_CPU_SHARE = 0.98
"""CPU time over wall time below which a core was shared; found in 38 % of bad runs and in no good run."""
DIRTY = "-dirty"  # Suffix of a run's ``commit`` if the code had uncommitted changes.
TELEMETRY_UNKNOWN = "unknown"  # A run's ``disturbance`` on an accelerator whose telemetry cannot be read.


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricMeaning:
    """Unit and direction of a stored metric."""

    unit: str  # Printed unit: ``GB/s``.
    better: Better  # Direction of an improvement.
    own: OwnMetric | None = field(default=None, compare=False)
    """Rule of a metric that the project registered; None for perfsuite's metrics."""

    def __str__(self) -> str:
        """Return unit and direction: ``GiB (lower is better)``."""
        return f"{self.unit or 'no unit'} ({self.better if self.better == 'neither' else f'{self.better} is better'})"


@dataclass(frozen=True, kw_only=True)
class CaseIdentity:
    """The properties that must be equal in comparable runs, and pytest-benchmark's name of the case."""

    node: str  # pytest node id, relative to the root directory.
    world_size: int
    backend: str  # Process-group backend; empty if the case ran out of memory before it was selected.
    parameters: Mapping[str, Any]  # Fields of the workload as plain JSON values.
    workload: str  # ``module:Class`` or ``module:function``; the module may change and is not compared.
    group: str | None = None  # pytest-benchmark's group.
    metrics: Mapping[str, MetricMeaning] = field(default_factory=dict)  # Unit and direction of each metric by name.
    defaults: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Defaults of the parameters; empty if an earlier version stored the case."""
    training: Training | None = field(default=None, compare=False)
    """The training step, for projections; not compared, because the parameters define it."""

    @functools.cached_property
    def key(self) -> tuple[str, int, str, str]:
        """The key of the case in a file."""
        return (self.node, self.world_size, self.backend, json.dumps(self._filled, sort_keys=True))

    @property
    def unsaid(self) -> Mapping[str, Any]:
        """Defaults of parameters that are not set."""
        return {name: value for name, value in self.defaults.items() if name not in self.parameters}

    @functools.cached_property
    def _filled(self) -> Mapping[str, Any]:
        return {**self.unsaid, **self.parameters}

    @functools.cached_property
    def kind(self) -> str:
        """Test function and number of ranks; cases of one kind share their estimates of noise."""
        return f"{self.node.partition('[')[0]} on {plural(self.world_size, 'rank')}"

    def differences(self, other: CaseIdentity) -> tuple[str, ...]:
        """Return a phrase for each property that differs between two cases of one node id; empty if comparable.

        >>> small = CaseIdentity(node="t.py::t", world_size=2, backend="gloo", parameters={"layers": 2}, workload="m:W")
        >>> large = CaseIdentity(node="t.py::t", world_size=4, backend="gloo", parameters={"layers": 8}, workload="m:W")
        >>> large.differences(small)
        ('world size 4, stored 2', 'layers=8, stored 2')
        """
        return tuple(
            f"{name}{'=' if name in self._filled or name in other._filled else ' '}{now}, stored {then}"
            for name, now, then in self.changed(other)
        )

    def changed(self, other: CaseIdentity) -> Iterator[tuple[str, object, object]]:
        """Yield name, value and the other case's value of each property that differs.

        A parameter of only one side with its default is equal: the other side ran with that value.
        """
        for name, now, then in (
            ("workload", self.workload.rpartition(":")[2], other.workload.rpartition(":")[2]),
            ("world size", self.world_size, other.world_size),
            ("backend", self.backend or other.backend, other.backend or self.backend),
        ):
            if now != then:
                yield name, now, then
        for name in sorted(set(self._filled) | set(other._filled)):
            alone = self if name not in other._filled else other if name not in self._filled else None
            now, then = self._filled.get(name, "absent"), other._filled.get(name, "absent")
            if now != then and not (alone and name in alone.defaults and alone.defaults[name] == alone._filled[name]):
                yield name, now, then
        for name, meaning in self.metrics.items():
            stored = other.metrics.get(name, meaning)
            if stored != meaning and name not in self.changed_metrics(other):
                yield f"unit of {name}", f"{meaning.unit} ({meaning.better})", f"{stored.unit} ({stored.better})"

    def changed_metrics(self, other: CaseIdentity) -> Mapping[str, str]:
        """Return phrases for own metrics whose unit or direction differs; only these metrics cannot be compared."""
        both = {name: (now, other.metrics[name]) for name, now in self.metrics.items() if name in other.metrics}
        return {
            name: f"{name} is in {now} now, stored in {then}"
            for name, (now, then) in both.items()
            if now != then and (now.own or then.own)
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """The summary of all samples in one run of a case, with one set of fresh rank processes."""

    session: str  # Identifier of the session; runs of one session are replicates within it.
    time: str  # Start of the run, UTC, ISO 8601.
    ordinal: int = 0
    """Number of earlier runs of this case in its session; above 0 the run is a within-session replicate."""
    outcome: Literal["measured", "out_of_memory"] = "measured"
    """``out_of_memory``: the case did not fit into memory, so it has no samples."""
    quantiles_s: tuple[float, ...] = ()  # Seconds per iteration at QUANTILES of all samples, four significant digits.
    location: float | None = None  # ln of the median of the clean samples in seconds; None without a clean sample.
    mean: float | None = None  # ln of the mean of all samples in seconds; None without samples.
    clean_mean: float | None = None  # ln of the mean of the clean samples in seconds; None without one.
    clean_p95: float | None = None
    """ln of the 95 % quantile of the clean samples in seconds; None as for ``clean_mean``."""
    yardstick: float | None = None
    """ln of the median yardstick time of the clean samples in seconds, or of all samples if too few are clean; None if
    it was not timed.
    """
    all_yardstick: float | None = None  # ln of the median yardstick time of all samples; None if it is ``yardstick``.
    yardstick_mean: float | None = None
    """ln of the mean yardstick time of the same samples; None as for ``yardstick``."""
    yardstick_p95: float | None = None  # ln of the 95 % quantile of these times.
    control: str = ""  # Kind of the yardstick, such as ``sleep 16 ms``, or UNLIKE; empty without one.
    samples: int = 0  # Number of samples.
    clean: int = 0  # Number of samples without an involuntary context switch of a rank.
    iterations: int = 1  # Iterations per sample.
    cpu_share: float = 1.0  # Smallest CPU time over wall time of any rank.
    waited: float | None = None
    """Largest share of the time of the samples in which a thread of a rank waited for a core; None if unknown."""
    throttled: float = 0.0  # Largest share of throttled periods in the CPU quota of a rank; 0 without a quota.
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metric values, six significant digits, without unknown ones."""
    process: Literal["fresh", "reused"] = "fresh"  # Whether the rank processes were started for this run only.
    disturbance: str = ""
    """Throttling or other processes in the vendor telemetry, or ``unknown``; empty for a quiet device."""
    commit: str = ""  # Revision of the code, with the suffix DIRTY if it had uncommitted changes.
    boot: str = ""  # Identifier of the machine's boot; empty if unknown.
    environment: Mapping[str, Any] = field(default_factory=dict)
    """The soft key: driver, torch and library versions, kernel, device ids, power cap, governor."""

    @property
    def key(self) -> tuple[str, str, int]:
        """The key of the run within its case."""
        return (self.session, self.time, self.ordinal)

    @property
    def median_s(self) -> float:
        """Median seconds per iteration over all samples; not defined for a case that ran out of memory."""
        assert self.quantiles_s, "a run without samples has no median"
        return self.quantiles_s[2]

    @property
    def yardstick_of_all(self) -> float | None:
        """ln of the median yardstick time of all samples in seconds; None if it was not timed."""
        return self.yardstick if self.all_yardstick is None else self.all_yardstick

    @property
    def disturbed_share(self) -> float:
        """Share of disturbed samples, estimated with one more disturbed and one more clean sample."""
        return (self.samples - self.clean + 1) / (self.samples + 2)

    @property
    def is_disturbed(self) -> bool:
        """Whether telemetry found the device throttled or shared; unknown is not disturbed."""
        return self.disturbance not in ("", TELEMETRY_UNKNOWN)

    @property
    def has_clean(self) -> bool:
        """Whether enough samples are clean."""
        return self.location is not None and enough_clean(self.clean, self.samples)


def enough_clean(clean: int, samples: int) -> bool:
    """Return whether enough samples of a run are clean: MIN_CLEAN, or half of them."""
    return clean >= MIN_CLEAN or 2 * clean >= samples


def moment(text: str) -> datetime:
    """Return a stored time, by default in UTC.  Raises ValueError unless it is ISO 8601 with a date and a time.

    >>> moment("2025-11-21T02:44:12.123Z").isoformat()
    '2025-11-21T02:44:12.123000+00:00'
    """
    time = datetime.fromisoformat(text[:-1] + "+00:00" if text.endswith("Z") else text)
    return time if time.tzinfo else time.replace(tzinfo=timezone.utc)


def days_before(now: datetime, days: float) -> datetime:
    """Return the time ``days`` before ``now``.  Raises ConfigurationError for a negative or too large age.

    >>> days_before(datetime(2026, 11, 26), 60).isoformat()
    '2026-09-27T00:00:00'
    """
    if not 0 <= days <= _MOST_DAYS:
        raise ConfigurationError(f"an age of {days:g} days is not between 0 and {_MOST_DAYS}; write for example 90")
    return now - timedelta(days=days)


def is_named(node: str, pattern: str) -> bool:
    """Return whether a node id is ``pattern`` or matches it as a shell pattern; False for an empty pattern."""
    return bool(pattern) and (node == pattern or fnmatch.fnmatchcase(node, pattern))


def in_order(runs: Iterable[RunSummary]) -> tuple[RunSummary, ...]:
    """Return the runs, oldest first, each once.

    Raises BaselineError if two runs with one identity differ, because one of them was changed.
    """
    unique: dict[tuple[str, str, int], RunSummary] = {}
    for run in runs:
        first = unique.setdefault(run.key, run)
        if first is not run and first != run:
            raise BaselineError(
                f"two different runs are both number {run.ordinal} of session {run.session} at {run.time}; "
                "one of them was changed after it was measured, so drop it before merging"
            )
    return tuple(sorted(unique.values(), key=lambda run: (moment(run.time), run.session, run.ordinal)))


def usually_clean(runs: Sequence[RunSummary]) -> bool:
    """Return whether only the clean samples of these runs are compared: CLEAN_RUNS and half of all have enough.

    Ranks that share cores interrupt each other all the time; their cases have no clean samples, so all are compared.
    """
    clean = [run.has_clean for run in runs if run.outcome == "measured"]
    return sum(clean) >= CLEAN_RUNS and mostly(clean)


def usable(runs: Iterable[RunSummary]) -> int:
    """Return the number of runs without a disturbance in the telemetry."""
    return sum(not run.is_disturbed for run in runs)


def why_unusable(runs: Sequence[RunSummary]) -> str:
    """Return the number of unusable stored runs with the most frequent reason; empty if all are usable."""
    disturbed = Counter(run.disturbance for run in runs if run.is_disturbed)
    if not disturbed:
        return ""
    return f"{len(runs)} stored, {usable(runs) or 'none'} usable: {disturbed.most_common(1)[0][0]}"


def is_dirty(commit: str) -> bool:
    """Return whether the code of a commit had uncommitted changes."""
    return commit.endswith(DIRTY)


def mostly(answers: Sequence[bool]) -> bool:
    """Return whether at least half of the answers are yes.

    >>> mostly([True, False]), mostly([True, False, False])
    (True, False)
    """
    return 2 * sum(answers) >= len(answers)


def rounded(value: float, digits: int) -> float:
    """Return ``value`` with ``digits`` significant digits.

    >>> rounded(0.00123456, 4), rounded(123456.0, 4), rounded(0.0, 4)
    (0.001235, 123500.0, 0.0)
    """
    return float(f"{value:.{digits - 1}e}")


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return a quantile of ascending values, linear between neighbours.

    >>> quantile([1.0, 2.0, 4.0], 0.75)
    3.0
    """
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
