"""What a verdict tells the baseline about the runs that it is offered."""

from __future__ import annotations

from dataclasses import replace

from perfsuite.baselines.draft import NewRuns
from perfsuite.gate.describe import headline
from perfsuite.gate.suite import SuiteVerdict
from perfsuite.record.verdict import FAILING, Finding, Verdict


def offered(new: NewRuns, verdict: Verdict, suite: SuiteVerdict | None) -> NewRuns:
    """The runs of a case with what the gate said of the case and of the session as a whole."""
    name, seen = verdict.name, seen_in(verdict)
    together = suite is not None and suite.seen and suite.name in FAILING and verdict.gated and name not in FAILING
    if suite is not None and together and (name == "inconclusive" or suite.name == "environment"):
        name, seen = suite.name, f"{suite.name} with the whole suite: {suite.line}"
    return replace(new, verdict=name, seen=seen, suspected=suspects_slowdown(verdict), gains=gains_in(verdict))


def seen_in(verdict: Verdict) -> str:
    """A verdict with its effect, or with its first reason where it has none."""
    finding = verdict.decisive
    if finding is None or finding.effect is None:
        return ": ".join([verdict.name, *verdict.reasons[:1]])
    return headline(verdict)


def suspects_slowdown(verdict: Verdict) -> bool:
    """Whether a slowdown was seen that is neither shown nor excluded, by the rule that the gate suspects by.

    Above half the tolerance and above the standard error, which is about a quarter of the 95 % interval's width.
    """
    return any(_is_suspect(finding) for finding in verdict.findings if finding.name == "inconclusive")


def _is_suspect(finding: Finding) -> bool:
    seen = [(level.change, level.interval) for level in (finding.level,) if level is not None]
    if finding.effect is not None:
        seen.append((finding.effect, finding.interval or (finding.effect, finding.effect)))
    return any(effect > max(finding.tolerance / 2, (high - low) / 4) for effect, (low, high) in seen)


def gains_in(verdict: Verdict) -> dict[str, float]:
    """The quantities that improved, and the relative gain from which on other runs show the same.

    The tolerance; half of what is seen now where nothing scatters, because such a tolerance may be absolute or none.
    """
    return {
        finding.quantity: abs(finding.effect or 0.0) / 2 if finding.exact else finding.tolerance
        for finding in verdict.findings
        if finding.name == "improved"
    }
