"""The state of one case in the gate: the runs that came, and what they still lack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from perfsuite.baselines.runs import Case, Run
from perfsuite.gate.noise import Level
from perfsuite.gate.quantity import Quantity
from perfsuite.records import VerdictName

SPARE_RUNS = 3
"""Unstable runs that are replaced, per stage, before the host is called unstable."""


@dataclass(frozen=True, kw_only=True)
class GateCase:
    """One case as the gate is given it; :func:`perfsuite.gate.comparable.gate_case` makes it."""

    case: Case
    """Identity, and the meaning of its metrics."""
    stored: tuple[Run, ...] = ()
    """Stored runs that may be compared with, oldest first."""
    tolerance: float | None = None
    """Relative slowdown that is accepted; None: the settings'."""
    metric_tolerances: Mapping[str, float] = field(default_factory=dict)
    """Tolerances by metric."""
    refusal: VerdictName | None = None
    """``no-baseline`` or ``not-comparable`` when nothing stored may be compared with."""
    reasons: tuple[str, ...] = ()
    """Why it is refused."""
    flags: tuple[str, ...] = ()
    """What a reader must know whatever the verdict: stale baseline, dropped runs."""
    soft_differences: tuple[str, ...] = ()
    """Fields of the environment that differ from the newest stored run."""


class CaseWork:
    """What came in for one case; it decides nothing."""

    def __init__(
        self,
        given: GateCase,
        judged: Sequence[Quantity] = (),
        flags: Sequence[str] = (),
        *,
        learnt: int | None = None,
    ) -> None:
        """``learnt`` is the number of stored runs that can be used when they are too few to judge anything."""
        self.given = given
        self.judged = tuple(judged)
        self.flags = tuple(flags)
        self.learnt = learnt
        self.levels: tuple[Level, ...] = ()
        self.yardstick_shift = 0.0
        self.screening: list[Run] = []
        self.fresh: list[Run] = []
        self.pairs: list[tuple[Run, Run]] = []
        self.suspects: frozenset[int] = frozenset()
        self.impossible: list[str] = []
        self.withdrawn = ""
        self.no_base = ""

    @property
    def node(self) -> str:
        """pytest node id."""
        return self.given.case.node

    @property
    def runs(self) -> list[Run]:
        """Every fresh run of the new code outside pairs."""
        return [*self.screening, *self.fresh]

    @property
    def is_open(self) -> bool:
        """Whether statistics may decide it: something comparable is stored and something measured came."""
        return (
            bool(self.levels)
            and bool(self.screening)
            and not self.impossible
            and not self.withdrawn
            and not self.ran_out
        )

    @property
    def ran_out(self) -> bool:
        """Whether a run of this session ran out of memory."""
        new = (pair[1] for pair in self.pairs)
        return any(run.outcome == "out_of_memory" for run in (*self.runs, *new))

    def add(self, run: Run) -> None:
        """Take a run into the stage that the case is in."""
        (self.fresh if self.suspects else self.screening).append(run)

    def values(self, index: int, runs: Sequence[Run]) -> list[float]:
        """Values of one quantity in the stable ones of these runs, on the scale of its level."""
        quantity, level = self.judged[index], self.levels[index]
        found = []
        for run in runs:
            value = quantity.value(run) if quantity.is_stable(run) else None
            if value is not None:
                value = level.adjusted(value, run.yardstick, self.yardstick_shift)
            if value is not None:
                found.append(value)
        return found

    def pair_values(self, index: int) -> list[tuple[float, float]]:
        """(base, new) values of one quantity in the pairs of which both runs are stable."""
        found = []
        for base, new in self.pairs:
            both = self.values(index, [base, new])
            if len(both) == 2:
                found.append((both[0], both[1]))
        return found

    def lacking(self, runs: Sequence[Run], wanted: int) -> int:
        """Runs to ask for until ``wanted`` are stable in every quantity; 0 when the spare ones are used up."""
        stable = min((len(self.values(index, runs)) for index in range(len(self.judged))), default=wanted)
        return max(0, min(wanted - stable, wanted + SPARE_RUNS - len(runs)))

    def lacking_pairs(self, wanted: int) -> int:
        """The same for pairs."""
        stable = min((len(self.pair_values(index)) for index in range(len(self.judged))), default=wanted)
        return max(0, min(wanted - stable, wanted + SPARE_RUNS - len(self.pairs)))
