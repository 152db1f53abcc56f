"""What a history finds: change points against a known truth, commits named, small changes added up."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import random
import sys

import pytest

from benchmarks import history_drift
from perfsuite.cli import main as cli
from perfsuite.errors import ConfigurationError
from perfsuite.history.findings import SUITE, findings_of
from perfsuite.history.order import in_order
from perfsuite.history.series import table_of
from perfsuite.statistics import change_points
from perfsuite.statistics.change_points import find_changes
from test_correctness.helpers.histories import ScriptedRepository, commit, drawn, written

CASES = tuple(f"t.py::test_{number:02d}" for number in range(24))


def noise(count, sigma, seed):
    rng = random.Random(seed)
    return [rng.gauss(0, sigma) for _ in range(count)]


def with_steps(values, *steps):
    return [value + sum(size for at, size in steps if index >= at) for index, value in enumerate(values)]


@pytest.mark.parametrize("at", [15, 30, 45])
@pytest.mark.parametrize("size", [0.02, -0.02])
def test_a_step_of_three_sigma_is_found_where_it_is(at, size):
    (change,) = find_changes(with_steps(noise(60, 0.006, seed=at), (at, size))).changes
    assert abs(change.at - at) <= 3
    assert change.earliest <= at <= change.latest
    assert change.low < size < change.high


def test_five_merges_of_one_percent_in_two_percent_of_noise_are_found_among_them():
    for seed in range(10):
        steps = [(20 + 4 * merge, 0.01) for merge in range(5)]
        changes = find_changes(with_steps(noise(60, 0.02, seed), *steps)).changes
        assert changes
        assert all(17 <= change.at <= 39 for change in changes)


def test_noise_outliers_and_short_series_have_no_change():
    found = [find_changes(noise(60, 0.006, seed)).changes for seed in range(60)]
    assert [()] * 60 == found
    spiked = [value + (0.5 if index in (20, 21, 40) else 0) for index, value in enumerate(noise(60, 0.006, 1))]
    assert find_changes(spiked).changes == ()
    assert all(find_changes(noise(count, 0.006, 1)).changes == () for count in range(change_points.SIDE * 2 + 1))


def test_a_long_series_is_searched_in_parts_and_none_of_their_borders_shows():
    (change,) = find_changes(with_steps(noise(900, 0.006, seed=3), (800, 0.02))).changes
    assert abs(change.at - 800) <= 3


def test_values_that_resemble_their_neighbours_make_a_mean_less_sure():
    fresh = noise(80, 0.006, seed=5)
    alike = [fresh[0]]
    for value in fresh[1:]:
        alike.append(0.8 * alike[-1] + value)
    assert find_changes(alike).inflation > 2 > find_changes(fresh).inflation


def test_without_ruptures_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ruptures", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'perfsuite\[history\]'"):
        find_changes([0.0] * 10)


def found(sessions, **options):
    timeline = in_order(sessions, ScriptedRepository(count=len(sessions)))
    return findings_of(timeline, **options)


def slower(case, number, *, at=20, size=0.05):
    return size if case == CASES[0] and number >= at else 0.0


def test_a_change_names_its_commit_and_the_environment_that_changed_with_it():
    sessions = drawn(40, CASES, slower)
    sessions = [
        dataclasses.replace(one, environment={"packages": {"torch": "2.13" if index >= 20 else "2.12"}})
        for index, one in enumerate(sessions)
    ]
    findings = found(sessions)
    (change,) = findings.changes
    assert (CASES[0], (commit(20),)) == (change.case, change.commits)
    assert change.environment == ("packages.torch 2.13, before 2.12",)
    assert 1.03 < change.ratio.low < 1.05 < change.ratio.high < 1.07
    assert [20] == [one.at for one in findings.environment]


def test_what_a_session_does_to_all_cases_is_no_change_of_a_case():
    def level(case, number):
        return 0.3 if number >= 20 else 0.0

    (change,) = found(drawn(40, CASES, level)).changes
    assert change.case == SUITE
    few = found(drawn(40, CASES[:5], level)).changes
    assert {one.case for one in few} == set(CASES[:5])  # five cases cannot tell the host from the code


def test_cases_that_changed_do_not_pull_the_others_along():
    def level(case, number):
        return 0.05 if case[:-2] in CASES[:6] and number >= 20 else 0.0

    many = tuple(f"{case}-{half}" for case in CASES for half in "ab")
    assert {one.case[:-2] for one in found(drawn(40, many, level)).changes} == set(CASES[:6])


def test_sessions_without_a_case_are_passed_over():
    sessions = drawn(40, CASES, slower)
    holed = [
        dataclasses.replace(
            one, cases={case: point for case, point in one.cases.items() if case != CASES[0] or index % 3}
        )
        for index, one in enumerate(sessions)
    ]
    (change,) = found(holed).changes
    assert change.before < 20 <= change.after
    assert math.isnan(table_of(holed).values[0, 0])


def test_one_percent_per_merge_adds_up():
    def level(case, number):
        return 0.002 * number if case == CASES[0] else 0.0

    findings = found(drawn(40, CASES, level))
    (best,) = [one for one in findings.accumulated if one.is_best]
    assert (CASES[0], True) == (best.case, 1.05 < best.ratio.low < best.ratio.value < best.ratio.high < 1.1)


def test_since_looks_back_at_a_revision_and_leaves_older_changes_out():
    sessions = drawn(60, CASES, lambda case, number: slower(case, number) + slower(case, number, at=40))
    later = [commit(number) for number in range(30, 60)]
    findings = found(sessions, since="v1", since_commits=later)
    assert [(commit(40),)] == [change.commits for change in findings.changes]
    (since,) = [one for one in findings.accumulated if not one.is_best]
    assert 1.03 < since.ratio.value < 1.07
    assert len(found(sessions).changes) == 2


def test_fail_on_is_the_exit_code(tmp_path, capsys):
    path = written(tmp_path / "h.jsonl", *drawn(40, CASES, slower))
    show = ["history", "show", str(path), "--repository", str(tmp_path)]
    codes = [cli.main([*show, f"--fail-on={what}"]) for what in ("slower", "any", "3%", "9%")]
    assert codes == [1, 1, 1, 0]
    assert cli.main([*show, "--case=test_01", "--fail-on=any"]) == 0
    assert "ordered by time" in capsys.readouterr().out


def test_the_page_says_what_the_terminal_does_and_holds_no_markup_of_others(tmp_path, capsys):
    hostile = "t.py::test_<script>alert(1)</script>"
    sessions = drawn(40, (hostile, *CASES), lambda case, number: 0.05 if case == hostile and number >= 20 else 0.0)
    path, page = written(tmp_path / "h.jsonl", *sessions), tmp_path / "h.html"
    assert cli.main(["history", "show", str(path), "--repository", str(tmp_path), "--html", str(page)]) == 0
    shown, text = capsys.readouterr().out, page.read_text()
    effect = next(line for line in shown.splitlines() if hostile in line).partition(" %")[0]
    assert f"<td>{effect} %" in text
    assert "t.py::test_&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "<script" not in text
    assert "style=" not in text


@pytest.mark.slow
def test_the_example_repository_names_its_commits():
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert history_drift.main([]) == 0
    shown = out.getvalue()
    assert "28: make it much slower" in shown
    assert "a little slower" in shown
    assert "40 sessions on main (3 apart)" in shown
    since = shown[shown.index("accumulated since v1.0") :]
    assert all(case in since for case in (history_drift.DRIFTING, history_drift.STEPPING))
    assert "packages.torch 2.13.0, before 2.12.1" in shown


@pytest.mark.slow
def test_the_numbers_hold_on_drawn_histories():
    from benchmarks import history_truth as truth

    for shape in truth.SHAPES:
        for sigma in (0.006, 0.02):
            assert truth.counts(2, shape, sigma, truth.nothing, seed=7).false <= 2
            known = truth.counts(2, shape, sigma, truth.ramp, seed=7)
            assert known.placed >= 0.95 * known.cases
        known = truth.counts(2, shape, 0.006, truth.step, seed=7)
        assert known.placed >= 0.95 * known.cases
