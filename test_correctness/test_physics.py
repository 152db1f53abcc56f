"""Each rule of physics has results that it must flag and results that it must leave alone."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.baselines.physics import link_bound_gb_per_s, speed_up_violation, violations
from perfsuite.records import ClockFacts, Measurement, Metric, Peak, RankFacts, Result, Sample, SpanTotal, Work


def measured(times_s=(0.1, 0.11, 0.12, 0.1, 0.13), ranks=1, hosts=1, spans=(), aligned=True):
    facts = [
        RankFacts(
            rank=rank,
            host=f"host{rank * hosts // ranks}",
            device="cpu",
            threads=1,
            cores=None,
            median_s=0.11,
            min_s=0.1,
            max_s=0.13,
            cpu_share=1.0,
            max_rss_bytes=1,
        )
        for rank in range(ranks)
    ]
    return Measurement(
        samples=tuple(Sample(time_s=time_s) for time_s in times_s),
        iterations=1,
        warmup_iterations=1,
        warmup_steady=True,
        aligned=aligned,
        clock=ClockFacts(name="perf_counter", resolution_s=1e-9, cost_s=1e-7),
        ranks=tuple(facts),
        backend="gloo",
        process="fresh",
        transport="local",
        spans=spans,
    )


def result(*metrics, work=None, measurement=None, **changes):
    plain = Result(
        case="t.py::t",
        workload="m:W",
        parameters={},
        platform="h200",
        world_size=1,
        outcome="measured",
        work=work or Work(),
        metrics=metrics,
        measurement=measurement or measured(),
    )
    return dataclasses.replace(plain, **changes)


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


@pytest.mark.parametrize(
    ("busbw", "hosts", "expected"), [(24.0, 1, []), (26.0, 1, ["above-link"]), (45.0, 2, []), (48.0, 2, ["above-link"])]
)
def test_bus_bandwidth_is_bound_by_the_links(busbw, hosts, expected):
    found = result(metric("busbw_gb_per_s", busbw, peak=25.0, unit="GB/s"), measurement=measured(ranks=16, hosts=hosts))
    assert rules(found) == expected


@given(st.integers(2, 64), st.integers(1, 8), st.floats(1, 1000))
def test_the_link_bound_is_never_below_the_link(ranks_per_host, hosts, link):
    ranks = ranks_per_host * hosts
    assert link_bound_gb_per_s(link, ranks, hosts) >= link * (1 - 1e-12)


def test_utilisation_is_at_most_whole():
    assert rules(result(metric("mfu_palm", 0.62, unit=""), metric("hfu", 0.7, unit=""))) == []
    assert rules(result(metric("mfu_palm", 1.52, unit=""))) == ["utilisation"]
    assert rules(result(metric("mfu_palm", 152.0, unit="percent"))) == ["utilisation"]


@given(st.floats(1, 1e6), st.floats(0.5, 2.0))
def test_throughput_times_latency_is_the_work(samples, factor):
    found = result(metric("samples_per_s", factor * samples / 0.11, unit="1/s"), work=Work(samples=samples))
    assert (rules(found) == []) == (abs(factor - 1) <= 0.01 + 1e-9 or abs(factor * samples - samples) <= 0.01 * samples)


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
