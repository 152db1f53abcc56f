"""Peaks of a CPU: a fixed set of probes at the start and at the end, the best of which every share is taken of."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
import torch

from perfsuite.base.errors import InvalidParameter, RanksFailed
from perfsuite.baselines.summarise import case_of, summarise
from perfsuite.metrics import derive, read_run
from perfsuite.plugin.benchmark import extra_info
from perfsuite.plugin.fixtures import CaseState
from perfsuite.plugin.outcome import properties
from perfsuite.record.journal_writer import JournalWriter
from perfsuite.record.result import ABOVE_MEASURED_PEAK, Peak, Peaks, Record, Work
from perfsuite.record.workload import Budget, Workload
from perfsuite.reports.tables.case import from_result
from perfsuite.reports.tables.grids import why_empty
from perfsuite.reports.terminal import metric_tables
from perfsuite.run.arms import Arm, arm_environment
from perfsuite.runtime.driver import Job
from perfsuite.workloads.matmul import Matmul
from perfsuite.workloads.peak_probe import PeakProbe
from test_correctness.helpers.bare_rank import BareRank
from test_correctness.helpers.scripted_driver import measurement
from test_correctness.test_session import HEADER, Product, case, session


@dataclass(frozen=True, kw_only=True)
class Training(Workload):
    """A training step of so many operations that takes half a second."""

    operations: float
    metrics = ("tflops_per_device", "mfu_percent", "hfu_percent")

    def work(self, shape):
        return Work(flops={"exact": self.operations, "exact with recompute": self.operations}, dtype="fp32")

    def build(self, rank):
        raise AssertionError


@dataclass(frozen=True, kw_only=True)
class Copy(Workload):
    """A kernel that moves bytes."""

    metrics = ("gb_per_s",)

    def work(self, shape):
        return Work(bytes_moved=1e9, memory_path="device")

    def build(self, rank):
        raise AssertionError


def probing(*rounds):
    """A script whose probes find these rates, one tuple a probe; cases take half a second."""
    left = iter(rounds)

    def script(job):
        measured = measurement(job)
        if not isinstance(job.workload, PeakProbe):
            return measured
        records = tuple(Record(name=f"probe {rate}", value=rate, unit="TFLOPS", reduce="only") for rate in next(left))
        return dataclasses.replace(measured, records=records)

    return script


def probes(driver):
    return [job for job in driver.jobs if isinstance(job.workload, PeakProbe)]


def test_the_peak_is_the_best_of_probes_at_start_and_end_for_every_case():
    made, driver = session(probing((0.25, 0.5), (0.75, 0.5)))
    first, _ = made.run(case(Product())), made.run(case(Product(side=8), "other"))
    assert first.metric("tflops").peak.value == 0.5  # what is known by then
    made.finish()
    peaks = {result.metric("tflops").peak for result in made.results.values()}
    source = "measured here, best of probes at start and end: probe 0.75"
    assert peaks == {Peak(value=0.75, unit="TFLOPS", source=source, kind="measured")}
    assert [type(job.workload).__name__ for job in driver.jobs] == ["Product", "PeakProbe", "Product", "PeakProbe"]


def test_a_probe_on_an_instrumented_rank_is_no_peak_and_the_reason_is_said():
    def script(job):
        made = probing((0.5,), (0.5,))(job)
        slowed = dataclasses.replace(made.ranks[0], instruments=("tracer coverage.CTracer (run without)",))
        return dataclasses.replace(made, ranks=(slowed,)) if isinstance(job.workload, PeakProbe) else made

    made, _ = session(script)
    result = made.run(case(Product()))
    assert result.metric("tflops").peak is None
    assert "its rank was instrumented: tracer coverage.CTracer (run without)" in str(result.metric("tflops"))


def test_probes_are_the_same_whatever_is_measured_and_run_in_a_process_of_their_own():
    seen = []
    for side in (8, 4096):
        made, driver = session()
        made.run(case(Product(side=side)))
        made.finish()
        seen.append(probes(driver))
    assert seen[0] == seen[1]
    assert all(job.fresh and job.world_size == 1 for job in seen[0])
    assert {job.workload for job in seen[0]} == {PeakProbe(quantity="fp32")}


def test_an_arm_of_a_comparison_probes_nothing(tmp_path, monkeypatch):
    for name, value in arm_environment(Arm(name="base", root=tmp_path)).items():
        monkeypatch.setenv(name, value)
    made, driver = session()
    result = made.run(case(Product()))
    made.finish()
    assert (result.outcome, result.metric("tflops").peak, probes(driver)) == ("measured", None, [])


def test_nothing_is_probed_where_no_case_needs_a_peak():
    made, driver = session()
    smoke = made.run(dataclasses.replace(case(Product()), budget=Budget(smoke=True)))
    made.finish()
    assert (smoke.outcome, probes(driver)) == ("smoke", [])


def test_the_bandwidth_of_a_cpu_is_probed_beyond_its_cache():
    def script(job):
        measured = measurement(job)
        ranks = tuple(dataclasses.replace(rank, cache_bytes=100 << 20) for rank in measured.ranks)
        return dataclasses.replace(measured, ranks=ranks)

    made, driver = session(script)
    made.run(case(Copy()))
    assert [job.workload for job in probes(driver)] == [PeakProbe(quantity="memory", cache_bytes=100 << 20)]


def test_a_peak_that_cannot_be_measured_leaves_the_share_out_and_says_why():
    def script(job):
        if isinstance(job.workload, PeakProbe):
            raise RanksFailed("rank 0 on here died\nwith a stack")
        return measurement(job)

    made, driver = session(script)
    for name in ("first", "second"):
        metric = made.run(case(Product(), name)).metric("tflops")
        assert (metric.peak, metric.value) == (None, 2 * 64**3 / 0.5 / 1e12)
        assert metric.note == "the CPU's fp32 peak could not be measured: rank 0 on here died"
    assert len(probes(driver)) == 1
    made.finish()
    assert len(made.results) == 2


# -- above the peak ----------------------------------------------------------------------------------------------


def test_a_result_above_the_measured_peak_is_no_share_of_it():
    made, _ = session(probing((0.5,), (0.5,)))
    made.run(case(Training(operations=1e12)))
    made.finish()
    (result,) = made.results.values()
    metrics = {metric.name: metric for metric in result.metrics}
    assert metrics["tflops_per_device"].value == 2.0
    assert metrics["tflops_per_device"].share_of_peak is None
    assert {(metrics[name].value, metrics[name].note) for name in ("mfu_percent", "hfu_percent")} == {
        (None, "above the measured peak")
    }
    table = metric_tables([result])
    assert "above the measured peak" in next(line for line in table if line.startswith("test_it["))
    assert "%" not in "".join(table)
    assert why_empty(from_result(result), "mfu_percent") == ABOVE_MEASURED_PEAK


def test_a_share_and_the_mfu_of_a_step_are_one_column():
    made, _ = session(probing((8.0,), (4.0,)))
    result = made.run(case(Training(operations=1e12)))
    assert result.metric("mfu_percent").value == 25.0
    headings, per, row = metric_tables([result])[2:5]
    assert headings.split() == ["case", "ranks", "median", "TFLOPS", "MFU", "samples"]
    assert per.split() == ["per", "device"]
    assert row.split() == ["test_it[cpu]", "1", "500", "ms", "2", "25.0%", "3", "x", "7"]
    kernel = metric_tables([made.run(case(Product(), "other"))])
    assert ["of", "peak"] == [kernel[2].split()[4], kernel[3].split()[0]]


def test_a_published_peak_is_exceeded_as_before():
    work = Work(flops={"exact": 1e12}, dtype="fp32")
    measured = measurement(Job(workload=Product(), world_size=1, budget=Budget()))
    peaks = Peaks(tflops={"fp32": Peak(value=1.0, unit="TFLOPS", source="data sheet")})
    rate, mfu = derive(("tflops_per_device", "mfu_percent"), work=work, measurement=measured, peaks=peaks)
    assert (rate.share_of_peak, mfu.value, mfu.share_of_peak) == (2.0, 200.0, 2.0)
    assert not rate.is_above_measured_peak
    assert not mfu.moves_with_peak


# -- what is kept ------------------------------------------------------------------------------------------------


def test_a_journal_is_read_as_shares_of_its_last_peaks(tmp_path):
    made, _ = session(probing((2.0,), (8.0,)))
    made.journal = JournalWriter(tmp_path / "j", HEADER)
    made.run(case(Training(operations=1e12)))
    assert read_run(tmp_path / "j").results["test_it.py::test_it[cpu]"].metric("mfu_percent").value == 100.0
    made.finish()
    made.close()
    journal = read_run(tmp_path / "j")
    assert journal.results["test_it.py::test_it[cpu]"].metric("mfu_percent").value == 25.0
    assert journal.results == made.results


def test_a_run_that_is_resumed_keeps_the_higher_peak(tmp_path):
    earlier, _ = session(probing((4.0,), (8.0,)))
    earlier.journal = JournalWriter(tmp_path / "j", HEADER)
    earlier.run(case(Training(operations=1e12)))
    earlier.finish()
    earlier.close()
    made, _ = session(probing((2.0,), (1.0,)))
    made.resume(read_run(tmp_path / "j"))
    made.run(case(Training(operations=1e12)))
    made.run(case(Product(), "new"))
    made.finish()
    assert made.reused == {"test_it.py::test_it[cpu]"}
    assert {result.metrics[0].peak.value for result in made.results.values()} == {8.0}


def test_what_moves_with_the_peak_is_neither_stored_nor_judged():
    made, _ = session()
    result = made.run(case(Training(operations=1e12 / 8)))
    assert result.metric("mfu_percent").value == 50.0
    kept = (
        case_of(result).metrics,
        summarise(result).metrics,
        dict(properties(CaseState(result=result), "")),
        extra_info(result),
    )
    for place in kept:
        assert "tflops_per_device" in place
        assert not {"mfu_percent", "hfu_percent"} & set(place)


# -- the kernels -------------------------------------------------------------------------------------------------


class Host(BareRank):
    """A rank that keeps the units of what is recorded."""

    def __init__(self):
        super().__init__()
        self.units = set()

    def record(self, name, value, *, unit, reduce):
        super().record(name, value, unit=unit, reduce=reduce)
        self.units.add(unit)


@pytest.mark.parametrize(
    ("quantity", "unit", "kernels"),
    [
        ("int8", "TOPS", ["64x64x64 product on 2 threads", "2 x 64x64x64 product on one thread each"]),
        (
            "memory",
            "GB/s",
            [f"{name} of 1 MiB on {how}" for name in ("triad", "copy") for how in ("2 threads", "2 x one thread")],
        ),
    ],
)
def test_a_probe_runs_every_kernel_on_all_threads_and_on_every_core(quantity, unit, kernels, monkeypatch):
    monkeypatch.setattr("perfsuite.workloads.peak_probe._SIDES", (64,))
    monkeypatch.setattr("perfsuite.workloads.peak_probe._BUFFER_BYTES", (1 << 20, 1 << 20))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    host = Host()
    try:
        PeakProbe(quantity=quantity, cache_bytes=1 << 30).build(host).run()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert list(host.records)[: len(kernels)] == kernels
    assert all(rate > 0 for rate in host.records.values())
    assert host.units == {unit}


def test_the_best_kernels_are_looked_at_for_longer(monkeypatch):
    from perfsuite.workloads import peak_probe

    looks = []

    def pretend(runs, enough_s):
        looks.append((len(runs), enough_s))
        return 1.0 / len(looks) if enough_s == peak_probe._ENOUGH_S else 1e-3

    monkeypatch.setattr(peak_probe, "_SIDES", (64, 128))
    monkeypatch.setattr(peak_probe, "_cores", lambda: 2)
    monkeypatch.setattr(peak_probe, "_fastest_s", pretend)
    host = Host()
    PeakProbe(quantity="fp32").build(host).run()
    assert 8 * [peak_probe._ENOUGH_S] + 2 * [peak_probe._LONGER_S] == [enough_s for _, enough_s in looks]
    rate = pytest.approx(2 * 2 * 128**3 / 1e-3 / 1e12)  # of both: 256 x 64 x 128 is as much
    best = {f"2 x {shape} product on one thread each": rate for shape in ("128x128x128", "256x64x128")}
    assert best == dict(sorted(host.records.items(), key=lambda record: -record[1])[:2])


def test_only_what_has_a_peak_can_be_probed():
    with pytest.raises(InvalidParameter, match=r"quantity='fp3' has no peak; choose fp64, fp32, .*, memory"):
        PeakProbe(quantity="fp3")
    assert Matmul(m=64, k=64, n=64, dtype="int8")  # the smallest product of the test above is legal
