"""Each rule of physics has results that it must flag and results that it must leave alone."""

import dataclasses
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from perfsuite.gate.physics import examine, violations
from perfsuite.record.result import Metric, Peak, Peaks, Record, Work
from perfsuite.record.step import SpanTotal
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


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (metric("tflops", 980.0, peak=989.0), []),
        (metric("tflops", 1100.0, peak=989.0), ["above-peak"]),
        (metric("tflops", 995.0, peak=989.0), []),  # rounding of clocks and data sheets
        (metric("tflops", 1100.0, peak=989.0, kind="measured"), []),  # a measured peak is no bound
        (metric("mfu_palm", 0.62, unit=""), []),
        (metric("hfu", 0.7, unit=""), []),
        (metric("mfu_palm", 1.52, unit=""), ["utilisation"]),
        (metric("mfu_palm", 152.0, unit="percent"), ["utilisation"]),
        (metric("bubble_ratio", 0.0, unit="ratio"), []),
        (metric("bubble_ratio", 0.27, unit="ratio"), []),
        (metric("bubble_ratio", -0.01, unit="ratio"), ["bubble"]),
        (metric("bubble_ratio", 1.0, unit="ratio"), ["bubble"]),
    ],
    ids=lambda each: f"{each.name} {each.value:g}" if isinstance(each, Metric) else None,
)
def test_a_figure_has_its_bounds(found, expected):
    assert rules(result(found)) == expected


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


# Exactly 1 % more or less is either: three roundings lie between the factor and the rule.
@given(st.floats(1, 1e6), st.floats(0.5, 2.0).filter(lambda factor: abs(abs(factor - 1) - 0.01) > 1e-9))
@example(samples=7.0, factor=0.99 + 2e-9)
@example(samples=7.0, factor=0.99 - 2e-9)
@example(samples=7.0, factor=1.01 - 2e-9)
@example(samples=7.0, factor=1.01 + 2e-9)
def test_throughput_times_latency_is_the_work(samples, factor):
    found = result(metric("samples_per_s", factor * samples / 0.11, unit="1/s"), work=Work(samples=samples))
    assert ([] if abs(factor - 1) < 0.01 else ["throughput-latency"]) == rules(found)


def test_samples_equal_to_the_bit_are_no_measurement():
    assert rules(result(measurement=measured(times_s=(0.1,) * 5))) == ["constant"]
    assert rules(result(measurement=measured(times_s=(0.1,) * 4))) == []
    assert rules(result(measurement=measured(times_s=(0.1,) * 5), simulated=True)) == []


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
        ((span("forward", 0.2), span("remainder", 0.01)), ["parts"]),
        ((span("forward", 0.1), span("remainder", -0.05)), ["parts"]),
        ((span("forward", 0.02), span("backward", 0.02)), []),  # without a remainder nobody said that this is all
        ((span("forward", 0.2, count=8.0), span("remainder", 0.0)), []),  # micro-batches may overlap
    ],
)
def test_parts_and_their_remainder_are_the_step(spans, expected):
    assert rules(result(measurement=measured(spans=spans))) == expected


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
