"""Decide by a control whether the host or the code made a case slower.

A control (yardstick) is fixed work that was timed between the samples.  It is evidence only for cases with similar
work, and only if all compared runs timed the same kind of control.
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
"""Fewest stored runs with a control of one kind for a stored control."""
SCATTERS = 2.0
"""Multiple of the usual distance between case and control above which the code is blamed."""
UNLIKE_RESPONSE = 0.3
"""Standard deviation of the share of a host's shift in a case: memory-bound and compute-bound cases differ."""
SURELY_UNLIKE = 3 * UNLIKE_RESPONSE
"""Share of a control's movement by which some case of a suite moves further.  Row: busier, controls."""
EXPLAINED = 0.5
"""Least share of a change that the control must show before the host is blamed.  Row: busier, controls."""
_BEFORE_KINDS = ("", "compute", "memory")
"""Kinds of controls that are comparable with a run without a kind: older versions chose them by the workload."""

Read = Callable[[RunSummary], float | None]
Says = Literal["host", "unsure", "code"]
"""Cause of a slowdown by the control; ``code`` if the control moved less than its usual scatter allows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Control:
    """The control of the stored runs of a case; times are logarithms."""

    kind: str
    """Kind of the control; empty in older runs."""
    centre: float
    """Median of its times."""
    apart: float
    """Standard deviation of the difference between case and control."""
    read: Read
    """Function that reads the time of the control from a run."""

    def of(self, run: RunSummary) -> float | None:
        """Return the time of a run's control; None without one, or for another kind."""
        return self.read(run) if comparable(self.kind, run.control) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """Movement of today's control from the stored one (ln)."""

    amount: float | None = None
    """None if no control resembles the case."""
    doubt: float = 0.0
    """Additional movement of the case that the host may have caused."""
    why: str = ""
    """The kind of the control, or why none resembles the case."""

    def says(self, effect: float, tolerance: float) -> Says:
        """Return the cause of a slowdown of a case or a suite by ``effect``."""
        if self.amount is None:
            return "unsure"
        if explains(effect, self.amount, tolerance):
            return "host"
        return "unsure" if effect - self.amount <= tolerance + self.doubt else "code"


def comparable(stored: str, now: str) -> bool:
    """Return whether controls of these kinds do the same work, and resemble the case.

    >>> comparable("sleep 4 ms", "sleep 4 ms"), comparable("", "memory"), comparable("", "message 1 KiB")
    (True, True, False)
    """
    if "" in (stored, now):
        return stored in _BEFORE_KINDS and now in _BEFORE_KINDS
    return stored == now != UNLIKE


def stored_control(runs: Sequence[RunSummary], values: Sequence[float], *reads: Read) -> Control | None:
    """Return the control of most stored runs; ``values`` are the judged values of the runs, in the same order.

    ``reads`` are functions that read a control's time; the first one with enough values is used, because old runs have
    no means.
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
    """Return the movement of these runs' control; None without any control.

    ``slope`` times its movement beyond ``common``, the common movement of all controls, is already subtracted from the
    values.
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
    shared, apart = (common, 0.0) if slope else (0.0, stored.apart)  # with a slope the distance is part of the noise
    doubt = SCATTERS * apart + SURELY_UNLIKE * max(0.0, far - shared)
    return Moved(amount=far - slope * (far - common), doubt=doubt, why=stored.kind or kinds)


def explains(effect: float, amount: float, tolerance: float) -> bool:
    """Return whether a control that moved by ``amount`` explains an effect up to the tolerance; all are logarithms.

    >>> explains(0.1, 0.08, 0.03), explains(0.1, 0.05, 0.03), explains(0.04, 0.015, 0.03)
    (True, False, False)
    """
    return effect - amount <= tolerance and amount >= EXPLAINED * effect
