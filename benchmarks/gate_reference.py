"""The plain gate that perfsuite's gate was built from, for comparison in gate_simulation.py: no session effects, no
variance components, no exclusion of large slowdowns, Huber means without the jackknife, thresholds per case.

It is run on the same simulated runs and counts in the same way.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from perfsuite.baselines.runs import RunSummary
from perfsuite.statistics.robust import t_quantile

TOLERANCE = math.log1p(0.03)
SUITE_ALPHA = SCREEN_ALPHA = 0.05

Measure = Callable[[int, str], RunSummary]
"""Runs a case: index, ``base`` or ``new``."""


def mean(values: Sequence[float], sigma: float) -> float:
    middle = statistics.median(values)
    return statistics.fmean(min(max(value, middle - 2 * sigma), middle + 2 * sigma) for value in values)


class Case:
    """Stored values of one case and what follows from them."""

    def __init__(self, values: Sequence[float]) -> None:
        self.values = values
        self.count = len(values)
        middle = statistics.median(values)
        mad = 1.4826 * statistics.median([abs(value - middle) for value in values]) * (1 + 1 / self.count)
        self.own = max(mad, statistics.stdev(values) / 2)
        self.sigma = self.own
        self.dof = 3 + self.count

    def pool(self, usual: float) -> None:
        """Pull the noise towards what is usual for the kind."""
        self.sigma = math.sqrt((4 * usual**2 + (self.count - 1) * self.own**2) / (3 + self.count))
        self.centre = mean(self.values, self.sigma)


def stable(measure: Measure, index: int, arm: str, wanted: int) -> list[float]:
    """Values of stable runs; a few unstable ones are replaced."""
    found: list[float] = []
    for _ in range(wanted + 3):
        if len(found) < wanted:
            run = measure(index, arm)
            if run.has_clean:
                found.append(run.location or 0.0)
    return found


def judge_suite(stored: Sequence[Sequence[float]], kinds: Sequence[int], measure: Measure, *, base: bool) -> list[str]:
    """Verdicts of a suite by the plain gate."""
    cases = [Case(values) for values in stored]
    for kind in set(kinds):
        usual = statistics.median([case.own for case, own in zip(cases, kinds, strict=True) if own == kind])
        for case, own in zip(cases, kinds, strict=True):
            if own == kind:
                case.pool(usual)
    screened = []
    for index, case in enumerate(cases):
        runs = min(4, max(1, math.ceil((case.sigma / 0.012) ** 2)))
        values = stable(measure, index, "new", runs)
        screened.append(statistics.median(values) - case.centre if values else None)
    shift = statistics.median([value for value in screened if value is not None])
    verdicts = ["unstable-host" if value is None else "pass" for value in screened]
    suspects = [i for i, value in enumerate(screened) if value is not None and value - shift > TOLERANCE / 2]
    alpha = SUITE_ALPHA / (len(cases) * SCREEN_ALPHA)
    fresh: dict[int, list[float]] = {index: [] for index in suspects}
    for _ in range(4):
        for index in suspects:
            fresh[index] += stable(measure, index, "new", 1)
    for index in suspects:
        state = _decide(cases[index], fresh[index], shift, alpha, 0.6)
        if state == "undecided":
            fresh[index] += stable(measure, index, "new", 8)
            state = _decide(cases[index], fresh[index], shift, alpha, 0.85)
        if state != "pass" and base:
            state = _confirm(cases[index], index, measure)
        verdicts[index] = {"candidate": "regressed", "undecided": "inconclusive"}.get(state, state)
    return verdicts


def _decide(case: Case, values: Sequence[float], shift: float, alpha: float, near: float) -> str:
    if not values:
        return "undecided"
    effect = mean(values, case.sigma) - case.centre - shift
    error = case.sigma * math.sqrt(1 / len(values) + 1 / case.count)
    if effect - t_quantile(1 - alpha, case.dof) * error > 0 and effect > TOLERANCE:
        return "candidate"
    passes = effect < near * TOLERANCE or effect + t_quantile(0.95, case.dof) * error < TOLERANCE
    return "pass" if passes else "undecided"


def _confirm(case: Case, index: int, measure: Measure) -> str:
    arms: dict[str, list[float]] = {"base": [], "new": []}
    for pair in range(6):
        for arm in ("base", "new") if pair % 2 == 0 else ("new", "base"):
            arms[arm] += stable(measure, index, arm, 1)
    if min(len(values) for values in arms.values()) < 3:
        return "inconclusive"
    effect = mean(arms["new"], case.sigma) - mean(arms["base"], case.sigma)
    own = statistics.variance(arms["new"]) + statistics.variance(arms["base"])
    pooled = math.sqrt((case.dof * case.sigma**2 + 5 * own) / (case.dof + 10))
    error = pooled * math.sqrt(1 / 3)
    if effect - t_quantile(0.995, case.dof + 10) * error > 0 and effect > 0.85 * TOLERANCE:
        return "regressed"
    return "pass" if effect + 1.7 * error < TOLERANCE or effect < TOLERANCE / 2 else "inconclusive"
