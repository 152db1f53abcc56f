"""Small seeded versions of benchmarks/gate_simulation.py: the numbers of docs gate-evidence hold on their hosts."""

import dataclasses

import pytest

from benchmarks.gate_promises import coverage, power
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
