"""The quantities and runs of one case in the gate, and the runs that are still missing."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from perfsuite.baselines.runs import CaseIdentity, MetricMeaning, RunSummary, is_dirty
from perfsuite.gate.noise import History, Level, levels
from perfsuite.gate.quantity import Quantity, Specs, all_samples, more_disturbed, quantities
from perfsuite.gate.shift import SURELY_UNLIKE, WAITS, Moved, Seen, comparable, moved, waited
from perfsuite.record.verdict import ALL, TIME, GateSettings, VerdictName
from perfsuite.statistics.robust import median

Pair = tuple[RunSummary, RunSummary]  # Neighbouring runs of another revision and of the new code.

SPARE_RUNS = 3  # Unstable runs that are replaced per stage before the host is called unstable.


@dataclass(frozen=True, kw_only=True)
class GateCase:
    """Input of the gate for one case; :func:`perfsuite.gate.comparable.gate_case` creates it."""

    case: CaseIdentity  # Identity, and the meaning of its metrics.
    specs: Specs  # Rules of perfsuite's metrics: :data:`perfsuite.metrics.REGISTRY`.
    stored: tuple[RunSummary, ...] = ()  # Stored runs to compare with: the reference of the epoch, oldest first.
    newest: tuple[RunSummary, ...] = ()
    """Newer stored runs, oldest first; they show between which commits a change grew."""
    tolerance: float | None = None  # Accepted relative slowdown; None: that of the settings.
    metric_tolerances: Mapping[str, float] = field(default_factory=dict)  # Tolerances by metric.
    stored_metrics: Mapping[str, MetricMeaning] = field(default_factory=dict)  # The metrics of the stored case.
    changed_metrics: Mapping[str, str] = field(default_factory=dict)
    """Own metrics whose unit or direction differs from the stored one, with both; ``case`` is without them."""
    refusal: VerdictName | None = None  # ``no-baseline`` or ``not-comparable`` if no stored run can be compared.
    reasons: tuple[str, ...] = ()  # Reasons of the refusal.
    flags: tuple[str, ...] = ()  # Remarks for any verdict: stale baseline, dropped runs.
    soft_differences: tuple[str, ...] = ()  # Differences of the environment from that of the compared runs.
    environment_changes: tuple[str, ...] = ()  # Differences that can slow the case.
    hosts: str = ""  # A sentence about the hosts of the stored runs; empty if all are, or may be, of this host.
    elsewhere: tuple[str, ...] = ()  # The host as a cause, if all stored runs are of one other host.

    @property
    def changes(self) -> tuple[str, ...]:
        """All differences from the stored runs that can slow the case."""
        return (*self.elsewhere, *self.environment_changes)

    @property
    def anchor(self) -> str:
        """The commit of the newest compared run with a clean commit; empty without one."""
        return next((run.commit for run in reversed(self.stored) if run.commit and not is_dirty(run.commit)), "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """One quantity of a case together with its stored level."""

    quantity: Quantity
    level: Level  # Stored level and scatter.

    @property
    def name(self) -> str:
        """``time``, ``mean``, ``p95`` or the name of a metric."""
        return self.quantity.name

    def plain(self, value: float) -> float:
        """Return a value of the level's scale in the quantity's unit: seconds for the time."""
        yardstick = self.level.slope * (self.level.yardstick or 0.0)
        return math.exp(self.quantity.sign * (value + yardstick))

    @property
    def is_secondary(self) -> bool:
        """Whether it is judged only if it looks worse."""
        return self.quantity.is_secondary

    def values(self, runs: Sequence[RunSummary], yardstick_shift: float = 0.0) -> list[float]:
        """Return the values of the stable runs; ``yardstick_shift`` is the common shift of the yardsticks today."""
        values, control = [], self.quantity.control
        for run in runs:
            value = self.quantity.stable_value(run)
            if value is not None:
                value = self.level.adjusted(value, control.of(run) if control else None, yardstick_shift)
            if value is not None:
                values.append(value)
        return values

    def seen(
        self, runs: Sequence[RunSummary], yardstick_shift: float = 0.0, control: Moved | None = None
    ) -> Seen | None:
        """Return the quantity in these runs with the movement of its control; None without a stable run."""
        values, kind = self.values(runs, yardstick_shift), self.quantity.history.kind
        return Seen(kind=kind, level=self.level, values=values, control=control) if values else None

    def unrest(self, runs: Sequence[RunSummary]) -> float:
        """Return the spread of the samples inside the stable runs, relative to the usual spread."""
        unrests = [self.quantity.unrest(run) for run in runs if self.quantity.is_stable(run)]
        return median(unrests) if unrests else 1.0

    def pair_values(self, pairs: Sequence[Pair], yardstick_shift: float = 0.0) -> list[tuple[float, float]]:
        """Return the (base, new) values of the pairs with two stable runs."""
        values = (self.values(pair, yardstick_shift) for pair in pairs)
        return [(both[0], both[1]) for both in values if len(both) == 2]

    def lacking(self, runs: Sequence[RunSummary], wanted: int) -> int:
        """Return the runs to request until ``wanted`` are stable; 0 if the spare ones are used up."""
        return max(0, min(wanted - len(self.values(runs)), wanted + SPARE_RUNS - len(runs)))

    def lacking_pairs(self, pairs: Sequence[Pair], wanted: int) -> int:
        """Return the pairs to request until ``wanted`` are stable; 0 if the spare ones are used up."""
        return max(0, min(wanted - len(self.pair_values(pairs)), wanted + SPARE_RUNS - len(pairs)))


class CaseWork:
    """The runs of one case; it decides nothing."""

    def __init__(
        self,
        gate_case: GateCase,
        judged: Sequence[Judged],
        flags: Sequence[str],
        *,
        settings: GateSettings,
        learnt: int | None,
        plain_level: Callable[[], Level],
    ) -> None:
        """``judged`` begins with the time; it is empty if nothing can be compared.  ``learnt`` is the number of usable
        stored runs if they are too few to judge. ``plain_level`` returns the level of the time without subtraction of a
        yardstick.
        """
        self.gate_case = gate_case
        self.judged = tuple(judged)
        self.flags = tuple(flags)
        self.learnt = learnt
        self._settings = settings
        self._plain_level = plain_level
        self.screening: list[RunSummary] = []
        self.fresh: list[RunSummary] = []
        self.pairs: list[Pair] = []
        """Runs of the base and of the new code."""
        self.anchor_pairs: list[Pair] = []
        """Runs of the stored runs' commit, and of the new code."""
        self.suspected: frozenset[str] = frozenset()
        """Names of the quantities that the screening suspects."""
        self.impossible: list[str] = []
        self.withdrawn = ""
        self.cut_short = ""
        """Why it was not measured further although its verdict needs more runs."""
        self.no_base = ""
        self.no_anchor = "" if gate_case.anchor else "the stored runs name no commit, or one with uncommitted changes"

    @property
    def node(self) -> str:
        """pytest node id."""
        return self.gate_case.case.node

    @property
    def settings(self) -> GateSettings:
        """The settings, without an A/B if the base cannot run this case."""
        return replace(self._settings, can_run_base=False) if self.no_base else self._settings

    @property
    def stored_commit_pairs(self) -> Sequence[Pair]:
        """Pairs with the commit of the stored runs; those with the base if it is the same commit."""
        same = self.gate_case.anchor and self.gate_case.anchor == self._settings.base_commit
        return self.pairs if same else self.anchor_pairs

    @property
    def why_no_anchor(self) -> str:
        """Why the commit of the stored runs was not run; empty if it can be."""
        if not self._settings.can_run_base:
            return "no base was given (--perf-against): the commit of the stored runs was not run"
        return self.no_anchor or self.cut_short

    @property
    def needs_anchor(self) -> bool:
        """Whether the commit of the stored runs can be run, and is not the base."""
        return not self.why_no_anchor and self.stored_commit_pairs is self.anchor_pairs

    @property
    def runs(self) -> list[RunSummary]:
        """Every fresh run of the new code outside pairs."""
        return [*self.screening, *self.fresh]

    @property
    def time(self) -> Judged:
        """The time, which is judged in any case; not defined if nothing can be compared."""
        return self.judged[0]

    @property
    def deciding(self) -> list[Judged]:
        """Quantities that need stable runs: all but mean and tail, and later the suspected ones."""
        if self.suspected:
            return [judged for judged in self.judged if judged.name in self.suspected]
        return [judged for judged in self.judged if not judged.is_secondary]

    @property
    def is_open(self) -> bool:
        """Whether statistics can decide it: there are comparable stored runs and measured ones."""
        return bool(self.judged and self.screening) and not (self.impossible or self.withdrawn or self.ran_out)

    @property
    def ran_out(self) -> bool:
        """Whether a run of this session ran out of memory."""
        new = (pair[1] for pair in (*self.pairs, *self.anchor_pairs))
        return any(run.outcome == "out_of_memory" for run in (*self.runs, *new))

    def add(self, run: RunSummary) -> None:
        """Add a run to the present stage of the case."""
        (self.fresh if self.suspected else self.screening).append(run)
        self.match(run)
        if run.clean < run.samples and self.judged and not any(judged.name == ALL for judged in self.judged):
            self._watch_all()

    def match(self, run: RunSummary) -> None:
        """Judge the time without its yardstick if this run timed another kind of control than the stored runs."""
        if not self.judged or not self.time.level.slope or run.outcome != "measured":
            return
        control = self.time.quantity.control
        if control is None or not comparable(control.kind, run.control):
            time = Judged(quantity=self.time.quantity, level=self._plain_level())
            self.judged = (time, *self.judged[1:])

    def _watch_all(self) -> None:
        """Judge all samples too if clearly more of them are disturbed than in the stored runs."""
        stored = self.gate_case.stored
        more = more_disturbed(stored, self.runs)
        quantity = all_samples(self.gate_case.case, stored, self.time.quantity) if more else None
        if quantity is not None:
            level = levels([quantity.history], min_suite=math.inf, use_yardstick=False)[0]
            self.judged = (*self.judged, Judged(quantity=quantity, level=level))

    def control(self, judged: Judged, runs: Sequence[RunSummary], yardstick_shift: float) -> Moved | None:
        """Return the movement of these runs' control that is not subtracted from their values; None without any.  A
        control uses torch, so it is not used if torch or another part of the environment changed.
        """
        if self.gate_case.environment_changes or (judged.name != TIME and not judged.is_secondary):
            return None
        stable = [run for run in runs if judged.quantity.is_stable(run)]
        beside = moved(judged.quantity.control, stable, slope=judged.level.slope, common=yardstick_shift)
        lost = 0.0 if judged.level.slope else waited(self.gate_case.stored, stable)
        if lost == 0 or (beside is not None and (beside.amount is None or lost <= beside.amount)):
            return beside
        doubt = max(SURELY_UNLIKE * lost, beside.doubt if beside else 0.0)
        return Moved(amount=lost, doubt=doubt, why=WAITS)

    def screened(self, judged: Judged, yardstick_shift: float) -> Seen | None:
        """Return one quantity in the screening; None without a stable run."""
        control = self.control(judged, self.screening, yardstick_shift)
        return judged.seen(self.screening, yardstick_shift, control)

    def lacking(self, runs: Sequence[RunSummary], wanted: int) -> int:
        """Return the runs to request until ``wanted`` are stable in every deciding quantity."""
        return max((judged.lacking(runs, wanted) for judged in self.deciding), default=0)

    def lacking_pairs(self, pairs: Sequence[Pair], wanted: int) -> int:
        """Return the pairs to request until ``wanted`` are stable in every deciding quantity."""
        return max((judged.lacking_pairs(pairs, wanted) for judged in self.deciding), default=0)


def case_works(cases: Iterable[GateCase], settings: GateSettings) -> Iterator[CaseWork]:
    """Yield every case with its judged quantities; with none if too few runs are stored."""
    chosen = []
    for gate_case in cases:
        found, flags = tuple[Quantity, ...](), tuple[str, ...]()
        if gate_case.stored and not gate_case.refusal:
            accepted = settings.tolerance if gate_case.tolerance is None else gate_case.tolerance
            wanted = gate_case.metric_tolerances
            found, flags = quantities(gate_case.case, gate_case.stored, gate_case.specs, accepted, wanted)
        chosen.append((gate_case, found, flags))
    judged_of = {
        (gate_case.case.node, quantity.name): quantity
        for gate_case, found, _ in chosen
        for quantity in _enough(found, settings)
    }
    fitted = _fitted(judged_of, settings)

    @functools.cache
    def plain() -> dict[tuple[str, str], Level]:
        times = {key: quantity for key, quantity in judged_of.items() if quantity.name == TIME}
        return _fitted(times, replace(settings, yardstick=False))

    for gate_case, found, flags in chosen:
        judged = [
            Judged(quantity=quantity, level=fitted[gate_case.case.node, quantity.name])
            for quantity in _enough(found, settings)
        ]
        time = [len(quantity.history.values) for quantity in found if quantity.name == TIME]
        can_learn = not judged and not gate_case.refusal and bool(gate_case.stored)
        yield CaseWork(
            gate_case,
            judged,
            flags,
            settings=settings,
            learnt=max(time, default=0) if can_learn else None,
            plain_level=functools.partial(lambda node: plain()[node, TIME], gate_case.case.node),
        )


def _enough(found: Sequence[Quantity], settings: GateSettings) -> list[Quantity]:
    enough = [quantity for quantity in found if len(quantity.history.values) >= settings.min_stored]
    return enough if any(quantity.name == TIME for quantity in enough) else []


def _fitted(chosen: dict[tuple[str, str], Quantity], settings: GateSettings) -> dict[tuple[str, str], Level]:
    """Return levels by node id and name; times (or means, or tails) are fitted together: a host moves them alike."""
    enough = math.inf if settings.in_place else settings.min_suite
    groups: dict[str, dict[tuple[str, str], History]] = {}
    for key, quantity in chosen.items():
        shared = quantity.name if quantity.name == TIME or quantity.is_secondary else ""
        groups.setdefault(shared, {})[key] = quantity.history
    fitted: dict[tuple[str, str], Level] = {}
    for shared, group in groups.items():
        min_suite = enough if shared else math.inf
        group_levels = levels(list(group.values()), min_suite=min_suite, use_yardstick=settings.yardstick)
        fitted.update(zip(group, group_levels, strict=True))
    return fitted
