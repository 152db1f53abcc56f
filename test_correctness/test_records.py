"""Records and their JSON form."""

import dataclasses
import functools
import json
import math
import statistics
import typing
from collections.abc import Mapping
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perfsuite.record import result as records
from perfsuite.record.codec import from_json, to_json
from perfsuite.record.own_metrics import Better, OwnMetric
from perfsuite.record.result import ClockFacts, Measurement, Metric, Peak, Peaks, Work
from perfsuite.record.step import Timeline, TimelineEvent
from test_correctness.helpers.measurements import measurement_of, rank_facts, result_of

RECORDS = [kind for kind in vars(records).values() if dataclasses.is_dataclass(kind) and isinstance(kind, type)]
QUICK = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


@functools.cache
def values(hint):  # noqa: PLR0911 - one return per kind of type
    """Any value that a field of this type may have."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is OwnMetric:  # which refuses what cannot be used
        return st.sampled_from([OwnMetric(name="a", unit="GiB", better=better) for better in typing.get_args(Better)])
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        fields = {each.name: values(hints[each.name]) for each in dataclasses.fields(hint)}
        if hint is Measurement:  # its columns have a value for each sample
            fields |= {"involuntary_switches": st.just(()), "yardsticks_s": st.just(())}
        return st.builds(hint, **fields)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is tuple:
        return st.lists(values(arguments[0]), max_size=3).map(tuple)
    if origin is Mapping:
        return st.dictionaries(st.text(max_size=5), values(arguments[1]), max_size=3)
    if origin is not None:
        return st.one_of([values(argument) for argument in arguments])
    simple = {
        str: st.text(max_size=8),
        int: st.integers(-(2**40), 2**60),
        float: st.floats(allow_nan=False, allow_infinity=False),
        bool: st.booleans(),
        type(None): st.none(),
        Any: PLAIN,
    }
    return simple[hint]


@pytest.mark.parametrize("kind", RECORDS)
@QUICK
@given(data=st.data())
def test_every_record_survives_json(kind, data):
    record = data.draw(values(kind))
    text = json.dumps(to_json(record), allow_nan=False)
    assert record == from_json(kind, json.loads(text))


@pytest.mark.parametrize("kind", RECORDS)
@QUICK
@given(data=st.data())
def test_a_file_broken_by_hand_is_a_value_error_that_names_the_field(kind, data):
    plain = to_json(data.draw(values(kind)))
    name = data.draw(st.sampled_from([each.name for each in dataclasses.fields(kind)]))
    plain[name] = data.draw(PLAIN)
    problem = ""
    try:
        record = from_json(kind, json.loads(json.dumps(plain)))
    except ValueError as error:
        problem = str(error)
    # A rule that compares two fields names the record alone: OwnMetric and Measurement have such rules.
    named = kind.__name__ if kind in (OwnMetric, Measurement) else f"{kind.__name__}.{name}"
    assert named in problem if problem else isinstance(record, kind)


def test_fields_at_their_default_stay_out_but_the_schema_is_always_there():
    assert {} == to_json(Work())
    clock = {"name": "c", "resolution_s": 1.0, "cost_s": 0.0}
    assert clock == to_json(ClockFacts(**clock))
    plain = to_json(measurement([1.0, 2.0], [1.0]))
    assert [1.0, 2.0] == plain["times_s"]
    assert not {"involuntary_switches", "yardsticks_s"} & plain.keys()
    assert records.SCHEMA == to_json(result_of())["schema"]


def test_a_newer_writer_is_named():
    clock = {"name": "c", "resolution_s": 1.0, "cost_s": 0}
    with pytest.raises(ValueError, match=r"ClockFacts has unknown fields colour; another version of perfsuite may"):
        from_json(ClockFacts, {**clock, "colour": "red"})
    with pytest.raises(ValueError, match=r"ClockFacts: .*cost_s"):
        from_json(ClockFacts, {"name": "c", "resolution_s": 1.0})
    with pytest.raises(ValueError, match=r"Work is 3, not an object"):
        from_json(Work, 3)
    with pytest.raises(ValueError, match=r"Metric.better is 'up', not one of 'higher', 'lower', 'neither'"):
        from_json(Metric, {"name": "n", "value": 1, "unit": "", "better": "up"})
    plain = to_json(measurement([1.0, 2.0], [1.0]))
    with pytest.raises(ValueError, match=r"Measurement.involuntary_switches\[1\] is True, not a int"):
        from_json(Measurement, {**plain, "involuntary_switches": [1, True]})
    with pytest.raises(ValueError, match=r"Measurement: yardsticks_s has 1 values for 2 samples; give one for each"):
        from_json(Measurement, {**plain, "yardsticks_s": [1.0]})


def measurement(times, medians, **columns):
    ranks = [rank_facts(rank, time_s=median) for rank, median in enumerate(medians)]
    return measurement_of(times, ranks, **columns)


@given(
    times=st.lists(st.floats(1e-6, 10), min_size=1, max_size=20),
    medians=st.lists(st.floats(1e-6, 10), min_size=1, max_size=8),
)
def test_what_a_measurement_says_of_itself(times, medians):
    measured = measurement(times, medians)
    assert statistics.median(times) == measured.median_s
    assert len(medians) == measured.world_size
    assert medians.index(max(medians)) == measured.slowest_rank
    assert math.isclose(max(medians), min(medians) * (1 + measured.rank_spread))


def test_disturbed_samples_are_counted():
    assert 0.5 == measurement([1.0] * 4, [1.0], involuntary_switches=(0, 3, 0, 1)).disturbed_share


def test_a_result_without_samples_says_why():
    result = result_of(case="test_x[cpu]", outcome="out_of_memory", detail="OOM at 3 GiB of 4 GiB")
    with pytest.raises(ValueError, match=r"test_x\[cpu\] has no samples: out_of_memory OOM at 3 GiB of 4 GiB"):
        _ = result.median_s
    with pytest.raises(KeyError, match="tflops is not a metric of"):
        result.metric("tflops")


def test_a_metric_knows_its_share_of_the_peak():
    peak = Peak(value=200.0, unit="TFLOPS", source="data sheet")
    metric = Metric(name="tflops", value=50.0, unit="TFLOPS", better="higher", peak=peak)
    assert 0.25 == metric.share_of_peak
    assert dataclasses.replace(metric, peak=None).share_of_peak is None
    assert dataclasses.replace(metric, value=None).share_of_peak is None
    assert Peaks() == from_json(Peaks, {})


EVENT = TimelineEvent(kind="send", rank=0, stage=0, micro_batch=0, start_s=0.0, end_s=1.0)
TIMELINE = Timeline(ranks=1, events=(EVENT, dataclasses.replace(EVENT, micro_batch=1)), source="measured")


def test_events_of_a_timeline_are_columns():
    plain = to_json(TIMELINE)
    assert [0, 1] == plain["events"]["micro_batch"]
    assert TIMELINE == from_json(Timeline, plain)
    empty = dataclasses.replace(TIMELINE, events=())
    assert empty == from_json(Timeline, to_json(empty))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": ["send", "receives"]}, r"Timeline.events.kind\[1\] is 'receives', not one of 'forward'"),
        ({"rank": [0]}, "Timeline.events has columns of different lengths"),
        ({"colour": ["red", "red"]}, "Timeline.events has the columns .*colour, not kind, rank"),
        ({"start_s": 1.0}, "Timeline.events.start_s is 1.0, not a list"),
    ],
)
def test_damaged_columns_are_named(changes, message):
    plain = to_json(TIMELINE)
    with pytest.raises(ValueError, match=message):
        from_json(Timeline, {**plain, "events": {**plain["events"], **changes}})
