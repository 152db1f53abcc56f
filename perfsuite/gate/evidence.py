"""What is judged of one case in the gate, the runs that came for it, and what they still lack."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from perfsuite.baselines.runs import CaseIdentity, MetricMeaning, RunSummary, is_dirty
from perfsuite.gate.control import Moved, comparable, moved
from perfsuite.gate.noise import History, Level, levels
from perfsuite.gate.quantity import Quantity, all_samples, more_disturbed, quantities
from perfsuite.gate.shift import Seen
from perfsuite.record.verdict import ALL, TIME, GateSettings, VerdictName
from perfsuite.statistics.robust import median

Pair = tuple[RunSummary, RunSummary]
"""Neighbouring runs of another revision and of the new code."""

SPARE_RUNS = 3
"""Unstable runs that are replaced, per stage, before the host is called unstable."""


@dataclass(frozen=True, kw_only=True)
class GateCase:
    """One case as the gate is given it; :func:`perfsuite.gate.comparable.gate_case` makes it."""

    case: CaseIdentity
    """Identity, and the meaning of its metrics."""
    stored: tuple[RunSummary, ...] = ()
    """Stored runs that are compared with: the reference of the epoch, oldest first."""
    newest: tuple[RunSummary, ...] = ()
    """Stored runs that are newer than these, oldest first: they tell between which commits a change grew."""
    tolerance: float | None = None
    """Relative slowdown that is accepted; None: the settings'."""
    metric_tolerances: Mapping[str, float] = field(default_factory=dict)
    """Tolerances by metric."""
    stored_metrics: Mapping[str, MetricMeaning] = field(default_factory=dict)
    """The metrics of the stored case."""
    changed_metrics: Mapping[str, str] = field(default_factory=dict)
    """Metrics of one's own that have another unit or direction than stored, with both; ``case`` is without them."""
    refusal: VerdictName | None = None
    """``no-baseline`` or ``not-comparable`` when nothing stored may be compared with."""
    reasons: tuple[str, ...] = ()
    """Why it is refused."""
    flags: tuple[str, ...] = ()
    """What a reader must know whatever the verdict: stale baseline, dropped runs."""
    soft_differences: tuple[str, ...] = ()
    """Fields of the environment that differ from that of the runs which are compared with."""
    environment_changes: tuple[str, ...] = ()
    """Those of them that can make the case slower."""
    hosts: str = ""
    """A sentence about the hosts of the stored runs; empty where all are, or may be, of this host."""
    elsewhere: tuple[str, ...] = ()
    """The host as a cause where all stored runs are of one other host: a level that moved may be the host's."""

    @property
    def changes(self) -> tuple[str, ...]:
        """Everything that differs from the stored runs and can make the case slower."""
        return (*self.elsewhere, *self.environment_changes)

    @property
    def anchor(self) -> str:
        """The commit of the newest run that is compared with and names one; empty where none does.

        A run of uncommitted changes names none: nobody can check them out.
        """
        return next((run.commit for run in reversed(self.stored) if run.commit and not is_dirty(run.commit)), "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """One quantity of a case together with its stored level."""

    quantity: Quantity
    """What is judged, and how a run's value of it is read."""
    level: Level
    """Where it was and how much it scattered."""

    @property
    def name(self) -> str:
        """``time``, ``mean``, ``p95`` or the name of a metric."""
        return self.quantity.name

    def plain(self, value: float) -> float:
        """A value on the scale of the level, in the quantity's unit: seconds for the time."""
        yardstick = self.level.slope * (self.level.yardstick or 0.0)
        return math.exp(self.quantity.sign * (value + yardstick))

    @property
    def is_secondary(self) -> bool:
        """Whether it is judged only where it looks worse."""
        return self.quantity.is_secondary

    def values(self, runs: Sequence[RunSummary], yardstick_shift: float = 0.0) -> list[float]:
        """Values in the stable ones of these runs, on the scale of the level.

        ``yardstick_shift`` is what the yardsticks of all cases have in common today.
        """
        values = []
        for run in runs:
            value = self.quantity.stable_value(run)
            if value is not None:
                control = self.quantity.control
                value = self.level.adjusted(value, control.of(run) if control else None, yardstick_shift)
            if value is not None:
                values.append(value)
        return values

    def seen(
        self, runs: Sequence[RunSummary], yardstick_shift: float = 0.0, control: Moved | None = None
    ) -> Seen | None:
        """The quantity as these runs saw it, beside a control that moved so far; None without a stable run."""
        values = self.values(runs, yardstick_shift)
        return (
            Seen(kind=self.quantity.history.kind, level=self.level, values=values, control=control) if values else None
        )

    def unrest(self, runs: Sequence[RunSummary]) -> float:
        """How many times as far as usual the samples lie apart inside the stable ones of these runs."""
        unrests = [self.quantity.unrest(run) for run in runs if self.quantity.is_stable(run)]
        return median(unrests) if unrests else 1.0

    def pair_values(self, pairs: Sequence[Pair], yardstick_shift: float = 0.0) -> list[tuple[float, float]]:
        """(base, new) values of the pairs of which both runs are stable."""
        values = (self.values(pair, yardstick_shift) for pair in pairs)
        return [(both[0], both[1]) for both in values if len(both) == 2]

    def lacking(self, runs: Sequence[RunSummary], wanted: int) -> int:
        """Runs to ask for until ``wanted`` of them are stable; 0 when the spare ones are used up."""
        return max(0, min(wanted - len(self.values(runs)), wanted + SPARE_RUNS - len(runs)))

    def lacking_pairs(self, pairs: Sequence[Pair], wanted: int) -> int:
        """The same for pairs."""
        return max(0, min(wanted - len(self.pair_values(pairs)), wanted + SPARE_RUNS - len(pairs)))


class CaseWork:
    """What came in for one case; it decides nothing."""

    def __init__(
        self,
        given: GateCase,
        judged: Sequence[Judged],
        flags: Sequence[str],
        *,
        settings: GateSettings,
        learnt: int | None = None,
        plain_level: Callable[[], Level] | None = None,
    ) -> None:
        """``judged`` has the time first, or nothing where nothing can be compared.

        ``learnt`` is the number of stored runs that can be used when they are too few to judge anything.
        ``plain_level`` gives the level of the time from which no yardstick is taken off.
        """
        self.given = given
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
        """Runs of the commit that the stored runs name, and of the new code."""
        self.suspected: frozenset[str] = frozenset()
        """Names of the quantities that the screening suspects."""
        self.impossible: list[str] = []
        self.withdrawn = ""
        self.cut_short = ""
        """Why it was not measured further, although it needs more for its verdict."""
        self.no_base = ""
        self.no_anchor = "" if given.anchor else "the stored runs name no commit, or one with uncommitted changes"

    @property
    def node(self) -> str:
        """pytest node id."""
        return self.given.case.node

    @property
    def settings(self) -> GateSettings:
        """The settings, without an A/B where the base cannot run this case."""
        return replace(self._settings, can_run_base=False) if self.no_base else self._settings

    @property
    def stored_commit_pairs(self) -> Sequence[Pair]:
        """Pairs with the commit that the stored runs name; those with the base where that is the same commit."""
        same = self.given.anchor and self.given.anchor == self._settings.base_commit
        return self.pairs if same else self.anchor_pairs

    @property
    def why_no_anchor(self) -> str:
        """Why the commit that the stored runs name was not run; empty where it can be."""
        if not self._settings.can_run_base:
            return "no base was given (--perf-against): the commit of the stored runs was not run"
        return self.no_anchor or self.cut_short

    @property
    def needs_anchor(self) -> bool:
        """Whether the commit that the stored runs name can be run, and was not run as the base."""
        return not self.why_no_anchor and self.stored_commit_pairs is self.anchor_pairs

    @property
    def runs(self) -> list[RunSummary]:
        """Every fresh run of the new code outside pairs."""
        return [*self.screening, *self.fresh]

    @property
    def time(self) -> Judged:
        """What is judged in any case; only where anything can be compared."""
        return self.judged[0]

    @property
    def deciding(self) -> list[Judged]:
        """What needs stable runs: all but mean and tail, and later what is suspected."""
        if self.suspected:
            return [judged for judged in self.judged if judged.name in self.suspected]
        return [judged for judged in self.judged if not judged.is_secondary]

    @property
    def is_open(self) -> bool:
        """Whether statistics may decide it: something comparable is stored and something measured came."""
        return (
            bool(self.judged)
            and bool(self.screening)
            and not self.impossible
            and not self.withdrawn
            and not self.ran_out
        )

    @property
    def ran_out(self) -> bool:
        """Whether a run of this session ran out of memory."""
        new = (pair[1] for pair in (*self.pairs, *self.anchor_pairs))
        return any(run.outcome == "out_of_memory" for run in (*self.runs, *new))

    def add(self, run: RunSummary) -> None:
        """Take a run into the stage that the case is in."""
        (self.fresh if self.suspected else self.screening).append(run)
        self.match(run)
        if run.clean < run.samples and self.judged and not any(judged.name == ALL for judged in self.judged):
            self._watch_all()

    def match(self, run: RunSummary) -> None:
        """Judge the plain time from now on if this run timed another kind of control than the stored runs did."""
        if not self.judged or not self.time.level.slope or self._plain_level is None or run.outcome != "measured":
            return
        control = self.time.quantity.control
        if control is None or not comparable(control.kind, run.control):
            time = Judged(quantity=self.time.quantity, level=self._plain_level())
            self.judged = (time, *self.judged[1:])

    def _watch_all(self) -> None:
        """Look at all samples as well where clearly more of them are left out than in the stored runs."""
        stored = self.given.stored
        if not more_disturbed(stored, self.runs):  # of most cases, and quickly told
            return
        quantity = all_samples(self.given.case, stored, self.time.quantity)
        if quantity is not None:
            level = levels([quantity.history], min_suite=math.inf, use_yardstick=False)[0]
            self.judged = (*self.judged, Judged(quantity=quantity, level=level))

    def control(self, judged: Judged, runs: Sequence[RunSummary], yardstick_shift: float) -> Moved | None:
        """How far the control beside these runs moved, as far as it is not taken off their values; None without any.

        A control that runs through torch is none where torch, or another part of the environment, changed.
        """
        if self.given.environment_changes or (judged.name != TIME and not judged.is_secondary):
            return None
        stable = [run for run in runs if judged.quantity.is_stable(run)]
        return moved(judged.quantity.control, stable, slope=judged.level.slope, common=yardstick_shift)

    def screened(self, judged: Judged, yardstick_shift: float) -> Seen | None:
        """One quantity as the screening saw it; None without a stable run."""
        control = self.control(judged, self.screening, yardstick_shift)
        return judged.seen(self.screening, yardstick_shift, control)

    def lacking(self, runs: Sequence[RunSummary], wanted: int) -> int:
        """Runs to ask for until ``wanted`` are stable in every quantity that decides."""
        return max((judged.lacking(runs, wanted) for judged in self.deciding), default=0)

    def lacking_pairs(self, pairs: Sequence[Pair], wanted: int) -> int:
        """The same for pairs."""
        return max((judged.lacking_pairs(pairs, wanted) for judged in self.deciding), default=0)


def case_works(cases: Iterable[GateCase], settings: GateSettings) -> Iterator[CaseWork]:
    """Every case with what can be judged of it; nothing where nothing is stored, or too little."""
    chosen = []
    for given in cases:
        known, flags = tuple[Quantity, ...](), tuple[str, ...]()
        if given.stored and not given.refusal:
            accepted = settings.tolerance if given.tolerance is None else given.tolerance
            wanted = given.metric_tolerances
            known, flags = quantities(given.case, given.stored, tolerance=accepted, metric_tolerances=wanted)
        chosen.append((given, known, flags))
    enough = [(given.case.node, quantity) for given, known, _ in chosen for quantity in _enough(known, settings)]
    judged_of = {(node, quantity.name): quantity for node, quantity in enough}
    fitted = _fitted(judged_of, settings)

    @functools.cache
    def plain() -> dict[tuple[str, str], Level]:
        times = {key: quantity for key, quantity in judged_of.items() if quantity.name == TIME}
        return _fitted(times, replace(settings, yardstick=False))

    for given, known, flags in chosen:
        judged = [
            Judged(quantity=quantity, level=fitted[given.case.node, quantity.name])
            for quantity in _enough(known, settings)
        ]
        time = [len(quantity.history.values) for quantity in known if quantity.name == TIME]
        can_learn = not judged and not given.refusal and bool(given.stored)
        yield CaseWork(
            given,
            judged,
            flags,
            settings=settings,
            learnt=max(time, default=0) if can_learn else None,
            plain_level=functools.partial(lambda node: plain()[node, TIME], given.case.node),
        )


def _enough(known: Sequence[Quantity], settings: GateSettings) -> list[Quantity]:
    """Those with enough stored runs; none where the time has not."""
    enough = [quantity for quantity in known if len(quantity.history.values) >= settings.min_stored]
    return enough if any(quantity.name == TIME for quantity in enough) else []


def _fitted(chosen: dict[tuple[str, str], Quantity], settings: GateSettings) -> dict[tuple[str, str], Level]:
    """Levels by node id and name: all times together, all means and all tails, because a host moves them alike."""
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
