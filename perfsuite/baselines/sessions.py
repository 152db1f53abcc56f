"""Which pytest sessions are one session of the machine, and which runs of an epoch its level is judged against."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from perfsuite.baselines.runs import RunSummary, in_order, moment

SESSION_GAP = timedelta(hours=1)
"""Sessions of one boot and one commit are one session of the machine unless more than this lies between them."""
REFERENCE_RUNS = 8
"""Runs from which on a reference is complete, when they are of REFERENCE_SESSIONS."""
REFERENCE_SESSIONS = 3
"""Sessions of the machine from which on it is."""
REFERENCE_MOST = 12
"""Runs with which it is complete in any case."""


@dataclass(kw_only=True, slots=True)
class _Span:
    """One pytest session: what its runs have in common, and when the first and the last of them started."""

    boot: str
    commit: str
    first: datetime
    last: datetime


def machine_sessions(runs: Iterable[RunSummary]) -> dict[str, str]:
    """The session of the machine of each pytest session among the runs, named after the first pytest session in it.

    Runs within minutes share what else the host did, whichever command started them.  A new session of the machine
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
    """Number of sessions of the machine that the runs are of."""
    return len({machine_session[run.session] for run in runs})


def is_complete(reference: Sequence[RunSummary], machine_session: Mapping[str, str]) -> bool:
    """Whether a reference takes no more runs; disturbed ones, which no comparison uses, do not count."""
    counted = [run for run in reference if not run.is_disturbed]
    enough = len(counted) >= REFERENCE_RUNS and count_sessions(counted, machine_session) >= REFERENCE_SESSIONS
    return enough or len(counted) >= REFERENCE_MOST


def first_runs(runs: Iterable[RunSummary], machine_session: Mapping[str, str]) -> tuple[RunSummary, ...]:
    """The oldest of an epoch's runs, as many as its reference takes, oldest first.

    Disturbed runs are taken only if there are no others. Today's undisturbed runs could not be compared with them.
    """
    ordered, taken = in_order(runs), list[RunSummary]()
    undisturbed = tuple(run for run in ordered if not run.is_disturbed)
    for run in undisturbed or ordered[:REFERENCE_MOST]:
        if is_complete(taken, machine_session):
            break
        taken.append(run)
    return tuple(taken)
