"""A measured bubble below what its own durations allow is an error of measurement, from the timeline to the verdict."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfsuite.base.errors import InvalidParameter
from perfsuite.cli.report import simulated_schedule
from perfsuite.gate.physics import bubble_bound, violations
from perfsuite.metrics.pipeline import SIMULATION_TOLERANCE, bubble_ratio
from perfsuite.reports.pipeline import pipeline_row
from perfsuite.reports.timelines.picture import timeline_svg
from perfsuite.schedules import SCHEDULES, Schedule, make_schedule, schedule_of
from test_correctness.helpers.pipelines import METRICS, measured, result_of, seen_without_waiting, simulated
from test_correctness.helpers.schedules import schedules
from test_correctness.helpers.scripted_driver import measurement, repository


def rules(timeline):
    return [violation.rule for violation in violations(result_of("t.py::t", timeline))]


@settings(deadline=None, max_examples=60)
@given(schedules(), st.integers(0, 1 << 30), st.floats(0, 0.02), st.floats(0, 2))
def test_what_a_correct_clock_sees_is_never_impossible(schedule, seed, gap_s, jitter):
    timeline = measured(schedule, seed=seed, gap_s=gap_s, jitter=jitter)
    assert bubble_bound(timeline) <= bubble_ratio(timeline) + 1e-9
    assert rules(timeline) == []


@settings(deadline=None, max_examples=60)
@given(schedules(), st.integers(0, 1 << 30), st.floats(0, 1))
def test_what_a_wrong_clock_makes_of_it_is_impossible_once_it_is_beyond_the_tolerance(schedule, seed, lost):
    wrong = seen_without_waiting(measured(schedule, seed=seed), lost=lost)
    below = bubble_bound(wrong) - bubble_ratio(wrong)
    assert rules(wrong) == (["bubble"] if below > SIMULATION_TOLERANCE else [])


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_wrong_clock_is_found_under_every_schedule(name):
    right = measured(make_schedule(name, ranks=4, num_micro_batches=8))
    assert (rules(right), rules(seen_without_waiting(right))) == ([], ["bubble"])


@settings(deadline=None, max_examples=40)
@given(schedules())
def test_a_timeline_is_recognised_by_its_actions(schedule):
    assert schedule_of(measured(schedule)) == schedule


def turned(events):
    return tuple(dataclasses.replace(event, rank=3 - event.rank) for event in events)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda timeline: {"schedule": "mine"}, "schedule='mine' is unknown; choose naive"),
        (lambda timeline: {"events": ()}, "has 0 stages on 4 ranks; a schedule has the same number of stages on each"),
        (lambda timeline: {"ranks": 3}, "has 4 stages on 3 ranks"),
        (lambda timeline: {"events": turned(timeline.events)}, "has stage 0 on rank 3; the schedule has it on rank 0"),
    ],
)
def test_a_timeline_of_no_schedule_is_named_and_has_no_bound(change, message):
    timeline = measured(make_schedule("1f1b", ranks=4, num_micro_batches=8))
    other = dataclasses.replace(timeline, **change(timeline))
    with pytest.raises(InvalidParameter, match=message):
        schedule_of(other)
    assert bubble_bound(other) is None


def test_a_step_is_simulated_once_for_all_who_hold_it_against_its_schedule(monkeypatch):
    timeline, walks, walk = measured(make_schedule("1f1b", ranks=3, num_micro_batches=5)), [], Schedule.walk
    monkeypatch.setattr(Schedule, "walk", lambda *args, **how: walks.append(args) or walk(*args, **how))
    bounds = {pipeline_row("t.py::t", timeline).simulated, bubble_bound(timeline)}
    bounds.add(bubble_ratio(simulated_schedule(timeline)))
    assert len(bounds) == 1
    assert f"simulated with the same durations {bounds.pop():.3f}" in timeline_svg(timeline)
    assert len(walks) == 2  # its stages as they are, and evened out: the schedule was made, and checked, once


CASES = f"""
import pytest

@dataclass(frozen=True, kw_only=True)
class Step(Workload):
    clock: str = "right"
    metrics = {METRICS!r}
    def work(self, shape):
        return Work()
    def build(self, rank):
        raise AssertionError("no rank builds it in these tests")

@pytest.mark.parametrize("clock", ["right", "wrong"])
def test_step(perf, clock):
    perf(Step(clock=clock), on=4)
"""


def of_clock(job):
    timeline = measured(make_schedule("gpipe", ranks=4, num_micro_batches=8))
    if job.workload.parameters().get("clock") == "wrong":
        timeline = seen_without_waiting(timeline)
    return measurement(job, timeline=timeline)


def test_only_the_case_with_the_wrong_clock_fails_the_gate_and_names_the_rule(pytester, monkeypatch):
    done = repository(pytester, monkeypatch, CASES, of_clock).run("--perf-gate", "--perf-allow-ungated")
    done.assert_outcomes(passed=1, failed=1)
    done.stdout.fnmatch_lines(
        ["*test_step[[]cpu-wrong[]]*: IMPOSSIBLE; bubble: bubble_ratio 0.* is below 0.*durations of its actions*"]
    )
    assert not [line for line in done.outlines if "cpu-right" in line and "impossible" in line.lower()]


def test_the_bound_uses_no_event_that_is_no_action():
    timeline = simulated("1f1b")
    late = dataclasses.replace(timeline.events[-1], kind="wait", stage=7, micro_batch=99)
    assert bubble_bound(dataclasses.replace(timeline, events=(*timeline.events, late))) == bubble_bound(timeline)
