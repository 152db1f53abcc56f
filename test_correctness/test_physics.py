"""Each rule of physics has results that it must flag and results that it must leave alone."""

import dataclasses
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from perfsuite.gate.physics import bubble_bound, examine, speed_up_violation, violations
from perfsuite.record.result import Metric, Peak, Peaks, Record, Work
from perfsuite.record.step import SpanTotal, Timeline, TimelineEvent
from test_correctness.helpers.measurements import measurement_of, rank_facts, result_of


def measured(times_s=(0.1, 0.11, 0.12, 0.1, 0.13), ranks=1, hosts=1, **columns):
    facts = [
        rank_facts(rank, host=f"host{rank * hosts // ranks}", median_s=0.11, min_s=0.1, max_s=0.13)
        for rank in range(ranks)
    ]
    return measurement_of(times_s, facts, **columns)


def result(*metrics, work=None, measurement=None, **changes):
    return result_of(measurement or measured(), work=work, metrics=metrics, **{"platform": "h200", **changes})


def metric(name, value, peak=None, kind="published", unit="TFLOPS"):
    limit = None if peak is None else Peak(value=peak, unit=unit, source="data sheet", kind=kind)
    return Metric(name=name, value=value, unit=unit, better="higher", peak=limit)


def rules(found):
    return [violation.rule for violation in violations(found)]


def test_a_plausible_result_breaks_nothing():
    assert rules(result(metric("tflops", 980.0, peak=989.0))) == []


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        (1100.0, "published", ["above-peak"]),
        (995.0, "published", []),  # rounding of clocks and data sheets
        (1100.0, "measured", []),  # a measured peak is no bound
    ],
)
def test_nothing_is_above_a_sourced_peak(value, kind, expected):
    assert rules(result(metric("tflops", value, peak=989.0, kind=kind))) == expected


GATHERED = Work(collective="all_gather")


@pytest.mark.parametrize(
    ("busbw", "hosts", "expected"), [(24.0, 1, []), (26.0, 1, ["above-link"]), (45.0, 2, []), (48.0, 2, ["above-link"])]
)
def test_bus_bandwidth_is_bound_by_the_links(busbw, hosts, expected):
    busbw_metric = metric("busbw_gb_per_s", busbw, peak=25.0, unit="GB/s")
    assert rules(result(busbw_metric, work=GATHERED, measurement=measured(ranks=16, hosts=hosts))) == expected


@pytest.mark.parametrize(("name", "bound"), [("ring_shift", 25.0), ("send_recv", 3.125), ("one_direction", 3.125)])
def test_messages_between_hosts_are_bound_by_the_links_too(name, bound):
    for busbw, expected in ((bound, []), (46.9, ["above-link"])):
        busbw_metric = metric("busbw_gb_per_s", busbw, peak=25.0, unit="GB/s")
        found = result(busbw_metric, work=Work(collective=name), measurement=measured(ranks=16, hosts=2))
        assert rules(found) == expected


def test_utilisation_is_at_most_whole():
    assert rules(result(metric("mfu_palm", 0.62, unit=""), metric("hfu", 0.7, unit=""))) == []
    assert rules(result(metric("mfu_palm", 1.52, unit=""))) == ["utilisation"]
    assert rules(result(metric("mfu_palm", 152.0, unit="percent"))) == ["utilisation"]


# Exactly 1 % more or less is either: three roundings lie between the factor and the rule.
@given(st.floats(1, 1e6), st.floats(0.5, 2.0).filter(lambda factor: abs(abs(factor - 1) - 0.01) > 1e-9))
@example(samples=7.0, factor=0.99 + 2e-9)
@example(samples=7.0, factor=0.99 - 2e-9)
@example(samples=7.0, factor=1.01 - 2e-9)
@example(samples=7.0, factor=1.01 + 2e-9)
def test_throughput_times_latency_is_the_work(samples, factor):
    found = result(metric("samples_per_s", factor * samples / 0.11, unit="1/s"), work=Work(samples=samples))
    assert ([] if abs(factor - 1) < 0.01 else ["throughput-latency"]) == rules(found)


def test_parts_longer_than_the_step_are_found():
    ok = (
        SpanTotal(name="forward", time_s=0.1, count=1, slowest_rank=0),
        SpanTotal(name="remainder", time_s=0.01, count=1, slowest_rank=0),
    )
    assert rules(result(measurement=measured(spans=ok, aligned=False))) == []
    over = (dataclasses.replace(ok[0], time_s=0.2), ok[1])
    assert rules(result(measurement=measured(spans=over, aligned=False))) == ["parts"]
    negative = (ok[0], dataclasses.replace(ok[1], time_s=-0.05))
    assert rules(result(measurement=measured(spans=negative))) == ["parts"]


@pytest.mark.parametrize(("value", "expected"), [(0.0, []), (0.27, []), (-0.01, ["bubble"]), (1.0, ["bubble"])])
def test_a_bubble_is_a_share(value, expected):
    assert rules(result(metric("bubble_ratio", value, unit="ratio"))) == expected


def test_samples_equal_to_the_bit_are_no_measurement():
    assert rules(result(measurement=measured(times_s=(0.1,) * 5))) == ["constant"]
    assert rules(result(measurement=measured(times_s=(0.1,) * 4))) == []
    assert rules(result(measurement=measured(times_s=(0.1,) * 5), simulated=True)) == []


def test_a_speed_up_above_linear_is_flagged():
    assert speed_up_violation(7.4, 8) == ""
    assert "8.9" in speed_up_violation(8.9, 8)
    assert speed_up_violation(3.9, 32, base_ranks=8) == ""


def severities(found, **known):
    return [(violation.rule, violation.severity) for violation in examine(found, **known)]


@pytest.mark.parametrize(
    ("busbw", "expected"),
    [
        (450.0, []),
        (480.0, [("above-link", "flagged")]),  # reduction inside the switches sends S once
        (800.0, [("above-link", "impossible")]),
    ],
)
def test_an_all_reduce_above_its_ring_is_flagged_as_long_as_switches_could_do_it(busbw, expected):
    found = result(
        metric("busbw_gb_per_s", busbw, peak=450.0, unit="GB/s"),
        work=Work(collective="all_reduce"),
        measurement=measured(ranks=8),
    )
    assert severities(found) == expected
    gathered = dataclasses.replace(found, work=Work(collective="all_gather"))
    assert severities(gathered) == ([("above-link", "impossible")] if expected else [])


def test_the_network_of_a_host_bounds_results_of_several_hosts():
    network = Peak(value=12.5, unit="GB/s", source="100 Gbit/s")
    busbw_metric = metric("busbw_gb_per_s", 30.0, unit="GB/s")
    found = result(busbw_metric, work=GATHERED, measurement=measured(ranks=16, hosts=2))
    assert violations(found) == ()
    assert [violation.rule for violation in violations(found, network=network)] == ["above-link"]
    measured_network = dataclasses.replace(network, kind="measured")
    assert violations(found, network=measured_network) == ()


def test_a_utilisation_of_a_measured_peak_is_no_contradiction():
    found = result(metric("mfu_percent", 120.0, unit="percent"), work=Work(dtype="bf16"))
    own = Peaks(tflops={"bf16": Peak(value=1.0, unit="TFLOPS", source="measured here", kind="measured")})
    published = Peaks(tflops={"bf16": Peak(value=1.0, unit="TFLOPS", source="data sheet")})
    assert [violation.rule for violation in violations(found)] == ["utilisation"]
    assert violations(found, peaks=own) == ()
    assert [violation.rule for violation in violations(found, peaks=published)] == ["utilisation"]
    noted = dataclasses.replace(found.metrics[0], note="of 1 TFLOPS: measured here: fastest product")
    assert violations(dataclasses.replace(found, metrics=(noted,))) == ()


@pytest.mark.parametrize("name", ["samples_per_s", "samples_per_s_per_device"])
def test_throughput_per_device_counts_every_device(name):
    facts = measured(ranks=4)
    spread = dataclasses.replace(
        facts, ranks=tuple(dataclasses.replace(rank, device=f"musa:{rank.rank}") for rank in facts.ranks)
    )
    rate = 8 / spread.median_s / (4 if name.endswith("device") else 1)
    assert rules(result(metric(name, rate, unit="1/s"), work=Work(samples=8), measurement=spread)) == []
    assert rules(result(metric(name, 2 * rate, unit="1/s"), work=Work(samples=8), measurement=spread)) == [
        "throughput-latency"
    ]


def span(name, time_s, count=1.0):
    return SpanTotal(name=name, time_s=time_s, count=count, slowest_rank=0)


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ((span("forward", 0.05), span("backward", 0.05), span("remainder", 0.01)), []),
        ((span("forward", 0.02), span("backward", 0.02), span("remainder", 0.01)), ["parts"]),
        ((span("forward", 0.02), span("backward", 0.02)), []),  # without a remainder nobody said that this is all
        ((span("forward", 0.2, count=8.0), span("remainder", 0.0)), []),  # micro-batches may overlap
    ],
)
def test_parts_and_their_remainder_are_the_step(spans, expected):
    assert rules(result(measurement=measured(spans=spans))) == expected


def pipeline(gap_s):
    """1F1B of two ranks and two micro-batches, every action one second, rank 1 starting ``gap_s`` after rank 0."""
    starts = {
        0: (("forward", 0, 0.0), ("forward", 1, 1.0), ("backward", 0, gap_s + 2.0), ("backward", 1, gap_s + 4.0)),
        1: (
            ("forward", 0, gap_s),
            ("backward", 0, gap_s + 1.0),
            ("forward", 1, gap_s + 2.0),
            ("backward", 1, gap_s + 3.0),
        ),
    }
    events = tuple(
        TimelineEvent(kind=kind, rank=rank, stage=rank, micro_batch=batch, start_s=start, end_s=start + 1.0)
        for rank, actions in starts.items()
        for kind, batch, start in actions
    )
    return Timeline(ranks=2, events=events, source="measured", schedule="1f1b")


def test_a_bubble_is_never_below_what_its_own_durations_allow():
    timeline = pipeline(1.0)
    assert bubble_bound(timeline) == pytest.approx(1 / 3)
    for value, expected in ((0.34, []), (0.30, ["bubble"])):
        found = result(
            metric("bubble_ratio", value, unit="ratio"),
            measurement=dataclasses.replace(measured(ranks=2), timeline=timeline),
        )
        assert rules(found) == expected
    assert bubble_bound(dataclasses.replace(timeline, schedule="own")) is None
    assert bubble_bound(dataclasses.replace(timeline, events=timeline.events[:-1])) is None


@pytest.mark.parametrize(("beyond", "expected"), [(-8.0, []), (0.0, []), (4.0, ["memory"])])
def test_a_peak_is_never_below_what_was_allocated_at_one_moment(beyond, expected):
    values = {"peak_bytes": 100.0, "parts_at_once_bytes": 100.0 + beyond, "parts_beyond_peak_bytes": beyond}
    found = tuple(Record(name=name, value=value, unit="bytes", reduce="max") for name, value in values.items())
    assert expected == rules(result(measurement=dataclasses.replace(measured(ranks=2), records=found)))


@pytest.mark.parametrize("time_s", [0.0, -0.1, math.nan, math.inf])
def test_no_work_takes_no_time(time_s):
    assert "time" in rules(result(measurement=measured(times_s=(0.1, 0.11, 0.12, 0.1, time_s))))


def test_a_smoke_run_and_a_case_without_samples_break_nothing():
    assert violations(result(metric("tflops", 1e9, peak=1.0), outcome="smoke")) == ()
    assert violations(result(outcome="out_of_memory", measurement=None)) == ()


def test_a_speed_up_above_the_ranks_is_only_flagged():
    base = result(work=Work(samples=1.0), measurement=measured(times_s=(0.9, 0.91, 0.92, 0.9, 0.93)), world_size=1)
    found = result(work=Work(samples=8.0), measurement=measured(ranks=8), world_size=8)
    assert severities(found, base=base) == [("speed-up", "flagged")]
    assert severities(found) == []
    assert violations(found) == ()
    (said,) = examine(found, base=base)
    assert str(said) == "speed-up 66.2 on 8 times the ranks is above linear (base: 1 rank)"


def test_a_speed_up_is_counted_from_fewer_ranks_and_from_counted_work():
    slow = measured(times_s=(0.9, 0.91, 0.92, 0.9, 0.93))
    found = result(work=Work(samples=8.0), measurement=measured(ranks=8), world_size=8)
    assert severities(found, base=result(work=Work(samples=8.0), measurement=slow, world_size=8)) == []
    assert severities(found, base=result(work=Work(), measurement=slow, world_size=1)) == []
    assert severities(found, base=result(outcome="out_of_memory", measurement=None, world_size=1)) == []
    # 0.91 / 0.11 = 8.27 times the throughput on 8 times the ranks: within 5 % of linear
    assert severities(found, base=result(work=Work(samples=8.0), measurement=slow, world_size=1)) == []
