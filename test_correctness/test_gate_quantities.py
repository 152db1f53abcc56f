"""Tolerances, and what is judged beside the time: metrics and exact quantities."""

import dataclasses
import math

import pytest

from perfsuite.gate.gate import Gate
from test_correctness.helpers.gate_runs import (
    METRICS,
    WOBBLE,
    case_of,
    gated,
    jitter,
    judged,
    node_of,
    run_of,
    settle,
    stored_runs,
)


def test_a_case_may_have_its_own_tolerance():
    assert judged(0.10, given=gated(tolerance=0.2))[0].name == "pass"
    assert judged(0.04, given=gated(tolerance=0.2))[0].decisive.tolerance == 0.2
    assert judged(0.10, given=gated(tolerance=0.01))[0].name == "regressed"


def test_below_ten_microseconds_the_tolerance_is_absolute():
    given_case = gated(stored=stored_runs(middle_s=1e-6))
    verdict, _ = judged(0.10, given=given_case, middle_s=1e-6)
    assert verdict.decisive.tolerance == pytest.approx(0.30, rel=0.02)  # 0.3 us of 1 us
    assert verdict.name == "pass"


def with_metrics(given_values, new_values, tolerances=None, change=0.0):
    """Verdict of a case with these metrics; ``given_values`` are those of the stored runs."""
    stored = tuple(
        dataclasses.replace(run, metrics={name: value(run) for name, value in given_values.items()})
        for run in stored_runs()
    )
    case = case_of(metrics={name: METRICS[name] for name in given_values})
    gate = Gate([dataclasses.replace(gated(stored=stored, metric_tolerances=tolerances or {}), case=case)])

    def new(name, number):
        run = run_of(change + jitter(number), number=number)
        return dataclasses.replace(run, metrics={name: value(run) for name, value in new_values.items()})

    gate.add(node_of(), new("a", 0))
    settle(gate, new)
    return gate.verdict(node_of())


def constant(value):
    return lambda run: value


@pytest.mark.parametrize(
    ("name", "before", "after", "expected"),
    [
        ("peak_memory_gib", 10.0, 10.09, "pass"),
        ("peak_memory_gib", 10.0, 10.11, "regressed"),
        ("peak_memory_gib", 10.0, 9.5, "improved"),
        ("bubble_ratio", 0.27, 0.279, "pass"),
        ("bubble_ratio", 0.27, 0.281, "regressed"),
        ("bubble_ratio", 0.0, 0.005, "pass"),
        ("bubble_ratio", 0.27, 0.25, "improved"),
        ("sent_bytes", 1_000_000.0, 1_000_000.0, "pass"),
        ("sent_bytes", 1_000_000.0, 1_000_100.0, "regressed"),
        ("sent_bytes", 1_000_000.0, 900_000.0, "improved"),
        ("work_flops", 1e12, 1e12, "pass"),
        ("work_flops", 1e12, 0.9e12, "regressed"),  # no direction is better: any change is one
    ],
)
def test_exact_quantities_follow_their_own_rules(name, before, after, expected):
    verdict = with_metrics({name: constant(before)}, {name: constant(after)})
    assert verdict.name == expected
    found = next(each for each in verdict.findings if each.quantity == name)
    assert (found.exact, found.name) == (True, expected)
    if expected == "regressed":
        assert found.confirmed
        assert name in verdict.reasons[0]


def test_memory_is_judged_while_the_time_is_still_learning():
    stored = tuple(dataclasses.replace(run, metrics={"peak_memory_gib": 10.0}) for run in stored_runs(WOBBLE[:2]))
    case = case_of(metrics={"peak_memory_gib": METRICS["peak_memory_gib"]})
    gate = Gate([dataclasses.replace(gated(stored=stored), case=case)])
    gate.add(node_of(), run_of(metrics={"peak_memory_gib": 12.0}))
    assert gate.verdict(node_of()).name == "regressed"


def test_an_exact_quantity_that_scatters_is_not_failed_by_an_exact_rule():
    values = iter((10.0, 10.5, 9.8, 10.2, 10.4, 9.9, 10.1, 10.3))
    verdict = with_metrics({"peak_memory_gib": lambda run: next(values)}, {"peak_memory_gib": constant(10.4)})
    assert verdict.name == "inconclusive"
    assert any("scatters" in flag for flag in verdict.flags)


@pytest.mark.parametrize(("after", "expected"), [(0.281, "inconclusive"), (0.29, "inconclusive"), (0.31, "regressed")])
def test_a_measured_bubble_has_to_leave_the_stored_ones_by_their_own_scatter(after, expected):
    values = iter((0.27, 0.275, 0.268, 0.272, 0.28, 0.265, 0.27, 0.271))
    verdict = with_metrics({"bubble_ratio": lambda run: next(values)}, {"bubble_ratio": constant(after)})
    assert verdict.name == expected


def test_a_metric_that_is_the_time_under_another_name_sets_the_tolerance_of_the_time():
    values = {"busbw_gb_per_s": lambda run: 1.0 / run.median_s}
    assert with_metrics(values, values, change=0.10).name == "regressed"
    loose = with_metrics(values, values, {"busbw_gb_per_s": 0.2}, change=0.10)
    assert loose.name == "pass"
    assert [finding.quantity for finding in loose.findings] == ["time"]


def test_a_metric_with_a_tolerance_of_its_own_is_judged_in_its_direction():
    score = {"own_score": lambda run: 100.0 * (1 + math.sin(run.location * 1e5) / 500)}
    for after, expected in ((80.0, "regressed"), (130.0, "improved"), (100.0, "pass")):
        verdict = with_metrics(score, {"own_score": constant(after)}, {"own_score": 0.05})
        found = {finding.quantity: finding.name for finding in verdict.findings}
        assert found == {"time": "pass", "own_score": expected}
        assert verdict.name == expected


@pytest.mark.parametrize(
    ("tolerances", "flag"),
    [
        ({"latency_p99_us": 0.1}, "tolerance for latency_p99_us unused: it is observed only"),
        ({"nothing": 0.1}, "tolerance for nothing unused: the case has latency_p99_us"),
    ],
)
def test_a_tolerance_that_cannot_be_used_is_said(tolerances, flag):
    values = {"latency_p99_us": constant(5.0)}
    assert flag in with_metrics(values, values, tolerances).flags


def test_a_quantity_that_stays_stable_asks_no_further_runs_for_one_that_does_not():
    stored = tuple(dataclasses.replace(run, metrics={"own_score": 100.0 + run.median_s}) for run in stored_runs())
    case = case_of(metrics={"own_score": METRICS["own_score"]})
    gate = Gate([dataclasses.replace(gated(stored=stored, metric_tolerances={"own_score": 0.05}), case=case)])

    def spoilt(name, number):
        return run_of(clean=3, metrics={"own_score": 100.0})

    gate.add(node_of(), spoilt("a", 0))
    assert len(settle(gate, spoilt)) <= 4
    assert gate.verdict(node_of()).name == "unstable-host"
