"""What is said of a session as a whole, from the cases whose runs tell of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from perfsuite.base.units import percent, plural
from perfsuite.gate import stages
from perfsuite.gate.estimate import Estimate
from perfsuite.gate.evidence import CaseWork
from perfsuite.gate.suite import Compared, SuiteVerdict, compared, suite_verdict
from perfsuite.gate.view import View
from perfsuite.record.verdict import GateSettings

LONE_SESSIONS = 8
"""Stored sessions from which on an unchanged case mostly passes where too few cases tell of the host (docs/gate.md)."""
NOISY = 2.0
"""Variance inside the session, over that of stored runs, from which on a reader is told."""


def against_base(works: Sequence[CaseWork], view: View) -> Compared | None:
    """What the A/Bs of these cases with the base say together."""
    return _compared(stages.change(work, work.time, view) for work in works)


def against_anchor(works: Sequence[CaseWork], view: View) -> Compared | None:
    """The same with the commit that the stored runs name."""
    return _compared(stages.since_anchor(work, work.time, view) for work in works)


def _compared(estimates: Iterator[Estimate | None]) -> Compared | None:
    return compared([(estimate.effect, estimate.error) for estimate in estimates if estimate is not None])


def needs_anchor(work: CaseWork, view: View) -> bool:
    """Whether the commit that the stored runs name can be run, and was not run as the base."""
    return not stages.why_no_anchor(work, view) and stages.anchor_pairs(work, view) is work.anchor_pairs


def verdict(works: Sequence[CaseWork], view: View) -> SuiteVerdict | None:
    """The verdict on the suite; None where it is not slower."""
    suite = view.suite
    if view.settings.in_place or not (suite.exceeds(view.settings) or suite.may_hide(view.settings)):
        return None
    changes = Counter(key for work in works for key in work.given.environment_changes)
    commits = Counter(work.given.anchor for work in works if work.given.anchor)
    reasons = Counter(why for work in works if (why := stages.why_no_anchor(work, view)))
    base = against_base(works, view)
    unknown = "the base was not measured" if view.settings.can_run_base and base is None else ""
    return suite_verdict(
        suite,
        view.settings,
        base=base,
        anchor=against_anchor(works, view),
        anchor_commit=commits.most_common(1)[0][0][:10] if commits else "",
        no_anchor=unknown or (reasons.most_common(1)[0][0] if reasons else ""),
        environment=changes,
    )


def banner(view: View) -> tuple[str, ...]:
    """What a reader must know about the session as a whole, beside the verdict on the suite."""
    said = []
    shift = view.today.shift
    if abs(shift) > math.log1p(view.settings.tolerance):
        word = "slower" if shift > 0 else "faster"
        said.append(
            f"the whole suite is {percent(abs(math.expm1(shift)))} {word} than its baseline; "
            "this is taken off every case before it is judged"
        )
    if view.shares.usual > NOISY:
        said.append(f"the host is {math.sqrt(view.shares.usual):.2g} times as noisy as when the baseline was taken")
    return tuple(said)


def few_sessions(undecided: Sequence[CaseWork], settings: GateSettings) -> str:
    """The way out where few cases and few stored sessions left these cases undecided; empty where it is none."""
    few = [work.time.level.sessions for work in undecided if work.time.level.sessions < LONE_SESSIONS]
    if not few:
        return ""
    return (
        f"{plural(len(few), 'case')} undecided: fewer than {settings.min_suite} cases tell nothing of the host, and "
        f"the stored runs are of {plural(min(few), 'session')} of the machine (runs of one commit without an hour "
        f"between them are one session); store runs in {LONE_SESSIONS} sessions, or give --perf-base=REV a revision to "
        "compare with"
    )
