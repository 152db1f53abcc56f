"""Print a history: its sessions, and its changes with the commits between which they lie."""

from __future__ import annotations

from collections.abc import Iterator

from perfsuite.base.text import escaped
from perfsuite.base.units import plural, significant
from perfsuite.history.file import HistoryFile, HistorySession
from perfsuite.history.findings import SUITE, Findings, HistoryChange
from perfsuite.history.git import short
from perfsuite.history.order import MIN_SUITE, OrderedSessions
from perfsuite.statistics.change_points import LEAST_VALUES

SHOWN_COMMITS = 10  # Most commits of a change to list; the others are counted.
SHOWN_APART = 5
SHOWN_OWN = 10  # Most own metrics to list; the others are counted.


def list_lines(history: HistoryFile) -> Iterator[str]:
    """Yield a line per session, oldest first."""
    yield f"{history.path}: {history.hardware or 'empty'}, {plural(len(history.sessions), 'session')}"
    for session in history.sessions:
        yield f"  {session_line(session)}"


def session_line(session: HistorySession) -> str:
    """Return time, commit, branch, cases and subject of a session in one line."""
    revision = session.revision
    branch = escaped(revision.branch) or "no branch"
    dirty = " with uncommitted changes" if revision.dirty else ""
    where = f"{short(escaped(revision.commit))} on {branch}{dirty}"
    return f"{_minute(session)}  {where}  {plural(len(session.cases), 'case')}  {escaped(revision.subject)}".rstrip()


def show_lines(history: HistoryFile, findings: Findings) -> Iterator[str]:
    """Yield the findings of a history: changes, accumulated changes, own metrics, environment, excluded sessions."""
    yield from head_lines(history, findings)
    yield ""
    yield from _change_lines(findings)
    yield from _accumulated_lines(findings)
    yield from _own_lines(findings.ordered)
    yield from _environment_lines(findings)
    yield from _apart_lines(findings.ordered)


def _own_lines(ordered: OrderedSessions) -> Iterator[str]:
    """Yield the project's own metrics in their first and last session, the largest change for the worse first.

    Values of different units are on separate lines.
    """
    series: dict[tuple[str, str, str, str], list[float]] = {}
    for session in ordered.sessions:
        for case, point in session.cases.items():
            for name, meaning in session.own.items():
                if name in point.metrics:
                    key = (name, case, meaning.unit, meaning.better)
                    series.setdefault(key, []).append(point.metrics[name])
    lines = []
    for (name, case, unit, better), values in series.items():
        change = values[-1] / values[0] - 1 if values[0] > 0 else 0.0
        line = (
            f"  {escaped(name)} {significant(values[0])} -> {significant(values[-1])} {escaped(unit)}".rstrip()
            + f", {100 * change:+.3g} %, between {significant(min(values))} and {significant(max(values))} in "
            f"{plural(len(values), 'session')}: {escaped(case)}"
        )
        lines.append((better == "neither", change if better == "higher" else -change, line))
    if lines:
        yield "own metrics, first and last session (changes are not judged):"
        yield from (line for *_, line in sorted(lines)[:SHOWN_OWN])
    if len(lines) > SHOWN_OWN:
        yield f"  and {len(lines) - SHOWN_OWN} more; perfsuite export has them all"


def head_lines(history: HistoryFile, findings: Findings) -> Iterator[str]:
    """Yield the searched sessions and cases, and notes about them."""
    ordered = findings.ordered
    where = f"on {escaped(ordered.branch)} " if ordered.branch else ""
    yield (
        f"{history.path}: {history.hardware or 'empty'}, {plural(len(ordered.sessions), 'session')} {where}"
        f"({len(ordered.apart)} apart), {plural(len(findings.cases), 'case')}"
    )
    for note in ordered.notes:
        yield f"note: {note}"
    unknown = findings.table.knows_shift.count(False)
    if unknown:
        yield f"note: {plural(unknown, 'session')} with fewer than {MIN_SUITE} cases: host noise could not be removed"
    if findings.most_sessions < LEAST_VALUES:
        yield f"a change needs {LEAST_VALUES} sessions of a case; no case has more than {findings.most_sessions}"
    elif not findings.changes and not findings.accumulated:
        yield "no change was found in these sessions"


def _change_lines(findings: Findings) -> Iterator[str]:
    for change in findings.changes:
        faster = "slower" if change.ratio.value > 1 else "faster"
        yield f"{change.ratio} {faster}  {escaped(change.case)}"
        yield f"    {where(findings.ordered, change)}"
        if steps := steps_between(findings.ordered, change):
            yield f"    {steps}"
        for commit in commit_lines(findings.ordered, change, SHOWN_COMMITS):
            yield f"      {commit}"
        for phrase in change.environment:
            yield f"    environment changed there: {escaped(phrase)}"
        if change.case == SUITE:
            yield "    caused by the host, or by code of all cases; subtracted from every other case"


def commit_lines(ordered: OrderedSessions, change: HistoryChange, most: int) -> Iterator[str]:
    """Yield the commits of a change: at most ``most`` likely ones, with the number of commits before and after."""
    places = [ordered.places[index] for index in (change.before, change.at, change.until)]
    before, *likely = [place for place in places if place is not None] or [0]
    middle = sum(likely) // max(1, len(likely)) - before - 1
    begin = max(0, min(middle - most // 2, len(change.commits) - most))
    if begin:
        yield plural(begin, "earlier commit")
    for commit in change.commits[begin : begin + most]:
        yield f"{short(commit)}  {escaped(ordered.subjects[commit])}"
    if later := change.commits[begin + most :]:
        yield plural(len(later), "later commit")


def where(ordered: OrderedSessions, change: HistoryChange) -> str:
    """Return the sessions or commits between which a change lies."""
    before, after, first = (ordered.sessions[index] for index in (change.before, change.after, change.at))
    old, new = (short(escaped(session.revision.commit)) for session in (before, after))
    times = f"{_minute(before)} and {_minute(after)}"
    if change.same_commit:
        return f"between two sessions of {old}, {times}: not the code"
    if len(change.commits) == 1:
        return f"one commit after {old}:"
    if change.commits:
        among = f"among {plural(len(change.commits), 'commit')} after {old}, up to {new}"
        likely = f", most likely first measured at {short(escaped(first.revision.commit))}"
        return f"step by step {among}" if change.is_drift else f"{among}{likely}"
    return f"between {times}, {old} and {new}"


def steps_between(ordered: OrderedSessions, change: HistoryChange) -> str:
    """Return the likely steps of a drift, or the commits of several small steps that look like one; else empty."""
    sessions = ordered.sessions
    if change.is_drift:
        places = (f"{ratio.percent} at {short(escaped(sessions[at].revision.commit))}" for at, ratio in change.steps)
        return f"seen as {', '.join(places)}; the single steps may be more and smaller"
    before, after = (sessions[index] for index in change.at_most)
    commits = ordered.commits_between(*change.at_most)
    if change.at_most == (change.before, change.after) or len(commits) == len(change.commits) > 0:
        return ""
    several = "several small steps would look the same"
    if not commits:
        return f"{several} between {_minute(before)} and {_minute(after)}"
    old, new = (short(escaped(session.revision.commit)) for session in (before, after))
    return f"{several} among {plural(len(commits), 'commit')} after {old}, up to {new}"


def _minute(session: HistorySession) -> str:
    return escaped(session.time)[:16]


def _accumulated_lines(findings: Findings) -> Iterator[str]:
    sessions = findings.ordered.sessions
    for is_best, title in ((False, f"accumulated since {escaped(findings.since)}"), (True, "above the best level")):
        rows = [one for one in findings.accumulated if one.is_best == is_best]
        if rows:
            yield ""
            yield f"{title}:"
        for one in rows:
            best = f", reached at {short(escaped(sessions[one.since].revision.commit))}" if is_best else ""
            yield f"  {one.ratio}  {escaped(one.case)}{best}"


def _environment_lines(findings: Findings) -> Iterator[str]:
    if findings.environment:
        yield ""
        yield "environment:"
    for at, phrases in findings.environment:
        session = findings.ordered.sessions[at]
        commit = short(escaped(session.revision.commit))
        yield f"  {_minute(session)} {commit}: {escaped('; '.join(phrases))}"


def _apart_lines(ordered: OrderedSessions) -> Iterator[str]:
    if ordered.apart:
        yield ""
        yield "excluded from the search:"
    for session, why in ordered.apart[-SHOWN_APART:]:
        yield f"  {session_line(session)}: {escaped(why)}"
    if len(ordered.apart) > SHOWN_APART:
        yield f"  and {plural(len(ordered.apart) - SHOWN_APART, 'older session')}"
