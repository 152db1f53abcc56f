"""Small seeded versions of the gate's simulations: promised rates, no silent slowdown, the verdicts that are stored."""

import dataclasses
import itertools
import random

import pytest

from benchmarks import gate_silence
from benchmarks.gate_frozen import FILE, Frozen, numbers
from benchmarks.gate_imports import base_import
from benchmarks.gate_promises import coverage, power
from benchmarks.gate_rows import ROWS
from benchmarks.gate_simulation import HOSTS, Plan, tally

SUITES = 2
SLOW = pytest.mark.slow
"""Of what the other hosts and kinds of a test hold as well."""


def outcome(host, slowdown, suites=SUITES, **changes):
    return tally(HOSTS[host], suites, slowdown=slowdown, share=0.05, plan=Plan(**changes), seed=7)


@pytest.mark.parametrize(
    ("base", "host"),
    [
        (True, "R2"),
        (False, "R1"),
        *(pytest.param(*case, marks=SLOW) for case in ((True, "R1"), (True, "R3"), (False, "R2"), (False, "R3"))),
    ],
)
def test_hosts_with_up_to_one_per_cent_of_noise(host, base):
    unchanged = outcome(host, 0.0, base=base)
    assert unchanged.unchanged["regressed"] == 0
    assert unchanged.runs <= 3.2
    slower = outcome(host, 0.05, base=base)
    assert slower.unchanged["regressed"] == 0
    assert slower.outcomes["regressed"] >= 0.9 * slower.slowed  # 20 cases; 95 % of many, docs/evidence/gate-evidence.md
    assert slower.runs <= 3.2


@pytest.mark.parametrize("suites", [1, pytest.param(SUITES, marks=SLOW)])
def test_a_hosted_machine(suites):
    unchanged = outcome("R4", 0.0, suites, cases=20 * suites)
    assert unchanged.unchanged["regressed"] <= 1
    slower = outcome("R4", 0.10, suites, cases=20 * suites)
    assert slower.outcomes["regressed"] >= 0.96 * slower.slowed
    assert slower.outcomes["pass"] == 0


@pytest.mark.parametrize(
    ("base", "baseline"),
    [
        (True, "hostile"),
        *(pytest.param(*case, marks=SLOW) for case in ((True, "R2"), (False, "hostile"), (False, "R2"))),
    ],
)
def test_on_a_hostile_host_a_slowdown_never_passes(baseline, base):
    plan = Plan(base=base, today=HOSTS["hostile"])
    slower = tally(HOSTS[baseline], SUITES, slowdown=0.10, share=0.2, plan=plan, seed=7)
    assert slower.outcomes["pass"] == 0
    assert slower.slowed == SUITES * 40


@pytest.mark.extended
def test_a_yardstick_that_tells_the_noise_saves_runs():
    with_yardstick, without = (outcome("R4y", 0.0, 1, yardstick=yardstick) for yardstick in (True, False))
    assert with_yardstick.runs < without.runs


def test_a_suite_that_is_slower_as_a_whole_is_found_with_a_base_and_never_passes_without():
    plan = Plan(cases=60)
    found = tally(HOSTS["R2"], 1, slowdown=0.10, share=1.0, plan=plan, seed=7)
    assert found.outcomes["regressed"] == found.slowed
    alone = tally(HOSTS["R2"], 1, slowdown=0.10, share=1.0, plan=dataclasses.replace(plan, base=False), seed=7)
    assert alone.outcomes["pass"] == 0


def test_cases_settled_in_place_raise_no_alarm_on_a_quiet_host():
    settled = tally(HOSTS["R1"], 2, slowdown=0.05, share=0.2, plan=Plan(cases=30, in_place=True), seed=7)
    assert settled.unchanged["regressed"] == 0
    assert settled.outcomes["regressed"] == settled.slowed


def test_the_plain_gate_does_worse_where_the_host_is_bad():
    plain = tally(HOSTS["hostile"], 3, slowdown=0.10, share=0.2, plan=Plan(plain=True, base=False), seed=1)
    assert plain.outcomes["pass"] > 0
    assert plain.unchanged["regressed"] > 0


@pytest.mark.parametrize(
    ("kind", "host"),
    [
        ("third", "R4"),
        ("tenth", "R1"),
        *(pytest.param("third", host, marks=SLOW) for host in ("R1", "R2", "R3")),
        *(pytest.param("tenth", host, marks=SLOW) for host in ("R2", "R3", "R4")),
    ],
)
def test_slow_iterations_that_the_median_does_not_feel_never_pass(host, kind):
    """Every third twice as slow (the mean by 33 %), every tenth ten times (90 %)."""
    plan = Plan(cases=60, kind=kind, base=False)
    found = tally(HOSTS[host], 1, slowdown=0.10, share=0.2, plan=plan, seed=7)
    assert found.outcomes == {"regressed": found.slowed}
    assert found.unchanged["regressed"] == 0


@pytest.mark.parametrize(
    ("host", "base"), [pytest.param("R1", True, marks=SLOW), ("R2", False), pytest.param("R4", True, marks=SLOW)]
)
def test_the_printed_change_is_found(host, base):
    found, of, _ = power(HOSTS[host], 2, share=0.1, plan=Plan(base=base), seed=7)
    assert found >= 0.9 * of  # 40 cases; 93 % of many, docs/evidence/gate-evidence.md


@pytest.mark.parametrize(
    ("cases", "today", "base"),
    [
        (4, "hostile", False),
        (60, "R4", True),
        *(pytest.param(*case, marks=SLOW) for case in ((4, "hostile", True), (60, "R4", False))),
    ],
)
def test_printed_intervals_hold_the_truth_on_a_noisier_day(cases, today, base):
    plan = Plan(cases=cases, base=base, today=HOSTS[today])
    held, of, _ = coverage(HOSTS["R2"], 120 // cases, slowdown=0.2, share=0.3, plan=plan, seed=7)["all"]
    assert held >= 0.9 * of  # 120 cases; 93 % of many, docs/evidence/gate-evidence.md


# -- no real slowdown ends green without a word ------------------------------------------------------------------------

LONE = [(name, slower) for name, row in ROWS.items() for slower in row.slowdowns if 1 in row.cases]
UNTOLD = {"unclean"}
"""Without clean samples and without a yardstick nothing tells the code from the host: it is named, and nobody fails."""


@pytest.mark.parametrize(("name", "slower"), LONE)
def test_no_way_of_being_slower_is_silent(name, slower):
    quiet, hosted = (gate_silence.tally(name, host, 1, slower, 4) for host in ("R1", "R4"))
    assert (quiet.silent, hosted.silent) == (0, 0)
    assert quiet.failed >= (0 if name in UNTOLD else 3)


def test_every_way_in_which_a_slowdown_was_green_has_a_simulation():
    assert {row.number for row in ROWS.values()} == set(range(1, 9))


@pytest.mark.parametrize("name", ["drift", "suite", "environment", "without-base"])
def test_nor_in_a_suite_whose_shift_is_taken_off(name):
    found = gate_silence.tally(name, "R2", 24, 0.10, 2)
    assert (found.silent, found.failed) == (0, 2)


@pytest.mark.parametrize("slower", ROWS["append-all"].slowdowns)
def test_an_update_refuses_cases_that_are_slower_all_together(slower):
    found = gate_silence.tally("append-all", "R2", 24, slower, 1)
    assert (found.stored, found.failed) == (0, 1)


def test_slow_merges_are_red_before_they_add_up():
    slow = [gate_silence.history("R2", f"slow{number}", 6, 0.01) for number in range(4)]
    assert all(found.reported_at is not None and found.reported_at <= 0.0511 for found in slow)
    assert sum(gate_silence.history("R2", f"still{number}", 15, 0.0).red for number in range(2)) == 0


def test_a_base_that_imports_the_new_code_is_refused_on_any_layout():
    found = [base_import(random.Random(number)) for number in range(40)]
    assert not [each for each in found if not each.own and not each.refused and each.install != "copy"]
    assert all(each.own for each in found if each.install in ("none", "line", "links", "mapping"))
    assert all(each.refused for each in found if each.install in ("ahead", "absolute"))


# -- the stored verdicts -----------------------------------------------------------------------------------------------

FEW = (0, 17, 10, 27, 4, 12, 37, 20, 25, 28, 52, 83, 139)
"""Scenes of 1 to 12 cases on every host, one of 30, and six that alone show one bound of the judge."""


@pytest.mark.parametrize("scenes", [FEW, pytest.param(tuple(numbers()), marks=pytest.mark.slow, id="all")])
def test_no_verdict_request_or_word_changed(scenes):
    """The gate says of 2,000 simulated cases exactly what it said when benchmarks/gate_frozen.py stored it."""
    of_scene = itertools.groupby(FILE.read_text(encoding="utf-8").splitlines(), lambda line: line.partition("/")[0])
    lines = {int(number): list(own) for number, own in of_scene}
    assert numbers() == list(lines)
    for number in scenes:
        assert lines[number] == list(Frozen(number).lines())
