"""Price a pipeline with given stages: by a closed form, or by the simulator for unequal stages."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from perfsuite.schedules import StageTimes, find_schedule, make_schedule, stages_of

MOST_ACTIONS = 4_000
"""Actions simulated at once; the rest of a longer step is extrapolated."""
_EQUAL = 1e-12


@functools.lru_cache(maxsize=4096)
def rank_stages(schedule: str, ranks: int, stages_per_rank: int) -> tuple[tuple[int, ...], ...]:
    """Return the stages on each rank; one stage without a schedule.

    >>> rank_stages("interleaved_1f1b", 2, 2), rank_stages("", 1, 1)
    (((0, 2), (1, 3)), ((0,),))
    """
    if ranks == 1:
        return ((0,),)
    placement = find_schedule(schedule or "1f1b").placement
    return tuple(
        stages_of(rank, ranks=ranks, stages_per_rank=stages_per_rank, placement=placement) for rank in range(ranks)
    )


StageKind = tuple[int, int, bool, bool]
"""(layers, layers with experts, is the first, is the last) of a stage."""


@functools.lru_cache(maxsize=256)
def stage_kinds(layers: int, expert_layers: int, stages: int) -> tuple[tuple[StageKind, ...], tuple[int, ...]]:
    """Return the different stages of a model and the index of the one at each place; its last layers have the experts.

    >>> stage_kinds(5, 0, 3)
    (((2, 0, True, False), (2, 0, False, False), (1, 0, False, True)), (0, 1, 2))
    """
    even, more = divmod(layers, stages)
    kinds: dict[StageKind, int] = {}
    order, before = [], 0
    for index in range(stages):
        count = even + (index < more)
        before += count
        experts = min(count, max(0, before - (layers - expert_layers)))
        order.append(kinds.setdefault((count, experts, index == 0, index == stages - 1), len(kinds)))
    return tuple(kinds), tuple(order)


@functools.lru_cache(maxsize=256)
def rank_kinds(schedule: str, ranks: int, stages_per_rank: int, order: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the kinds of stages on each rank, without ranks that equal an earlier one."""
    held = (tuple([order[stage] for stage in own]) for own in rank_stages(schedule, ranks, stages_per_rank))
    return tuple(dict.fromkeys(held))


@dataclass(frozen=True, kw_only=True)
class PricedPipeline:
    """A schedule and the times of one micro-batch in every stage."""

    schedule: str
    ranks: int
    num_micro_batches: int
    stages_per_rank: int
    times: StageTimes

    def step_s(self, *, simulated: bool = True) -> float:
        """Return the seconds from the first action to the last.

        Equal stages use the schedule's formula. Unequal stages are simulated, or estimated without ``simulated``: the
        work of the busiest rank plus one micro-batch of every other rank.
        """
        spec = find_schedule(self.schedule)
        equal = all(max(each) - min(each) <= _EQUAL * max(each) for each in (self._stage_sums, self.times.forward_s))
        if spec.bubble is not None and equal:
            return self.busiest_s / float(1 - spec.bubble(self.ranks, self.num_micro_batches, self.stages_per_rank))
        return self._simulated_s() if spec.bubble is None or simulated else self._estimate_s()

    @property
    def busiest_s(self) -> float:
        """Return the seconds that the busiest rank works."""
        return self.num_micro_batches * max(self._rank_sums)

    @functools.cached_property
    def _stage_sums(self) -> list[float]:
        times = self.times
        both = zip(times.forward_s, times.backward_input_s, times.backward_weight_s, strict=True)
        return [a + b + c for a, b, c in both]

    @functools.cached_property
    def _rank_sums(self) -> list[float]:
        placed = rank_stages(self.schedule, self.ranks, self.stages_per_rank)
        return [sum([self._stage_sums[stage] for stage in own]) for own in placed]

    def _estimate_s(self) -> float:
        sums = self._stage_sums
        if self.schedule == "naive":
            return self.num_micro_batches * sum(sums)
        fill = (sum(sums) - max(self._rank_sums)) / self.stages_per_rank
        if self.num_micro_batches < self.ranks:
            fill += (self.stages_per_rank - 1) * (self.ranks - self.num_micro_batches) * max(sums)
        return self.busiest_s + fill

    def _simulated_s(self) -> float:
        """Simulate the first micro-batches and extrapolate the rest."""
        spec, count = find_schedule(self.schedule), self.num_micro_batches
        per_micro_batch = self.ranks * self.stages_per_rank * (3 if spec.splits_backward else 2)
        fewer = max(4 * self.ranks, MOST_ACTIONS // per_micro_batch)
        rest = (count - fewer) // self.ranks * self.ranks
        few = (count - rest, count - rest - self.ranks)
        if rest <= 0 or not all(spec.legal_count(self.ranks, micro_batches) for micro_batches in few):
            return self._walked_s(count)
        few_s, fewer_s = (self._walked_s(micro_batches) for micro_batches in few)
        return few_s + rest * max((few_s - fewer_s) / self.ranks, *self._rank_sums)

    def _walked_s(self, num_micro_batches: int) -> float:
        schedule = make_schedule(
            self.schedule, ranks=self.ranks, num_micro_batches=num_micro_batches, stages_per_rank=self.stages_per_rank
        )
        times = schedule.walk(self.times).times  # no events of a timeline: nothing but its ends is asked for
        first, last = min(rank[0][0] for rank in times), max(rank[-1][1] for rank in times)
        return last - first
