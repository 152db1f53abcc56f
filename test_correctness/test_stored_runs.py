"""What a baseline keeps of a result."""

import dataclasses
import math
import random

import pytest

from perfsuite.baselines import store
from perfsuite.baselines.runs import QUANTILES, MetricMeaning
from perfsuite.baselines.summarise import case_of, summarise
from perfsuite.record.result import Metric
from perfsuite.record.step import DeviceLook
from test_correctness.helpers import measurements
from test_correctness.helpers.measurements import measurement_of, rank_facts
from test_correctness.helpers.stored_files import HARDWARE, case, offer, run_of


def result_of(times_s, *, switches=(), yardsticks_s=(), **changes):
    ranks = [rank_facts(rank, time_s=0.01, cpu_share=0.999 - rank / 10) for rank in range(2)]
    columns = {"involuntary_switches": tuple(switches), "yardsticks_s": tuple(yardsticks_s), "iterations": 4}
    said = {
        "workload": "test_x:Sum",
        "world_size": 2,
        "parameters": {"size": (1, 2), "dtype": "fp32"},
        "metrics": (
            Metric(name="latency_us", value=10_000.123456, unit="us", better="lower"),
            Metric(name="unknown", value=None, unit="us", better="lower", note="no"),
        ),
        "session": "now",
        "started_at": "2026-01-01T00:00:00+00:00",
        "environment": {"torch": "2.13.0"},
    }
    measured = changes.pop("measurement", measurement_of(times_s or [0.01], ranks, **columns))
    return measurements.result_of(measured, "test_x.py::test_a", **{**said, **changes})


def test_a_run_keeps_quantiles_of_all_samples_and_the_median_of_the_clean_ones():
    rng = random.Random(1)
    times_s = [*(0.01 + rng.random() / 1000 for _ in range(30)), *[0.02] * 10]
    measured = result_of(times_s, switches=[0] * 30 + [2] * 10, yardsticks_s=[0.002] * 30 + [0.004] * 10)
    run = summarise(measured, ordinal=2, commit="abc")
    assert (run.samples, run.clean, run.ordinal, run.commit, run.iterations) == (40, 30, 2, "abc", 4)
    assert run.location == pytest.approx(math.log(0.0105), abs=0.02)
    assert run.yardstick == pytest.approx(math.log(0.002), abs=1e-4)
    assert run.cpu_share == 0.899
    assert run.metrics == {"latency_us": 10000.1}
    assert len(run.quantiles_s) == len(QUANTILES)
    assert run.quantiles_s[-1] == 0.02
    assert run.has_clean


def test_a_run_keeps_mean_and_tail_of_all_and_of_the_clean_samples():
    run = summarise(result_of([*[0.1] * 9, 0.4, 2.0], switches=[0] * 10 + [1]))
    assert run.mean == pytest.approx(math.log(3.3 / 11), abs=1e-5)
    assert run.clean_mean == pytest.approx(math.log(1.3 / 10), abs=1e-5)
    assert run.clean_p95 == pytest.approx(math.log(0.1 + 0.55 * 0.3), abs=1e-5)


def test_a_yardstick_of_no_time_is_not_used_and_few_samples_may_be_clean():
    run = summarise(result_of([0.01, 0.01, 0.012], switches=[0, 0, 1], yardsticks_s=[0.002, 0.0, 0.002]))
    assert run.yardstick is None
    assert (run.clean, run.has_clean) == (2, True)
    assert not summarise(result_of([0.012] * 5, switches=[1] * 5)).has_clean


def test_the_yardstick_of_a_run_with_few_clean_samples_is_that_of_all():
    """The few samples that no neighbour interrupts are the quick ones, and say nothing about the others."""
    columns = {"switches": [0] * 3 + [2] * 37, "yardsticks_s": [0.001] * 3 + [0.004] * 37}
    run = summarise(result_of([0.01] * 40, **columns))
    assert (run.clean, run.has_clean) == (3, False)
    assert [run.yardstick, run.yardstick_of_all, run.yardstick_p95] == pytest.approx([math.log(0.004)] * 3, abs=1e-4)
    assert run.yardstick_mean == pytest.approx(math.log((3 * 0.001 + 37 * 0.004) / 40), abs=1e-4)


def test_the_identity_of_a_case_is_plain_json():
    one = case_of(result_of([0.01]))
    assert one.parameters == {"size": [1, 2], "dtype": "fp32"}
    assert (one.backend, one.kind) == ("gloo", "test_x.py::test_a on 2 ranks")
    assert one.metrics["latency_us"] == MetricMeaning(unit="us", better="lower")
    failed = result_of((), outcome="out_of_memory", measurement=None)
    assert case_of(failed, backend="nccl").backend == "nccl"
    assert summarise(failed).outcome == "out_of_memory"


@pytest.mark.parametrize("changes", [{"outcome": "smoke"}, {"measurement": result_of([0.0]).measurement}])
def test_what_is_no_measurement_makes_no_run(changes):
    with pytest.raises(ValueError, match=r"test_x.py::test_a"):
        summarise(result_of([0.01], **changes))


def measuring(result, **changes):
    """The same result of another measurement."""
    return dataclasses.replace(result, measurement=dataclasses.replace(result.measurement, **changes))


def timed_with(throttle, hosts=1, elsewhere=None):
    measured = result_of([0.010 + index * 1e-5 for index in range(30)])
    first = measured.measurement.ranks[0]
    others = (dataclasses.replace(first, host=f"node{rank}", rank=rank, throttle=elsewhere) for rank in range(1, hosts))
    ranks = (dataclasses.replace(first, host="node0"), *others)
    looks = tuple(DeviceLook(device=0, at_s=0.5 * index, throttle=throttle) for index in range(4))
    return dataclasses.replace(measuring(measured, ranks=ranks, looks=looks), simulated=False)


@pytest.mark.parametrize(
    ("throttle", "hosts", "elsewhere", "after", "expected"),
    [
        (("thermal",), 1, None, "", "device 0 was throttled (thermal) in 4 of 4 looks while it was timed"),
        (("thermal",), 1, None, "unknown", "device 0 was throttled (thermal) in 4 of 4 looks while it was timed"),
        (("power cap",), 1, None, "", ""),  # a device under load is at its cap, now as when runs were stored
        ((), 1, None, "device 0 is shared with 1 other process", "device 0 is shared with 1 other process"),
        ((), 2, None, "", "unknown"),  # nobody looked at the devices of the other host
        ((), 2, (), "", ""),
        ((), 2, ("power cap",), "", ""),
        ((), 2, ("hardware",), "", "rank 1 (cpu of node1) was throttled (hardware)"),
        (None, 1, None, "unknown", "unknown"),
    ],
)
def test_looks_while_samples_were_taken_tell_a_disturbed_run(throttle, hosts, elsewhere, after, expected):
    assert summarise(timed_with(throttle, hosts, elsewhere), disturbance=after).disturbance == expected


def test_what_a_quota_held_back_is_kept_by_a_run_and_by_its_file(tmp_path):
    result = result_of([0.01] * 12)
    assert summarise(result).throttled == 0.0
    first, second = result.measurement.ranks
    ranks = (dataclasses.replace(first, throttled=0.125), dataclasses.replace(second, throttled=0.254))
    held = measuring(result, ranks=ranks)
    assert summarise(held).throttled == 0.25
    assert summarise(dataclasses.replace(held, simulated=True)).throttled == 0.0
    offer(tmp_path, run_of("s0", throttled=0.25))
    assert [run.throttled for run in store.load(tmp_path, HARDWARE).by_node[case().node][0].runs] == [0.25]


def test_a_run_keeps_kind_mean_and_tail_of_the_control():
    result = result_of([0.01] * 20, yardsticks_s=[0.002] * 18 + [0.008] * 2)
    run = summarise(measuring(result, control="memory"))
    assert run.control == "memory"
    assert run.yardstick == pytest.approx(math.log(0.002), abs=1e-4)
    assert run.yardstick_mean == pytest.approx(math.log(0.0026), abs=1e-4)
    assert run.yardstick_p95 == pytest.approx(math.log(0.008), abs=1e-4)
    assert summarise(result_of([0.01])).yardstick_mean is None
