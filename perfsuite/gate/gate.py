"""The gate: judge the cases of a session against their stored runs.  It decides and never measures.

A session passes the gated cases and every fresh run; the gate returns requests for more runs until it has a verdict for
each case::

    gate = Gate(cases, GateSettings(can_run_base=True))
    ...                                   # run every case once: gate.add(node, run)
    while requests := gate.next_requests():
        for request in requests:          # in this order
            ...           # gate.add(node, run), gate.add_pair(node, base=run, new=run) or gate.add_anchor_pair(...)
    verdicts = gate.verdicts()

If time is limited, ``next_requests`` gets the remaining time and the costs of runs, and requests the runs that decide
most; ``end`` means that no more runs follow.  Equal inputs give equal requests and verdicts.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence

from perfsuite.base.units import percent
from perfsuite.baselines.runs import RunSummary
from perfsuite.gate import findings
from perfsuite.gate.budget import SCREENING_SHARE, Spending, Wanted, round_robin
from perfsuite.gate.evidence import CaseWork, GateCase, Judged, case_works
from perfsuite.gate.question import Need, Question, View, suspected, suspects
from perfsuite.gate.shift import Seen, Shares, Today, knows_shift, look, moved, shares
from perfsuite.gate.suite import Drift, suite_shift, usual_drift
from perfsuite.record.verdict import MEAN, P95, GateSettings, Request, RequestKind, SuiteVerdict, Verdict
from perfsuite.statistics.robust import median

PROBES = 3
"""Cases whose A/B shows whether the host or the code shifted the whole suite.  Row: suite, silence."""


class Gate:
    """Collects the runs of a session's gated cases, requests more runs and returns verdicts."""

    def __init__(self, cases: Iterable[GateCase], settings: GateSettings | None = None) -> None:
        """``cases``: all gated cases of the session, also those without a baseline."""
        self.settings = settings or GateSettings()
        self._works = {work.node: work for work in case_works(cases, self.settings)}
        self._tests = sum(not judged.is_secondary for work in self._works.values() for judged in work.judged)
        self._frozen: Today | None = None
        self._frozen_beside: dict[str, Today] = {}
        self._beside: dict[str, list[tuple[CaseWork, Judged]]] = {MEAN: [], P95: []}
        for work in self._works.values():
            for each in work.judged:
                if each.is_secondary or each.name in self._beside:
                    self._beside.setdefault(each.name, []).append((work, each))
        self._confirming = 0
        self._probes: list[CaseWork] | None = None
        self._probed = False
        self._probes_lack = False
        """Whether the time was too short for the pairs that show the cause of a shift of the suite."""
        self._ended = False

    @property
    def covered(self) -> tuple[str, ...]:
        """Node ids of the cases with enough stored runs for a comparison."""
        return tuple(node for node, work in self._works.items() if work.judged)

    def add(self, node: str, run: RunSummary, *, violations: Iterable[str] = ()) -> None:
        """Add a fresh run of the new code.  ``violations`` of physics make the case impossible."""
        work = self._works[node]
        work.impossible.extend(violations)
        work.add(run)

    def add_impossible(self, node: str, violations: Iterable[str]) -> None:
        """Add a result that breaks physics so badly that it cannot become a run."""
        self._works[node].impossible.extend(violations)

    def add_pair(self, node: str, *, base: RunSummary, new: RunSummary) -> None:
        """Add an A/B pair: neighbouring fresh runs of the base and of the new code."""
        self._works[node].pairs.append((base, new))
        self._works[node].match(base)

    def add_anchor_pair(self, node: str, *, anchor: RunSummary, new: RunSummary) -> None:
        """Add an A/B pair with the commit of the case's stored runs."""
        self._works[node].anchor_pairs.append((anchor, new))
        self._works[node].match(anchor)

    def withdraw(self, node: str, reason: str) -> None:
        """Request nothing more for a case that can no longer run; without a decision it stays inconclusive."""
        self._works[node].withdrawn = reason

    def without_base(self, node: str, reason: str) -> None:
        """Judge a case without a base, because the base cannot run it; the verdict prints the reason."""
        self._works[node].no_base = reason

    def anchor_of(self, node: str) -> str:
        """Return the commit of the case's stored runs; empty without one."""
        return self._works[node].gate_case.anchor

    def without_anchor(self, node: str, reason: str) -> None:
        """Judge a case without the commit of its stored runs, which cannot run it; the verdict prints the reason."""
        self._works[node].no_anchor = reason

    def suspects(self, node: str) -> bool:
        """Return whether a case was suspected, so that only its further runs decide."""
        return bool(self._works[node].suspected)

    def verdict(self, node: str) -> Verdict:
        """Return the verdict from the present runs; cases that need more runs are inconclusive."""
        return findings.verdict(self._works[node], self._look())

    def verdicts(self) -> dict[str, Verdict]:
        """Return the verdict of every case by node id."""
        view = self._look()
        return {node: findings.verdict(work, view) for node, work in self._works.items()}

    def suite(self) -> SuiteVerdict | None:
        """Return the verdict on the whole session; None if its cases are not slower together."""
        return findings.on_suite(self._open(None), self._look())

    def banner(self) -> tuple[str, ...]:
        """Return remarks about the whole session, apart from the verdict on the suite."""
        view = self._look()
        lines = findings.banner(view)
        if view.today.is_known or self.settings.in_place or self.settings.can_run_base:
            return lines
        undecided = [work for work in self._open(None) if findings.verdict(work, view).name == "inconclusive"]
        few = findings.few_sessions(undecided, self.settings)
        return (*lines, few) if few else lines

    def next_requests(self, node: str | None = None, spending: Spending | None = None) -> list[Request]:
        """Return the next requests in order; empty if every verdict is final, or if no useful request fits the time.
        Call it after every case of the suite has run, or with a node id to settle that case in place. Without
        ``spending`` there is no limit.
        """
        if not self.settings.remeasure or self._ended:
            return []
        open_works, view = self._open(node), self._look()
        screening: Wanted = {"run": _screening(open_works, view)}
        now, first = screening["run"], spending and spending.keeping(1 - SCREENING_SHARE)
        if first is not None and not first.affords(screening):
            now = first.cheapest(screening)
        if any(now.values()):
            return round_robin(now, "run", "screening")
        if self._frozen is None and not self.settings.in_place:
            self._frozen = view.today
            self._frozen_beside = {name: today for name, (today, _) in view.beside.items()}
        if requests := self._probe_requests(open_works, view, spending):
            return requests
        view = dataclasses.replace(view, today=self._frozen or view.today)
        for work in open_works:
            work.suspected = work.suspected or suspected(work, view)
        requests = self._deciding_requests(open_works, dataclasses.replace(view, suspects=self._suspects), spending)
        if requests or spending is None:
            return requests
        left = {node: count for node, count in screening["run"].items() if not self._works[node].suspected}
        return round_robin(spending.cheapest({"run": left}), "run", "screening")

    def outlook(self, node: str | None = None) -> Wanted:
        """Return the largest number of requests that may follow, by kind and case."""
        works, view, settings = self._open(node), self._look(), self.settings
        wanted: dict[RequestKind, dict[str, int]] = {"run": _screening(works, view), "ab_pair": {}, "anchor_pair": {}}
        pairs = settings.pairs + settings.more_pairs + (0 if view.today.is_known else settings.sure_pairs)
        for work in works if settings.remeasure and not self._ended else ():
            if work.suspected or wanted["run"][work.node] or suspected(work, view):
                base = work.settings.can_run_base
                runs = settings.first_runs + (0 if base else settings.more_runs)
                wanted["run"][work.node] += max(0, runs - len(work.fresh))
                wanted["ab_pair"][work.node] = max(0, pairs - len(work.pairs)) if base else 0
                anchor = base and work.needs_anchor
                wanted["anchor_pair"][work.node] = max(0, pairs - len(work.anchor_pairs)) if anchor else 0
        return wanted

    def end(self, why: str, node: str | None = None) -> tuple[str, ...]:
        """Request nothing more because of ``why``; return the cases that need more runs: none of them passes."""
        if not self.settings.remeasure:
            return ()
        works, view = self._open(node), self._look()
        lacking = _screening(works, view)
        unclear = self._probes_lack if self._probed else not self.settings.in_place and self._is_unclear(view)
        for work in works:
            needs = [count for counts in self._wanted([work], view).values() for count in counts.values()]
            unsettled = not work.suspected and (lacking[work.node] or suspected(work, view))
            if unclear or any(needs) or unsettled:
                work.cut_short = why
        self._ended = node is None
        return tuple(work.node for work in works if work.cut_short)

    def _open(self, node: str | None) -> list[CaseWork]:
        works = [self._works[node]] if node is not None else self._works.values()
        return [work for work in works if work.is_open]

    def _is_unclear(self, view: View) -> bool:
        """Return whether only an A/B can show the cause of a slower suite: its shift is shown, or is subtracted."""
        if not self.settings.can_run_base:
            return False
        suite = view.suite
        if not suite.exceeds(self.settings):
            return suite.may_hide(self.settings)
        return not suite.explained(self.settings) and (suite.is_shown or view.today.is_known)

    def _probe_requests(self, works: Sequence[CaseWork], view: View, spending: Spending | None) -> list[Request]:
        if self._frozen is None or self._probed or not self._is_unclear(view):
            return []
        if self._probes is None:
            yard = view.today.yardstick_shift
            seen = [(first, work) for work in works if (first := work.screened(work.time, yard))]
            seen.sort(key=lambda pair: abs(pair[0].difference - view.suite.effect))
            self._probes = [work for _, work in seen[:PROBES]]
        amount = percent(math.expm1(view.suite.effect))
        probes = [work for work in self._probes if work.is_open]
        pairs = {work.node: work.lacking_pairs(work.pairs, self.settings.pairs) for work in probes if not work.no_base}
        self._probes_lack = any(pairs.values())
        pairs = spending.cheapest({"ab_pair": pairs}) if spending else pairs
        requests = round_robin(pairs, "ab_pair", f"does the base show the suite's shift of {amount}?")
        base = findings.against_base(self._probes, view)
        if not requests and not (base and base.shows(view.suite)):
            anchored = [work for work in probes if work.needs_anchor]
            pairs = {work.node: work.lacking_pairs(work.anchor_pairs, self.settings.pairs) for work in anchored}
            self._probes_lack |= any(pairs.values())
            pairs = spending.cheapest({"anchor_pair": pairs}) if spending else pairs
            requests = round_robin(pairs, "anchor_pair", f"does the stored commit show the suite's shift of {amount}?")
        if not requests:
            self._probed = True
            self._frozen = today = view.today
            if base is not None and today.is_known and base.effect > 2 * base.error:
                rest = today.shift - base.effect  # the part that the A/B shows in the code stays in the cases
                unexplained = max(0.0, min(today.unexplained, rest))
                self._frozen = dataclasses.replace(today, shift=rest, unexplained=unexplained)
        return requests

    @property
    def _suspects(self) -> int:
        return sum(bool(work.suspected) for work in self._works.values())

    def _deciding_requests(self, works: Sequence[CaseWork], view: View, spending: Spending | None) -> list[Request]:
        wanted = self._wanted(works, view)
        confirming = sum(bool(work.pairs) or bool(wanted["ab_pair"].get(work.node)) for work in works)
        if not any(wanted["run"].values()):
            self._confirming = max(self._confirming, confirming)
        done = {work.node: len(work.pairs) + len(work.anchor_pairs) for work in works}
        if spending is not None:
            wanted = self._affordable(works, wanted, view, spending)
        return (
            round_robin(wanted["run"], "run", "re-measurement")
            or round_robin(wanted["ab_pair"], "ab_pair", "confirmation", done)
            or round_robin(wanted["anchor_pair"], "anchor_pair", "is the stored commit as fast as stored?", done)
        )

    def _wanted(self, works: Sequence[CaseWork], view: View) -> dict[RequestKind, dict[str, int]]:
        wanted: dict[RequestKind, dict[str, int]] = {"run": {}, "ab_pair": {}, "anchor_pair": {}}
        for work in works:
            if work.suspected:
                needs = [asked.need for asked in suspects(work, view)]
                need = Need(*map(max, zip(*needs, strict=True)))  # over the suspected quantities
                runs = work.lacking(work.fresh, need.runs)
                wanted["run"][work.node] = runs
                if not runs:
                    pairs = work.lacking_pairs(work.pairs, need.pairs) if need.pairs else 0
                    wanted["ab_pair"][work.node] = pairs
                    if not pairs and need.anchor_pairs:
                        lacking = work.lacking_pairs(work.anchor_pairs, need.anchor_pairs)
                        wanted["anchor_pair"][work.node] = lacking
        return wanted

    def _affordable(
        self, works: Sequence[CaseWork], wanted: Wanted, view: View, spending: Spending
    ) -> dict[RequestKind, dict[str, int]]:
        """Return the part that fits the time: runs of the clearest suspects with their pairs, then deciding pairs."""
        allowed: dict[RequestKind, dict[str, int]] = {kind: dict(counts) for kind, counts in wanted.items()}
        if any(wanted["run"].values()):
            # Distance from the level in standard errors at the screening: the clearest are decided first.
            seen = {work.node: [asked.screened for asked in suspects(work, view)] for work in works}
            clear = {
                node: max((abs(one.effect) / max(one.error, 1e-9) for one in each if one is not None), default=0.0)
                for node, each in seen.items()
            }
            order = sorted((work for work in works if wanted["run"].get(work.node)), key=lambda work: -clear[work.node])
            nodes = [work.node for work in order]
            runs = {node: wanted["run"][node] for node in nodes}
            pairs = {work.node: self.settings.pairs for work in order if work.settings.can_run_base}
            allowed["run"] = spending.complete(nodes, {"run": runs, "ab_pair": pairs})
            allowed["run"] = allowed["run"] or spending.complete(nodes, {"run": runs})
        for kind in ("ab_pair", "anchor_pair"):
            if not spending.affords({kind: wanted[kind]}):

                def decides(node: str, further: int, kind: str = kind) -> bool:
                    work = self._works[node]
                    made = work.pairs if kind == "ab_pair" else work.anchor_pairs
                    return any(asked.may_decide(made, further) for asked in suspects(work, view))

                allowed[kind] = spending.shared_out(kind, wanted[kind], decides)
        return allowed

    def _look(self) -> View:
        """Return the present view for one decision; it is not stored, so it is never stale."""
        works = self._open(None)
        yard = self._frozen.yardstick_shift if self._frozen else self._yardstick_shift(works)
        seen, noise = self._seen([(work, work.time) for work in works], yard)
        same = 2 * sum(bool(work.gate_case.environment_changes) for work in works) <= len(works)
        suite = suite_shift(seen, self._drift, self.settings, yardstick_counts=same)
        today, corrected = look(seen, noise, self.settings, explained=suite.explained(self.settings))
        today = self._frozen or dataclasses.replace(today, yardstick_shift=yard)
        return View(
            settings=self.settings,
            today=today,
            suite=suite,
            shares=corrected,
            beside={name: self._look_beside(name, today) for name in self._beside},
            tests=max(self._tests, self.settings.planned_cases),
            suspects=self._suspects,
            confirming=self._confirming,
        )

    def _seen(self, having: Sequence[tuple[CaseWork, Judged]], yard: float) -> tuple[list[Seen], Shares]:
        seen = [first for work, judged in having if (first := work.screened(judged, yard)) is not None]
        sets = (judged.seen(runs, yard) for work, judged in having for runs in (work.screening, work.fresh))
        replicates = [one for one in sets if one is not None and one.dof]
        return seen, shares(replicates, with_shift=knows_shift(len(seen), self.settings))

    def _yardstick_shift(self, works: Iterable[CaseWork]) -> float:
        """Return the common shift (ln) of all yardsticks from the stored ones; 0 if too few resemble their case."""
        amounts = []
        for work in works:
            quantity = work.time.quantity
            beside = moved(quantity.control, [run for run in work.screening if quantity.is_stable(run)])
            if beside is not None and beside.amount is not None:
                amounts.append(beside.amount)
        return median(amounts) if knows_shift(len(amounts), self.settings) else 0.0

    @functools.cached_property
    def _drift(self) -> Drift:
        """The movement of the suite between stored sessions."""
        return usual_drift(
            (work.time.quantity.history, work.time.level) for work in self._works.values() if work.judged
        )

    def _look_beside(self, name: str, time: Today) -> tuple[Today, Shares]:
        """Return the session's shift of all means or tails, with the shares of noise.  A host moves all tails alike,
        and so may a change of the code: movement beyond that of the times by more than the tolerance stays in the
        cases.
        """
        yard = time.yardstick_shift
        having = [(work, judged) for work, judged in self._beside[name] if judged.is_secondary and work.is_open]
        seen, noise = self._seen(having, yard)
        today, corrected = look(seen, noise, self.settings, explained=True)
        beyond = today.shift - time.shift
        accepted = min((judged.quantity.tolerance for _, judged in having), default=0.0)
        own = [judged.quantity for _, judged in having if judged.quantity.is_own]
        if own and abs(beyond) > math.log1p(accepted):  # no host moves a metric further than the time
            shared = sorted((0.0, time.shift, today.shift))[1]
            usual = usual_drift((judged.quantity.history, judged.level) for _, judged in having)[0] ** 2
            today = dataclasses.replace(time, shift=shared, shift_variance=time.shift_variance + usual, unexplained=0.0)
        elif today.is_known and beyond > math.log1p(accepted):
            today = dataclasses.replace(today, shift=time.shift, unexplained=beyond)
        else:
            today = dataclasses.replace(today, unexplained=0.0)
        return self._frozen_beside.get(name, today), corrected


def _screening(works: Sequence[CaseWork], view: View) -> dict[str, int]:
    """Return the missing runs of the screening by node id, so that each quantity has enough stable ones."""
    return {
        work.node: max(
            judged.lacking(work.screening, asked.judge(work.screening).screening_runs(asked.values(work.screening)))
            for judged in work.deciding
            for asked in [Question(work=work, judged=judged, view=view)]
        )
        if not work.suspected
        else 0
        for work in works
    }
