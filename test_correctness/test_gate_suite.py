"""What the cases of a suite tell about each other, and a session that settles in place or only looks."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfsuite.gate.gate import Gate
from perfsuite.record.verdict import GateSettings
from test_correctness.helpers.gate_runs import (
    WOBBLE,
    gated,
    jitter,
    node_of,
    run_of,
    settle,
    settled_suite,
    stored_runs,
)

WITH_BASE = GateSettings(can_run_base=True)
NAMES = [f"n{index}" for index in range(30)]


def suite(change_of, *, settings=None, base_change=0.0, yardstick=None):
    """Verdicts of a suite of 30 cases; ``change_of`` is name -> slowdown, ``yardstick`` that of the host's kernel."""

    def timed(longer):
        return {} if yardstick is None else {"yardstick": math.log(0.001 * (1 + longer))}

    def new(name, number):
        return run_of(change_of(name) + jitter(5 * number), number=number, **timed(yardstick))

    def base(name, number):
        return run_of(base_change + jitter(number), number=number)

    gate, done = settled_suite(
        len(NAMES), lambda own: stored_runs(own, **timed(0.0)), new, settings=settings, base=base
    )
    return gate, {verdict.case: verdict.name for verdict in gate.verdicts().values()}, done


def test_one_slow_case_in_a_suite_is_found_alone():
    gate, names, done = suite(lambda name: 0.1 if name == "n7" else 0.0)
    assert [case for case, name in names.items() if name != "pass"] == [node_of("n7")]
    assert names[node_of("n7")] == "regressed"
    assert {request.case for request in done} == {node_of("n7")}
    assert gate.banner() == ()


@pytest.mark.parametrize("change", [0.06, 0.5, 4.0])
def test_one_half_of_a_suite_that_is_slower_is_no_shift_of_all(change):
    slow = set(NAMES[:15])
    gate, names, _ = suite(lambda name: change if name in slow else 0.0)
    assert {"regressed"} == {names[node_of(name)] for name in slow}
    assert {"pass"} == {names[node_of(name)] for name in NAMES if name not in slow}
    assert gate.suite() is None


def test_suspects_are_measured_in_turn():
    _, _, done = suite(lambda name: 0.1 if name in ("n3", "n4", "n5") else 0.0)
    assert [request.case for request in done[:6]] == [node_of(name) for name in ("n3", "n4", "n5")] * 2


def test_a_suite_that_is_slower_as_a_whole_does_not_pass_in_silence():
    gate, names, _ = suite(lambda name: 0.08)
    assert set(names.values()) == {"inconclusive"}
    one = gate.verdict(node_of("n0"))
    assert "so is the whole suite" in one.reasons[0]
    assert one.hidden > (0.08, ""), "what is taken off the cases may hide there too"
    assert one.decisive.level.change == one.decisive.effect == pytest.approx(0.08, abs=0.03)
    assert gate.suite().name == "drifted"
    assert gate.suite().line.startswith("the suite is 8")
    assert "30 of 30 cases by more than 3 %" in gate.suite().line


def test_the_shift_of_the_suite_is_taken_off_a_single_slow_case():
    _, names, _ = suite(lambda name: 0.16 if name == "n7" else 0.02)
    assert names[node_of("n7")] == "regressed"
    assert names[node_of("n8")] == "pass"


def test_under_a_large_shift_nothing_fails_without_an_a_b():
    gate, names, _ = suite(lambda name: 0.5 if name == "n7" else 0.2, yardstick=0.2)
    assert names[node_of("n7")] == "inconclusive"
    assert "only an A/B could confirm" in gate.verdict(node_of("n7")).reasons[0]


def test_settled_in_place_a_case_needs_no_other_and_says_so():
    gate = Gate([gated(name) for name in NAMES], GateSettings(in_place=True, planned_cases=30))
    gate.add(node_of("n7"), run_of(0.1))
    done = settle(gate, lambda name, number: run_of(0.1 + jitter(number)), nodes=node_of("n7"))
    assert {request.case for request in done} == {node_of("n7")}
    verdict = gate.verdict(node_of("n7"))
    assert verdict.name == "regressed"
    assert "settled in place: the suite's shift is not known and 0 is used" in verdict.flags
    assert gate.verdict(node_of("n8")).reasons == ("it has not been measured",)


def test_a_session_that_only_looks_is_asked_for_nothing():
    gate = Gate([gated(name) for name in ("a", "b", "c")], GateSettings(remeasure=False))
    gate.add(node_of("a"), run_of(0.1))
    gate.add(node_of("b"), run_of(-0.1))
    gate.add(node_of("c"), run_of())
    assert gate.next_requests() == []
    assert [verdict.name for verdict in gate.verdicts().values()] == ["inconclusive", "pass", "pass"]
    assert gate.verdict(node_of("a")).reasons == ("suspected and not measured again; --perf-gate does",)


def test_covered_cases_are_those_with_enough_stored_runs():
    gate = Gate([gated("a"), gated("b", stored=stored_runs(WOBBLE[:3])), gated("c", stored=())])
    assert gate.covered == (node_of("a"),)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_equal_inputs_give_equal_requests_and_verdicts(seed, base):
    def answer():
        gate = Gate([gated(name) for name in NAMES[:6]], GateSettings(can_run_base=base))

        def new(name, number):
            return run_of(((seed >> (number % 16)) % 7 - 2) / 100 + jitter(number), number=number)

        for number, name in enumerate(NAMES[:6]):
            gate.add(node_of(name), new(name, number))
        done = settle(gate, new)
        return done, gate.verdicts()

    assert answer() == answer()


@pytest.mark.parametrize(
    ("sessions", "settings", "told"), [(4, GateSettings(), True), (8, GateSettings(), False), (4, WITH_BASE, False)]
)
def test_a_lone_case_that_few_stored_sessions_leave_undecided_gets_a_way_out(sessions, settings, told):
    stored = tuple(run_of(2 * WOBBLE[n], session=f"s{n % sessions}", number=n) for n in range(8))
    gate = Gate([gated(stored=stored)], settings)
    gate.add(node_of(), run_of())
    settle(gate, lambda name, number: run_of(jitter(number), number=number))
    assert gate.verdict(node_of()).name == ("pass" if sessions == 8 else "inconclusive")
    lines = gate.banner()
    assert bool(lines) == told
    if told:
        assert lines[0].startswith("1 case undecided: fewer than 8 cases cannot show the host's noise")
        assert "of 4 sessions of the machine (runs of one commit without an hour between" in lines[0]
