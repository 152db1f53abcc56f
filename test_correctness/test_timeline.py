"""Timelines as traces and pictures: every action where it belongs, nothing that a viewer would refuse."""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from fractions import Fraction
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfsuite.errors import InvalidParameter
from perfsuite.metrics.pipeline import COMPUTE, bubble_ratio
from perfsuite.records import Timeline, TimelineEvent
from perfsuite.reports.timeline import chrome_trace, timeline_svg, write_chrome_trace, write_timeline_svg
from perfsuite.schedules import SCHEDULES, StageTimes, make_schedule, simulate

SVG = "{http://www.w3.org/2000/svg}"


def timeline_of(name: str, *, ranks: int = 4, num_micro_batches: int = 8, unit_s: float = 0.04) -> Timeline:
    schedule = make_schedule(name, ranks=ranks, num_micro_batches=num_micro_batches)
    times = StageTimes.in_proportion([unit_s / schedule.stages_per_rank] * schedule.num_stages)
    return simulate(schedule, times, communication_s=unit_s / 20, detail=True)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_trace_has_every_event_in_microseconds_on_its_rank(name):
    timeline = timeline_of(name)
    trace = chrome_trace(timeline)
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["ph"] for event in trace["traceEvents"]} == {"M", "X"}
    assert len(complete) == len(timeline.events)
    for event, written in zip(timeline.events, complete, strict=True):
        assert written["pid"] == event.rank
        assert (written["ts"], written["dur"]) == pytest.approx(
            (event.start_s * 1e6, (event.end_s - event.start_s) * 1e6)
        )
        assert written["args"] == {"stage": event.stage, "micro_batch": event.micro_batch}
        assert (written["cat"], written["name"]) == (event.kind, f"{event.kind} {event.micro_batch}")
        assert written["tid"] == (0 if event.kind in COMPUTE else 1 if event.kind == "wait" else 2)
    assert trace["otherData"]["bubble_ratio"] == pytest.approx(bubble_ratio(timeline))
    assert (trace["otherData"]["schedule"], trace["otherData"]["source"]) == (name, "simulated")


def test_a_trace_names_its_processes_and_tracks():
    trace = chrome_trace(timeline_of("zbv", ranks=2))
    names = {
        (event["name"], event["pid"], event["tid"]): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] in ("process_name", "thread_name")
    }
    expected = {("process_name", rank, 0): f"rank {rank}" for rank in range(2)}
    for rank in range(2):
        expected |= {("thread_name", rank, track): name for track, name in enumerate(("compute", "wait", "messages"))}
    assert expected == names


@pytest.mark.parametrize("name", SCHEDULES)
def test_slices_of_one_track_do_not_overlap(name):
    tracks = defaultdict(list)
    for event in chrome_trace(timeline_of(name))["traceEvents"]:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for slices in tracks.values():
        ordered = sorted(slices)
        for (_, end), (start, _) in pairwise(ordered):
            assert start >= end - 1e-6


def test_a_written_trace_is_plain_json_with_finite_times_from_zero(tmp_path):
    exact = simulate(make_schedule("1f1b", ranks=2, num_micro_batches=3), lambda action: Fraction(1, 3))
    write_chrome_trace(exact, tmp_path / "step.trace.json")
    trace = json.loads((tmp_path / "step.trace.json").read_text())
    times = [event["ts"] for event in trace["traceEvents"] if event["ph"] == "X"]
    assert min(times) == 0
    assert all(math.isfinite(each) for each in times)
    assert trace["otherData"]["bubble_ratio"] == 0.25


def boxes(svg: str) -> list[tuple[str, float, float, float, str]]:
    """(kind and place, left, right, top, fill) of every box that has a tooltip."""
    return [
        (
            rect.findtext(f"{SVG}title"),
            float(rect.get("x")),
            float(rect.get("x")) + float(rect.get("width")),
            float(rect.get("y")),
            rect.get("fill"),
        )
        for rect in ElementTree.fromstring(svg).iter(f"{SVG}rect")
        if rect.find(f"{SVG}title") is not None
    ]


@settings(deadline=None, max_examples=25)
@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 6), st.integers(0, 3))
def test_a_picture_has_a_box_per_action_and_wait_in_its_ranks_lane_to_scale(name, ranks, more):
    timeline = timeline_of(name, ranks=ranks, num_micro_batches=2 * ranks * (1 + more))
    drawn = boxes(timeline_svg(timeline))
    spans = [event for event in timeline.events if event.kind in (*COMPUTE, "wait")]
    assert len(drawn) == len(spans)
    tops = sorted({top for _, _, _, top, _ in drawn})
    assert len(tops) == ranks
    left = min(box[1] for box in drawn)
    last_s = max(event.end_s for event in spans)
    scale = (max(box[2] for box in drawn) - left) / last_s
    for event, (title, start, end, top, _) in zip(spans, drawn, strict=True):
        assert title.startswith(f"{event.kind}, stage {event.stage}, micro-batch {event.micro_batch}: ")
        assert top == tops[event.rank]
        assert (start, end) == pytest.approx((left + event.start_s * scale, left + event.end_s * scale), abs=0.03)


def texts(svg: str) -> list[str]:
    return [each.text or "" for each in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_a_picture_says_what_it_shows():
    schedule = make_schedule("1f1b", ranks=4, num_micro_batches=8)
    words = texts(timeline_svg(simulate(schedule, StageTimes.in_proportion([1] * 4), detail=True)))
    assert words[:2] == ["1F1B", "simulated: step 33 s, bubble_ratio 0.273, idle / busy 0.375"]
    assert words[2:6] == ["forward", "backward", "wait", "ticks: received above, sent below"]
    assert [word for word in words if word.startswith("rank ")] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    in_flight = [word.split(", ")[1] for word in words if word.startswith("busy ")]
    assert in_flight == ["4 in flight", "3 in flight", "2 in flight", "1 in flight"]
    assert Counter(word for word in words if re.fullmatch(r"[1-7]", word)) == {str(batch): 8 for batch in range(1, 8)}


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_action_is_labelled_where_a_screen_can_show_it(name):
    timeline = timeline_of(name)
    labels = Counter(word for word in texts(timeline_svg(timeline)) if word.isdigit())
    actions = Counter(str(event.micro_batch) for event in timeline.events if event.kind in COMPUTE)
    labels["0"] -= 1  # the axis
    assert labels == actions


def test_kinds_have_their_own_colour_and_later_stages_of_a_rank_a_paler_one():
    timeline = timeline_of("zbv", ranks=2)
    fills = defaultdict(set)
    for title, *_, fill in boxes(timeline_svg(timeline)):
        kind, stage = re.match(r"(\w+), stage (\d)", title).groups()
        fills[kind, int(stage) // 2].add(fill)
    fills = {key: values.pop() for key, values in fills.items() if key[0] != "wait" and len(values) == 1}
    assert len(fills) == 6
    assert len(set(fills.values())) == 6

    def brightness(colour):
        return sum(int(colour[at : at + 2], 16) for at in (1, 3, 5))

    for kind in ("forward", "backward_input", "backward_weight"):
        assert brightness(fills[kind, 0]) < brightness(fills[kind, 1])


def measured() -> Timeline:
    def event(kind, rank, start_s, end_s):
        return TimelineEvent(kind=kind, rank=rank, stage=rank, micro_batch=0, start_s=start_s, end_s=end_s)

    events = (event("forward", 0, 5, 6), event("wait", 0, 6, 8), event("backward", 0, 8, 10))
    events += (event("wait", 1, 3, 6), event("forward", 1, 6, 7), event("backward", 1, 7, 8), event("wait", 1, 8, 12))
    return Timeline(ranks=2, events=events, source="measured")


def test_what_was_measured_outside_the_step_is_cut_off_the_picture_and_kept_in_the_trace():
    drawn = boxes(timeline_svg(measured(), title="<mine & yours>"))
    frame = min(box[1] for box in drawn), max(box[2] for box in drawn)
    assert [(start, end) for title, start, end, *_ in drawn if title.startswith("wait, stage 1")] == [
        (frame[0], pytest.approx(frame[0] + (frame[1] - frame[0]) / 5)),
        (pytest.approx(frame[0] + (frame[1] - frame[0]) * 3 / 5), frame[1]),
    ]
    complete = [event for event in chrome_trace(measured())["traceEvents"] if event["ph"] == "X"]
    assert min(event["ts"] for event in complete) == 0
    assert max(event["ts"] + event["dur"] for event in complete) == 9e6


def test_a_picture_is_written_with_its_title_escaped(tmp_path):
    write_timeline_svg(measured(), tmp_path / "step.svg", title="<mine & yours>")
    assert texts((tmp_path / "step.svg").read_text(encoding="utf-8"))[0] == "<mine & yours>"


def test_a_timeline_without_actions_is_refused():
    empty = Timeline(ranks=2, events=(), source="measured")
    for draw in (chrome_trace, timeline_svg):
        with pytest.raises(InvalidParameter, match="no forward or backward"):
            draw(empty)
