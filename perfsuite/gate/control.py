"""What a control says about a case: whether the host, or the code, made it slower.

A control is fixed work that was timed beside the samples, a yardstick.
A control is evidence only about cases that do similar work.  Runs can be compared by it only if all of them timed the
same kind of control.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from perfsuite.baselines.runs import RunSummary
from perfsuite.record.result import UNLIKE
from perfsuite.statistics.robust import median, rough_sigma

ENOUGH_CONTROLS = 3
"""Stored runs with a control of one kind from which on that is what is stored."""
SCATTERS = 2.0
"""Usual distances between a case and its control that a case must lie beyond it before the code is blamed."""
UNLIKE_RESPONSE = 0.3
"""Standard deviation of how much of a host's shift a case really feels: memory-bound and compute-bound cases differ."""
SURELY_UNLIKE = 3 * UNLIKE_RESPONSE
"""Share of what a control moved by that its case may have moved further: of a suite some case does."""
EXPLAINED = 0.5
"""Share of a change that the control must show, at least, before it is put down to the host."""
_BEFORE_KINDS = ("", "compute", "memory")
"""Kinds that a run without one may have: the workload said which, and says the same today where the step works."""

Read = Callable[[RunSummary], float | None]
Says = Literal["host", "unsure", "code"]
"""What made a case slower, by its control; ``code`` where the control stayed behind by more than it ever does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Control:
    """The control of the stored runs of a case; times are logarithms."""

    kind: str
    """As its ranks named it; empty where it names none."""
    centre: float
    """Median of its times."""
    apart: float
    """How far case and control usually lie apart, beside their medians: a standard deviation."""
    read: Read
    """Which time of a control this is."""

    def of(self, run: RunSummary) -> float | None:
        """The time of a run's control; None without one, and for one of another kind."""
        return self.read(run) if comparable(self.kind, run.control) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """How far the control beside some runs of today lies from the stored one; logarithms."""

    amount: float | None = None
    """None where no control resembles the case."""
    doubt: float = 0.0
    """How much further the host may have moved the case."""
    why: str = ""
    """The kind of the control, or why none resembles the case."""

    def says(self, effect: float, tolerance: float) -> Says:
        """Whose doing it is that a case, or a suite, is slower by ``effect``."""
        if self.amount is None:
            return "unsure"
        if explains(effect, self.amount, tolerance):
            return "host"
        return "unsure" if effect - self.amount <= tolerance + self.doubt else "code"


def comparable(stored: str, now: str) -> bool:
    """Whether controls of these kinds do the same work, and resemble the step at all.

    >>> comparable("sleep 4 ms", "sleep 4 ms"), comparable("", "memory"), comparable("", "message 1 KiB")
    (True, True, False)
    """
    if "" in (stored, now):
        return stored in _BEFORE_KINDS and now in _BEFORE_KINDS
    return stored == now != UNLIKE


def middle(run: RunSummary) -> float | None:
    """The median time of a run's control."""
    return run.yardstick


def stored_control(runs: Sequence[RunSummary], values: Sequence[float], *reads: Read) -> Control | None:
    """The control that most stored runs have; ``values`` are what is judged of them, in the same order.

    Of ``reads``, which say what a control's time is, the first that enough runs have: means were not always stored.
    """
    kinds = Counter(run.control for run in runs if run.yardstick is not None)
    kind = max(kinds, key=lambda one: (kinds[one], one), default="")
    alike = [(run, value) for run, value in zip(runs, values, strict=True) if comparable(kind, run.control)]
    for read in reads:
        timed = [(time, value) for run, value in alike if (time := read(run)) is not None]
        if len(timed) >= ENOUGH_CONTROLS:
            apart = rough_sigma([value - time for time, value in timed])
            return Control(kind=kind, centre=median([time for time, _ in timed]), apart=apart, read=read)
    return None


def moved(
    stored: Control | None, runs: Sequence[RunSummary], *, slope: float = 0.0, common: float = 0.0
) -> Moved | None:
    """How far the control beside these runs moved; None where they have none at all.

    ``slope`` of its movement beyond ``common``, what all controls have in common, is taken off the values already.
    """
    timed = [run for run in runs if run.control or run.yardstick is not None]
    if not timed:
        return None
    kinds = ", ".join(dict.fromkeys(run.control or "of unknown kind" for run in timed))
    now = [time for run in timed if stored is not None and (time := stored.of(run)) is not None]
    if stored is None or not now:
        if all(run.control == UNLIKE for run in timed):
            return Moved(why="no control resembles the step")
        then = "none of one kind" if stored is None else stored.kind or "of unknown kind"
        return Moved(why=f"its control is {kinds}, stored is {then}: store new runs")
    far = median(now) - stored.centre
    shared, apart = (common, 0.0) if slope else (0.0, stored.apart)  # with a slope the noise is what they lie apart
    doubt = SCATTERS * apart + SURELY_UNLIKE * max(0.0, far - shared)
    return Moved(amount=far - slope * (far - common), doubt=doubt, why=stored.kind or kinds)


def explains(effect: float, amount: float, tolerance: float) -> bool:
    """Whether a control that moved by ``amount`` leaves less than the tolerance of an effect; all logarithms.

    >>> explains(0.1, 0.08, 0.03), explains(0.1, 0.05, 0.03), explains(0.04, 0.015, 0.03)
    (True, False, False)
    """
    return effect - amount <= tolerance and amount >= EXPLAINED * effect
