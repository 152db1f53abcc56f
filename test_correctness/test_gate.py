"""What the gate asks for and says of one case, of its time and of other quantities; every number here is chosen."""

import dataclasses
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfsuite.base.errors import ConfigurationError
from perfsuite.gate.gate import Gate
from perfsuite.record.describe import describe
from perfsuite.record.verdict import GateSettings
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
from test_correctness.helpers.stored_files import OUT_OF_MEMORY

WITH_BASE = GateSettings(can_run_base=True)


def test_an_unchanged_case_passes_after_one_run():
    verdict, done = judged(0.0)
    assert (verdict.name, verdict.runs, done) == ("pass", 1, [])
    assert verdict.gated
    assert not verdict.fails
    low, high = verdict.decisive.interval
    assert low < 0 < high
    assert 0.03 < verdict.decisive.mde < 0.04  # at the tolerance itself half of the sessions would find it
    assert describe(verdict).startswith("pass -0.02 % (10 ms -> 10 ms); ")


def test_a_slow_case_is_measured_again_and_fails_unconfirmed_without_a_base():
    verdict, done = judged(0.10)
    assert [request.kind for request in done] == ["run"] * 4
    assert (verdict.name, verdict.decisive.confirmed) == ("regressed", False)
    assert verdict.decisive.effect == pytest.approx(0.10, abs=0.005)
    assert any("unconfirmed" in flag for flag in verdict.flags)
    assert re.match(r"REGRESSED \+9\.95 % \(10 ms -> 11 ms\); stored: 8 runs of 8 sessions; level", describe(verdict))


def test_a_slow_case_is_confirmed_by_pairs_that_alternate():
    verdict, done = judged(0.10, settings=WITH_BASE)
    assert [request.kind for request in done] == ["run"] * 4 + ["ab_pair"] * 6
    assert [request.first for request in done[4:]] == ["base", "new"] * 3
    assert (verdict.name, verdict.decisive.confirmed, verdict.pairs) == ("regressed", True, 6)
    assert not any("unconfirmed" in flag for flag in verdict.flags)
    low, high = verdict.decisive.interval
    assert low < 0.10 < high


def test_noise_that_forbids_a_verdict_is_said_and_costs_few_runs():
    wild = stored_runs((0.0, 0.3, -0.2, 0.25, -0.25, 0.2, -0.3, 0.1))
    verdict, done = judged(0.05, given=gated(stored=wild))
    assert (verdict.name, verdict.fails) == ("inconclusive", False)
    assert len(done) <= 3
    assert any("not gateable at 3 %" in flag for flag in verdict.flags)
    assert verdict.decisive.mde > 0.3


@pytest.mark.parametrize(
    ("given_case", "name", "reason"),
    [
        (gated(stored=()), "no-baseline", "nothing is stored for it"),
        (gated(stored=stored_runs(WOBBLE[:4])), "learning", "4 of the 5 usable stored runs that a comparison needs"),
        (
            gated(stored=(*stored_runs(WOBBLE[:4]), run_of(0.0, "u", disturbance="shared"), run_of(0.1, "v", clean=1))),
            "learning",
            "4 of the 5 usable stored runs that a comparison needs; 1 stored run disturbed: shared; 1 stored run with "
            "too few clean samples",
        ),
        (
            gated(stored=(), refusal="not-comparable", reasons=("cores 8, stored 4",)),
            "not-comparable",
            "cores 8, stored 4",
        ),
    ],
)
def test_what_cannot_be_compared_is_not_gated(given_case, name, reason):
    verdict, done = judged(0.5, given=given_case)
    assert (verdict.name, done, verdict.gated, verdict.fails) == (name, [], False, False)
    assert reason in verdict.reasons


def test_a_result_against_physics_is_impossible_whatever_is_stored():
    for given_case in (gated(), gated(stored=())):
        gate = Gate([given_case])
        gate.add(node_of(), run_of(), violations=["above-peak: 1100 TFLOPS of 989"])
        assert gate.next_requests() == []
        verdict = gate.verdict(node_of())
        assert (verdict.name, verdict.fails, verdict.gated) == ("impossible", True, False)
        assert verdict.reasons == ("above-peak: 1100 TFLOPS of 989",)


def out_of_memory(**changes):
    return run_of(**OUT_OF_MEMORY, **changes)


def test_running_out_of_memory_is_judged_by_what_fitted():
    never = tuple(out_of_memory(session=f"s{index}") for index in range(5))
    for stored, run, name in (
        (stored_runs(), out_of_memory(), "regressed"),
        (stored_runs(WOBBLE[:1]), out_of_memory(), "regressed"),
        (never, out_of_memory(), "pass"),
        (never, run_of(), "improved"),
    ):
        gate = Gate([gated(stored=stored)])
        gate.add(node_of(), run)
        assert gate.next_requests() == []
        assert gate.verdict(node_of()).name == name


def test_unstable_runs_are_replaced_and_three_of_them_say_so():
    unstable = {"clean": 3}
    gate = Gate([gated()])
    gate.add(node_of(), run_of(0.5, **unstable))
    requests = gate.next_requests()
    assert [request.kind for request in requests] == ["run"]
    gate.add(node_of(), run_of())
    assert gate.next_requests() == []
    assert gate.verdict(node_of()).name == "pass"
    verdict, done = judged(0.5, **unstable)
    assert (verdict.name, verdict.fails) == ("unstable-host", False)
    assert len(done) <= 3


def test_pairs_that_a_neighbour_spoilt_are_counted_in_the_reason():
    gate = Gate([gated()], WITH_BASE)
    gate.add(node_of(), run_of(0.10))
    settle(gate, lambda name, number: run_of(0.10 + jitter(number)), base=lambda name, number: run_of(clean=3))
    verdict = gate.verdict(node_of())
    assert (verdict.name, verdict.pairs) == ("inconclusive", 9)
    assert verdict.reasons == ("slower, and not confirmed: 0 of 9 A/B pairs stable, 3 are needed",)


@pytest.mark.parametrize("changes", [{"disturbance": "device 0 is throttled (thermal)"}, {"cpu_share": 0.9}])
def test_a_disturbed_device_or_a_shared_core_makes_a_run_unstable(changes):
    verdict, _ = judged(0.5, **changes)
    assert verdict.name == "unstable-host"
    assert changes.get("disturbance", "too few clean samples") in verdict.reasons[0]


NEVER_CLEAN = {"clean": 0, "location": None}


@pytest.mark.parametrize(
    ("stored", "now", "flag"),
    [
        ({}, {"disturbance": "unknown"}, "telemetry unknown: throttling would not be seen"),
        (NEVER_CLEAN, NEVER_CLEAN, "no clean samples: all samples are compared"),
        ({}, {"process": "reused"}, "processes were reused; stored runs had fresh ones"),
    ],
)
def test_runs_that_are_compared_all_the_same_are_told(stored, now, flag):
    verdict, _ = judged(0.1, given=gated(stored=stored_runs(**stored)), **now)
    assert verdict.name == "regressed"
    assert flag in verdict.flags


def test_a_baseline_of_one_session_is_said_and_trusted_less():
    once = tuple(run_of(change, session="s0", number=index) for index, change in enumerate(WOBBLE))
    many = GateSettings(planned_cases=200)
    assert judged(0.05, settings=many)[0].name == "regressed"
    assert judged(0.05, settings=many, given=gated(stored=once))[0].name == "inconclusive"
    verdict, _ = judged(0.30, given=gated(stored=once))
    assert verdict.name == "regressed"
    assert any("the baseline is of 1 session" in flag for flag in verdict.flags)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-0.9, 3.0), min_size=1, max_size=12), st.booleans())
def test_any_runs_end_in_a_verdict(changes, base):
    gate = Gate([gated()], GateSettings(can_run_base=base))
    gate.add(node_of(), run_of(changes[0]))
    done = settle(
        gate,
        lambda name, number: run_of(changes[number % len(changes)]),
        base=lambda name, number: run_of(changes[-number % len(changes)]),
    )
    assert len(done) <= 12 + 12 + 15
    verdict = gate.verdict(node_of())
    assert verdict.gated
    assert describe(verdict)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tolerance": 3.0}, "tolerance 3.0 is not between 0 and 1"),
        ({"suite_alpha": 0.0}, "suite_alpha=0.0 is not between"),
        ({"min_stored": 1}, "min_stored=1 is too few"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(ConfigurationError, match=message):
        GateSettings(**changes)


def test_a_case_may_have_its_own_tolerance():
    assert judged(0.10, given=gated(tolerance=0.2))[0].name == "pass"
    assert judged(0.04, given=gated(tolerance=0.2))[0].decisive.tolerance == 0.2
    assert judged(0.10, given=gated(tolerance=0.01))[0].name == "regressed"


def test_below_ten_microseconds_the_tolerance_is_absolute():
    given_case = gated(stored=stored_runs(middle_s=1e-6))
    verdict, _ = judged(0.10, given=given_case, middle_s=1e-6)
    assert verdict.decisive.tolerance == pytest.approx(0.30, rel=0.02)  # 0.3 us of 1 us
    assert verdict.name == "pass"


def with_names(given_case, *names):
    """The case with metrics of these names."""
    return dataclasses.replace(given_case, case=case_of(metrics={name: METRICS[name] for name in names}))


def with_metrics(given_values, new_values, tolerances=None, change=0.0):
    """Verdict of a case with new metrics ``new_values``; its stored runs have ``given_values``."""
    stored = tuple(
        dataclasses.replace(run, metrics={name: value(run) for name, value in given_values.items()})
        for run in stored_runs()
    )
    gate = Gate([with_names(gated(stored=stored, metric_tolerances=tolerances or {}), *given_values)])

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
    stored = stored_runs(WOBBLE[:2], metrics={"peak_memory_gib": 10.0})
    gate = Gate([with_names(gated(stored=stored), "peak_memory_gib")])
    gate.add(node_of(), run_of(metrics={"peak_memory_gib": 12.0}))
    assert gate.verdict(node_of()).name == "regressed"


@pytest.mark.parametrize(("after", "expected"), [(0.281, "inconclusive"), (0.29, "inconclusive"), (0.31, "regressed")])
def test_a_measured_bubble_has_to_leave_the_stored_ones_by_their_own_scatter(after, expected):
    values = iter((0.27, 0.275, 0.268, 0.272, 0.28, 0.265, 0.27, 0.271))
    verdict = with_metrics({"bubble_ratio": lambda run: next(values)}, {"bubble_ratio": constant(after)})
    assert verdict.name == expected
    assert any("scatters" in flag for flag in verdict.flags) == (expected == "inconclusive")


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
    gate = Gate([with_names(gated(stored=stored, metric_tolerances={"own_score": 0.05}), "own_score")])

    def spoilt(name, number):
        return run_of(clean=3, metrics={"own_score": 100.0})

    gate.add(node_of(), spoilt("a", 0))
    assert len(settle(gate, spoilt)) <= 4
    assert gate.verdict(node_of()).name == "unstable-host"
