"""Between which stored commits a change of the level grew."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from perfsuite.base.units import percent
from perfsuite.gate.evidence import CaseWork, Judged
from perfsuite.gate.view import View
from perfsuite.statistics.robust import median


def growth(work: CaseWork, judged: Judged, view: View) -> tuple[str, ...]:
    """A phrase that names the stored commits around the largest step of a level that left its reference.

    Nothing where no newer runs than the reference are stored, or where these name no commit.
    """
    steps = _by_commit(work, judged)
    if not steps:
        return ()
    now = view.values(judged, work.runs)
    last = median(now) - judged.level.centre if now else steps[-1][1]
    path = [(work.given.anchor, 0.0), *steps, ("this run", last)]
    before, after = max(itertools.pairwise(path), key=lambda pair: pair[1][1] - pair[0][1])
    sign = judged.quantity.sign
    step = f"from {_percent(sign * before[1])} at {before[0][:10]} to {_percent(sign * after[1])} at {after[0][:10]}"
    since = f"{_percent(sign * last)} since the reference ({work.given.anchor[:10]}), over {len(steps)} stored commits"
    return (f"{since}; the largest step is {step}",)


def _by_commit(work: CaseWork, judged: Judged) -> Sequence[tuple[str, float]]:
    """Commits of the newer stored runs, oldest first, with how far each lies above the level; logarithms."""
    values: dict[str, list[float]] = {}
    for run in work.given.newest:
        if run.commit and run.commit != work.given.anchor:
            values.setdefault(run.commit, []).extend(judged.values([run]))
    return [(commit, median(own) - judged.level.centre) for commit, own in values.items() if own]


def _percent(logarithm: float) -> str:
    return percent(math.expm1(logarithm), signed=True)
