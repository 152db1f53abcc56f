"""What the median of clean samples does not feel: mean, tail, samples that are left out, runs without clean ones."""

import dataclasses
import itertools
import math
from dataclasses import replace

import pytest

from perfsuite.gate import findings
from perfsuite.gate.gate import Gate
from perfsuite.record.describe import describe, headline, undecided_lines
from perfsuite.record.verdict import Effect, Finding, GateSettings, Verdict
from test_correctness.helpers.gate_runs import (
    METRICS,
    MIDDLE_S,
    WOBBLE,
    case_of,
    gated,
    jitter,
    node_of,
    run_of,
    settle,
    settled_suite,
    stored_runs,
)

WITH_BASE = GateSettings(can_run_base=True)
IN_PLACE = GateSettings(in_place=True)
BOTH = pytest.mark.parametrize("settings", [GateSettings(), WITH_BASE], ids=["alone", "with a base"])


def sampled(change=0.0, *, mean=0.0, p95=0.0, **changes):
    """A run whose mean and tail are worse by so much beside what its median is slower by."""
    middle = math.log(MIDDLE_S * (1 + change))
    own = {"clean_mean": middle + 0.01 + math.log1p(mean), "clean_p95": middle + 0.05 + math.log1p(p95)}
    return run_of(change, mean=own["clean_mean"], **own, **changes)


def sampled_runs(wobble=WOBBLE, **changes):
    return tuple(sampled(change, session=f"s{index}", **changes) for index, change in enumerate(wobble))


def asked(new, *, base=sampled, given=None, settings=None):
    """Verdict and requests of a case whose runs ``new`` and ``base`` make from a small change."""
    gate = Gate([given or gated(stored=sampled_runs())], settings or GateSettings())
    gate.add(node_of(), new(0.0))
    nodes = node_of() if gate.settings.in_place else None
    done = settle(
        gate, lambda name, number: new(jitter(number)), base=lambda name, number: base(jitter(number + 3)), nodes=nodes
    )
    return gate.verdict(node_of()), done


@BOTH
@pytest.mark.parametrize(
    ("tail", "quantity", "effect"),
    [({"mean": 0.33}, "mean", 0.33), ({"mean": 0.9, "p95": 9.0}, "mean", 0.9), ({"p95": 1.0}, "p95", 1.0)],
    ids=["every third twice as slow", "every tenth ten times", "a tail that doubled"],
)
def test_what_the_median_does_not_feel_is_found(settings, tail, quantity, effect):
    verdict, done = asked(lambda change: sampled(change, **tail), settings=settings)
    assert (verdict.name, verdict.decisive.quantity) == ("regressed", quantity)
    assert verdict.decisive.effect == pytest.approx(effect, rel=0.05)
    assert verdict.decisive.confirmed is settings.can_run_base
    assert [request.kind for request in done][:4] == ["run"] * 4
    assert f"worse in {quantity}" in describe(verdict)
    assert not any("not gateable" in flag for flag in verdict.flags)


def test_mean_and_tail_that_did_not_move_are_not_mentioned_and_ask_for_nothing():
    verdict, done = asked(sampled)
    assert (verdict.name, done, verdict.flags) == ("pass", [], ())
    assert [finding.quantity for finding in verdict.findings] == ["time"]


@pytest.mark.parametrize(
    ("samples", "iterations", "named"), [(5, 1, True), (199, 1, True), (50, 4, False), (200, 1, False)]
)
def test_a_case_whose_runs_are_too_short_for_every_sixtieth_iteration_is_named(samples, iterations, named):
    short = {"samples": samples, "clean": samples, "iterations": iterations}
    verdict, _ = asked(lambda change: sampled(change, **short), given=gated(stored=sampled_runs(**short)))
    assert verdict.name == "pass"
    for name in ("pass", "inconclusive", "improved", "unstable-host"):
        lines = [line for line in undecided_lines([replace(verdict, name=name)], gate=True) if "not seen" in line]
        assert [verdict.case in line and "slow once in 60" in line for line in lines] == [True] * named
    assert not any("not seen" in line for line in undecided_lines([replace(verdict, name="regressed")], gate=True))


@pytest.mark.parametrize(
    ("high", "quantity", "told"),
    [
        (0.025, "time", "slowdowns of the median up to 2.5 % could have hidden"),
        (0.4, "mean", "slowdowns of mean up to 40 % could have hidden"),
        (1.2, "time", "any slowdown could have hidden"),
    ],
)
def test_a_bound_names_its_quantity_and_above_100_per_cent_there_is_none(high, quantity, told):
    finding = Finding(quantity=quantity, name="inconclusive", tolerance=0.03, effect=0.0, interval=(-0.1, high))
    verdict = Verdict(case="t.py::t", name="inconclusive", findings=(finding,), iterations=500)
    (line,) = undecided_lines([verdict], gate=False)
    assert told in line


def test_a_slowdown_whose_interval_contains_no_change_is_not_shown(monkeypatch):
    shown = Finding(quantity="time", name="regressed", tolerance=0.03, effect=0.05, interval=(-0.01, 0.1))
    monkeypatch.setattr(findings, "finding", lambda asked: shown)
    verdict, _ = asked(sampled)
    assert verdict.name == "inconclusive"
    assert "its interval contains no change" in verdict.reasons[0]
    monkeypatch.setattr(findings, "finding", lambda asked: replace(shown, interval=(0.01, 0.1)))
    assert asked(sampled)[0].name == "regressed"
    level = Effect(change=0.08, interval=(0.04, 0.12), count=4)
    monkeypatch.setattr(findings, "finding", lambda asked: replace(shown, level=level))
    verdict, _ = asked(sampled)
    assert (verdict.name, verdict.decisive.effect, verdict.decisive.interval) == ("regressed", 0.08, (0.04, 0.12))
    assert verdict.decisive.after == pytest.approx(1.08 * verdict.decisive.before)


def test_a_better_mean_is_no_improvement_and_no_question():
    verdict, done = asked(lambda change: sampled(change, mean=-0.2, p95=-0.4))
    assert (verdict.name, done) == ("pass", [])


@pytest.mark.parametrize(("stored", "new"), [(stored_runs(), sampled), (sampled_runs(), run_of)])
def test_runs_from_before_mean_and_tail_were_kept_are_judged_by_their_time(stored, new):
    worse = (lambda change: sampled(change, mean=1.0)) if new is sampled else run_of
    verdict, done = asked(worse, given=gated(stored=stored))
    assert (verdict.name, done) == ("pass", [])


@pytest.mark.parametrize(
    ("tolerances", "expected"), [({"mean": 0.5}, "pass"), ({"mean": 0.1}, "regressed"), ({"p95": 0.5}, "regressed")]
)
def test_mean_and_tail_have_tolerances_of_their_own(tolerances, expected):
    given = gated(stored=sampled_runs(), metric_tolerances=tolerances)
    assert asked(lambda change: sampled(change, mean=0.33), given=given)[0].name == expected


def test_a_metric_that_is_the_mean_under_another_name_sets_its_tolerance():
    def scored(change, *, mean=0.0, **changes):
        plain = sampled(change, mean=mean + 3 * abs(change), **changes)
        return dataclasses.replace(plain, metrics={"own_score": math.exp(-plain.mean)})

    stored = tuple(scored(change, session=f"s{index}") for index, change in enumerate(WOBBLE))
    case = case_of(metrics={"own_score": METRICS["own_score"]})
    for tolerance, expected in ((0.6, "pass"), (0.1, "regressed")):
        given = dataclasses.replace(gated(stored=stored, metric_tolerances={"own_score": tolerance}), case=case)
        verdict, _ = asked(lambda change: scored(change, mean=0.33), given=given)
        assert verdict.name == expected
        assert not any("unused" in flag for flag in verdict.flags)


def suite_with_tails(mean, *, settings):
    def by(mean):
        return lambda name, number: sampled(jitter(5 * number), mean=mean)

    gate, done = settled_suite(24, sampled_runs, by(mean), settings=settings, base=by(0.0))
    return gate.verdicts().values(), done


def test_tails_that_grew_in_every_case_are_not_taken_off_in_silence():
    alone, _ = suite_with_tails(0.33, settings=GateSettings())
    assert {verdict.name for verdict in alone} == {"inconclusive"}
    told = "mean is slower in the whole suite: the host or the code; --perf-against decides"
    assert {verdict.reasons for verdict in alone} == {(told,)}
    code, _ = suite_with_tails(0.33, settings=WITH_BASE)
    assert {verdict.name for verdict in code} == {"regressed"}


def test_means_that_a_host_moves_by_less_than_is_accepted_are_taken_off():
    verdicts, done = suite_with_tails(0.02, settings=GateSettings())
    assert ({verdict.name for verdict in verdicts}, done) == ({"pass"}, [])


# -- samples that are left out ---------------------------------------------------------------------------------------


def disturbed(change, *, all_samples=0.5, clean=15, **changes):
    """A run whose clean samples did not move, while all together are slower and many are left out."""
    median_s = MIDDLE_S * (1 + change) * (1 + all_samples)
    quantiles_s = tuple(median_s * factor for factor in (0.98, 0.99, 1.0, 1.01, 1.02))
    return run_of(change, quantiles_s=quantiles_s, clean=clean, **changes)


QUIET = {"clean": 40}


def asked_disturbed(new, **options):
    return asked(new, given=gated(stored=stored_runs(**options.pop("stored", QUIET))), **options)[0]


def test_a_regression_that_disturbs_samples_does_not_vanish_with_them():
    verdict = asked_disturbed(disturbed)
    assert verdict.name == "inconclusive"
    told = ("all samples +49.9 %", "clean ones", "samples disturbed, clearly more than stored")
    assert all(text in verdict.reasons[0] for text in told)
    found = asked_disturbed(disturbed, settings=WITH_BASE, base=lambda change: run_of(change, **QUIET))
    assert (found.name, found.decisive.quantity, found.decisive.confirmed) == ("regressed", "all samples", True)


def test_a_host_that_disturbs_samples_raises_no_alarm():
    busy = asked_disturbed(disturbed, settings=WITH_BASE, base=disturbed)
    assert busy.name == "pass"
    assert "more samples are disturbed than stored, with the base too" in busy.flags
    told = asked_disturbed(
        lambda change: disturbed(change, yardstick=math.log(1e-3), all_yardstick=math.log(1.5e-3)),
        stored={**QUIET, "yardstick": math.log(1e-3)},
    )
    assert told.name == "pass"
    assert "more samples are disturbed, and the yardstick moved by +50 %" in told.flags


@pytest.mark.parametrize("clean", [40, 38])
def test_a_few_more_disturbed_samples_than_stored_change_nothing(clean):
    assert asked_disturbed(lambda change: disturbed(change, clean=clean)).name == "pass"
    used_to_it = asked_disturbed(lambda change: disturbed(change, clean=12), stored={"clean": 14})
    assert used_to_it.name == "pass"


# -- no clean samples ------------------------------------------------------------------------------------------------

YARD = {"yardstick": math.log(1e-3)}


def spoilt(yardstick=None):
    """A run at twice the time without enough clean samples, and with a yardstick that took so much longer."""
    timed = {} if yardstick is None else {"yardstick": math.log(1e-3 * (1 + yardstick))}
    return lambda change: disturbed(change, all_samples=1.0, clean=3, **timed)


@pytest.mark.parametrize("settings", [GateSettings(), WITH_BASE, IN_PLACE], ids=["alone", "with a base", "in place"])
def test_a_case_without_clean_samples_is_held_against_its_yardstick(settings):
    verdict, _ = asked(spoilt(0.05), given=gated(stored=stored_runs(**YARD)), settings=settings)
    assert (verdict.name, verdict.fails, verdict.decisive.confirmed) == ("regressed", True, False)
    assert verdict.decisive.effect == pytest.approx(1.0, abs=0.01)
    assert headline(verdict) == "REGRESSED +100 % (10.01 ms -> 20.02 ms)"
    assert "unconfirmed: no clean samples, slower even against its yardstick" in verdict.flags


@pytest.mark.parametrize(("all_yardstick", "name"), [(1.0, "unstable-host"), (0.0, "regressed")])
def test_a_case_that_never_has_clean_samples_is_held_against_the_yardstick_of_all(all_yardstick, name):
    """A neighbour, or the code, takes half of the time; twelve quick samples that nobody interrupted are unlike it."""
    yards = {"yardstick": math.log(1e-3), "all_yardstick": math.log(1e-3 * (1 + all_yardstick)), "clean": 12}
    verdict, _ = asked(lambda change: run_of(1 + change, **yards), given=gated(stored=stored_runs(**YARD, clean=0)))
    assert (verdict.name, verdict.decisive.quantity) == (name, "time")


@pytest.mark.parametrize("yardstick", [None, 0.9])
def test_where_the_yardstick_is_slow_too_or_missing_the_apparent_change_is_named(yardstick):
    verdict, _ = asked(spoilt(yardstick), given=gated(stored=stored_runs(**YARD)))
    assert (verdict.name, verdict.decisive.quantity) == ("unstable-host", "time")
    assert "all samples +100 %" in verdict.reasons[0]


# -- a CPU quota ----------------------------------------------------------------------------------------------------


def throttled_from(first, last=99, slower=0.2):
    """Runs of which those from the first to the last are held back by the CPU quota, and slower."""
    count = itertools.count()

    def new(change):
        held = first <= next(count) <= last
        return sampled((1 + change) * (1 + slower * held) - 1, throttled=0.4 * held)

    return new


def test_a_run_that_the_quota_held_back_is_replaced():
    verdict, done = asked(throttled_from(0, 0))
    assert (verdict.name, verdict.fails, bool(done)) == ("pass", False, True)


@BOTH
@pytest.mark.parametrize(("slower", "name"), [(0.2, "environment"), (0.0, "unstable-host")])
def test_where_every_run_is_held_back_the_quota_is_named(settings, slower, name):
    verdict, _ = asked(throttled_from(0, slower=slower), settings=settings)
    assert verdict.name == name
    assert "the CPU quota held the ranks back in 40% of its periods, and not in the stored runs" in describe(verdict)


def test_a_quota_that_held_the_stored_runs_back_as_well_is_no_cause():
    given = gated(stored=sampled_runs(throttled=0.5))
    assert asked(throttled_from(0, slower=0.0), given=given)[0].name == "pass"
    verdict, _ = asked(throttled_from(0, slower=0.2), given=given)
    assert verdict.name == "regressed"
    metrics = gated(stored=sampled_runs(throttled=0.5), metric_tolerances={"gb_per_s": 0.05})
    assert asked(throttled_from(0, slower=0.0), given=metrics)[0].name == "pass"


def test_stored_runs_that_the_quota_held_back_are_the_reason_where_too_few_are_left():
    runs = [replace(run, throttled=0.4 * (number < 3)) for number, run in enumerate(sampled_runs())]
    verdict, _ = asked(sampled, given=gated(stored=tuple(runs[:7])))
    assert verdict.name == "learning"
    assert "4 of the 5 usable stored runs" in describe(verdict)
    assert "; 3 stored runs held back by the CPU quota" in describe(verdict)


def test_a_stored_run_that_alone_was_held_back_is_not_compared():
    first, *others = sampled_runs()
    given = gated(stored=(replace(first, location=first.location + 0.5, throttled=0.9), *others))
    verdict, _ = asked(sampled, given=given)
    assert (verdict.name, verdict.decisive.level is None or abs(verdict.decisive.level.change) < 0.02) == ("pass", True)
