"""Kernels that take less time than the host takes to start them are said to, with the rate of the kernel alone."""

import dataclasses

import pytest

from perfsuite.metrics import derive
from perfsuite.metrics.spec import LAUNCH_BOUND
from perfsuite.record.result import Peak, Peaks, Record, Work
from perfsuite.record.step import DeviceLook, Training
from perfsuite.reports.devices import BURST_NOTE, burst
from perfsuite.reports.questions import answers
from perfsuite.reports.terminal import metric_tables
from perfsuite.run.session import Case
from perfsuite.workloads.matmul import Matmul
from perfsuite.workloads.memory_bandwidth import MemoryCopy
from simmusa.costs import Costs
from test_correctness.helpers import large_yardstick, simmusa_ranks
from test_correctness.helpers.measurements import measurement_of, rank_facts, result_of
from test_correctness.helpers.simmusa_ranks import KERNELS, QUICK, opened, require_built

PEAKS = Peaks(
    tflops={"bf16": Peak(value=100.0, unit="TFLOPS", source="a table", kind="published")},
    memory_bandwidth=Peak(value=1000.0, unit="GB/s", source="a table", kind="published"),
)
PRODUCT = Work(flops={"exact": 4e9}, dtype="bf16")


def measured(device):
    return measurement_of([1e-3] * 10, [rank_facts(device=device)])


def rate(launch_us, kernel_us=None, work=PRODUCT, name="tflops", device="cuda:0"):
    """The metric of an iteration of a millisecond."""
    plain = measured(device)
    ranks = tuple(dataclasses.replace(rank, launch_s=launch_us * 1e-6) for rank in plain.ranks)
    records = () if kernel_us is None else (Record(name="kernel_us", value=kernel_us, unit="us", reduce="max"),)
    (metric,) = derive(
        [name], work=work, measurement=dataclasses.replace(plain, ranks=ranks, records=records), peaks=PEAKS
    )
    return metric


def test_a_launch_bound_rate_is_no_share_of_the_devices_peak_and_has_the_kernels_own_beside():
    bound = rate(950.0, 100.0)
    assert (4.0, None) == (bound.value, bound.peak)
    assert bound.note == (
        "launch-bound: the host takes 950 of 1000 us to start it; the kernel alone, in a captured graph: 40 TFLOPS"
    )
    assert "launch-bound: the host takes 950 of 1000 us to start it; no graph was captured" == rate(950.0).note
    copied = Work(bytes_moved=2e8, memory_path="device")
    assert "captured graph: 400 GB/s" in rate(950.0, 500.0, copied, "gb_per_s").note


def test_nothing_above_the_peak_is_explained_by_launches():
    above = rate(1000.0, 500.0, dataclasses.replace(PRODUCT, flops={"exact": 1.5e11}))
    assert ("", PEAKS.tflops["bf16"]) == (above.note, above.peak)  # impossible, as it was
    assert rate(1000.0, 1.0).note.endswith("no graph was captured")  # one of nothing: 4000 TFLOPS


def test_a_copy_that_blocks_the_host_is_not_launch_bound():
    copied = Work(bytes_moved=1e9, memory_path="host_to_device")
    assert "launch-bound" not in rate(1000.0, None, copied, "gb_per_s").note


@pytest.mark.parametrize(
    "arguments",
    [
        {"launch_us": 800.0},
        {"launch_us": 950.0, "kernel_us": 940.0},  # the host waits for a full queue: the kernel is what takes so long
        {"launch_us": 1000.0, "device": "cpu"},  # to start is to compute there
        {"launch_us": 950.0, "work": dataclasses.replace(PRODUCT, training=Training(model="gpt2"))},
    ],
)
def test_other_rates_are_shares_of_the_peak(arguments):
    assert ("", PEAKS.tflops["bf16"]) == (rate(**arguments).note, rate(**arguments).peak)


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    require_built()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simmusa_ranks, "FAMILY", large_yardstick.GRAPHS)
        costs = Costs(launch_ns=4_000, kernel_ns=1_000, flops_per_s={"bf16": 1e12}, bytes_per_s=1e12)
        with opened(costs, tmp_path_factory.mktemp("ranks"), KERNELS) as session:
            yield session


@pytest.mark.extended
@pytest.mark.parametrize(
    ("workload", "name", "bound"),
    [
        (Matmul(m=32, k=32, n=32, dtype="bf16"), "tflops", True),
        (MemoryCopy(buffer_bytes=4096), "gb_per_s", True),
        (Matmul(m=256, k=256, n=256, dtype="bf16"), "tflops", False),  # 34 us
    ],
)
def test_the_rank_captures_the_kernel_where_its_launch_was_timed(session, workload, name, bound):
    case = Case(id=f"test_it[s4000-{workload}]", workload=workload, world_size=1, budget=QUICK, platform="s4000")
    result = session.run(case)
    assert bound == ("kernel_us" in [record.name for record in result.measurement.records])
    note = result.metric(name).note
    assert (bound, bound) == (note.startswith(LAUNCH_BOUND), "the kernel alone, in a captured graph: " in note)
    line = " ".join(f"{row.share} {row.note}" for row in answers([result]))
    assert bound == ("(launch-bound)" in line)


def looked(throttle, *, iterations=10, device="cuda:0", simulated=False):
    """Ten samples of a product of a millisecond, after 0.9 s of warm-up, and one look at its device."""
    looks = (DeviceLook(device=0, at_s=0.0, throttle=throttle),)
    timed = dataclasses.replace(measured(device), looks=looks, iterations=iterations, warmup_s=0.9)
    return result_of(timed, platform="h100", work=PRODUCT, metrics=["tflops"], peaks=PEAKS, simulated=simulated)


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (looked(()), "burst of 1 s"),
        (looked(None), "burst of 1 s"),
        (looked(("power cap",)), ""),
        (looked((), iterations=200), ""),  # 2.9 s of load
        (looked(None, device="cpu"), ""),
        (looked((), simulated=True), ""),
    ],
    ids=["not capped", "unknown", "capped", "long", "a CPU", "simulated"],
)
def test_a_rate_before_the_power_cap_can_act_is_called_a_burst(result, said):
    assert said == burst(result)
    line = " ".join(f"{row.share} {row.note}" for row in answers([result]))
    assert bool(said) == ("burst of " in line)
    assert bool(said) == any(BURST_NOTE in text for text in metric_tables([result]))
