"""Level and change are two answers: a worse level is explained by a control that moved along, or fails."""

import dataclasses
import math

import pytest

from perfsuite.gate.gate import Gate
from perfsuite.record.describe import describe
from perfsuite.record.verdict import GateSettings
from test_correctness.helpers.gate_runs import (
    WOBBLE,
    gated,
    jitter,
    judged,
    node_of,
    run_of,
    settled_suite,
    stored_runs,
)

WITH_BASE = GateSettings(can_run_base=True, base_commit="b" * 40)
STORED = "a" * 40
TORCH = ("packages.torch 2.14.0, stored 2.13.0",)


def anchored(**changes):
    return gated(stored=stored_runs(commit=STORED), **changes)


def test_code_that_drifted_before_the_base_fails_and_the_stored_commit_shows_it():
    verdict, done = judged(0.10, settings=WITH_BASE, base=0.10, anchor=0.0, given=anchored())
    assert [request.kind for request in done] == ["run"] * 4 + ["ab_pair"] * 6 + ["anchor_pair"] * 6
    assert (verdict.name, verdict.fails, verdict.decisive.confirmed) == ("drifted", True, True)
    assert verdict.decisive.change.change == pytest.approx(0.0, abs=0.005)
    assert verdict.decisive.level.change == pytest.approx(0.10, abs=0.005)
    assert verdict.decisive.since_anchor.change == pytest.approx(0.10, abs=0.005)
    said = describe(verdict)
    assert said.startswith("DRIFTED +9.98 % (10.01 ms -> 11.01 ms); stored at aaaaaaaaaa: ")
    for text in (
        "change against the base +0",
        "level +9.95 %",
        "against aaaaaaaaaa +",
        "next: perfsuite ab --a aaaaaaaaaa",
    ):
        assert text in said


def one_of_a_suite(noisier, away):
    """Verdict of one case of 24 that is 6 % slower than the stored commit, and its pairs; runs lie ``away`` apart."""

    def stored(own):
        return stored_runs([noisier * step for step in own], commit=STORED)

    def new(name, number):
        change = 0.06 - away * (-1) ** number if name == "n7" else noisier * jitter(number)
        return run_of(change, number=number)

    def anchor(name, number):
        return run_of(0.0, number=number)

    gate, done = settled_suite(24, stored, new, settings=WITH_BASE, base=new, anchor=anchor)
    pairs = [request for request in done if request.case == node_of("n7") and request.kind == "anchor_pair"]
    return gate.verdict(node_of("n7")), len(pairs)


@pytest.mark.parametrize(
    ("noisier", "away", "pairs", "said"),
    [
        (4, 0.04, 12, "the code drifted"),
        (1, 0.05, 24, "as slow as the base; aaaaaaaaaa, which the stored runs name, is not surely faster"),
    ],
)
def test_in_a_suite_too_a_drift_is_shown_by_as_many_pairs_as_make_it_sure(noisier, away, pairs, said):
    verdict, done = one_of_a_suite(noisier, away)
    assert (verdict.name, done) == ("drifted", pairs)
    assert said in verdict.reasons[0]


def test_a_stored_commit_that_is_slow_as_well_leaves_the_drift_unattributed():
    verdict, _ = judged(0.10, settings=WITH_BASE, base=0.10, anchor=0.10, given=anchored())
    assert (verdict.name, verdict.fails) == ("drifted", True)
    assert "(unattributed) slower than stored; as slow as the base and as aaaaaaaaaa" in verdict.reasons[0]


def test_an_environment_that_differs_is_named_and_fails():
    given_case = anchored(environment_changes=TORCH, soft_differences=TORCH)
    for settings in (WITH_BASE, GateSettings()):
        verdict, _ = judged(0.10, settings=settings, base=0.10, anchor=0.10, given=given_case)
        assert (verdict.name, verdict.fails) == ("environment", True)
        assert TORCH[0] in verdict.reasons[0]
        assert "--perf-accept=environment" in describe(verdict)
    unmoved, _ = judged(0.0, given=given_case)
    assert unmoved.name == "pass"


def test_a_level_is_left_sooner_where_something_that_can_do_it_is_known_to_have_changed():
    stored = stored_runs([4 * step for step in WOBBLE], commit=STORED)
    slow = {"settings": WITH_BASE, "base": 0.06, "anchor": 0.06}
    told = [judged(0.06, **slow, given=gated(stored=stored, environment_changes=changes)) for changes in (TORCH, ())]
    assert [verdict.name for verdict, _ in told] == ["environment", "inconclusive"]


@pytest.mark.parametrize("settings", [WITH_BASE, GateSettings()])
def test_a_verdict_that_fails_says_nothing_of_what_the_noise_could_hide(settings):
    wobble = tuple(12 * step for step in WOBBLE)
    tails = [{"clean_p95": math.log(0.01 * factor)} for factor in (1, 4, 1, 6, 2, 9, 1, 3)]
    runs = [
        dataclasses.replace(run, **tail) for run, tail in zip(stored_runs(wobble, commit=STORED), tails, strict=True)
    ]
    verdict, _ = judged(0.6, settings=settings, base=0.6, anchor=0.6, given=gated(stored=tuple(runs)), clean_p95=-2.0)
    assert verdict.fails
    assert not [flag for flag in verdict.flags if "would show" in flag]
    unchanged, _ = judged(0.0, given=gated(stored=tuple(runs)), clean_p95=-4.0)
    assert [flag for flag in unchanged.flags if "would show" in flag]


def test_slow_code_is_a_regression_in_any_environment():
    verdict, _ = judged(0.10, settings=WITH_BASE, given=anchored(environment_changes=TORCH))
    assert verdict.name == "regressed"


def test_a_yardstick_is_no_control_where_the_environment_changed():
    given_case = gated(stored=stored_runs(commit=STORED, yardstick=math.log(0.001)), environment_changes=TORCH)
    verdict, _ = judged(0.10, given=given_case, yardstick=math.log(0.0011))
    assert verdict.name == "environment"


def test_a_base_that_is_the_stored_commit_needs_no_third_arm():
    settings = dataclasses.replace(WITH_BASE, base_commit=STORED)
    verdict, done = judged(0.10, settings=settings, base=0.10, given=anchored())
    assert {request.kind for request in done} == {"run", "ab_pair"}
    assert verdict.name == "drifted"


def test_faster_than_stored_is_improved_where_an_older_revision_measured_now_is_slower():
    for base, anchor, name in ((0.0, 0.0, "improved"), (-0.10, 0.0, "improved"), (-0.10, -0.10, "pass")):
        verdict, _ = judged(-0.10, settings=WITH_BASE, base=base, anchor=anchor, given=anchored())
        assert (verdict.name, verdict.fails) == (name, False)


def test_the_stored_commits_between_which_a_drift_grew_are_named():
    newest = tuple(
        run_of(change, session=f"n{index}", number=index, commit=letter * 40)
        for index, (letter, change) in enumerate(zip("cde", (0.01, 0.02, 0.09), strict=True))
    )
    given_case = anchored(newest=newest)
    verdict, _ = judged(0.10, settings=WITH_BASE, base=0.10, given=given_case)
    grown = verdict.reasons[1]
    assert "over 3 stored commits" in grown
    assert "the largest step is from +1.97 % at dddddddddd to +8.97 % at eeeeeeeeee" in grown


def suite(count, slower, *, settings=None, environment=(), base=0.0, anchor=0.0, spread=0.0):
    """The gate after a session of ``count`` cases that are all slower; ``spread`` is how stored sessions differ."""
    drift = [spread * step for step in (1, -1, 0.5, -0.5, 1, -1, 0, 0)]

    def stored(own):
        return stored_runs([step + moved for step, moved in zip(own, drift, strict=True)], commit=STORED)

    def by(change, away):
        return lambda name, number: run_of(change + jitter(number + away), number=number)

    arms = {"base": by(base, 3), "anchor": by(anchor, 5)}
    return settled_suite(count, stored, by(slower, 0), settings=settings, environment_changes=environment, **arms)[0]


@pytest.mark.parametrize("count", [2, 19, 20, 60])
@pytest.mark.parametrize("slower", [0.5, 4.0])
def test_a_suite_that_is_slower_fails_at_any_size(count, slower):
    found = suite(count, slower).suite()
    assert found.name == "drifted"
    assert found.effect == pytest.approx(slower, rel=0.02)
    assert f"{count} of {count} cases" in found.line


@pytest.mark.parametrize("count", [5, 30])
@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"base": 0.10, "anchor": 0.0}, "drifted"),
        ({"base": 0.0, "anchor": 0.0}, "regressed"),
        ({"base": 0.10, "anchor": 0.10}, "drifted"),
        ({"base": 0.10, "anchor": 0.10, "environment": TORCH}, "environment"),
    ],
)
def test_what_moved_the_suite_is_told_by_arms_and_environment(count, changes, name):
    found = suite(count, 0.10, settings=WITH_BASE, **changes).suite()
    assert found.name == name
    assert ("drifted since aaaaaaaaaa" in found.line) == (changes["anchor"] == 0.0 and changes["base"] != 0.0)


def test_a_host_that_moves_between_sessions_as_it_always_did_raises_no_alarm():
    found = suite(30, 0.04, spread=0.04).suite()
    assert found.name == "inconclusive"
    assert "this host moves by up to" in found.line
    hidden = suite(30, 0.02, spread=0.04).suite()
    assert (hidden.name, hidden.seen) == ("inconclusive", False)
    assert "all cases may be up to" in hidden.line
    assert "--perf-against decides" in hidden.line
    assert suite(30, 0.5, spread=0.04).suite().name == "drifted"


@pytest.mark.parametrize(
    ("base", "anchor", "name"), [(-0.08, -0.08, "regressed"), (0.02, -0.08, "drifted"), (0.02, 0.02, None)]
)
def test_slow_code_that_a_host_hides_which_is_faster_today_is_told_by_the_arms(base, anchor, name):
    found = suite(30, 0.02, spread=0.04, settings=WITH_BASE, base=base, anchor=anchor).suite()
    assert (found and found.name) == name


def test_yardsticks_are_no_control_of_a_suite_whose_environment_changed():
    def stored(own):
        return stored_runs(commit=STORED, yardstick=math.log(0.001))

    def new(name, number):
        return run_of(0.10 + jitter(number), number=number, yardstick=math.log(0.0011))

    for environment, name in (((), "unstable-host"), (TORCH, "environment")):
        assert settled_suite(5, stored, new, environment_changes=environment)[0].suite().name == name


def test_a_suite_whose_base_cannot_run_asks_no_more_of_it():
    gate = Gate([gated(f"n{index}", stored=stored_runs(commit=STORED)) for index in range(24)], WITH_BASE)
    for index in range(24):
        gate.add(node_of(f"n{index}"), run_of(0.10 + jitter(5 * index)))
    for _ in range(30):
        for request in gate.next_requests():
            if request.kind == "run":
                gate.add(request.case, run_of(0.10))
            elif request.kind == "ab_pair":
                gate.without_base(request.case, "it is not there")
            else:
                gate.without_anchor(request.case, "nor is the stored commit")
    assert gate.next_requests() == []
    assert gate.suite().name == "drifted"
