"""What is read off a pipeline's timeline: bubbles, phases, micro-batches in flight, memory, the stage that binds."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.schedule import peak_activations
from perfsuite.base.errors import InvalidParameter
from perfsuite.metrics.pipeline import (
    METRICS,
    bubble_ratio,
    busy_s,
    impossible_bubble,
    in_flight_micro_batches,
    phases,
    step_bounds_s,
)
from perfsuite.record.result import Record
from perfsuite.record.step import Timeline
from perfsuite.schedules import (
    SCHEDULES,
    StageTimes,
    durations_of,
    find_imbalance,
    make_schedule,
    simulate,
)
from test_correctness.helpers.pipelines import event_of
from test_correctness.helpers.schedules import random_durations, schedules
from test_correctness.helpers.scripted_driver import measured_on


@given(schedules(names=("naive", "gpipe", "1f1b")))
@settings(deadline=None)
def test_in_flight_micro_batches_are_those_of_the_papers(schedule):
    timeline = simulate(schedule, StageTimes.in_proportion([1] * schedule.ranks))
    p, m = schedule.ranks, schedule.num_micro_batches
    expected = {"naive": [1] * p, "gpipe": [m] * p, "1f1b": [min(m, p - rank) for rank in range(p)]}[schedule.name]
    assert in_flight_micro_batches(timeline) == tuple(expected)
    assert peak_activations(timeline) == tuple(expected)
    sizes = [10 + stage for stage in range(p)]
    assert peak_activations(timeline, sizes) == tuple(held * size for held, size in zip(expected, sizes, strict=True))


@pytest.mark.parametrize(
    ("name", "held"),
    [
        ("interleaved_1f1b", lambda p, v, m, rank: (v - 1) * p + 2 * (p - 1 - rank) + 1),
        ("looped_bfs", lambda p, v, m, rank: v * m),
        ("interleaved_zero_bubble", lambda p, v, m, rank: v * p),
        ("zbv", lambda p, v, m, rank: 2 * p),
        ("dualpipev", lambda p, v, m, rank: 2 * p + 1),
    ],
)
def test_peak_activations_of_schedules_with_several_stages_per_rank(name, held):
    most = SCHEDULES[name].most_stages_per_rank or 3
    for p, m, v in ((2, 6, 2), (4, 12, 2), (4, 16, most)):
        schedule = make_schedule(name, ranks=p, num_micro_batches=m, stages_per_rank=v)
        timeline = simulate(schedule, StageTimes.in_proportion([1] * p * v))
        assert peak_activations(timeline) == tuple(held(p, v, m, rank) for rank in range(p))


@given(schedules(), st.integers(0, 99), st.integers(0, 3))
@settings(deadline=None)
def test_phases_add_up_to_the_step_and_their_idle_time_to_the_bubble(schedule, seed, delay):
    timeline = simulate(schedule, random_durations(seed), communication_s=delay)
    first, last = step_bounds_s(timeline)
    found = phases(timeline)
    assert [each.rank for each in found] == list(range(schedule.ranks))
    for each in found:
        assert min(each.warm_up_s, each.steady_s, each.cool_down_s) >= 0
        assert each.warm_up_s + each.steady_s + each.cool_down_s == last - first
    idle = sum(last - first - busy for busy in busy_s(timeline))
    assert bubble_ratio(timeline) == pytest.approx(idle / (schedule.ranks * (last - first)))


def test_the_stage_that_binds_is_named_and_what_an_even_split_would_give():
    schedule = make_schedule("1f1b", ranks=4, num_micro_batches=8)
    uneven = simulate(schedule, StageTimes.in_proportion([1, 1, 3, 1], forward_s=2), detail=True)
    found = find_imbalance(schedule, uneven)
    assert (found.rank, found.stage) == (2, 2)
    assert (found.busy_s, found.mean_busy_s) == (3 * 8 * 4, 1.5 * 8 * 4)
    assert found.excess == 1
    assert found.simulated == uneven
    assert bubble_ratio(found.balanced) == pytest.approx(3 / 11)
    assert step_bounds_s(found.balanced)[1] == pytest.approx(11 * 1.5 * 4)
    assert step_bounds_s(uneven)[1] >= found.busy_s


def test_the_binding_stage_of_several_on_a_rank_is_the_heaviest_of_the_busiest_rank():
    schedule = make_schedule("zbv", ranks=2, num_micro_batches=4)
    found = find_imbalance(schedule, simulate(schedule, StageTimes.in_proportion([4, 3, 3, 1])))
    assert (found.rank, found.stage) == (1, 1)  # 3 + 3 on rank 1 against 4 + 1 on rank 0
    found = find_imbalance(schedule, simulate(schedule, StageTimes.in_proportion([5, 2, 3, 1])))
    assert (found.rank, found.stage) == (0, 0)


def test_a_longer_action_or_delay_never_shortens_the_step():
    schedule = make_schedule("interleaved_zero_bubble", ranks=3, num_micro_batches=6)
    seconds = random_durations(7)
    before = step_bounds_s(simulate(schedule, seconds))[1]
    for order in schedule.orders:
        for slow in order:
            longer = step_bounds_s(simulate(schedule, lambda each, slow=slow: seconds(each) + 3 * (each == slow)))[1]
            assert before <= longer <= before + 3
    assert before <= step_bounds_s(simulate(schedule, seconds, communication_s=1))[1]


def test_what_cannot_be_simulated_or_read_is_refused():
    schedule, larger = (make_schedule("gpipe", ranks=ranks, num_micro_batches=2) for ranks in (2, 3))
    timeline = simulate(schedule, lambda action: 1)
    lacking = Timeline(ranks=2, events=timeline.events[:-1], source="measured", schedule="gpipe")
    uneven = {"forward_s": (1, 1), "backward_input_s": (1,), "backward_weight_s": (1, 1)}
    for message, act in {
        "communication_s=-1 is negative": lambda: simulate(schedule, lambda action: 1, communication_s=-1),
        "the timeline of gpipe has no 1B1; record every": lambda: simulate(schedule, durations_of(lacking)),
        "no forward or backward": lambda: bubble_ratio(dataclasses.replace(timeline, events=())),
        "last 0 s": lambda: bubble_ratio(simulate(schedule, lambda action: 0)),
        "a timeline of 2 ranks for a schedule of 3": lambda: find_imbalance(larger, timeline),
        "stage times for 2, 1 and 2 stages": lambda: StageTimes(**uneven),
    }.items():
        with pytest.raises(InvalidParameter, match=message):
            act()


def test_a_measured_bubble_well_below_its_simulation_is_impossible():
    assert [impossible_bubble(measured, 0.3) for measured in (0.35, 0.29, 0.28, 0.27)] == [False, False, False, True]


def test_idle_time_without_a_recorded_wait_counts_and_waits_outside_the_step_do_not():
    events = (event_of("wait", 0, 0, 10), event_of("forward", 0, 10, 12), event_of("backward", 0, 16, 20))
    events += (event_of("forward", 1, 12, 13), event_of("backward", 1, 13, 16), event_of("wait", 1, 16, 40))
    timeline = Timeline(ranks=2, events=events, source="measured")
    assert step_bounds_s(timeline) == (10, 20)
    assert busy_s(timeline) == (6, 4)
    assert bubble_ratio(timeline) == 0.5
    idle_rank = Timeline(ranks=3, events=events, source="measured")
    assert bubble_ratio(idle_rank) == pytest.approx(1 - 10 / 30)
    assert [each.rank for each in phases(idle_rank)] == [0, 1]
    assert in_flight_micro_batches(idle_rank) == (1, 1, 0)


def test_metrics_read_the_timeline_of_a_measurement_or_say_that_there_is_none():
    timeline = simulate(make_schedule("1f1b", ranks=4, num_micro_batches=8), StageTimes.in_proportion([1] * 4))
    recorded = {
        "bubble_ratio_median": 0.3,
        "bubble_ratio_simulated": 0.27,
        "bubble_ratio_balanced": 0.25,
        "peak_activations_bytes": 2**29,
    }
    records = [Record(name=name, value=value, unit="", reduce="equal") for name, value in recorded.items()]
    measured = measured_on(4, timeline=timeline, records=tuple(records))
    readings = {spec.name: spec.compute(None, measured, None) for spec in METRICS}
    assert {name: reading.value for name, reading in readings.items()} == {
        "bubble_ratio": pytest.approx(3 / 11),
        "bubble_to_ideal_ratio": pytest.approx(3 / 8),
        "in_flight_micro_batches": 4,
        "median_bubble_ratio": 0.3,
        "simulated_bubble_ratio": 0.27,
        "balanced_bubble_ratio": 0.25,
        # Means over ranks of 10, 8, 6 and 4, of 12, 15, 18 and 21, and of 11, 10, 9 and 8 slots of 33.
        "warm_up_percent": pytest.approx(100 * 7 / 33),
        "steady_percent": pytest.approx(50),
        "cool_down_percent": pytest.approx(100 * 9.5 / 33),
        "peak_activations_gib": 0.5,
    }
    for spec in METRICS:
        reading = spec.compute(None, measured_on(4), None)
        reason = "no memory build was run" if spec.name == "peak_activations_gib" else "no timeline of a "
        assert reading.value is None
        assert reading.note.startswith(reason)
