"""Quantities that do not scatter: memory, bytes, operations, bubble.  A rule judges one run, without statistics."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from perfsuite.base.units import percent, significant
from perfsuite.baselines.runs import MetricMeaning, RunSummary
from perfsuite.metrics import REGISTRY
from perfsuite.record.own_metrics import Better
from perfsuite.record.verdict import Finding, VerdictName

STORED_DIGITS = 1e-5  # Relative difference between equal values that were stored with six digits.
BUBBLE_CHANGE = 0.01  # Accepted absolute change of a bubble ratio.
MEMORY_CHANGE = 0.01  # Accepted relative change of a memory size that has no other rule in the registry.

_STILL = 0.1  # Share of the allowed change up to which stored values do not scatter.


ExactRule = tuple[float, float]
"""Allowed change for the worse: as a share of the stored value, and in the unit of the quantity; the larger counts."""


def rule_for(name: str, meaning: MetricMeaning, tolerance: float | None = None) -> ExactRule | None:
    """Return the exact rule of a metric; None if it scatters and is judged by statistics or not judged.  The registry
    lists the deterministic metrics. Of other metrics bubbles, sizes in GiB or bytes, and counts of operations are
    deterministic. ``tolerance`` is the relative tolerance of the case; a bubble ratio keeps its absolute rule.
    """
    spec, own = REGISTRY.get(name), meaning.own
    if own is not None and own.exact:
        return (own.tolerance or 0.0) if tolerance is None else tolerance, own.floor
    scatters = not name.startswith("bubble") and spec is not None and not (spec.deterministic or spec.unit == "GiB")
    if own is not None or scatters or (spec is not None and spec.observed):
        return None
    if name.startswith("bubble"):
        return 0.0, (spec.absolute_floor if spec else 0.0) or BUBBLE_CHANGE
    if spec is not None:
        usual = MEMORY_CHANGE if spec.unit == "GiB" else 0.0
        relative = next(choice for choice in (tolerance, spec.tolerance, usual) if choice is not None)
        return relative, spec.absolute_floor
    if meaning.unit == "GiB":
        return MEMORY_CHANGE if tolerance is None else tolerance, 0.0
    return (tolerance or 0.0, 0.0) if meaning.unit in ("B", "bytes", "FLOP", "FLOPs") else None


def exact_findings(
    stored: Sequence[RunSummary],
    runs: Sequence[RunSummary],
    meanings: Mapping[str, MetricMeaning],
    tolerances: Mapping[str, float],
) -> tuple[Finding, ...]:
    """Return a finding for each exact quantity of both sides."""
    findings = []
    for name in sorted(meanings):
        rule = rule_for(name, meanings[name], tolerances.get(name))
        then = [run.metrics[name] for run in stored if name in run.metrics]
        now = [run.metrics[name] for run in runs if name in run.metrics]
        if rule is not None and then and now:
            findings.append(_judge(name, rule, meanings[name], then, now))
    return tuple(findings)


def _judge(name: str, rule: ExactRule, meaning: MetricMeaning, then: Sequence[float], now: Sequence[float]) -> Finding:
    (relative, absolute), before, after = rule, statistics.median(then), statistics.median(now)
    allowed = max(relative * abs(before), absolute, STORED_DIGITS * abs(before))
    change = after - before  # for the worse; without a better direction any change is worse
    change = {"higher": -change, "lower": change}.get(meaning.better, abs(change))
    verdict: VerdictName = "regressed" if change > allowed else "improved" if change < -allowed else "pass"
    reasons: tuple[str, ...] = ()
    if verdict != "pass":
        figures = f"{name} {significant(after, 6)}, stored {significant(before, 6)} {meaning.unit}".rstrip()
        limits = [*([percent(relative)] if relative else []), *([significant(absolute)] if absolute else [])]
        reasons = (f"{figures}: it may change by {' or '.join(limits) or 'nothing'}",)
    flags: tuple[str, ...] = ()
    spread = max(then) - min(then)
    if verdict == "regressed" and spread > _STILL * allowed and _beyond(then, now, meaning.better) <= spread:
        verdict = "inconclusive"
        flags = (f"{name} scatters in the stored runs: not gateable by an exact rule",)
    return Finding(
        quantity=name,
        name=verdict,
        tolerance=absolute if absolute > relative * abs(before) else relative,
        before=before,
        after=after,
        unit=meaning.unit,
        effect=change / abs(before) if before else (math.copysign(math.inf, change) if change else 0.0),
        exact=True,
        confirmed=True if verdict == "regressed" else None,
        reasons=reasons,
        flags=flags,
    )


def _beyond(then: Sequence[float], now: Sequence[float], better: Better) -> float:
    if better == "neither":
        return min(abs(new - old) for new in now for old in then)
    return min(then) - max(now) if better == "higher" else min(now) - max(then)
