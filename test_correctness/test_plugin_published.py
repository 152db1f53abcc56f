"""--perf-published and the marker: which cases of the suite reproduce the rows of a report, and no others."""

import pytest

from perfsuite.published.lookup import rows, shipped
from perfsuite.published.recipes import find, recipes
from test_correctness.helpers.scripted_driver import WORKLOADS, repository
from test_correctness.test_ids import collect


def of(*names):
    """Recipes that run a row of these reports or tables, other readings of it included."""
    wanted = tuple(f"{name}/" for name in names)
    having = {recipe.name for recipe in recipes() if any(f"{table}/".startswith(wanted) for table, _ in recipe.rows)}
    return [recipe for recipe in recipes() if {recipe.name, recipe.beside} & having]


@pytest.mark.extended
@pytest.mark.parametrize("names", ["000", "001,002", "003", "004", "004/weak"])
def test_a_report_selects_the_case_of_each_of_its_rows_and_no_other(names):
    """On a platform of full sizes that is the session's own, whatever platform the report is of."""
    found = collect("--perf-platform=h200", f"--perf-published={names}").splitlines()
    assert sorted(found) == sorted({recipe.case("h200") for recipe in of(*names.split(","))})


def test_a_report_has_cases_in_many_tests():
    """``-k 004`` finds those alone that have its number in their names."""
    mine = of("004")
    assert len({recipe.test for recipe in mine}) == 9
    assert sum("004" in recipe.case("a100") for recipe in mine) < len(mine) / 2


@pytest.mark.extended
def test_where_the_own_sizes_are_small_a_report_names_its_platforms():
    """A case is of a platform that its row is of: nothing is listed of an RTX 4090 that the report ran on another."""
    found = collect("--perf-platform=cpu", "--perf-published=001/latte-l,002").splitlines()
    lines = {(f"{row.report}/{row.table}", row.line): row.platforms for row in rows(shipped())}
    wanted = {
        recipe.case(platform)
        for recipe in of("001/latte-l", "002")
        for row in (find(recipe.beside) if recipe.beside else recipe).rows
        for platform in lines[row]
    }
    assert sorted(found) == sorted(wanted)
    assert {case.partition("[")[2].partition("-")[0] for case in found} == {"rtx4090", "rtx6000ada", "h100", "s4000"}


@pytest.mark.extended
def test_the_marker_says_report_and_table():
    found = collect("--perf-platform=cpu", "-k", "a100", "-m", "published(table='004/5d')")
    assert found.split() == ["test_perf/test_meshes.py::test_components[a100-pp8-dp2-ep2-cp2-tp4]"]


# -- in somebody else's repository -------------------------------------------------------------------------------

OTHERS = """
def test_plain():
    pass

def test_case(perf):
    perf(step)
"""
PUBLISHED = """
@sizes(param="recipe", full=["002-llama2_7b-fp16-1x8", "000-opensora-1x1", "mine"], small=["mine"])
def test_published(perf, recipe):
    perf(Sum())
"""


@pytest.fixture
def mixed(pytester, monkeypatch):
    """Plain tests, cases that reproduce nothing, and one that has the name of a recipe's."""
    repo = repository(pytester, monkeypatch, OTHERS)
    pytester.makepyfile(test_published=WORKLOADS + PUBLISHED)
    return repo


def selected(found):
    return [line.partition("::")[2] for line in found.outlines if "::" in line]


CASE = "test_published[s4000-002-llama2_7b-fp16-1x8]"


def test_the_option_deselects_everything_else_and_the_ini_key_other_cases(mixed):
    collected = ("--collect-only", "-q", "--perf-platform=cpu")
    found = mixed.run(*collected, "--perf-published=002")
    assert [CASE] == selected(found)
    assert "1/7 tests collected (6 deselected)" in found.stdout.str()
    assert ["test_plain", CASE] == selected(mixed.run(*collected, "-o", "perf_published=002"))
    everything = ["test_plain", "test_case[cpu]", "test_published[cpu-mine]"]
    assert everything == selected(mixed.run(*collected, "-o", "perf_published=002", "--perf-published="))


def test_an_ini_key_changes_no_run_without_perf_cases(mixed):
    mixed.run("-o", "perf_published=002", "test_it.py::test_plain").assert_outcomes(passed=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--perf-published=007"], "--perf-published: no published report or table is called '007'; *reports: 000, *"),
        (["--perf-published=003/logs"], "--perf-published: 003/logs has no row that is a run, *; * runs: 003/results"),
        (["-o", "perf_published=2"], "ini perf_published: no published report * did you mean 002? *"),
        (
            ["--perf-published=003", "--perf-platform=cpu"],
            "--perf-published=003: none of * reproduces a row of it; run test_perf/test_oneflow.py::test_oneflow, at *",
        ),
        (
            ["--perf-published=002", "test_it.py::test_plain"],
            "--perf-published=002: none of 0 collected perf cases reproduces a row of it; run test_perf/*",
        ),
    ],
)
def test_what_selects_nothing_is_one_line_and_exit_4(mixed, arguments, message):
    found = mixed.run(*arguments)
    assert found.ret == pytest.ExitCode.USAGE_ERROR
    assert len([line for line in found.errlines if line]) == 1
    found.stderr.fnmatch_lines([f"ERROR: {message}"])
