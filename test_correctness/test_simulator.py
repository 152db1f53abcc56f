"""The event simulator: against an independent longest-path reckoning and exact formulas."""

from fractions import Fraction
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfsuite.metrics.pipeline import COMPUTE, bubble_ratio, bubble_to_ideal
from perfsuite.schedules import SCHEDULES, StageTimes, durations_of, formula_bubble, make_schedule, simulate
from test_correctness.helpers.schedules import actions_by_rank, random_durations, schedules

fractions = st.fractions(min_value=Fraction(1, 7), max_value=9, max_denominator=7)


def reckon(schedule, seconds, delay):
    """(rank, place in its order) -> start and end, by recursion from each action to all that it waits for."""
    place = {
        (action.kind[0], action.stage, action.micro_batch): (rank, index)
        for rank, order in enumerate(schedule.orders)
        for index, action in enumerate(order)
        if action.kind != "backward_weight"
    }

    @cache
    def times(rank, index):
        action = schedule.orders[rank][index]
        waits = [times(rank, index - 1)[1] if index else 0]
        before = action.stage - 1 if action.kind == "forward" else action.stage + 1
        source = place.get((action.kind[0], before, action.micro_batch))
        if source and action.kind != "backward_weight":
            other, at = source
            while schedule.orders[other][at].joined:
                at += 1
            waits.append(times(other, at)[1] + (delay if other != rank else 0))
        return max(waits), max(waits) + seconds(action)

    return {
        (rank, index): times(rank, index) for rank, order in enumerate(schedule.orders) for index in range(len(order))
    }


@settings(deadline=None)
@given(schedules(), st.integers(0, 99), st.integers(0, 5))
def test_times_equal_an_independent_reckoning(schedule, seed, delay):
    seconds = random_durations(seed)
    expected = reckon(schedule, seconds, delay)
    timeline = simulate(schedule, seconds, communication_s=delay)
    actual = {
        (rank, index): (event.start_s, event.end_s)
        for rank, events in actions_by_rank(timeline).items()
        for index, event in enumerate(events)
    }
    assert expected == actual


@given(schedules(), st.integers(0, 99), st.integers(1, 4))
@settings(deadline=None)
def test_waits_and_actions_fill_every_lane_and_each_message_leaves_before_it_arrives(schedule, seed, delay):
    timeline = simulate(schedule, random_durations(seed), communication_s=delay, detail=True)
    for rank, events in actions_by_rank(timeline).items():
        lane = [event for event in timeline.events if event.rank == rank and event.kind in (*COMPUTE, "wait")]
        assert [event.start_s for event in lane] == [0, *(event.end_s for event in lane[:-1])]
        assert lane[-1] == events[-1]
    sent, received = (
        sorted(event.start_s for event in timeline.events if event.kind == kind) for kind in ("send", "receive")
    )
    assert [at + delay for at in sent] == received
    rank_of = schedule.rank_of_stage
    hops = sum(rank_of[stage] != rank_of[stage + 1] for stage in range(schedule.num_stages - 1))
    assert len(sent) == 2 * hops * schedule.num_micro_batches
    assert simulate(schedule, random_durations(seed), communication_s=delay).events == tuple(
        event for event in timeline.events if event.kind in COMPUTE
    )


@given(schedules(), st.integers(0, 99))
@settings(deadline=None)
def test_a_timeline_fed_back_gives_itself(schedule, seed):
    timeline = simulate(schedule, random_durations(seed))
    assert simulate(schedule, durations_of(timeline)) == timeline


@pytest.mark.extended
@given(schedules(names=("naive", "gpipe", "1f1b", "interleaved_1f1b", "looped_bfs")), fractions, fractions, fractions)
@settings(deadline=None)
def test_equal_stages_have_exactly_the_bubble_of_the_formula(schedule, forward, backward_input, backward_weight):
    times = StageTimes.in_proportion(
        [1] * schedule.num_stages, forward_s=forward, backward_input_s=backward_input, backward_weight_s=backward_weight
    )
    timeline = simulate(schedule, times)
    p, m, v = schedule.ranks, schedule.num_micro_batches, schedule.stages_per_rank
    expected = SCHEDULES[schedule.name].bubble(p, m, v)
    assert bubble_ratio(timeline) == expected
    assert bubble_to_ideal(timeline) == expected / (1 - expected)
    if schedule.name == "naive":
        assert expected == 1 - Fraction(1, p)
    elif v == 1 or m >= p:
        assert expected == Fraction(p - 1, v * m + p - 1)
        assert bubble_to_ideal(timeline) == Fraction(p - 1, v * m)
    assert formula_bubble(schedule) == float(expected)


@pytest.mark.parametrize(
    ("name", "fewest", "empty"),
    [
        ("interleaved_zero_bubble", lambda p: p, lambda p: p - 1),
        ("zbv", lambda p: 2 * p - 1, lambda p: p - 1),
        ("dualpipev", lambda p: 2 * p, lambda p: 2 * (p - 1)),  # overlapped pairs send only at their end
    ],
)
def test_schedules_that_split_the_backward_fill_most_of_the_bubble_where_its_halves_are_forwards(name, fewest, empty):
    for p in range(1, 7):
        for m in (count for count in range(fewest(p), 20) if SCHEDULES[name].legal_count(p, count)):
            schedule = make_schedule(name, ranks=p, num_micro_batches=m)
            timeline = simulate(schedule, StageTimes.in_proportion([Fraction(1)] * schedule.num_stages))
            assert formula_bubble(schedule) is None
            assert bubble_ratio(timeline) == Fraction(empty(p), 3 * 2 * m + empty(p))
