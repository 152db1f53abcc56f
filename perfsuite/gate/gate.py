"""The gate: what the cases of a session are worth against their stored runs.  It decides and never measures.

A session gives it the gated cases and every fresh run; the gate answers with requests for more runs until it can say a
verdict for each case::

    gate = Gate(cases, GateSettings(can_run_base=True))
    ...                                   # run every case once: gate.add(node, run)
    while requests := gate.next_requests():
        for request in requests:          # in this order
            ...                           # gate.add(node, run) or gate.add_pair(node, base=run, new=run)
    verdicts = gate.verdicts()

Equal inputs give equal requests and verdicts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from perfsuite.baselines.runs import Run
from perfsuite.gate import findings, stages
from perfsuite.gate.evidence import CaseWork, GateCase
from perfsuite.gate.judge import Today
from perfsuite.gate.noise import Level, levels
from perfsuite.gate.quantity import quantities
from perfsuite.gate.shift import Replicates, knows_shift, look, shares, yardstick_shift
from perfsuite.gate.verdict import TIME, GateSettings, Request, Verdict, percent
from perfsuite.gate.view import View

PROBES = 3
"""Cases whose A/B tells whether a shift of the whole suite is the host's or the code's."""


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Nothing made here is garbage, and looking for some takes a fifth of the time of 10,000 cases."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Gate:
    """Collects the runs of a session's gated cases, asks for more and says verdicts."""

    def __init__(self, cases: Iterable[GateCase], settings: GateSettings | None = None) -> None:
        """``cases`` are all gated cases of the session, those without a baseline included."""
        self.settings = settings or GateSettings()
        with _collector_paused():
            self._works = {given.case.node: self._work(given) for given in cases}
            self._set_levels()
        self._tests = sum(len(work.levels) for work in self._works.values())
        self._frozen: Today | None = None
        self._suspects = 0
        self._confirming = 0
        self._probes: list[CaseWork] | None = None
        self._probed = False
        self._view: View | None = None

    def _work(self, given: GateCase) -> CaseWork:
        if given.refusal or not given.stored:
            return CaseWork(given)
        tolerance = self.settings.tolerance if given.tolerance is None else given.tolerance
        judged, flags = quantities(
            given.case, given.stored, tolerance=tolerance, metric_tolerances=given.metric_tolerances
        )
        enough = [each for each in judged if len(each.history.values) >= self.settings.min_stored]
        if any(each.name == TIME for each in enough):
            return CaseWork(given, enough, flags)
        known = max((len(each.history.values) for each in judged if each.name == TIME), default=0)
        return CaseWork(given, (), flags, learnt=known)

    def _set_levels(self) -> None:
        """Times together, because a host moves them all; each other quantity by itself."""
        enough = math.inf if self.settings.in_place else self.settings.min_suite
        found: dict[tuple[str, int], Level] = {}
        for timed, shared in ((True, enough), (False, math.inf)):
            places = [
                (node, index, each.history)
                for node, work in self._works.items()
                for index, each in enumerate(work.judged)
                if (each.name == TIME) == timed
            ]
            fitted = levels(
                [history for _, _, history in places], min_suite=shared, use_yardstick=self.settings.yardstick
            )
            found.update({(node, index): level for (node, index, _), level in zip(places, fitted, strict=True)})
        for node, work in self._works.items():
            work.levels = tuple(found[node, index] for index in range(len(work.judged)))

    @property
    def covered(self) -> tuple[str, ...]:
        """Node ids of the cases that have enough stored runs to be compared with."""
        return tuple(node for node, work in self._works.items() if work.levels)

    @property
    def view(self) -> View:
        """What decisions depend on at this moment."""
        if self._view is None:
            self._view = self._look()
        return self._view

    def add(self, node: str, run: Run, *, violations: Iterable[str] = ()) -> None:
        """Take in a fresh run of the new code.  ``violations`` of physics make the case impossible."""
        work = self._works[node]
        work.impossible.extend(violations)
        work.add(run)
        self._view = None

    def add_impossible(self, node: str, violations: Iterable[str]) -> None:
        """Take in a result that breaks physics so badly that no run can be made of it."""
        self._works[node].impossible.extend(violations)
        self._view = None

    def add_pair(self, node: str, *, base: Run, new: Run) -> None:
        """Take in an A/B pair: neighbouring fresh runs of the base and of the new code."""
        self._works[node].pairs.append((base, new))
        self._view = None

    def withdraw(self, node: str, reason: str) -> None:
        """Ask nothing more for a case that cannot be run any more; undecided, it stays inconclusive."""
        self._works[node].withdrawn = reason
        self._view = None

    def without_base(self, node: str, reason: str) -> None:
        """The base revision cannot run this case: it is judged as if there were no base.  The reason is shown."""
        self._works[node].no_base = reason
        self._view = None

    def verdict(self, node: str) -> Verdict:
        """The verdict on what has come in so far; cases that still need runs are inconclusive."""
        return findings.verdict(self._works[node], self.view)

    def verdicts(self) -> dict[str, Verdict]:
        """The verdict of every case by node id."""
        with _collector_paused():
            return {node: self.verdict(node) for node in self._works}

    def banner(self) -> tuple[str, ...]:
        """What a reader must know about the session as a whole."""
        return findings.banner(self.view)

    def next_requests(self, node: str | None = None) -> list[Request]:
        """What to run next, in this order; empty when every verdict stands.

        Call it when every case of the suite has run, or with a node id to settle that case in place.
        """
        if not self.settings.remeasure:
            return []
        works = [self._works[node]] if node is not None else list(self._works.values())
        open_works = [work for work in works if work.is_open]
        requests = self._screening_requests(open_works)
        if requests:
            return requests
        self._freeze(open_works)
        return self._probe_requests(open_works) or self._deciding_requests(open_works)

    def _screening_requests(self, works: Sequence[CaseWork]) -> list[Request]:
        wanted = {}
        for work in works:
            if work.suspects:
                continue
            wanted[work.node] = work.lacking(work.screening, stages.screening_runs(work, self.view))
        return _round_robin(wanted, "run", "screening")

    def _freeze(self, works: Sequence[CaseWork]) -> None:
        """Screening is over: fix the shift, and who is suspected."""
        if self._frozen is None and not self.settings.in_place:
            self._frozen = self.view.today
            self._view = None
        if self._needs_probes():
            return
        for work in works:
            if not work.suspects:
                work.suspects = stages.suspects(work, self.view)
        found = sum(bool(work.suspects) for work in self._works.values())
        if found != self._suspects:
            self._suspects = found
            self._view = None

    def _needs_probes(self) -> bool:
        if self._frozen is None or self._probed or not self.settings.can_run_base:
            return False
        return self._frozen.unexplained > math.log1p(self.settings.tolerance)

    def _probe_requests(self, works: Sequence[CaseWork]) -> list[Request]:
        """A/B of a few typical cases when the whole suite is slower and nothing else tells why."""
        frozen = self._frozen
        if frozen is None or not self._needs_probes():
            return []
        if self._probes is None:
            seen = [(each, work) for work in works if (each := stages.screened(work)) is not None]
            seen.sort(key=lambda pair: abs(pair[0].difference - frozen.shift))
            self._probes = [work for _, work in seen[:PROBES]]
        wanted = {work.node: work.lacking_pairs(self.settings.pairs) for work in self._probes if work.is_open}
        requests = _round_robin(wanted, "ab_pair", f"is the suite's shift of {percent(frozen.shift)} the host's?")
        if not requests:
            self._probed = True
            self._frozen = self._after_probes(frozen, self._probes)
            self._view = None
            self._freeze(works)
        return requests

    def _after_probes(self, frozen: Today, probes: Sequence[CaseWork]) -> Today:
        """Leave the part of the shift that the A/B shows in the code itself where it is: in the cases."""
        found = [
            self.view.judge(work, 0).paired(pairs)
            for work in probes
            if work.levels and len(pairs := work.pair_values(0)) >= stages.MIN_PAIRS
        ]
        if not found:
            return frozen
        effect = statistics.median([each.effect for each in found])
        error = statistics.median([each.error for each in found])
        code = effect if effect > 2 * error else 0.0
        return dataclasses.replace(frozen, shift=frozen.shift - code, unexplained=0.0)

    def _deciding_requests(self, works: Sequence[CaseWork]) -> list[Request]:
        runs: dict[str, int] = {}
        pairs: dict[str, int] = {}
        for work in works:
            if not work.suspects:
                continue
            need = stages.need(work, self.view)
            runs[work.node] = work.lacking(work.fresh, need.runs)
            if need.pairs and not runs[work.node]:
                pairs[work.node] = work.lacking_pairs(need.pairs)
        requests = _round_robin(runs, "run", "re-measurement")
        if requests:
            return requests
        confirming = sum(bool(work.pairs) or bool(pairs.get(work.node)) for work in works)
        if confirming > self._confirming:
            self._confirming = confirming
            self._view = None
        done = {work.node: len(work.pairs) for work in works}
        return _round_robin(pairs, "ab_pair", "confirmation", done)

    def _look(self) -> View:
        works = [work for work in self._works.values() if work.is_open]
        if self._frozen is None:
            moved = [each for work in works if (each := stages.yardstick_moved(work)) is not None]
            common = yardstick_shift(moved, self.settings)
            for work in self._works.values():
                work.yardstick_shift = common
        seen = [first for work in works if (first := stages.screened(work)) is not None]
        found = shares(_replicates_of(works), with_shift=knows_shift(len(seen), self.settings))
        today, corrected = look(seen, found, self.settings)
        return View(
            settings=self.settings,
            today=self._frozen or today,
            shares=corrected,
            tests=max(self._tests, self.settings.planned_cases),
            suspects=self._suspects,
            confirming=self._confirming,
        )


def _replicates_of(works: Sequence[CaseWork]) -> Iterator[Replicates]:
    """Every set of times of one case that this session measured more than once."""
    for work in works:
        for runs in (work.screening, work.fresh):
            values = work.values(0, runs) if len(runs) > 1 else []
            if len(values) > 1:
                yield Replicates(kind=work.judged[0].history.kind, level=work.levels[0], values=values)


def _round_robin(
    wanted: Mapping[str, int], kind: Literal["run", "ab_pair"], why: str, done: Mapping[str, int] | None = None
) -> list[Request]:
    """One of each, then a second of each, and so on: a bad minute of the host then hits no case twice."""
    return [
        Request(
            case=node,
            kind=kind,
            first="base" if kind == "ab_pair" and _is_even(turn + place + (done or {}).get(node, 0)) else "new",
            why=why,
        )
        for turn in range(max(wanted.values(), default=0))
        for place, (node, count) in enumerate(wanted.items())
        if turn < count
    ]


def _is_even(number: int) -> bool:
    return number % 2 == 0
