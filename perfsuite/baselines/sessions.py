"""Group pytest sessions into sessions of the machine, and select the reference runs of an epoch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from perfsuite.baselines.runs import RunSummary, in_order, moment

SESSION_GAP = timedelta(hours=1)
"""Longest pause in a session of the machine, which has one boot and one commit."""
REFERENCE_RUNS = 8
"""Runs of a complete reference, if they are of REFERENCE_SESSIONS."""
REFERENCE_SESSIONS = 3
"""Sessions of the machine in a complete reference."""
REFERENCE_MOST = 12
"""Most runs of a reference."""


@dataclass(kw_only=True, slots=True)
class _Span:
    """One pytest session: boot and commit of its runs, and the starts of the first and the last one."""

    boot: str
    commit: str
    first: datetime
    last: datetime


def machine_sessions(runs: Iterable[RunSummary]) -> dict[str, str]:
    """Return the session of the machine of each pytest session; it is named after its first pytest session.

    Runs within minutes share the host's noise, even if different commands started them.  A new session of the machine
    begins with another boot, with another commit, or after a pause of more than SESSION_GAP.
    """
    spans: dict[str, _Span] = {}
    for run in runs:
        time = moment(run.time)
        span = spans.get(run.session)
        if span is None:
            spans[run.session] = _Span(boot=run.boot, commit=run.commit, first=time, last=time)
        elif time < span.first:
            span.first, span.boot, span.commit = time, run.boot, run.commit
        elif time > span.last:
            span.last = time
    current: dict[tuple[str, str], tuple[str, datetime]] = {}
    machine_session = {}
    for session, span in sorted(spans.items(), key=lambda item: (item[1].first, item[0])):
        name, last = current.get((span.boot, span.commit), (session, span.first))
        if span.first - last > SESSION_GAP:
            name = session
        current[span.boot, span.commit] = name, max(last, span.last)
        machine_session[session] = name
    return machine_session


def count_sessions(runs: Iterable[RunSummary], machine_session: Mapping[str, str]) -> int:
    """Return the number of the machine's sessions with these runs."""
    return len({machine_session[run.session] for run in runs})


def is_complete(reference: Sequence[RunSummary], machine_session: Mapping[str, str]) -> bool:
    """Return whether a reference takes no more runs; disturbed runs do not count, because no comparison uses them."""
    counted = [run for run in reference if not run.is_disturbed]
    enough = len(counted) >= REFERENCE_RUNS and count_sessions(counted, machine_session) >= REFERENCE_SESSIONS
    return enough or len(counted) >= REFERENCE_MOST


def first_runs(runs: Iterable[RunSummary], machine_session: Mapping[str, str]) -> tuple[RunSummary, ...]:
    """Return the oldest runs of an epoch for its reference, oldest first.

    Disturbed runs are used only if there are no others: undisturbed runs could not be compared with them.
    """
    ordered, taken = in_order(runs), list[RunSummary]()
    undisturbed = tuple(run for run in ordered if not run.is_disturbed)
    for run in undisturbed or ordered[:REFERENCE_MOST]:
        if is_complete(taken, machine_session):
            break
        taken.append(run)
    return tuple(taken)
