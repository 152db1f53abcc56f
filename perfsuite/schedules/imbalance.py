"""Which stage binds an uneven pipeline, and what an even one would give."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from perfsuite.base.errors import InvalidParameter
from perfsuite.record.step import Timeline
from perfsuite.schedules.action import LETTERS
from perfsuite.schedules.durations import durations_of, evened_durations
from perfsuite.schedules.schedule import Schedule
from perfsuite.schedules.simulator import simulate


@dataclass(frozen=True, kw_only=True)
class Imbalance:
    """How unevenly the work of a step lies on the ranks."""

    rank: int
    """The busiest rank: no step is shorter than its work."""
    stage: int
    """The stage with the most work on that rank: the one that binds."""
    busy_s: float
    """Work of that rank."""
    mean_busy_s: float
    """Work of a rank on average."""
    simulated: Timeline
    """The schedule with the durations as they are, waits and messages included."""
    balanced: Timeline
    """The schedule with the same work spread evenly over the stages."""

    @property
    def excess(self) -> float:
        """Work of the busiest rank over the average, minus 1; 0 is even, where an average may round to more."""
        return max(0.0, self.busy_s / self.mean_busy_s - 1)


def find_imbalance(schedule: Schedule, timeline: Timeline, *, communication_s: float = 0) -> Imbalance:
    """The stage that binds in ``timeline``, measured or simulated, and both simulations of its schedule.

    Raises InvalidParameter when the timeline lacks an action of the schedule.
    """
    if timeline.ranks != schedule.ranks:
        raise InvalidParameter(
            f"a timeline of {timeline.ranks} ranks for a schedule of {schedule.ranks}; give the schedule that ran"
        )
    by_rank: dict[int, float] = defaultdict(float)
    by_stage: dict[int, float] = defaultdict(float)
    for event in timeline.events:
        if event.kind in LETTERS:
            by_rank[event.rank] += event.end_s - event.start_s
            by_stage[event.stage] += event.end_s - event.start_s
    simulated = simulate(schedule, durations_of(timeline), communication_s=communication_s, detail=True)
    rank = max(range(schedule.ranks), key=lambda index: by_rank[index])
    return Imbalance(
        rank=rank,
        stage=max(schedule.stages_of(rank), key=lambda stage: by_stage[stage]),
        busy_s=by_rank[rank],
        mean_busy_s=sum(by_rank.values()) / schedule.ranks,
        simulated=replace(simulated, world_ranks=timeline.world_ranks, place=timeline.place),
        balanced=simulate(schedule, evened_durations(timeline), communication_s=communication_s),
    )
