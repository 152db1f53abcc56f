"""The pipelines' section of the report: every number of a case beside what it should be, short where one is missing."""

import dataclasses
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfsuite.metrics.pipeline import bubble_ratio
from perfsuite.record.result import Record
from perfsuite.reports.layout import grid_lines
from perfsuite.reports.pipeline import EVEN, binding_sentence, peak_activations_bytes, pipeline_grids, pipeline_row
from perfsuite.schedules import SCHEDULES, find_imbalance, make_schedule
from test_correctness.helpers.pipelines import event_of, measured, result_of, seen_without_waiting, simulated
from test_correctness.helpers.runs import remeasured

TEST = "test_perf/test_pipeline.py::test_schedule"


def pipeline_lines(results):
    return grid_lines(pipeline_grids(results))


def memory_records(*sizes):
    return tuple(
        Record(name=f"peak_activations_bytes_rank{rank}", value=size, unit="bytes", reduce="max")
        for rank, size in enumerate(sizes)
    )


def as_measured(timeline):
    return dataclasses.replace(timeline, source="measured")


def case(name, parameters="", **changes):
    records = changes.pop("records", ())
    return result_of(f"{TEST}[cpu-ws4-{name}{parameters}]", as_measured(simulated(name, **changes)), records=records)


def test_cases_of_one_test_share_a_table_and_its_width_suits_a_terminal():
    results = [case("naive"), case("interleaved_zero_bubble"), case("1f1b", "-16", ranks=16, num_micro_batches=16)]
    lines = pipeline_lines([*results, dataclasses.replace(case("gpipe"), case="other.py::test_it[cpu-gpipe]")])
    assert [line for line in lines if "::" in line] == [TEST, "other.py::test_it"]
    assert max(map(len, lines)) <= 120
    rows = {line.split()[0]: re.split(r"\s{2,}", line) for line in lines if line.startswith("cpu-")}
    assert rows["cpu-ws4-naive"][4:] == ["0.750", "0.750", "0.750", "3.000", "1"]
    assert rows["cpu-ws4-interleaved_zero_bubble"][6] == "-"  # no formula
    assert rows["cpu-ws4-1f1b-16"][-1] == "1 to 16"


def test_the_schedule_has_a_column_where_an_id_does_not_say_it():
    plain = dataclasses.replace(case("zbv"), case="t.py::test_it")
    lines = pipeline_lines([plain])
    assert lines[2].split()[:2] == ["pipeline", "schedule"]
    assert re.split(r"\s{2,}", lines[4])[:2] == ["-", "zbv"]


def test_nothing_is_said_without_a_timeline():
    smoke = dataclasses.replace(case("1f1b"), outcome="smoke")
    gone = dataclasses.replace(case("1f1b"), outcome="out_of_memory", measurement=None)
    assert pipeline_lines([result_of("t.py::t", None), smoke, gone]) == []


def test_what_is_not_known_of_an_own_schedule_is_a_dash():
    own = dataclasses.replace(as_measured(simulated("1f1b")), schedule="mine")
    row = re.split(r"\s{2,}", pipeline_lines([result_of("t.py::t[mine]", own)])[4])
    assert row == ["mine", "4", "-", "-", "0.273", "-", "-", "0.375", "4 3 2 1"]


def test_a_missing_action_leaves_the_simulation_out_and_no_more():
    whole = as_measured(simulated("1f1b"))
    last = max(index for index, event in enumerate(whole.events) if event.kind == "backward")
    torn = dataclasses.replace(whole, events=whole.events[:last] + whole.events[last + 1 :])
    row = re.split(r"\s{2,}", pipeline_lines([result_of("t.py::t[1f1b]", torn)])[4])
    assert row[4:7] == [f"{bubble_ratio(torn):.3f}", "-", "0.273"]


def test_a_damaged_timeline_is_named_and_the_others_are_shown():
    fine = case("1f1b")
    whole = fine.measurement.timeline
    damaged = dataclasses.replace(whole, events=(dataclasses.replace(whole.events[0], rank=9),))
    bad = dataclasses.replace(remeasured(fine, timeline=damaged), case="t.py::bad")
    lines = pipeline_lines([bad, fine])
    assert lines[-1] == "  t.py::bad: the timeline of 1f1b has a forward of stage 0 on rank 9; its ranks are 0 to 3"
    assert any(line.startswith("cpu-ws4-1f1b") for line in lines)
    assert pipeline_lines([bad]) == ["", lines[-1]]


def test_an_impossible_bubble_is_marked():
    wrong = seen_without_waiting(measured(make_schedule("gpipe", ranks=4, num_micro_batches=8)))
    lines = pipeline_lines([result_of("t.py::t[gpipe]", wrong), case("gpipe")])
    assert [line.split()[0] for line in lines if " ! " in line] == ["gpipe", "!"]
    assert lines[-1] == "  ! more than 0.02 below the simulation of its own durations: an error of measurement"


def test_unequal_stages_name_the_one_that_binds_and_what_an_even_split_would_give():
    lines = pipeline_lines([case("1f1b"), case("1f1b", "-uneven", costs=(1, 1, 2, 1))])
    assert lines[6] == (
        "  cpu-ws4-1f1b-uneven: stage 2 binds, rank 2 has +60% work; an even split: "
        "bubble_ratio 0.455 -> 0.273, step 2.2 s -> 1.65 s"
    )
    assert (
        lines[-1] == "  a stage binds where its rank has so much more work than the average; both steps are simulated"
    )
    assert sum("binds" in line for line in lines) == 2  # nothing about the even case


def test_actions_that_were_held_up_bind_nothing():
    timeline = as_measured(simulated("1f1b"))
    held = [index for index, event in enumerate(timeline.events) if event.rank == 1 and event.kind == "forward"][:3]
    events = [
        dataclasses.replace(event, end_s=event.end_s + 0.5) if index in held else event
        for index, event in enumerate(timeline.events)
    ]
    busy = dataclasses.replace(timeline, events=tuple(events))
    schedule = make_schedule("1f1b", ranks=4, num_micro_batches=8)
    assert find_imbalance(schedule, busy).excess > 0.5
    assert pipeline_row("t.py::t", busy).imbalance is None


def test_nothing_binds_where_an_even_split_gains_nothing():
    naive = as_measured(simulated("naive", costs=(1, 1, 2, 1)))
    assert pipeline_row("t.py::t", naive).imbalance is None


def test_only_the_most_uneven_of_many_cases_are_told():
    results = [case("1f1b", f"-{extra}", costs=(1, 1 + extra / 10, 1, 1)) for extra in range(11)]
    lines = pipeline_lines(results)
    told = [line for line in lines if "stage 1 binds" in line]
    assert len(told) == 4
    assert told[0].startswith("  cpu-ws4-1f1b-10: ")
    assert "  and 6 more cases with a stage that binds" in lines


def test_even_work_whose_average_rounds_up_has_nothing_more():
    timeline = as_measured(simulated("1f1b", ranks=3, num_micro_batches=6))
    found = find_imbalance(make_schedule("1f1b", ranks=3, num_micro_batches=6), timeline)
    assert found.busy_s < found.mean_busy_s
    assert found.excess == 0
    assert "has +0% work" in binding_sentence(found)


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(sorted(set(SCHEDULES) - {"naive"})), st.integers(2, 5), st.data())
def test_the_binding_stage_is_on_the_rank_whose_work_no_step_can_undercut(name, ranks, data):
    schedule = make_schedule(name, ranks=ranks, num_micro_batches=2 * ranks)
    costs = data.draw(st.tuples(*[st.floats(0.1, 10)] * schedule.num_stages))
    timeline = as_measured(simulated(name, ranks=ranks, num_micro_batches=2 * ranks, costs=costs))
    found = find_imbalance(schedule, timeline)
    pipeline = pipeline_row("t.py::t", timeline)
    assert pipeline.imbalance in (found, None)
    assert found.excess > EVEN or pipeline.imbalance is None
    assert found.stage in schedule.stages_of(found.rank)
    assert max(event.end_s for event in timeline.events) >= found.busy_s * (1 - 1e-9)
    assert binding_sentence(found).startswith(f"stage {found.stage} binds, rank {found.rank} has +")
    assert pipeline.simulated == pytest.approx(pipeline.bubble_ratio, abs=1e-9)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("peak_activations_bytes_rank1", "peak_activations_bytes_rank0"), (2.0, 1.0)),
        (("peak_activations_bytes_rank0", "peak_activations_bytes_rank2"), ()),  # nobody knows what rank 1 held
        (("peak_activations_bytes_rank0", "peak_bytes_rank0"), (1.0,)),
        (("peak_activations_bytes", "weights_bytes"), ()),
    ],
)
def test_the_memory_of_ranks_is_found_by_the_names_of_its_records(names, expected):
    records = tuple(
        Record(name=name, value=value, unit="bytes", reduce="max")
        for name, value in zip(names, (1.0, 2.0), strict=True)
    )
    assert peak_activations_bytes(result_of("t.py::t", simulated("1f1b"), records=records).measurement) == expected


@pytest.mark.parametrize(
    ("size", "unit", "cell"), [(3 << 30, "GiB", "3"), (3 << 20, "MiB", "3"), (3 << 10, "KiB", "3")]
)
def test_memory_has_the_unit_that_reads_best(size, unit, cell):
    lines = pipeline_lines([case("1f1b", records=memory_records(size, size, size, size))])
    assert lines[3].split()[-3] == unit
    assert lines[4].split()[-1] == cell


def test_a_rank_without_an_action_counts_as_idle():
    events = (event_of("forward", 0, 0.0, 1.0), event_of("backward", 0, 1.0, 2.0))
    timeline = dataclasses.replace(as_measured(simulated("1f1b")), ranks=2, events=events)
    assert pipeline_row("t.py::t", timeline).bubble_ratio == 0.5
