"""Small seeded versions of benchmarks/gate_silence.py: no real slowdown ends green without a word."""

import random

import pytest

from benchmarks.gate_imports import base_import
from benchmarks.gate_rows import ROWS
from benchmarks.gate_silence import history, tally

LONE = [(name, slower) for name, row in ROWS.items() for slower in row.slowdowns if 1 in row.cases]
UNTOLD = {"unclean"}
"""Without clean samples and without a yardstick nothing tells the code from the host: it is named, and nobody fails."""


@pytest.mark.parametrize(("name", "slower"), LONE)
def test_no_way_of_being_slower_is_silent(name, slower):
    quiet, hosted = (tally(name, host, 1, slower, 4) for host in ("R1", "R4"))
    assert (quiet.silent, hosted.silent) == (0, 0)
    assert quiet.failed >= (0 if name in UNTOLD else 3)


def test_every_way_in_which_a_slowdown_was_green_has_a_simulation():
    assert {row.number for row in ROWS.values()} == set(range(1, 9))


@pytest.mark.parametrize("name", ["drift", "suite", "environment", "without-base"])
def test_nor_in_a_suite_whose_shift_is_taken_off(name):
    found = tally(name, "R2", 24, 0.10, 2)
    assert (found.silent, found.failed) == (0, 2)


@pytest.mark.parametrize("slower", ROWS["append-all"].slowdowns)
def test_an_update_refuses_cases_that_are_slower_all_together(slower):
    found = tally("append-all", "R2", 24, slower, 1)
    assert (found.stored, found.failed) == (0, 1)


def test_slow_merges_are_red_before_they_add_up():
    slow = [history("R2", f"slow{number}", 6, 0.01) for number in range(4)]
    assert all(found.reported_at is not None and found.reported_at <= 0.0511 for found in slow)
    assert sum(history("R2", f"still{number}", 15, 0.0).red for number in range(2)) == 0


def test_a_base_that_imports_the_new_code_is_refused_on_any_layout():
    found = [base_import(random.Random(number)) for number in range(40)]
    assert not [each for each in found if not each.own and not each.refused and each.install != "copy"]
    assert all(each.own for each in found if each.install in ("none", "line", "links", "mapping"))
    assert all(each.refused for each in found if each.install in ("ahead", "absolute"))
