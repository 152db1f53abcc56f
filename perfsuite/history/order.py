"""Order sessions by the first-parent commits of a branch, and tabulate the times of their cases.

Sessions of other branches are excluded. The table holds times without the common shift of all cases in a session.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from perfsuite.base.errors import ConfigurationError
from perfsuite.base.text import escaped, listed
from perfsuite.base.units import plural
from perfsuite.baselines.hosts import NAMED_HOSTS, host_numbers, named
from perfsuite.baselines.runs import moment
from perfsuite.history.file import HistorySession, have_equal_settings
from perfsuite.history.git import Repository
from perfsuite.statistics.change_points import LEAST_VALUES

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Times = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class OrderedSessions:
    """The sessions of a branch in the order of its commits."""

    branch: str  # Empty without a repository.
    sessions: tuple[HistorySession, ...]  # Sessions of the branch, oldest commit first; sessions of one commit by time.
    places: tuple[int | None, ...]
    """Index of each session's commit on the branch; None if the session is placed by time."""
    subjects: Mapping[str, str]  # Subjects of the branch's commits by full id, oldest first.
    apart: tuple[tuple[HistorySession, str], ...] = ()  # Excluded sessions, with the reasons.
    notes: tuple[str, ...] = ()  # Remarks about the order.
    tag: tuple[str, str] | None = None  # Name and full commit id of the last tag of the branch before its tip.

    @functools.cached_property
    def commits(self) -> tuple[str, ...]:
        """Full ids of the branch's commits, oldest first."""
        return tuple(self.subjects)

    def commits_between(self, before: int, after: int) -> tuple[str, ...]:
        """Return the commits after that of one session up to that of another, oldest first; empty if unknown."""
        old, new = self.places[before], self.places[after]
        return self.commits[old + 1 : new + 1] if old is not None and new is not None else ()


def in_order(sessions: Sequence[HistorySession], repository: Repository, branch: str = "") -> OrderedSessions:
    """Return sessions, passed oldest first, in the order of a branch; by default the checked-out one.

    A session without a commit, or with one that this repository lacks, is placed by its time, unless it belongs to
    another branch.  Raises ConfigurationError for an unknown branch.
    """
    if not repository.is_there():
        apart = tuple((session, _DIRTY) for session in sessions if session.revision.dirty)
        clean = tuple(session for session in sessions if not session.revision.dirty)
        why = repository.refusal or f"{repository.root} is not a git repository with a commit"
        note = f"{why}: ordered by time"
        return OrderedSessions(
            branch=branch, sessions=clean, places=(None,) * len(clean), subjects={}, apart=apart, notes=(note,)
        )
    name = branch or repository.branch() or "HEAD"
    subjects = repository.first_parents(name)
    place = {commit: index for index, commit in enumerate(subjects)}
    present = repository.present({session.revision.commit for session in sessions} - set(place))
    on_branch: list[tuple[int, HistorySession]] = []
    by_time: list[HistorySession] = []
    apart_list: list[tuple[HistorySession, str]] = []
    for session in sessions:
        if why := _why_apart(session, name, place, present):
            apart_list.append((session, why))
        elif session.revision.commit in place:
            on_branch.append((place[session.revision.commit], session))
        else:
            by_time.append(session)
    on_branch.sort(key=lambda placed: placed[0])  # stable: sessions of one commit keep their order
    ordered = _with(on_branch, by_time)
    return OrderedSessions(
        branch=name,
        sessions=tuple(session for _, session in ordered),
        places=tuple(index for index, _ in ordered),
        subjects=subjects,
        apart=tuple(apart_list),
        notes=_notes(by_time, repository),
        tag=repository.last_tag(name),
    )


def with_one_setting(ordered: OrderedSessions) -> OrderedSessions:
    """Return the sessions without cases whose parameters, ranks or backend differ from their newest session."""
    newest = {case: session for session in ordered.sessions for case, point in session.cases.items() if point.settings}
    sessions, apart = [], {}
    for session in ordered.sessions:
        compared = [case for case in session.cases if case in newest]
        other = {case for case in compared if not have_equal_settings(case, session, newest[case])}
        apart.update(dict.fromkeys(other, session))
        kept = {case: point for case, point in session.cases.items() if case not in other}
        sessions.append(replace(session, cases=kept) if other else session)
    if not apart:
        return ordered
    case, last = list(apart.items())[-1]
    note = (
        f"{plural(len(apart), 'case')} ran with other parameters, ranks or backend up to {last.time[:16]}: those times "
        f"are not compared with the later ones, e.g. {escaped(case)}"
    )
    return replace(ordered, sessions=tuple(sessions), notes=(*ordered.notes, note))


ALL_HOSTS = "all"


def of_one_host(ordered: OrderedSessions, host: str = "") -> OrderedSessions:
    """Return the sessions of one host; exclude those of other hosts with equal hardware.

    Without ``host`` it is the host with most sessions, if most sessions are of hosts with enough of them for a search;
    otherwise, as with runners that live for one session, all hosts are searched together, with a note.  Raises
    ConfigurationError for a host without sessions.
    """
    number = host_numbers(session.host for session in ordered.sessions)
    counts = Counter(number[session.host] for session in ordered.sessions)
    names: dict[int, str] = {}
    for identity, at in number.items():
        names.setdefault(at, escaped(identity.name))
    chosen = next((at for identity, at in number.items() if host and identity.name == host), None)
    if host and host != ALL_HOSTS and chosen is None:
        raise ConfigurationError(
            f"--host {host!r} has no session on this branch; hosts are "
            f"{listed([name for name in names.values() if name], NAMED_HOSTS) or 'unknown'}"
        )
    if len(counts) < 2:
        return ordered
    most = counts.most_common()
    note = f"sessions are of several hosts of equal hardware: {named([(names[at], n) for at, n in most], 'session')}"
    if chosen is None and (host or 2 * sum(n for _, n in most if n >= LEAST_VALUES) <= len(ordered.sessions)):
        note = f"{note}; they are searched together, so differences between hosts count as noise"
        return replace(ordered, notes=(*ordered.notes, note))
    chosen = most[0][0] if chosen is None else chosen
    kept = [at for at, session in enumerate(ordered.sessions) if number[session.host] == chosen]
    others = (session for session in ordered.sessions if number[session.host] != chosen)
    return replace(
        ordered,
        sessions=tuple(ordered.sessions[at] for at in kept),
        places=tuple(ordered.places[at] for at in kept),
        apart=(*ordered.apart, *((session, f"on host {session.host.name}") for session in others)),
        notes=(*ordered.notes, f"{note}; only {names[chosen]} is searched (--host=NAME, --host={ALL_HOSTS})"),
    )


_DIRTY = "uncommitted changes"


def _why_apart(session: HistorySession, branch: str, place: Mapping[str, int], present: frozenset[str]) -> str:
    revision = session.revision
    if revision.dirty:
        return _DIRTY
    if revision.commit in place:
        return ""
    other = revision.branch not in ("", branch)
    if revision.commit in present:
        return f"on branch {revision.branch}" if other else "its commit is not on the branch's first-parent line"
    return f"on branch {revision.branch}, whose commit is not in this clone" if other else ""


def _with(
    on_branch: Sequence[tuple[int, HistorySession]], by_time: Sequence[HistorySession]
) -> list[tuple[int | None, HistorySession]]:
    ordered: list[tuple[int | None, HistorySession]] = list(on_branch)
    for session in by_time:
        began = moment(session.time)
        later = (index for index, (_, other) in enumerate(ordered) if moment(other.time) > began)
        ordered.insert(next(later, len(ordered)), (None, session))
    return ordered


def _notes(by_time: Sequence[HistorySession], repository: Repository) -> tuple[str, ...]:
    notes = []
    missing = sum(bool(session.revision.commit) for session in by_time)
    if missing:
        why = repository.why_missing() or "it was rewritten, or is not fetched"
        notes.append(f"{plural(missing, 'session')} placed by time: the commit is not in this repository ({why})")
    if len(by_time) > missing:
        unknown = plural(len(by_time) - missing, "session")
        notes.append(f"{unknown} placed by time: measured outside of git, or without an answer of git")
    return tuple(notes)


MIN_SUITE = 20  # Fewest cases of a session for an estimate of their common shift, as in the gate.
_ROUNDS = 4  # Rounds of Tukey's median polish; more rounds change nothing.


@dataclass(frozen=True, kw_only=True)
class SeriesTable:
    """ln times of all cases in all sessions."""

    cases: tuple[str, ...]  # Node ids, sorted.
    values: Times  # One row per session, one column per case; NaN if the session does not have the case.
    shifts: tuple[float, ...]  # Common shift of all cases in each session, subtracted from its row; 0 if unknown.
    knows_shift: tuple[bool, ...]  # Whether a session has enough cases for an estimate.

    def rows_of(self, column: int) -> list[int]:
        """Return the rows that have a case."""
        rows: list[int] = (self.values[:, column] == self.values[:, column]).nonzero()[0].tolist()  # NaN is not itself
        return rows

    def values_of(self, column: int) -> list[float]:
        """Return the values of a case in the rows that have it."""
        values: list[float] = self.values[self.rows_of(column), column].tolist()
        return values


def table_of(sessions: Sequence[HistorySession], *, witnesses: Collection[str] | None = None) -> SeriesTable:
    """Return the table of sessions in their order.

    The shift of a session with at least MIN_SUITE cases is the median distance of its cases from their levels; levels
    and shifts are estimated in turn (Tukey's median polish).  ``witnesses``: estimate the shifts from these cases only,
    if every session has enough of them.
    """
    import numpy as np

    cases = sorted({case for session in sessions for case in session.cases})
    column = {case: index for index, case in enumerate(cases)}
    values = np.full((len(sessions), len(cases)), np.nan)
    for row, session in enumerate(sessions):
        columns = [column[case] for case in session.cases]
        values[row, columns] = [point.log_time for point in session.cases.values()]
    knows = tuple(len(session.cases) >= MIN_SUITE for session in sessions)
    chosen = values if witnesses is None else values[:, [column[case] for case in witnesses]]
    enough = (~np.isnan(chosen)).sum(axis=1) >= MIN_SUITE
    shifts = _shifts(chosen if all(enough[list(knows)]) else values, knows)
    return SeriesTable(
        cases=tuple(cases), values=values - shifts[:, None], shifts=tuple(shifts.tolist()), knows_shift=knows
    )


def _shifts(values: Times, knows: Sequence[bool]) -> Times:
    import numpy as np

    total = np.zeros(len(values))
    rows = np.flatnonzero(knows)
    if not len(rows):
        return total
    rest = values[rows]
    rest = rest[:, ~np.isnan(rest).all(axis=0)]
    taken = np.zeros(len(rows))
    for _ in range(_ROUNDS):
        away = np.nanmedian(rest - np.nanmedian(rest, axis=0), axis=1)
        rest = rest - away[:, None]
        taken += away
    total[rows] = taken - np.median(taken)
    return total
