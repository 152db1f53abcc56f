"""Small seeded versions of benchmarks/gate_silence.py: no real slowdown ends green without a word."""

from __future__ import annotations

import pytest

from benchmarks.gate_silence import ROWS, history, tally

TRIALS = 12


@pytest.mark.parametrize("host", ["R1", "R3", "R4"])
@pytest.mark.parametrize("row", ROWS)
def test_no_way_of_being_slower_is_silent(row, host):
    found = tally(row, host, 1, 0.10, TRIALS)
    assert found.silent == 0
    if host == "R1":
        assert found.failed >= found.trials - 1


@pytest.mark.parametrize("row", ["drift", "suite", "environment", "without-base"])
def test_nor_in_a_suite_whose_shift_is_taken_off(row):
    found = tally(row, "R2", 24, 0.10, 3)
    assert (found.silent, found.failed) == (0, 3)


@pytest.mark.parametrize("cases", [1, 2, 19, 20, 24])
def test_a_suite_that_is_half_as_slow_again_fails_at_any_size(cases):
    assert tally("suite", "R3", cases, 0.5, 2).failed == 2


def test_slow_merges_are_red_before_they_add_up():
    slow = [history("R2", f"slow{number}", 6, 0.01) for number in range(6)]
    assert all(found.reported_at is not None and found.reported_at <= 0.0511 for found in slow)
    assert sum(history("R2", f"still{number}", 20, 0.0).red for number in range(3)) == 0
