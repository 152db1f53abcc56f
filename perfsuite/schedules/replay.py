"""A timeline's schedule once more, with the timeline's own durations and nothing else that takes time.

The runtime's records, the gate's rule, the terminal, pictures and traces hold a step against it; it is simulated once.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from perfsuite.errors import InvalidParameter
from perfsuite.records import Timeline
from perfsuite.schedules.imbalance import Imbalance, find_imbalance
from perfsuite.schedules.recognition import schedule_of
from perfsuite.schedules.schedule import Schedule

_KEPT = 64
"""Timelines whose replay is kept: all who ask for that of a case do so within few cases."""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What can be known of a timeline by simulating it again."""

    schedule: Schedule | None
    """None for one that is not in the catalogue."""
    imbalance: Imbalance | None
    """Both simulations and which stage binds; None without a schedule, or where the timeline lacks an action of it."""
    reason: str = ""
    """Why there is no simulation."""

    @property
    def simulated(self) -> Timeline | None:
        """The schedule with the timeline's durations, waits and messages included: no step can be shorter."""
        return self.imbalance.simulated if self.imbalance else None


@functools.lru_cache(maxsize=_KEPT)
def replay(timeline: Timeline) -> Replay:
    """The schedule that ``timeline`` names, simulated with its durations.

    >>> from perfsuite.schedules.catalog import make_schedule
    >>> from perfsuite.schedules.simulator import simulate
    >>> timeline = simulate(make_schedule("gpipe", ranks=2, num_micro_batches=2), lambda action: 1, detail=True)
    >>> replay(timeline).simulated == timeline
    True
    """
    schedule = None
    try:
        schedule = schedule_of(timeline)
        return Replay(schedule=schedule, imbalance=find_imbalance(schedule, timeline))
    except InvalidParameter as reason:  # somebody's own schedule, or an action is missing
        return Replay(schedule=schedule, imbalance=None, reason=str(reason))
