"""What a reader should look at: ranked, each with its effect and how sure it is."""

import dataclasses
import math

import pytest

from perfsuite.record.result import Metric, Peak, Work
from perfsuite.record.run import GateRecord
from perfsuite.record.verdict import Finding, Verdict
from perfsuite.reports.notable import KINDS, equal_work, notable, spread_of_equal_work
from test_correctness.helpers import runs
from test_correctness.helpers.runs import on_devices, record, verdict


def result(case, median_s=0.5, *, ranks=1, metrics=(), **parameters):
    work = Work(flops={"exact": 1.0}, dtype="fp32")
    fields = {"world_size": ranks, "work": work, "metrics": metrics, "parameters": parameters}
    return runs.result(f"t.py::{case}", median_s, **fields)


def test_the_gravest_kind_comes_first_and_in_it_the_largest_effect():
    gone = dataclasses.replace(result("gone", n=7), outcome="out_of_memory", measurement=None, detail="OOM at 44 GiB")
    gate = GateRecord(
        gate=True,
        verdicts=(
            verdict("t.py::a"),
            verdict("t.py::b", effect=0.2),
            Verdict(case="t.py::c", name="impossible", reasons=("above the peak",)),
            Verdict(case="t.py::d", name="improved"),
            Verdict(case="t.py::e", name="pass"),
        ),
    )
    found = notable(record(gone, gate=gate, failures={"t.py::f": "rank 1 died\nTraceback"}))
    assert [(one.kind, one.case[6:]) for one in found] == [
        ("impossible", "c"),
        ("failed", "f"),
        ("regressed", "b"),
        ("regressed", "a"),
        ("out-of-memory", "gone"),
        ("improved", "d"),
    ]
    assert found[3].sentence == "8.1 % slower [6.2, 10], 1 s -> 1.081 s"
    assert (found[3].sure, found[3].effect, found[3].interval) == ("sure", 0.081, pytest.approx((0.062, 0.1)))
    assert found[1].sentence == "failed: rank 1 died"
    assert found[4].sentence == "out of memory at 44 GiB"


def test_verdicts_that_fail_by_option_are_told_and_others_are_not():
    verdicts = (Verdict(case="t.py::a", name="inconclusive"), Verdict(case="t.py::b", name="no-baseline"))
    assert notable(record(gate=GateRecord(gate=True, fail_on=("regressed",), verdicts=verdicts))) == ()
    (told,) = notable(record(gate=GateRecord(gate=True, fail_on=("inconclusive",), verdicts=verdicts)))
    assert (told.kind, told.case) == ("undecided", "t.py::a")
    assert notable(record(gate=GateRecord(gate=False, fail_on=("inconclusive",), verdicts=verdicts))) == ()


def test_a_suite_that_is_slower_stands_before_its_cases():
    gate = GateRecord(
        gate=True, verdicts=(verdict("t.py::a", effect=0.5),), suite="regressed", suite_line="+10 % slower"
    )
    assert [one.case for one in notable(record(gate=gate))] == ["", "t.py::a"]


def test_equal_work_apart_by_more_than_the_tolerance_is_told_as_unsure():
    results = (result("a", 1.0, n=1), result("b", 1.64, n=1), result("c", 1.02, n=2), result("d", 1.0, n=2))
    (told,) = notable(record(*results))
    assert (told.kind, told.case, told.sure, told.interval) == ("equal-work", "t.py::b", "unsure", None)
    assert told.sentence == "2 cases of equal work: 1 s to 1.64 s, 64% apart, one run each"
    assert spread_of_equal_work(equal_work(results)) == pytest.approx(0.64)


@pytest.mark.parametrize(
    "change", [{"world_size": 2}, {"parameters": {"n": 2}}, {"workload": "t:x"}, {"platform": "x"}]
)
def test_work_that_differs_in_anything_is_not_equal(change):
    one, other = result("a", 1.0, n=1), result("b", 9.0, n=1)
    assert len(equal_work([one, other])) == 1
    assert equal_work([one, dataclasses.replace(other, **change)]) == []
    assert spread_of_equal_work(equal_work([one])) is None


def test_a_result_above_a_measured_peak_has_no_share():
    peak = Peak(value=1.0, unit="TFLOPS", source="measured here", kind="measured")
    metric = Metric(name="tflops", value=294.7, unit="TFLOPS", better="higher", peak=peak)
    below = dataclasses.replace(metric, value=0.9)
    (told,) = notable(record(result("a", metrics=(metric,), n=1), result("b", metrics=(below,), n=2)))
    assert (told.kind, told.case, told.cases, told.effect) == ("above-peak", "t.py::a", ("t.py::a",), None)
    assert told.sentence.startswith("peak exceeded: 1 case above the measured peak (fp32 TFLOPS)")
    assert "29" not in told.sentence


def test_a_bubble_beyond_its_simulation_is_told_once_for_all_pipelines():
    def pipeline(case, *ratios):
        named = zip(("bubble_ratio", "simulated_bubble_ratio"), ratios, strict=True)
        found = (Metric(name=name, value=ratio, unit="", better="lower") for name, ratio in named)
        return result(case, metrics=tuple(found), name=case)

    (told,) = notable(record(pipeline("a", 0.61, 0.31), pipeline("b", 0.3, 0.2), pipeline("c", 0.21, 0.2)))
    assert (told.kind, told.case, told.cases) == ("bubble", "t.py::a", ("t.py::a", "t.py::b"))
    assert told.sentence.endswith("bubble 61%, simulated 31%")


def suite_on_devices(*times_s):
    """The record of a case for each of these times of devices."""
    cases = (result(f"c{number}", name=number) for number in range(len(times_s)))
    return record(*(on_devices(case, times) for case, times in zip(cases, times_s, strict=True)))


def test_a_device_that_is_slowest_everywhere_is_named():
    (told,) = notable(suite_on_devices(*[(1.0, 1.01, 1.1, 1.02)] * 6))
    assert (told.kind, told.effect, len(told.cases)) == ("slowest", pytest.approx(1.1 / 1.01 - 1), 6)
    assert told.sentence == "device cuda:2 is the slowest in 6 of 6 cases, typically by 8.9%"


@pytest.mark.parametrize(
    "times_s",
    [
        [(1.0, 1.1)] * 5,  # of two ranks one is slowest five times in a row once in sixteen suites
        [(1.0, 1.001, 1.0, 1.0)] * 8,  # always, by nothing
        [(1.1, 1.0, 1.0, 1.0), (1.0, 1.1, 1.0, 1.0)] * 4,  # everybody in turn
    ],
)
def test_chance_names_no_device(times_s):
    assert notable(suite_on_devices(*times_s)) == ()


def test_a_slower_case_comes_before_a_faster_one():
    gate = GateRecord(gate=True, verdicts=(verdict("t.py::a", effect=0.1), Verdict(case="t.py::d", name="improved")))
    assert [one.kind for one in notable(record(gate=gate))] == ["regressed", "improved"]
    assert KINDS[0] == "impossible"


def test_an_effect_without_bound_is_no_figure():
    finding = Finding(quantity="loss", name="regressed", tolerance=0.0, effect=math.inf, exact=True)
    worse = Verdict(case="t.py::a", name="regressed", findings=(finding,))
    (told,) = notable(record(gate=GateRecord(gate=True, verdicts=(worse,))))
    assert told.sentence == "more than nothing worse in loss"


def test_a_failing_environment_names_what_differs():
    keys = ('packages.torch "2.13", stored "2.12"', "driver 1, stored 2", "kernel a, stored b", "os c, stored d")
    environment = dataclasses.replace(verdict("t.py::a"), name="environment", soft_differences=keys)
    (found,) = notable(record(result("a"), gate=GateRecord(gate=True, verdicts=(environment,))))
    assert found.sentence.startswith("environment: 8.1 % slower [6.2, 10], 1 s -> 1.081 s")
    assert found.sentence.endswith("; not as stored: packages.torch, driver, kernel and 1 more")
