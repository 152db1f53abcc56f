"""How long actions take: by stage, as measured, or evened out over the stages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from perfsuite.base.errors import InvalidParameter
from perfsuite.record.step import Timeline
from perfsuite.schedules.action import LETTERS, Action, Durations


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """Durations that depend on the stage and the kind alone; call it with an action.

    >>> times = StageTimes.in_proportion([1, 3], forward_s=2, backward_input_s=2, backward_weight_s=1)
    >>> times(Action(kind="forward", stage=1, micro_batch=0)), times(Action(kind="backward", stage=1, micro_batch=0))
    (6, 9)
    """

    forward_s: tuple[float, ...]
    """By stage."""
    backward_input_s: tuple[float, ...]
    backward_weight_s: tuple[float, ...]
    """By stage; a whole backward takes both."""

    def __post_init__(self) -> None:
        if not len(self.forward_s) == len(self.backward_input_s) == len(self.backward_weight_s):
            raise InvalidParameter(
                f"stage times for {len(self.forward_s)}, {len(self.backward_input_s)} and "
                f"{len(self.backward_weight_s)} stages; give forward, backward_input and backward_weight of every stage"
            )

    @classmethod
    def in_proportion(
        cls, costs: Sequence[float], *, forward_s: float = 1, backward_input_s: float = 1, backward_weight_s: float = 1
    ) -> StageTimes:
        """A stage of cost c takes c times the given seconds; ``[1] * n`` is n equal stages."""
        return cls(
            forward_s=tuple(cost * forward_s for cost in costs),
            backward_input_s=tuple(cost * backward_input_s for cost in costs),
            backward_weight_s=tuple(cost * backward_weight_s for cost in costs),
        )

    def __call__(self, action: Action) -> float:
        """Seconds of ``action``."""
        stage = action.stage
        if action.kind == "forward":
            return self.forward_s[stage]
        if action.kind == "backward":
            return self.backward_input_s[stage] + self.backward_weight_s[stage]
        return (self.backward_input_s if action.kind == "backward_input" else self.backward_weight_s)[stage]


def durations_of(timeline: Timeline) -> Durations:
    """What each action took in ``timeline``; asking for one that it lacks raises InvalidParameter."""
    took = {
        (event.kind, event.stage, event.micro_batch): event.end_s - event.start_s
        for event in timeline.events
        if event.kind in LETTERS
    }

    def seconds(action: Action) -> float:
        try:
            return took[action.kind, action.stage, action.micro_batch]
        except KeyError:
            raise InvalidParameter(
                f"the timeline of {timeline.schedule or 'a pipeline'} has no {action}; record every action of the step"
            ) from None

    return seconds


def evened_durations(timeline: Timeline) -> Durations:
    """Every stage takes what the stages of ``timeline`` took on average, kind by kind: a perfectly balanced split."""
    took: dict[str, list[float]] = defaultdict(list)
    for event in timeline.events:
        if event.kind in LETTERS:
            took[event.kind].append(event.end_s - event.start_s)
    mean: dict[str, float] = {kind: sum(seconds) / len(seconds) for kind, seconds in took.items()}

    def seconds(action: Action) -> float:
        return mean[action.kind]

    return seconds
