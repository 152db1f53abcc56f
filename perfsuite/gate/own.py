"""Metrics of one's own, and exact ones, that cannot be compared: each is said, so that none is silently skipped."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from perfsuite.base.units import plural, significant
from perfsuite.baselines.runs import MetricMeaning
from perfsuite.gate.evidence import CaseWork
from perfsuite.gate.exact import rule_for
from perfsuite.record.verdict import Finding

_ACCEPT = "if that is meant: --perf-update=accept --perf-reason=TEXT"


def uncompared(work: CaseWork) -> Iterator[Finding]:
    """A finding per metric that changed its unit or direction, that no run of today has, or that is not above 0."""
    given = work.given
    for name, why in given.changed_metrics.items():
        yield _undecided(name, f"{why}: not compared; {_ACCEPT}")
    newest = (given.newest or given.stored)[-1]
    for name, meaning in given.stored_metrics.items():
        if name in given.changed_metrics or not (meaning.own or rule_for(name, meaning)):
            continue
        if name in newest.metrics and not any(name in run.metrics for run in work.runs):
            stored = f"{significant(newest.metrics[name])} {meaning.unit}".rstrip()
            yield _undecided(
                name,
                f"{name} was {stored} in the newest stored run and was not recorded now: not compared; if that is "
                "meant, store runs without it: --perf-update=append",
            )
    for name, meaning in given.case.metrics.items():
        if meaning.own and not meaning.own.exact and meaning.better != "neither":
            yield from _not_above_zero(work, name, meaning)


def _not_above_zero(work: CaseWork, name: str, meaning: MetricMeaning) -> Iterator[Finding]:
    """What statistics of logarithms cannot compare: values of 0 and below, stored or measured now."""
    then = [run.metrics[name] for run in work.given.stored if name in run.metrics]
    now = [run.metrics[name] for run in work.runs if name in run.metrics]
    if not then or not now or min(*then, *now) > 0:
        return
    before, after = statistics.median(then), statistics.median(now)
    told = f"{name} is {significant(after)}, stored {significant(before)} {meaning.unit}".rstrip()
    higher = meaning.better == "higher"
    if min(then) > 0 and higher and max(now) <= 0:
        yield Finding(
            quantity=name,
            name="regressed",
            tolerance=0.0,
            before=before,
            after=after,
            unit=meaning.unit,
            effect=(before - after) / before,
            confirmed=False,
            reasons=(f"{told}: it fell to 0 or below",),
        )
        return
    apart = min(then) - max(now) if higher else min(now) - max(then)
    if min(then) > 0 or apart > max(then) - min(then):
        yield _undecided(name, f"{told}: values of 0 and below have no relative change; exact=True and floor= judge it")


def _undecided(name: str, why: str) -> Finding:
    return Finding(quantity=name, name="inconclusive", tolerance=0.0, reasons=(why,))


def unjudged(work: CaseWork, needed: int) -> Iterator[str]:
    """A flag per metric of one's own that is not judged (yet), and why; ``needed`` stored runs are compared with."""
    for name, meaning in work.given.case.metrics.items():
        own = meaning.own
        if own is None:
            continue
        then = [run.metrics[name] for run in work.given.stored if name in run.metrics]
        if own.better == "neither" and not own.exact:
            yield f"{name} is not judged: it has no better direction; give better='lower' or 'higher'"
        elif len(then) < (1 if own.exact else needed):
            total = plural(1 if own.exact else needed, "stored run")
            yield f"{name} is not judged yet: {len(then)} of the {total} that a comparison needs have it"
        elif not own.exact and min(then) <= 0:
            yield f"{name} is judged by its range alone: a stored value is 0 or below; exact=True and floor= judge it"
