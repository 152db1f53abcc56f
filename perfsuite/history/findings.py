"""Search a history: changes of level with the commits between which they lie, and the sum of small changes."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from perfsuite.base.errors import ConfigurationError
from perfsuite.gate.comparable import causes
from perfsuite.history.file import HistorySession
from perfsuite.history.git import Repository
from perfsuite.history.order import OrderedSessions, SeriesTable, in_order, of_one_host, table_of, with_one_setting
from perfsuite.statistics.change_points import LEAST_CHANGE, Levels, Ramp, find_changes, ramps
from perfsuite.statistics.robust import median, t_quantile

LEVEL = 5  # Sessions whose mean is a level: the newest one, the one at a tag, or the best one.
_ALPHA = 0.05  # Probability of an accumulated change in any case of an unchanged history.
_DOF = 30


@dataclass(frozen=True, kw_only=True)
class Accumulated:
    """The change of a case's time since a session, small changes included; only if it is significant."""

    case: str
    ratio: Ratio
    since: int  # Index of the last session of the compared level.
    is_best: bool  # Whether the best level is compared; otherwise it is the level at a tag or revision.


def _accumulated(
    table: SeriesTable, levels: Mapping[str, Levels], cases: Sequence[str], until: int
) -> Iterator[Accumulated]:
    """Yield cases whose newest level differs from that at session ``until``, or is worse than the best one."""
    for case in cases:
        rows, level = table.rows_of(table.cases.index(case)), levels[case]
        if len(rows) < 2 * LEVEL:
            continue
        sums = list(accumulate(level.clipped, initial=0.0))
        means = [(sums[end] - sums[end - LEVEL]) / LEVEL for end in range(LEVEL, len(sums))]  # of LEVEL neighbours
        error = level.sigma * math.sqrt(2 * level.inflation / LEVEL)
        at = sum(row <= until for row in rows)
        if LEVEL <= at <= len(rows) - LEVEL and (
            ratio := _surely(means[-1] - means[at - LEVEL], error, len(cases), two_sided=True)
        ):
            yield Accumulated(case=case, ratio=ratio, since=rows[at - 1], is_best=False)
        earlier = means[: len(rows) - 2 * LEVEL + 1]
        best = min(range(len(earlier)), key=earlier.__getitem__)
        looks = len(cases) * len(earlier)
        if ratio := _surely(means[-1] - earlier[best], error, looks, two_sided=False):
            yield Accumulated(case=case, ratio=ratio, since=rows[best + LEVEL - 1], is_best=True)


def _surely(difference: float, error: float, looks: int, *, two_sided: bool) -> Ratio | None:
    size = abs(difference) if two_sided else difference
    if size < LEAST_CHANGE or size < t_quantile(1 - _ALPHA / (2 * looks), _DOF) * error:
        return None
    half = t_quantile(0.975, _DOF) * error
    return Ratio.of_logs(difference, difference - half, difference + half)


SUITE = "all cases together"
"""Name of the common shift of all cases in a session: by the host, or by code that all of them run."""
NOTICEABLE_SHIFT = 0.2  # Share of a case's noise above which a session's shift changes the findings.


@dataclass(frozen=True, kw_only=True)
class HistoryChange:
    """A change of one case's level, in one step, or in several if it drifted.  Indexes are of ordered sessions."""

    case: str  # Node id, or SUITE.
    ratio: Ratio  # Time after over time before.
    steps: tuple[tuple[int, Ratio], ...]
    """Steps that the values show, oldest first; a drift over many commits may have more.

    Each is the index of the session that is most likely the first after the step, and time after over time before.
    """
    is_drift: bool  # Whether it certainly took more than one step.
    before: int  # Index of the last session that certainly had the old level.
    after: int  # Index of the first session that certainly had the new one.
    at_most: tuple[int, int]  # ``before`` and ``after`` if a step is a group of several changes, which looks the same.
    commits: tuple[str, ...]
    """Full ids of the commits that may have caused it, oldest first.

    Empty if their order is unknown, or if both sides measured the same commit.
    """
    same_commit: bool  # Whether both sides measured one commit, so the code is not the cause.
    environment: tuple[str, ...]  # Changes of the environment in the same period.

    @property
    def at(self) -> int:
        """Index of the session that most likely was the first after the old level."""
        return self.steps[0][0]

    @property
    def until(self) -> int:
        """Index of the session that most likely was the first at the new level."""
        return self.steps[-1][0]


EnvironmentChange = tuple[int, tuple[str, ...]]
"""Index of the first session with a new soft key, and phrases on the changes since the session before it."""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """The findings of ordered sessions."""

    ordered: OrderedSessions
    table: SeriesTable
    cases: tuple[str, ...]  # The searched cases.
    changes: tuple[HistoryChange, ...]  # Newest first; changes of one session by size.
    accumulated: tuple[Accumulated, ...]  # Largest first.
    since: str  # The tag or revision of ``accumulated``, apart from the best level; empty without one.
    environment: tuple[EnvironmentChange, ...]
    nothing_since: bool = False  # Whether no session was measured after the revision ``since``.

    @functools.cached_property
    def most_sessions(self) -> int:
        """The largest number of sessions that have one of the searched cases."""
        column = {case: index for index, case in enumerate(self.table.cases)}
        return max((len(self.table.rows_of(column[case])) for case in self.cases), default=0)


def searched(
    sessions: Sequence[HistorySession],
    repository: Repository,
    branch: str = "",
    case: str = "",
    since: str = "",
    *,
    host: str = "",
) -> Findings:
    """Return the findings of sessions, oldest first, on a branch.

    Raises PerfsuiteError for an unknown branch, revision or host.
    """
    ordered = of_one_host(in_order(sessions, repository, branch), host)
    later = tuple(repository.first_parents(ordered.branch, since)) if since else ()
    return findings_of(ordered, case=case, since=since, since_commits=later)


def findings_of(
    ordered: OrderedSessions, *, case: str = "", since: str = "", since_commits: Sequence[str] = ()
) -> Findings:
    """Return the findings of ordered sessions in the cases whose id contains ``case``.

    ``since`` is a revision and ``since_commits`` are the commits of the branch after it: changes before it are left
    out, and it replaces the last tag.  Raises ConfigurationError if no case contains the text.
    """
    ordered = with_one_setting(ordered)
    table, levels = _searched(ordered.sessions)
    names = tuple(name for name in table.cases if case in name)
    if case and not names:
        raise ConfigurationError(f"--case {case!r}: no id of a case in this history contains it; leave it out for all")
    environment = tuple(_environment(ordered))
    first = 0
    if since:
        later, sessions = set(since_commits), enumerate(ordered.sessions)
        first = next((index for index, one in sessions if one.revision.commit in later), len(ordered.sessions))
    changes = [
        _change_of(ordered, name, change, table.rows_of(table.cases.index(name)), environment)
        for name in names
        for change in ramps(levels[name])
    ]
    if not case:
        rows = [row for row, knows in enumerate(table.knows_shift) if knows]
        suite = find_changes([table.shifts[row] for row in rows])
        changes += [_change_of(ordered, SUITE, change, rows, environment) for change in ramps(suite)]
    changes.sort(key=lambda change: (-change.until, -abs(math.log(change.ratio.value))))
    look_back, index = _looked_back(ordered, since, first)
    sums = sorted(
        _accumulated(table, levels, names, index), key=lambda one: (-abs(math.log(one.ratio.value)), one.case)
    )
    return Findings(
        ordered=ordered,
        table=table,
        cases=names,
        changes=tuple(change for change in changes if change.until >= first),
        accumulated=tuple(sums),
        since=look_back,
        environment=tuple(change for change in environment if change[0] >= first),
        nothing_since=first >= len(ordered.sessions),
    )


def _searched(sessions: Sequence[HistorySession]) -> tuple[SeriesTable, dict[str, Levels]]:
    """Return the table and the levels of its cases.

    Cases that changed would distort the common shift of a session.  If the shifts without them differ noticeably, the
    shifts are estimated from the other cases and the search is repeated.
    """
    table = table_of(sessions)
    levels = _levels(table)
    unchanged = [case for case in table.cases if not levels[case].changes]
    corrected = table_of(sessions, witnesses=unchanged)
    moved = max((abs(new - old) for new, old in zip(corrected.shifts, table.shifts, strict=True)), default=0.0)
    if moved <= NOTICEABLE_SHIFT * median([level.sigma for level in levels.values()] or [0.0]):
        return table, levels
    return corrected, _levels(corrected)


def _levels(table: SeriesTable) -> dict[str, Levels]:
    return {case: find_changes(table.values_of(column)) for column, case in enumerate(table.cases)}


def _change_of(
    ordered: OrderedSessions, case: str, ramp: Ramp, rows: Sequence[int], environment: Sequence[EnvironmentChange]
) -> HistoryChange:
    (before, after), at_most = ((rows[first - 1], rows[last]) for first, last in (ramp.between, ramp.at_most))
    return HistoryChange(
        case=case,
        ratio=Ratio.of_logs(ramp.effect, ramp.low, ramp.high),
        steps=tuple((rows[step.at], Ratio.of_logs(step.effect, step.low, step.high)) for step in ramp.steps),
        is_drift=ramp.is_drift,
        before=before,
        after=after,
        at_most=at_most,
        commits=ordered.commits_between(before, after),
        same_commit=ordered.places[before] is not None and ordered.places[before] == ordered.places[after],
        environment=tuple(phrase for at, phrases in environment if before < at <= after for phrase in phrases),
    )


def _environment(ordered: OrderedSessions) -> Iterator[EnvironmentChange]:
    for index, (before, now) in enumerate(zip(ordered.sessions, ordered.sessions[1:], strict=False), start=1):
        differ = before.environment != now.environment
        if phrases := causes(now.environment, before.environment) if differ else ():
            yield index, tuple(text.replace(", stored ", ", before ") for text in phrases)


def _looked_back(ordered: OrderedSessions, since: str, first: int) -> tuple[str, int]:
    """Return the revision for accumulated changes, and the index of the last session up to it."""
    if since:
        return since, first - 1
    name, commit = ordered.tag or ("", "")
    if commit not in ordered.subjects:
        return "", -1
    place = ordered.commits.index(commit)
    before = [index for index, other in enumerate(ordered.places) if other is not None and other <= place]
    return (name, before[-1]) if before else ("", -1)


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """A ratio of two times with its 95 % interval: 1.05 is 5 % slower."""

    value: float
    low: float
    high: float

    @classmethod
    def of_logs(cls, value: float, low: float, high: float) -> Ratio:
        """Return the ratio of differences of logarithms."""
        return cls(value=math.exp(value), low=math.exp(low), high=math.exp(high))

    @property
    def percent(self) -> str:
        """The change without its interval: ``+5.0 %``."""
        return f"{100 * (self.value - 1):+.1f} %"

    def __str__(self) -> str:
        low, high = (f"{percent:+.1f}" for percent in (100 * (self.low - 1), 100 * (self.high - 1)))
        return f"{self.percent} [{low}, {high}]"
