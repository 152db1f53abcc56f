"""What a history finds: change points against a known truth, commits named, small changes added up."""

import contextlib
import dataclasses
import io
import json
import math
import random
import sys
from pathlib import Path

import pytest

from benchmarks import history_drift
from perfsuite.base.errors import ConfigurationError
from perfsuite.cli import main as cli
from perfsuite.history.describe import commit_lines, steps_between
from perfsuite.history.file import HistoryFile
from perfsuite.history.findings import SUITE, findings_of
from perfsuite.history.order import in_order, table_of
from perfsuite.reports.beside_others import OverTime
from perfsuite.reports.document import Charts
from perfsuite.reports.page.sections.history import history_section
from perfsuite.statistics import change_points
from perfsuite.statistics.change_points import find_changes, ramps
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


def test_noise_outliers_and_short_series_have_no_change():
    found = [find_changes(noise(60, 0.006, seed)).changes for seed in range(60)]
    assert [()] * 60 == found
    spiked = [value + (0.5 if index in (20, 21, 40) else 0) for index, value in enumerate(noise(60, 0.006, 1))]
    assert find_changes(spiked).changes == ()
    assert all(find_changes(noise(count, 0.006, 1)).changes == () for count in range(change_points.SIDE * 2 + 1))


def test_steps_of_a_ramp_are_one_change_and_two_steps_with_a_level_between_are_two():
    for seed in range(10):
        merges = [(20 + 2 * merge, 0.01) for merge in range(5)]
        (ramp,) = ramps(find_changes(with_steps(noise(60, 0.006, seed), *merges)))
        assert 17 <= ramp.steps[0].at <= ramp.steps[-1].at <= 31
        assert 0.04 < ramp.effect < 0.06
        apart = ramps(find_changes(with_steps(noise(60, 0.006, seed), (20, 0.02), (36, 0.02))))
        assert [1, 1] == [len(one.steps) for one in apart]
    back = ramps(find_changes(with_steps(noise(60, 0.002, seed=1), (20, 0.02), (24, -0.02))))
    assert [True, False] == [one.effect > 0 for one in back]


def test_a_drift_that_looks_like_one_step_is_told_with_all_its_merges():
    merges = range(20, 25)
    for seed in range(5):
        (change,) = found(drawn(50, CASES, lambda *at: slower_by_merges(*at, merges), noise=0.004, seed=seed)).changes
        assert change.is_drift
        assert {commit(number) for number in merges} <= set(change.commits)
        assert change.ratio.low < math.exp(0.05) < change.ratio.high


def test_a_step_that_may_be_several_says_among_which_commits_they_would_be():
    findings = found(drawn(50, CASES, slower, seed=3, noise=0.02))
    (change,) = findings.changes
    first, last = change.at_most
    assert (False, True) == (change.is_drift, first <= change.before < change.after <= last < 50)
    told = steps_between(findings.ordered, change)
    assert told.startswith(f"several small steps would look the same among {last - first} commits after ")
    sharp = found(drawn(50, CASES, slower, noise=0.0002))
    assert "" == steps_between(sharp.ordered, sharp.changes[0])


def test_of_many_commits_the_likely_ones_are_told():
    findings = found(drawn(50, CASES, lambda *at: slower_by_merges(*at, range(20, 29, 2)), seed=2))
    (change,) = findings.changes
    earlier, *commits, later = commit_lines(findings.ordered, change, 10)
    assert {f"commit {number}" for number in range(20, 29, 2)} <= {told.partition("  ")[2] for told in commits}
    counts = [int(told.split()[0]) for told in (earlier, later)]
    assert len(change.commits) == 10 + sum(counts)


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
    ordered = in_order(sessions, ScriptedRepository(count=len(sessions)))
    return findings_of(ordered, **options)


def with_torch_from(at, sessions):
    """These sessions, with another torch from one of them on."""
    versions = ({"packages": {"torch": "2.13" if index >= at else "2.12"}} for index in range(len(sessions)))
    return [dataclasses.replace(one, environment=new) for one, new in zip(sessions, versions, strict=True)]


def section_of(sessions, most):
    """The blocks of the page about these sessions."""
    history = HistoryFile(path=Path("h.jsonl"), sessions=tuple(sessions))
    return history_section(OverTime(history=history, findings=found(sessions)), most).blocks


def slower(case, number, *, at=20, size=0.05):
    return size if case == CASES[0] and number >= at else 0.0


def slower_by_merges(case, number, merges):
    return 0.01 * sum(number >= at for at in merges) if case == CASES[0] else 0.0


def test_a_change_names_its_commit_and_the_environment_that_changed_with_it():
    findings = found(with_torch_from(20, drawn(40, CASES, slower)))
    (change,) = findings.changes
    assert (CASES[0], (commit(20),)) == (change.case, change.commits)
    assert change.environment == ("packages.torch 2.13, before 2.12",)
    assert 1.03 < change.ratio.low < 1.05 < change.ratio.high < 1.07
    assert [20] == [at for at, _ in findings.environment]


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
    fewer = [{case: point for case, point in one.cases.items() if case != CASES[0]} for one in sessions]
    holed = [one if at % 3 else dataclasses.replace(one, cases=fewer[at]) for at, one in enumerate(sessions)]
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
    assert f'<td class="n">{effect} %' in text
    assert "t.py::test_&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert 1 == text.count("<script")
    assert "style=" not in text


def test_the_page_draws_every_case_that_changed_with_its_commit_levels_and_environment():
    blocks = section_of(with_torch_from(30, drawn(40, CASES, slower)), 24)
    charts = next(block for block in blocks if isinstance(block, Charts))
    (chart,) = charts.charts
    layers = {json.dumps(layer["mark"]): layer["data"]["values"] for layer in chart.spec["layer"]}
    drawn_values = list(layers.values())
    assert 40 == len(drawn_values[0])
    before, after = drawn_values[1]
    assert (-0.5, 19.5, 19.5, 39.5) == (before["begin"], before["end"], after["begin"], after["end"])
    assert 1.03 < after["value"] / before["value"] < 1.07
    ((change,),) = [rows for rows in drawn_values if "label" in rows[0] and "top" not in rows[0]]
    assert (19.5, "bad") == (change["at"], change["tone"])
    assert change["label"].startswith(f"{commit(20)[:7]} +")
    assert [29.5] == [row["at"] for row in drawn_values[-1]]
    told = [row[-1] for row in chart.grid.rows if row[-1]]
    assert "environment: packages.torch 2.13, before 2.12" == told[0]
    assert (40, f"one commit after {commit(19)[:10]}") == (len(chart.grid.rows), told[1].partition("] ")[2])


def test_five_merges_of_one_percent_in_two_percent_of_noise_are_found_among_them():
    for seed in range(10):
        steps = [(20 + 4 * merge, 0.01) for merge in range(5)]
        changes = find_changes(with_steps(noise(60, 0.02, seed), *steps)).changes
        assert changes
        assert all(17 <= change.at <= 39 for change in changes)


def test_a_drift_is_one_change_with_its_range_of_commits():
    merges = range(18, 31, 3)
    (change,) = found(drawn(50, CASES, lambda *at: slower_by_merges(*at, merges), seed=2)).changes
    assert len(change.steps) > 1
    assert {commit(number) for number in merges} <= set(change.commits)
    assert 1.04 < change.ratio.low < 1.051 < change.ratio.high < 1.065


def test_no_more_cases_are_drawn_than_have_room_and_the_sentence_says_so():
    def level(case, number):
        return 0.05 if case in CASES[:4] and number >= 20 else 0.0

    said, charts, table, *_ = section_of(drawn(40, CASES, level), 3)
    assert "4 cases changed: 4 slower, 0 faster; 3 are drawn, the newest first" == said.text
    assert (3, 4) == (len(charts.charts), len(table.grid.rows))


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
