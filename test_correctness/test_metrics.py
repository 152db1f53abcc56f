"""The metric registry: formulas against independent arithmetic, peaks and reasons, the figures of docs metrics."""

import dataclasses
import doctest
import importlib
import math
import random
import re
import statistics
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfsuite.base.collectives import TRAFFIC
from perfsuite.base.errors import InvalidParameter
from perfsuite.metrics import REGISTRY, derive, find, fit_alpha_beta
from perfsuite.record.result import Peak, Peaks, Work
from test_correctness.helpers.measurements import measurement_of, rank_facts

DOCS = Path(__file__).parent.parent / "docs"
MODULES = ["spec", "compute", "memory", "collective"]
PEAKS = Peaks(
    tflops={
        "bf16": Peak(value=100.0, unit="TFLOPS", source="sheet"),
        "int8": Peak(value=200.0, unit="TOPS", source="sheet"),
    },
    memory_bandwidth=Peak(value=768.0, unit="GB/s", source="sheet"),
    link=Peak(value=240.0, unit="GB/s", source="sheet"),
    host_link=Peak(value=63.0, unit="GB/s", source="sheet"),
)
MIB = 2**20


def measured(times, *, places=(("a", "musa:0"),), cache_bytes=0, memory=None):
    """A measurement with these seconds per iteration, on ranks at these (host, device)."""
    ranks = [
        rank_facts(rank, host=host, device=device, cache_bytes=cache_bytes)
        for rank, (host, device) in enumerate(places)
    ]
    return measurement_of(times if isinstance(times, list) else [times], ranks, peak_memory_bytes=memory)


def on(*, devices, ranks_per_device=1, hosts=1):
    return [
        (f"host{host}", f"musa:{device}")
        for host in range(hosts)
        for device in range(devices)
        for _ in range(ranks_per_device)
    ]


def one(name, work, measurement, peaks=PEAKS):
    (metric,) = derive([name], work=work, measurement=measurement, peaks=peaks)
    return metric


@pytest.mark.parametrize("name", MODULES)
def test_worked_numbers(name):
    failed, _ = doctest.testmod(importlib.import_module(f"perfsuite.metrics.{name}"))
    assert failed == 0


@pytest.mark.parametrize("spec", REGISTRY.values(), ids=list(REGISTRY))
def test_every_metric_says_what_it_means(spec):
    assert isinstance(spec, type(find("tflops")))
    unit = spec.unit.lower().replace("/", "_per_")
    assert unit in spec.name
    assert spec.name.endswith((unit, f"{unit}_per_device"))
    assert spec.doc.endswith(".")
    assert spec.convention
    assert spec.better in ("higher", "lower", "neither")


def test_the_registry_cannot_be_changed():
    with pytest.raises(TypeError):
        REGISTRY["mine"] = REGISTRY["tflops"]  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        REGISTRY["tflops"].unit = "GFLOPS"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("typo", "meant"), [("busbw", "busbw_gb_per_s"), ("tflop", "tflops"), ("latency", "latency_us")]
)
def test_a_typo_names_what_was_meant(typo, meant):
    with pytest.raises(InvalidParameter, match=rf"metric '{typo}' is not in the registry; did you mean .*{meant}"):
        derive([typo], work=Work(), measurement=measured(1.0), peaks=PEAKS)


def test_metrics_come_in_the_order_they_were_asked_for():
    names = ("busbw_gb_per_s", "latency_us", "algbw_gb_per_s")
    work = Work(collective="all_reduce", message_bytes=1e6)
    assert names == tuple(each.name for each in derive(names, work=work, measurement=measured(1.0), peaks=PEAKS))


@given(
    operations=st.integers(1, 10**15), time=st.floats(1e-6, 100), devices=st.integers(1, 8), sharing=st.integers(1, 4)
)
def test_tflops(operations, time, devices, sharing):
    work = Work(flops={"exact": float(operations)}, dtype="bf16")
    measurement = measured(time, places=on(devices=devices, ranks_per_device=sharing))
    expected = Fraction(operations) / Fraction(time) / 10**12
    total, each = one("tflops", work, measurement), one("tflops_per_device", work, measurement)
    assert math.isclose(float(expected), total.value or 0.0, rel_tol=1e-12)
    assert math.isclose(float(expected / devices), each.value or 0.0, rel_tol=1e-12)
    assert total.peak is not None
    assert each.peak is not None
    assert (100.0 * devices, 100.0) == (total.peak.value, each.peak.value)
    assert math.isclose(total.share_of_peak or 0.0, each.share_of_peak or 0.0, rel_tol=1e-12)


def test_integer_operations_are_tops():
    metric = one("tflops", Work(flops={"exact": 1e12}, dtype="int8"), measured(0.01))
    assert ("TOPS", 100.0, 0.5) == (metric.unit, metric.value, metric.share_of_peak)


def test_the_convention_of_the_work_model_is_kept():
    work = Work(flops={"palm": 2e12, "6n": 1e12}, dtype="bf16")
    assert ("palm", 2.0) == (one("tflops", work, measured(1.0)).convention, one("tflops", work, measured(1.0)).value)
    work = Work(flops={"palm": 2e12, "exact": 1e12}, dtype="bf16")
    assert "exact" == one("tflops", work, measured(1.0)).convention


@given(size=st.integers(1, 2**40), time=st.floats(1e-6, 100), ranks=st.integers(2, 64))
@pytest.mark.parametrize("op", sorted(TRAFFIC))
@settings(max_examples=25)
def test_collective_bandwidth(op, size, time, ranks):
    """Independent: the bytes that one rank must put on its link, over the time."""
    own = Fraction(size, ranks)
    on_the_link = {
        "all_reduce": 2 * (ranks - 1) * own,  # a ring passes each of n parts on n - 1 times, twice
        "broadcast": Fraction(size),
        "reduce": Fraction(size),
        **dict.fromkeys(("send_recv", "ring_shift", "one_direction"), Fraction(size)),
    }.get(op, (ranks - 1) * own)
    work = Work(collective=op, message_bytes=float(size))
    measurement = measured(time, places=on(devices=ranks))
    algbw, busbw = one("algbw_gb_per_s", work, measurement), one("busbw_gb_per_s", work, measurement)
    assert math.isclose(float(size / Fraction(time) / 10**9), algbw.value or 0.0, rel_tol=1e-12)
    assert math.isclose(float(on_the_link / Fraction(time) / 10**9), busbw.value or 0.0, rel_tol=1e-12)
    assert "nccl-tests" == busbw.convention == algbw.convention
    assert PEAKS.link == busbw.peak
    assert algbw.peak is None


@given(size=st.integers(1, 2**36), time=st.floats(1e-6, 100), devices=st.integers(1, 8), sharing=st.integers(1, 4))
def test_memory_bandwidth_is_per_device(size, time, devices, sharing):
    measurement = measured(time, places=on(devices=devices, ranks_per_device=sharing))
    for path, peak in (("device", PEAKS.memory_bandwidth), ("host_to_device", PEAKS.host_link)):
        metric = one("gb_per_s", Work(bytes_moved=float(size), memory_path=path), measurement)  # type: ignore[arg-type]
        assert math.isclose(size * sharing / time / 1e9, metric.value or 0.0, rel_tol=1e-12)
        assert (peak, "") == (metric.peak, metric.note)


@pytest.mark.parametrize(
    ("touched", "note"),
    [
        (8 * MIB, "cache-resident: touches 8MiB, the last-level cache is 32MiB"),
        (32 * MIB, "cache-resident"),
        (64 * MIB, "partly cache-resident: touches 64MiB, under 4 x the last-level cache of 32MiB"),
        (128 * MIB, ""),
    ],
)
def test_a_bandwidth_of_the_cache_is_marked_and_is_no_share_of_the_memory(touched, note):
    work = Work(bytes_moved=float(touched), memory_path="device", footprint_bytes=float(touched))
    metric = one("gb_per_s", work, measured(1.0, cache_bytes=32 * MIB))
    assert metric.note.startswith(note) if note else metric.note == ""
    assert (metric.peak is None) == bool(note)
    # Four ranks on one device share its cache: what fits for one does not for all.
    shared = one("gb_per_s", work, measured(1.0, cache_bytes=32 * MIB, places=on(devices=1, ranks_per_device=4)))
    assert (shared.peak is None) == (touched < 32 * MIB)


def test_latency():
    times = [0.001 * index for index in range(1, 201)]
    random.Random(1).shuffle(times)
    assert math.isclose(statistics.median(times) * 1e6, one("latency_us", Work(), measured(times)).value or 0.0)
    p99 = one("latency_p99_us", Work(), measured(times)).value or 0.0
    assert 2 == sum(time * 1e6 > p99 for time in times)
    few = one("latency_p99_us", Work(), measured(times[:99]))
    assert (None, "99 samples; a 99th percentile needs 100") == (few.value, few.note)


def test_peak_memory():
    assert 3.0 == one("peak_memory_gib", Work(), measured(1.0, memory=3 * 2**30)).value
    unknown = one("peak_memory_gib", Work(), measured(1.0))
    assert (None, "the device has no allocator statistics") == (unknown.value, unknown.note)


@pytest.mark.parametrize(
    ("name", "work", "note"),
    [
        ("tflops", Work(flops={"exact": 1e12}, dtype="fp64"), "no fp64 peak in the platform's row"),
        ("gb_per_s", Work(bytes_moved=1e9, memory_path="device"), "no memory bandwidth in the platform's row"),
        ("gb_per_s", Work(bytes_moved=1e9, memory_path="device_to_host"), "no host link in the platform's row"),
        ("busbw_gb_per_s", Work(collective="all_gather", message_bytes=1e9), "no link in the platform's row"),
    ],
)
def test_without_a_peak_the_value_stays_and_the_reason_is_given(name, work, note):
    for peaks, reason in ((Peaks(), note), (Peaks(unknown="no row for 'Foo 9'"), "no row for 'Foo 9'")):
        metric = one(name, work, measured(1.0, places=on(devices=2)), peaks)
        assert (None, reason) == (metric.peak, metric.note)
        assert metric.value is not None
        assert metric.value > 0


def test_a_link_within_the_node_is_no_peak_between_nodes():
    work = Work(collective="all_reduce", message_bytes=1e9)
    metric = one("busbw_gb_per_s", work, measured(1.0, places=on(devices=2, hosts=2)))
    assert metric.peak is None
    assert metric.note.startswith("the ranks are on 2 hosts")
    assert 1.5 == metric.value


@pytest.mark.parametrize(
    ("name", "work", "note"),
    [
        ("tflops", Work(), "the work model counts no operations"),
        ("gb_per_s", Work(), "the work model moves no bytes"),
        ("busbw_gb_per_s", Work(collective="barrier"), "barrier moves no message that a bandwidth could be taken of"),
        ("algbw_gb_per_s", Work(), "the workload moves no message that a bandwidth could be taken of"),
    ],
)
def test_what_cannot_be_known_says_why(name, work, note):
    metric = one(name, work, measured(1.0))
    assert (None, note) == (metric.value, metric.note)


@pytest.mark.parametrize("name", [name for name, spec in REGISTRY.items() if not spec.deterministic])
def test_neither_a_time_of_zero_nor_the_one_iteration_of_a_smoke_run_gives_a_rate(name):
    work = Work(flops={"exact": 1.0}, bytes_moved=1.0, collective="all_reduce", message_bytes=1.0)
    zero = one(name, work, measured(0.0))
    assert zero.value is None
    assert "too short for the clock perf_counter" in zero.note
    smoke = one(name, work, dataclasses.replace(measured(1.0), smoke=True))
    assert (smoke.value, smoke.note) == (None, "the case was run once and not measured")


SIZES = [float(4**power) for power in range(5, 16)]


@given(alpha=st.floats(1e-7, 1e-2), rate=st.floats(1e7, 1e12), sizes=st.sets(st.sampled_from(SIZES), min_size=3))
def test_the_fit_finds_the_line_that_made_the_points(alpha, rate, sizes):
    fit = fit_alpha_beta([(size, alpha + size / rate) for size in sizes])
    reach_us = min(alpha + size / rate for size in sizes) * 1e6
    assert math.isclose(alpha * 1e6, fit.alpha_us, rel_tol=1e-3, abs_tol=1e-3 * reach_us)
    if max(sizes) / rate > 1e-3 * alpha:  # else bandwidth does not show in any of the times
        assert math.isclose(rate / 1e9, fit.beta_gb_per_s, rel_tol=1e-2)
    assert fit.misfit < 1e-6
    assert fit.trusted
    assert len(sizes) == fit.points


def test_the_fit_survives_noise_and_one_bad_point():
    rng = random.Random(5)
    clean = [(size, 20e-6 + size / 10e9) for size in SIZES]
    for _ in range(50):
        points = [(size, time * rng.uniform(0.95, 1.05)) for size, time in clean]
        bad = rng.randrange(len(points))
        points[bad] = (points[bad][0], points[bad][1] * 5)
        fit = fit_alpha_beta(points)
        assert math.isclose(20.0, fit.alpha_us, rel_tol=0.15)
        assert math.isclose(10.0, fit.beta_gb_per_s, rel_tol=0.15)


def test_errors_of_the_fit_cover_the_truth():
    rng = random.Random(6)
    inside = 0
    for _ in range(200):
        points = [(size, (20e-6 + size / 10e9) * rng.gauss(1, 0.05)) for size in SIZES]
        fit = fit_alpha_beta(points)
        inside += abs(fit.alpha_us - 20) <= 2 * fit.alpha_error_us
        inside += abs(fit.beta_gb_per_s - 10) <= 2 * fit.beta_error_gb_per_s
    assert 0.85 <= inside / 400 <= 1


def test_a_fit_that_is_none_says_so():
    with pytest.raises(ValueError, match="over 2 different sizes says nothing; measure at least 3"):
        fit_alpha_beta([(1.0, 1.0), (2.0, 2.0), (2.0, 2.1)])
    with pytest.raises(ValueError, match="needs positive times"):
        fit_alpha_beta([(1.0, 1.0), (2.0, 0.0), (3.0, 2.1)])
    with pytest.raises(ValueError, match="time does not grow with size"):
        fit_alpha_beta([(1e3, 3.0), (1e6, 2.0), (1e9, 1.0)])
    assert not fit_alpha_beta([(1e3, 1e-5), (1e6, 1e-2), (1e7, 1e-5), (1e8, 3e-2)]).trusted
    assert 0.0 == fit_alpha_beta([(1e3, 1e-6), (2e6, 3e-3), (4e6, 7e-3)]).alpha_us, "a negative start-up time is none"


def test_the_document_has_a_worked_number_of_every_metric_and_they_are_right():
    page = DOCS / "evidence" / "worked-numbers.md"
    text = page.read_text()
    assert set(REGISTRY) <= set(re.findall(r"^>>> .*  # (\w+)", text, re.MULTILINE))
    results = doctest.testfile(str(page), module_relative=False)
    assert results.attempted >= len(REGISTRY)
    assert results.failed == 0


def test_every_collective_has_its_size_in_the_document():
    page = (DOCS / "reference" / "metrics.md").read_text(encoding="utf-8")
    sizes = page.partition("S is\n")[2].partition("<!-- factors -->")[0]
    assert set(TRAFFIC) == set(re.findall(r"`(\w+)`", sizes))
