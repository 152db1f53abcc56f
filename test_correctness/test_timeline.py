"""Timelines as traces and pictures: every action where it belongs, nothing that a viewer would refuse."""

import dataclasses
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

from perfsuite.base.errors import InvalidParameter
from perfsuite.metrics.pipeline import COMPUTE, bubble_ratio
from perfsuite.record.step import Timeline
from perfsuite.reports.timelines.files import chrome_trace, trace_text
from perfsuite.reports.timelines.picture import timeline_svg
from perfsuite.schedules import SCHEDULES, StageTimes, make_schedule, simulate
from test_correctness.helpers.pipelines import event_of

SVG = "{http://www.w3.org/2000/svg}"


def timeline_of(name, *, ranks=4, num_micro_batches=8, unit_s=0.04):
    schedule = make_schedule(name, ranks=ranks, num_micro_batches=num_micro_batches)
    times = StageTimes.in_proportion([unit_s / schedule.stages_per_rank] * schedule.num_stages)
    return simulate(schedule, times, communication_s=unit_s / 20, detail=True)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_trace_has_every_event_in_microseconds_on_its_rank_and_track_where_none_overlap(name):
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
    named = (event for event in trace["traceEvents"] if event["name"] in ("process_name", "thread_name"))
    names = {(event["name"], event["pid"], event["tid"]): event["args"]["name"] for event in named}
    tracks = enumerate(("compute", "wait", "messages"))
    expected = {("thread_name", rank, track): name for track, name in tracks for rank in range(4)}
    assert names == expected | {("process_name", rank, 0): f"rank {rank}" for rank in range(4)}
    slices = defaultdict(list)
    for event in complete:
        slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for of_track in slices.values():
        assert all(start >= end - 1e-6 for (_, end), (start, _) in pairwise(sorted(of_track)))


def test_a_written_trace_is_plain_json_with_finite_times_from_zero():
    exact = simulate(make_schedule("1f1b", ranks=2, num_micro_batches=3), lambda action: Fraction(1, 3))
    trace = json.loads(trace_text(exact))
    times = [event["ts"] for event in trace["traceEvents"] if event["ph"] == "X"]
    assert min(times) == 0
    assert all(math.isfinite(each) for each in times)
    assert trace["otherData"]["bubble_ratio"] == 0.25


def boxes(svg):
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


@settings(deadline=None, max_examples=10)  # a tenth of a second each
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


def texts(svg):
    return [each.text or "" for each in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_a_measured_picture_is_held_against_its_own_durations_and_the_formula():
    timeline = dataclasses.replace(timeline_of("1f1b"), source="measured")
    said = texts(timeline_svg(timeline, title="test_it[cpu-ws4]"))
    assert said[0] == f"test_it[cpu-ws4]: measured, bubble_ratio {bubble_ratio(timeline):.3f}"
    assert "; bubble_ratio simulated with the same durations 0.273, formula for equal stages 0.273; " in said[1]
    own = texts(timeline_svg(dataclasses.replace(timeline, schedule="mine")))
    assert own[0] == f"mine: measured, bubble_ratio {bubble_ratio(timeline):.3f}"
    assert own[1].startswith("mine; p=4; step ")
    assert "formula" not in own[1]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_action_is_labelled_where_a_screen_can_show_it(name):
    timeline = timeline_of(name)
    labels = Counter(word for word in texts(timeline_svg(timeline)) if re.fullmatch(r"[FBIW]\d+", word))
    letters = {"forward": "F", "backward": "B", "backward_input": "I", "backward_weight": "W"}
    actions = (event for event in timeline.events if event.kind in COMPUTE)
    assert Counter(f"{letters[event.kind]}{event.micro_batch}" for event in actions) == labels


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "zbv", "dualpipev"])
def test_a_picture_of_16_ranks_and_32_micro_batches_is_labelled_and_fits_a_screen_that_scrolls(name):
    timeline = timeline_of(name, ranks=16, num_micro_batches=32)
    svg = timeline_svg(timeline)
    root = ElementTree.fromstring(svg)
    assert float(root.get("width")) <= 6300
    assert float(root.get("height")) <= 800
    labels = sum(bool(re.fullmatch(r"[FBIW]\d+", word)) for word in texts(svg))
    assert labels >= 0.9 * sum(event.kind in COMPUTE for event in timeline.events)


@settings(deadline=None, max_examples=8)  # as above
@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 16), st.floats(1e-9, 1e3), st.text("ab[-] ", max_size=90))
def test_no_word_leaves_the_picture_or_lies_on_another(name, ranks, unit_s, title):
    root = ElementTree.fromstring(
        timeline_svg(timeline_of(name, ranks=ranks, num_micro_batches=2 * ranks, unit_s=unit_s), title=title)
    )
    width, height = float(root.get("width")), float(root.get("height"))
    lines = defaultdict(list)
    for text in root.iter(f"{SVG}text"):
        length = len(text.text) * 6 * float(text.get("font-size", "11")) / 11  # a narrow letter's width or more
        shift = {"middle": 0.5, "end": 1.0}.get(text.get("text-anchor"), 0.0)
        left = float(text.get("x")) - shift * length
        lines[text.get("y")].append((left, left + length))
        assert left >= 0
        assert left + length <= width
        assert 0 < float(text.get("y")) < height
    for line in lines.values():
        for (_, right), (left, _) in pairwise(sorted(line)):
            assert left >= right - 1


def marks(svg, kind):
    """(x1, y1, x2, y2) of the lines whose tooltip is of this kind."""
    return [
        tuple(float(each.get(at)) for at in ("x1", "y1", "x2", "y2"))
        for each in ElementTree.fromstring(svg).iter(f"{SVG}line")
        if (each.findtext(f"{SVG}title") or "").startswith(kind)
    ]


def test_messages_are_ticks_outside_the_lane_and_bars_where_they_took_time():
    times = {"receive": (0, 0), "forward": (0, 1), "send": (1, 3), "backward": (3, 4)}
    events = tuple(event_of(kind, 0, *ends) for kind, ends in times.items())
    svg = timeline_svg(Timeline(ranks=1, events=events, source="measured"))
    (forward, backward) = boxes(svg)
    top, bottom = forward[3], forward[3] + 26
    assert forward[2] < backward[1]
    ((x1, y1, x2, y2),) = marks(svg, "receive")
    assert (x1, x2, max(y1, y2)) == (forward[1], forward[1], top)
    assert min(y1, y2) < top
    tick, bar = marks(svg, "send")
    assert (tick[0], tick[2], min(tick[1], tick[3])) == (forward[2], forward[2], bottom)
    assert max(tick[1], tick[3]) > bottom
    assert (bar[0], bar[2]) == (forward[2], backward[1])
    assert bottom < bar[1] == bar[3]


@pytest.mark.parametrize(
    ("length_s", "unit"), [(2.0, "s"), (0.02, "ms"), (2e-5, "us"), (2e-8, "ns"), (3600.0, "s"), (0.999, "ms")]
)
def test_the_axis_names_its_unit_and_is_to_scale(length_s, unit):
    events = (event_of("forward", 0, 0, length_s / 2), event_of("backward", 0, length_s / 2, length_s))
    svg = timeline_svg(Timeline(ranks=1, events=events, source="measured"))
    assert f"time since the step's first action, {unit}" in texts(svg)
    left, right = boxes(svg)[0][1], boxes(svg)[1][2]
    factor = {"s": 1, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}[unit]
    numbers = [
        (float(each.get("x")), float(each.text))
        for each in ElementTree.fromstring(svg).iter(f"{SVG}text")
        if re.fullmatch(r"[\d.]+", each.text)
    ]
    assert len(numbers) >= 3
    for x, number in numbers:
        assert x == pytest.approx(left + (right - left) * number * factor / length_s, abs=0.02)


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


def measured():
    first = (("forward", 0, 5, 6), ("wait", 0, 6, 8), ("backward", 0, 8, 10))
    second = (("wait", 1, 3, 6), ("forward", 1, 6, 7), ("backward", 1, 7, 8), ("wait", 1, 8, 12))
    events = tuple(event_of(*each) for each in (*first, *second))
    return Timeline(ranks=2, events=events, source="measured")


def test_what_was_measured_outside_the_step_is_cut_off_the_picture_and_kept_in_the_trace():
    picture = timeline_svg(measured(), title="<mine & yours>")
    assert texts(picture)[0].startswith("<mine & yours>: measured, "), "the title is escaped"
    drawn = boxes(picture)
    frame = min(box[1] for box in drawn), max(box[2] for box in drawn)
    assert [(start, end) for title, start, end, *_ in drawn if title.startswith("wait, stage 1")] == [
        (frame[0], pytest.approx(frame[0] + (frame[1] - frame[0]) / 5)),
        (pytest.approx(frame[0] + (frame[1] - frame[0]) * 3 / 5), frame[1]),
    ]
    complete = [event for event in chrome_trace(measured())["traceEvents"] if event["ph"] == "X"]
    assert min(event["ts"] for event in complete) == 0
    assert max(event["ts"] + event["dur"] for event in complete) == 9e6


def test_a_timeline_without_actions_is_refused():
    empty = Timeline(ranks=2, events=(), source="measured")
    for draw in (chrome_trace, timeline_svg):
        with pytest.raises(InvalidParameter, match="no forward or backward"):
            draw(empty)
