"""Schedules that Hypothesis draws, and durations for their actions."""

from __future__ import annotations

import random
from collections import defaultdict
from functools import cache

from hypothesis import strategies as st

from perfsuite.metrics.pipeline import COMPUTE
from perfsuite.record.step import Timeline, TimelineEvent
from perfsuite.schedules import SCHEDULES, make_schedule


@st.composite
def schedules(draw, names=tuple(SCHEDULES), largest=5):
    spec = SCHEDULES[draw(st.sampled_from(names))]
    ranks = draw(st.integers(1, largest))
    most = spec.most_stages_per_rank or 3
    counts = [count for count in range(1, 15) if spec.legal_count(ranks, count)]
    return make_schedule(
        spec.name,
        ranks=ranks,
        num_micro_batches=draw(st.sampled_from(counts)),
        stages_per_rank=draw(st.integers(spec.fewest_stages_per_rank, most)),
    )


def random_durations(seed: int):
    """Every action its own whole number of seconds."""

    @cache
    def seconds(action):
        return random.Random(f"{seed} {action}").randint(1, 9)

    return seconds


def actions_by_rank(timeline: Timeline) -> dict[int, list[TimelineEvent]]:
    events = defaultdict(list)
    for event in timeline.events:
        if event.kind in COMPUTE:
            events[event.rank].append(event)
    return events
