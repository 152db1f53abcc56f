"""The robust mean of pairs: its interval holds the truth on noisy hosts, and what is said to be found is found."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.ab_coverage import tally
from benchmarks.gate_simulation import HOSTS
from perfsuite.cli.ab import looks
from perfsuite.statistics.comparison import COLUMNS, compare, progress, table
from perfsuite.statistics.paired import Paired, paired_mean, pairs_needed, smallest_found

DIFFERENCES = st.lists(st.floats(-0.2, 0.2), min_size=3, max_size=30)


@pytest.mark.parametrize(
    ("host", "pairs"),
    [("R4", 3), ("hostile", 12), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("R3", 3), ("R4", 6)))],
)
def test_what_is_printed_is_true_on_a_noisy_host(host, pairs):
    counts = tally(HOSTS[host], pairs, 150, "test")
    assert counts.covers >= 0.93 * counts.trials
    assert counts.until_covers >= 0.95 * counts.trials
    assert counts.found >= 0.92 * counts.trials  # 95 % of 150 are 142 +- 3
    assert counts.false <= 0.05 * counts.unchanged
    assert counts.until_false <= 0.05 * counts.unchanged


@given(DIFFERENCES, st.floats(-1, 1), st.floats(0.1, 10))
def test_the_mean_moves_and_grows_with_its_values(differences, shift, factor):
    plain = paired_mean(differences)
    moved = paired_mean([value * factor + shift for value in differences])
    assert moved.mean == pytest.approx(plain.mean * factor + shift, abs=1e-9)
    assert moved.error == pytest.approx(plain.error * factor, rel=0.5, abs=1e-9)  # a value at the clip's edge
    assert min(differences) - 1e-12 <= plain.mean <= max(differences) + 1e-12
    assert 1 <= plain.dof < plain.pairs == len(differences)


def test_one_pair_that_something_hit_moves_nothing_far():
    calm = [0.01, 0.012, 0.008, 0.011, 0.009, 0.01]
    assert abs(paired_mean([*calm, 2.0]).mean - 0.01) < 0.003


@given(st.integers(3, 60), st.floats(0.0001, 0.1), st.floats(0.001, 0.1))
def test_less_noise_finds_smaller_changes_and_needs_fewer_pairs(pairs, error, tolerance):
    noisy, calm = (Paired(mean=0.0, error=each, dof=pairs - 1, pairs=pairs) for each in (error, error / 2))
    assert smallest_found(noisy, tolerance) >= smallest_found(calm, tolerance) >= tolerance
    needed = [pairs_needed(each, tolerance, 200) or 201 for each in (noisy, calm)]
    assert 3 <= needed[1] <= needed[0] <= 201
    assert (pairs_needed(noisy, tolerance, 200, alpha=0.01) or 201) >= needed[0]


def test_looks_share_the_error_rate():
    a_s, b_s = [1.0] * 8, [1.02, 1.04, 1.03, 1.05, 1.03, 1.02, 1.05, 1.04]
    one, four = (compare("case", a_s, b_s, 0.03, alpha=0.05 / len(looks(6, most))) for most in (6, 48))
    assert four.low < one.low < one.high < four.high


def rows(noise, tolerance=0.03, name="test_it.py::test_case[cpu-1]", pairs=4):
    b_s = [math.exp(0.02 + (noise if pair % 2 else -noise)) for pair in range(pairs)]
    return compare(name, [1.0] * pairs, b_s, tolerance)


def test_undecided_says_what_would_decide():
    calm, noisy = rows(0.02), rows(0.5)
    assert calm.outcome == noisy.outcome == "undecided"
    assert calm.outcome_text == f"undecided, ~{calm.pairs_needed} pairs"
    assert 4 < calm.pairs_needed <= 200
    assert noisy.outcome_text == "undecided, > 200 pairs"
    assert "this host is too noisy for 3.0%" in "\n".join(table([noisy], 0.03))
    near = rows(0.005, tolerance=0.0205, pairs=48)
    assert near.outcome_text == "undecided, near it"
    assert progress([calm, noisy, rows(0.0001)], 6) == "1 of 3 decided; 6 pairs will hardly decide 2"


@pytest.mark.parametrize("name", ["t.py::t[1]", "test_perf/test_training.py::test_step[" + "x" * 48 + "]"])
def test_the_table_fits_100_columns(name):
    lines = list(table([rows(noise, name=name) for noise in (0.0001, 0.02, 0.5, 3.0)], 0.03))
    assert max(map(len, lines)) <= COLUMNS
    assert lines[0].startswith("case")
    head, first = lines[:2] if len(name) < 20 else lines[1:4:2]
    assert head.index("outcome") == first.index("no difference")
