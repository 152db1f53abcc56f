"""What the gate asks for and says of one case; every number here is chosen, nothing is measured."""

import dataclasses
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfsuite.base.errors import ConfigurationError
from perfsuite.gate.gate import Gate
from perfsuite.record.describe import describe
from perfsuite.record.verdict import GateSettings
from test_correctness.helpers.gate_runs import WOBBLE, gated, jitter, judged, node_of, run_of, settle, stored_runs

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


def test_a_case_that_the_base_cannot_run_is_judged_without_it():
    gate = Gate([gated()], WITH_BASE)
    gate.add(node_of(), run_of(0.1))
    for request in gate.next_requests():
        gate.add(request.case, run_of(0.1))
    assert {request.kind for request in gate.next_requests()} == {"ab_pair"}
    gate.without_base(node_of(), "the base has no such case")
    assert settle(gate, lambda name, number: run_of(0.1)) == []
    verdict = gate.verdict(node_of())
    assert (verdict.name, verdict.decisive.confirmed) == ("regressed", False)
    assert "unconfirmed: the base has no such case" in verdict.flags


def test_a_faster_case_is_improved_and_never_fails():
    verdict, done = judged(-0.10)
    assert (verdict.name, len(done), verdict.fails) == ("improved", 4, False)
    assert "unconfirmed: no A/B was run" in verdict.flags


def test_a_change_within_the_tolerance_passes():
    verdict, done = judged(0.02)
    assert len(done) >= 4  # it looked suspicious
    assert verdict.name == "pass"


def test_one_disturbed_run_carries_no_verdict():
    gate = Gate([gated()], GateSettings())
    gate.add(node_of(), run_of(0.5))
    settle(gate, lambda name, number: run_of(0.4 if number == 2 else jitter(number)))
    assert gate.verdict(node_of()).name == "pass"


def test_noise_that_forbids_a_verdict_is_said_and_costs_few_runs():
    wild = stored_runs((0.0, 0.3, -0.2, 0.25, -0.25, 0.2, -0.3, 0.1))
    verdict, done = judged(0.05, given=gated(stored=wild))
    assert (verdict.name, verdict.fails) == ("inconclusive", False)
    assert len(done) <= 3
    assert any("not gateable at 3 %" in flag for flag in verdict.flags)
    assert verdict.decisive.mde > 0.3


def test_no_pass_where_a_large_slowdown_could_hide():
    wild = stored_runs((0.0, 0.3, -0.2, 0.25, -0.25, 0.2, -0.3, 0.1))
    for change in (-0.3, -0.1, 0.0):
        verdict, _ = judged(change, given=gated(stored=wild))
        assert verdict.name != "pass"


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
    return dataclasses.replace(
        run_of(outcome="out_of_memory", quantiles_s=(), location=None, samples=0, clean=0), **changes
    )


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


def test_stored_runs_of_a_device_that_is_always_held_down_are_named():
    held = stored_runs(disturbance="device 0 was throttled (thermal) in 5 of 5 looks while it was timed")
    verdict, _ = judged(0.0, given=gated(stored=held))
    assert verdict.name == "learning"
    assert "; 8 stored runs disturbed: device 0 was throttled (thermal)" in verdict.reasons[-1]


def test_unknown_telemetry_is_compared_and_said():
    verdict, _ = judged(0.0, disturbance="unknown")
    assert verdict.name == "pass"
    assert "telemetry unknown: throttling would not be seen" in verdict.flags


def test_cases_that_never_have_clean_samples_are_compared_by_all():
    shared = {"clean": 0, "location": None}
    verdict, _ = judged(0.1, given=gated(stored=stored_runs(**shared)), **shared)
    assert verdict.name == "regressed"
    assert "no clean samples: all samples are compared" in verdict.flags


def test_reused_processes_are_said():
    verdict, _ = judged(0.0, process="reused")
    assert "processes were reused; stored runs had fresh ones" in verdict.flags


def test_a_case_that_cannot_be_run_again_stays_inconclusive_with_the_reason():
    gate = Gate([gated()])
    gate.add(node_of(), run_of(0.1))
    assert gate.next_requests()
    gate.withdraw(node_of(), "rank 1 was killed")
    assert gate.next_requests() == []
    verdict = gate.verdict(node_of())
    assert verdict.name == "inconclusive"
    assert verdict.reasons[-1] == "rank 1 was killed"


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
