"""What of communication nothing covers, from the times of kernels."""

import dataclasses
import os
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.metrics import derive
from perfsuite.record.result import Peaks, Record, Work
from perfsuite.record.workload import Budget, FunctionWorkload
from perfsuite.reports.tables.report import STYLES, report
from perfsuite.reports.terminal import case_metrics
from perfsuite.runtime.driver import Job
from perfsuite.workloads.training.exposed import kernels_of, record_kernels, steps_agree, uncovered_share
from test_correctness.helpers.local_driver import local_driver
from test_correctness.helpers.report_runs import run, table, trained
from test_correctness.helpers.scripted_driver import measured_on


@given(
    st.lists(
        st.builds(
            lambda name, start, length: (0, start, start + length, name),
            st.sampled_from(["xcclDevKernel_AllReduce", "gemm", "adam"]),
            st.integers(0, 40),
            st.integers(1, 12),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_the_share_is_that_of_the_moments_when_only_communication_ran(kernels):
    first, last = min(start for _, start, _, _ in kernels), max(end for _, _, end, _ in kernels)
    alone = 0
    for moment in range(first, last):
        running = [name for _, start, end, name in kernels if start <= moment < end]
        alone += bool(running) and all("xccl" in name for name in running)
    known = any("xccl" in name for *_, name in kernels)
    assert uncovered_share(kernels, "xccl") == (pytest.approx(alone / (last - first)) if known else None)


def event(name, device, start=0, marked=False):
    return SimpleNamespace(
        name=lambda: name,
        device_type=lambda: device,
        start_ns=lambda: start,
        duration_ns=lambda: 10,
        is_user_annotation=lambda: marked,
        device_resource_id=lambda: 7,
    )


def test_only_kernels_of_the_device_count():
    events = [
        event("aten::mm", "cpu"),
        event("void cutlass::Kernel<float>(Params)", "device", 5),
        event("xccl:all_reduce", "device"),
        event("my range", "device", marked=True),
        event("xcclDevKernel_AllReduce_Sum_f32_RING_LL", "device", 20),
    ]
    assert [(name[:8], start, end) for _, start, end, name in kernels_of(events, "cpu")] == [
        ("void cut", 5, 15),
        ("xcclDevK", 20, 30),
    ]


def test_a_cpu_has_no_kernels():
    calls = []
    assert record_kernels(lambda: calls.append("run"), lambda: calls.append("wait")) == []
    assert calls == ["run"] * 3 + ["wait"]


def test_metrics_of_overlap_say_why_there_are_none():
    plain = measured_on(2)
    devices = tuple(
        dataclasses.replace(facts, device=f"cuda:{facts.rank}", utilisation_percent=98.0 - 4 * facts.rank)
        for facts in plain.ranks
    )
    names = ["exposed_kernels_percent", "device_utilisation_percent"]
    names += ["exposed_communication_percent", "exposed_communication_low_percent"]

    def metrics(ranks=devices, **told):
        records = tuple(Record(name=name, value=value, unit="", reduce="equal") for name, value in told.items())
        measured = dataclasses.replace(plain, ranks=ranks, records=records)
        return derive(names, work=Work(), measurement=measured, peaks=Peaks())

    kernels, busy, *_ = metrics(plain.ranks)
    assert (kernels.value, kernels.note) == (None, "not supported on a cpu: it has no kernels on a clock of their own")
    assert (busy.value, busy.note) == (None, "unknown: the vendor's library does not report it on every rank")
    assert metrics((dataclasses.replace(devices[0], utilisation_percent=None), devices[1]))[1].value is None
    kernels, busy, share, low = metrics(exposed_kernel_share=0.25)
    assert (kernels.value, busy.value, share.value, low.value) == (25.0, 96.0, 25.0, None)
    assert share.convention == "profiler: only communication kernels ran"
    assert low.note == "by the times of kernels, which have no interval"
    kernels, *_ = metrics(exposed_share=0.25)
    assert (kernels.value, kernels.note.partition(":")[0]) == (None, "unknown")
    kernels, *_ = metrics(exposed_share=0.25, exposed_kernels_lost=1.0)
    assert kernels.note == "unknown: torch's profiler did not see the same kernels in every step"
    share = metrics(exposed_without_silent=1.0)[2]
    assert share.note.startswith("not available: collectives can be made to do nothing on a mesh of one axis")


def test_the_interval_stands_beside_the_share_wherever_it_is_printed():
    def case(ranks, share, low, high):
        values = (("exposed_share", share), ("exposed_share_low", low), ("exposed_share_high", high))
        return trained("test_weak", ranks, 1.0, model="gpt2-xl", strategy="ddp", builds=("exposed",), records=values)

    several, one = case(2, 0.1234, -0.02, 0.251), case(1, 0.0, 0.0, 0.0)
    rows = table(report([run(several, one)], [STYLES["methods"]]), "Data parallel, DDP: gpt2-xl")
    at = rows[0].index("communication % of step")
    assert ["0", "12.34 (-2 to 25)"] == [row[at] for row in rows[1:] if "s4000" in row[0]]
    several_told, one_told = (dict(case_metrics(each)) for each in (several, one))
    assert several_told["exposed_communication_percent"] == "12.34 (-2 to 25) percent"
    assert one_told["exposed_communication_percent"] == "0 percent"


@pytest.mark.parametrize("lost", range(0, 9))
def test_a_kernel_that_the_profiler_lost_makes_steps_differ(lost):
    names = ["gemm", "gemm", "adam"] * 3
    ran = [(7, at, at + 1, name) for at, name in enumerate(names)]
    other = [(9, 3 * at, 3 * at + 1, "xcclDevKernel") for at in range(3)]
    assert steps_agree([*ran, *other])
    assert not steps_agree([*ran[:lost], *ran[lost + 1 :], *other])
    assert not steps_agree([*ran, *other[1:]])


def _profiles(rank, profiled):
    def step():
        if profiled:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
                torch.ones(1).add_(1)
        rank.record("pid", os.getpid())

    return step


@pytest.mark.extended
@pytest.mark.parametrize("profiled", [True, False])
def test_no_further_build_has_a_process_in_which_a_profiler_ran(tmp_path, profiled):
    with local_driver(tmp_path) as driver:
        ran = FunctionWorkload(function=_profiles, arguments={"profiled": profiled})
        job = Job(workload=ran, world_size=2, budget=Budget(smoke=True))
        further = dataclasses.replace(job, continues=True)  # as the build ``traffic`` after ``exposed``
        pids = [driver.run(each).records[0].value for each in (job, further, job)]
    assert len(set(pids)) == (3 if profiled else 1)
