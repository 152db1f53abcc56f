"""What a baseline keeps of a run, and the identity of the case that it ran."""

from __future__ import annotations

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
from perfsuite.record.result import Training

_MOST_DAYS = 36_500
QUANTILES = (0.05, 0.25, 0.50, 0.75, 0.95)
"""Which quantiles of the samples a run keeps."""
MIN_CLEAN = 10
"""A run with fewer clean samples is unstable, unless it has few samples and at least half of them are clean."""
CLEAN_RUNS = 5
"""Runs with enough clean samples from which on these alone are compared: as many as a comparison needs."""
DISTURBED_CPU_SHARE = 0.98
"""CPU time over wall time below which a core was shared; seen in 38 % of bad runs and in no good one."""
DIRTY = "-dirty"
"""What a run's ``commit`` ends with when the code had uncommitted changes."""
TELEMETRY_UNKNOWN = "unknown"
"""What a run's ``disturbance`` says on an accelerator whose telemetry cannot be read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricMeaning:
    """What a stored metric value means."""

    unit: str
    """As printed: ``GB/s``."""
    better: Better
    """Which direction is an improvement."""
    own: OwnMetric | None = field(default=None, compare=False)
    """What a metric of one's own is judged by; None for perfsuite's."""

    def __str__(self) -> str:
        """Unit and direction: ``GiB (lower is better)``."""
        return f"{self.unit or 'no unit'} ({self.better if self.better == 'neither' else f'{self.better} is better'})"


@dataclass(frozen=True, kw_only=True)
class CaseIdentity:
    """What must be equal for two runs to be comparable, and how pytest-benchmark names the case."""

    node: str
    """pytest node id, relative to the root directory."""
    world_size: int
    """Number of ranks."""
    backend: str
    """Process-group backend; empty when the case ran out of memory before it was known."""
    parameters: Mapping[str, Any]
    """Fields of the workload as plain JSON values."""
    workload: str
    """``module:Class`` or ``module:function``; its module is not compared: it may move."""
    group: str | None = None
    """pytest-benchmark's group."""
    metrics: Mapping[str, MetricMeaning] = field(default_factory=dict)
    """Unit and direction of each metric by name."""
    defaults: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Values that parameters have where nobody gives them; empty where an earlier version stored the case."""
    training: Training | None = field(default=None, compare=False)
    """What a training step trains, for projections; never compared: the parameters say it to this perfsuite."""

    @functools.cached_property
    def key(self) -> tuple[str, int, str, str]:
        """What identifies the case in a file; runs of equal keys belong together."""
        return (self.node, self.world_size, self.backend, json.dumps(self._filled, sort_keys=True))

    @property
    def unsaid(self) -> Mapping[str, Any]:
        """Defaults of parameters that nobody gave."""
        return {name: value for name, value in self.defaults.items() if name not in self.parameters}

    @functools.cached_property
    def _filled(self) -> Mapping[str, Any]:
        return {**self.unsaid, **self.parameters}

    @functools.cached_property
    def kind(self) -> str:
        """Cases of one kind share what is known about noise: the test function and the number of ranks."""
        return f"{self.node.partition('[')[0]} on {plural(self.world_size, 'rank')}"

    def differences(self, other: CaseIdentity) -> tuple[str, ...]:
        """What keeps two cases of one node id from being comparable, one phrase each; empty when they are.

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
        """What keeps two cases of one node id apart: its name, the value here and the value of the other.

        A parameter that only one side has, with its default value, counts as equal: the other side ran with that value.
        """
        ours, theirs = _class_of(self.workload), _class_of(other.workload)
        for name, now, then in (
            ("workload", ours, theirs),
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
        """Metrics of one's own with another unit or direction than in the other case; they alone cannot be compared."""
        both = {name: (now, other.metrics[name]) for name, now in self.metrics.items() if name in other.metrics}
        return {
            name: f"{name} is in {now} now, stored in {then}"
            for name, (now, then) in both.items()
            if now != then and (now.own or then.own)
        }


def _class_of(workload: str) -> str:
    """The class or function without its module, which may move."""
    return workload.rpartition(":")[2]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """One run of one case: one set of fresh rank processes, all its samples summarised."""

    session: str
    """Identifier of the session; runs of one session are replicates within it."""
    time: str
    """When the run started, UTC, ISO 8601."""
    ordinal: int = 0
    """How many runs of this case its session had before this one; above 0 the run is a within-session replicate."""
    outcome: Literal["measured", "out_of_memory"] = "measured"
    """Whether the case fitted into memory; without it there are no samples."""
    quantiles_s: tuple[float, ...] = ()
    """Seconds per iteration at QUANTILES of all samples, four significant digits."""
    location: float | None = None
    """ln of the median of the clean samples in seconds; None without a clean sample."""
    mean: float | None = None
    """ln of the mean of all samples in seconds; None without samples."""
    clean_mean: float | None = None
    """ln of the mean of the clean samples in seconds; None without one."""
    clean_p95: float | None = None
    """ln of the 95 % quantile of the clean samples in seconds; None as for ``clean_mean``."""
    yardstick: float | None = None
    """ln of the median yardstick time beside the clean samples in seconds; None when it was not timed."""
    all_yardstick: float | None = None
    """The same beside all samples; None where it is ``yardstick``."""
    yardstick_mean: float | None = None
    """ln of the mean yardstick time beside the clean samples; None as for ``yardstick``."""
    yardstick_p95: float | None = None
    """The same of the 95 % quantile."""
    control: str = ""
    """Kind of the yardstick, as ``sleep 16 ms``, or UNLIKE; empty without one."""
    samples: int = 0
    """Number of samples."""
    clean: int = 0
    """Samples during which no rank was switched out against its will."""
    iterations: int = 1
    """Iterations per sample."""
    cpu_share: float = 1.0
    """Smallest CPU time over wall time of any rank."""
    throttled: float = 0.0
    """Largest share of the periods of a rank's CPU quota in which it was held back; 0 where none is known."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metric values, six significant digits; a metric that could not be known is left out."""
    process: Literal["fresh", "reused"] = "fresh"
    """Whether the rank processes were started for this run alone."""
    disturbance: str = ""
    """What vendor telemetry saw (throttling, other processes), or ``unknown``; empty when it saw a quiet device."""
    commit: str = ""
    """Revision of the code that ran, with DIRTY at its end where it had uncommitted changes."""
    boot: str = ""
    """Identifier of the boot of the machine that it ran on; empty where it is not known."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    """The soft key: driver, torch and library versions, kernel, device ids, power cap, governor."""

    @property
    def key(self) -> tuple[str, str, int]:
        """What identifies the run within its case."""
        return (self.session, self.time, self.ordinal)

    @property
    def median_s(self) -> float:
        """Median seconds per iteration over all samples; a case that ran out of memory has none."""
        assert self.quantiles_s, "a run without samples has no median"
        return self.quantiles_s[2]

    @property
    def yardstick_of_all(self) -> float | None:
        """ln of the median yardstick time beside all samples in seconds; None when it was not timed."""
        return self.yardstick if self.all_yardstick is None else self.all_yardstick

    @property
    def disturbed_share(self) -> float:
        """Share of samples during which a rank was switched out against its will; a sample more and less counts."""
        return (self.samples - self.clean + 1) / (self.samples + 2)

    @property
    def is_disturbed(self) -> bool:
        """Whether telemetry saw the device throttled or shared; unknown is not disturbed, and is not clean either."""
        return self.disturbance not in ("", TELEMETRY_UNKNOWN)

    @property
    def has_clean(self) -> bool:
        """Whether enough samples are clean: MIN_CLEAN, or half of them when there are few."""
        return self.location is not None and (self.clean >= MIN_CLEAN or 2 * self.clean >= self.samples)


def moment(text: str) -> datetime:
    """A stored time; ValueError unless it is ISO 8601 with a date and a time.  Without an offset it is UTC.

    >>> moment("2025-11-21T02:44:12.123Z").isoformat()
    '2025-11-21T02:44:12.123000+00:00'
    """
    time = datetime.fromisoformat(text[:-1] + "+00:00" if text.endswith("Z") else text)
    return time if time.tzinfo else time.replace(tzinfo=timezone.utc)


def days_before(now: datetime, days: float) -> datetime:
    """The moment so many days before ``now``; ConfigurationError for a negative, endless or impossible age.

    >>> days_before(datetime(2026, 11, 26), 60).isoformat()
    '2026-09-27T00:00:00'
    """
    if not 0 <= days <= _MOST_DAYS:
        raise ConfigurationError(f"an age of {days:g} days is not between 0 and {_MOST_DAYS}; write for example 90")
    return now - timedelta(days=days)


def in_order(runs: Iterable[RunSummary]) -> tuple[RunSummary, ...]:
    """The runs, oldest first; a run that is there twice counts once.

    Raises BaselineError when two runs with one identity differ: one of them was changed.
    """
    unique: dict[tuple[str, str, int], RunSummary] = {}
    for run in runs:
        known = unique.setdefault(run.key, run)
        if known is not run and known != run:
            raise BaselineError(
                f"two different runs are both number {run.ordinal} of session {run.session} at {run.time}; "
                "one of them was changed after it was measured, so drop it before merging"
            )
    return tuple(sorted(unique.values(), key=lambda run: (moment(run.time), run.session, run.ordinal)))


def usually_clean(runs: Sequence[RunSummary]) -> bool:
    """Return whether the clean samples of these runs are compared alone: CLEAN_RUNS have enough, and half of all.

    Ranks that share cores switch each other out all the time: their cases have no clean samples, all are compared.
    """
    clean = [run.has_clean for run in runs if run.outcome == "measured"]
    return sum(clean) >= CLEAN_RUNS and mostly(clean)


def usable(runs: Iterable[RunSummary]) -> int:
    """Return how many runs telemetry does not call disturbed."""
    return sum(not run.is_disturbed for run in runs)


def why_unusable(runs: Sequence[RunSummary]) -> str:
    """Return how many stored runs no comparison can use, and the most frequent reason; empty where all can be used."""
    disturbed = Counter(run.disturbance for run in runs if run.is_disturbed)
    if not disturbed:
        return ""
    return f"{len(runs)} stored, {usable(runs) or 'none'} usable: {disturbed.most_common(1)[0][0]}"


def is_dirty(commit: str) -> bool:
    """Whether the code that a run names had uncommitted changes."""
    return commit.endswith(DIRTY)


def mostly(answers: Sequence[bool]) -> bool:
    """Whether at least half of the answers are yes.

    >>> mostly([True, False]), mostly([True, False, False])
    (True, False)
    """
    return 2 * sum(answers) >= len(answers)


def rounded(value: float, digits: int) -> float:
    """``value`` to ``digits`` significant digits.

    >>> rounded(0.00123456, 4), rounded(123456.0, 4), rounded(0.0, 4)
    (0.001235, 123500.0, 0.0)
    """
    return float(f"{value:.{digits - 1}e}")


def quantile(ordered: Sequence[float], share: float) -> float:
    """Quantile of ascending values, linear between neighbours.

    >>> quantile([1.0, 2.0, 4.0], 0.75)
    3.0
    """
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
