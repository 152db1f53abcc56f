"""The gate in pytest runs: a slowed case fails and no other, and every way around it.

A scripted driver runs the cases, so that their times are known; test_gating_processes.py has real ranks.
"""

import shutil
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest

from benchmarks.gate_aa import aa_lines, read_and_judge
from perfsuite.base.errors import OutOfMemory, RanksFailed, UnsupportedCase
from perfsuite.plugin import verdict_reports
from test_correctness.helpers.gated_repository import ScriptedArms, baseline_file, commit_all
from test_correctness.helpers.scripted_driver import junit

EXAMPLE = Path(__file__).parent.parent / "baselines" / "examples" / "cpu-example.json"


def verdict(case):
    return {each.attrib["name"]: each.attrib["value"] for each in case.findall("properties/property")}.get("verdict")


def failures(name):
    return [case for case, element in junit(name).items() if element.find("failure") is not None]


def test_nothing_changed_nothing_fails(stored):
    done = stored.run("--perf-gate", "--junitxml=j.xml", "--perf-summary=summary.md")
    done.assert_outcomes(passed=3)
    done.stdout.fnmatch_lines(["gate *gated 3 of 3 cases: 3 pass"])
    assert [verdict(case) for case in junit("j.xml").values()] == ["pass"] * 3
    assert "**perfsuite**: 3 unchanged" in Path("summary.md").read_text()
    assert "test_case" not in Path("summary.md").read_text(), "nothing changed: nothing to see"


def test_a_slowed_case_fails_alone_after_fresh_runs(stored, machine):
    machine.factors.update({1: 1.1, 2: 0.8})
    before = len(stored.driver.jobs)
    done = stored.run("--perf-gate", "--junitxml=j.xml", "-v")
    assert done.ret == pytest.ExitCode.TESTS_FAILED
    done.assert_outcomes(passed=2, failed=1)
    assert failures("j.xml") == ["test_case[cpu-1]"]
    assert verdict(junit("j.xml")["test_case[cpu-1]"]) == "regressed"
    done.stdout.fnmatch_lines(["*test_case[[]cpu-1[]] REGRESSED*", "*unconfirmed*", "REGRESSED *test_case[[]cpu-1[]]*"])
    assert verdict(junit("j.xml")["test_case[cpu-2]"]) == "improved"
    jobs = stored.driver.jobs[before:]
    assert all(job.fresh and job.budget.yardstick for job in jobs)
    assert sum(job.workload.parameters()["number"] == 1 for job in jobs) >= 5  # judged on runs after the suspicion


@pytest.mark.extended
def test_of_many_failing_cases_a_few_are_printed_in_full_and_junit_has_all(stored, machine, monkeypatch):
    monkeypatch.setattr(verdict_reports, "IN_FULL", 1)
    machine.factors.update({0: 1.2, 1: 1.4, 2: 1.3})
    full = "*next: perfsuite ab*"
    commit_all("the revision")
    done = stored.run("--perf-gate", "--perf-show=summary", "--junitxml=junit.xml")
    done.assert_outcomes(failed=4)
    done.stdout.fnmatch_lines(
        [
            "_* the suite as a whole *_",
            "SUITE DRIFTED: *",
            "_* test_case?cpu-1? *_",
            "REGRESSED +*",
            "_* 2 more failing cases *_",
            "REGRESSED +* % (* ms -> 1* ms)*test_it.py::test_case?cpu-0?",
            "REGRESSED +* % (* ms -> 1* ms)*test_it.py::test_case?cpu-2?",
            "  each in full: *",
            "notable",
            " ! SUITE DRIFTED*",
            " ! * slower*",
            "REGRESSED test_it.py::test_case?cpu-0? - *",
        ]
    )
    assert sum(fnmatch(line, full) for line in done.outlines) == 1
    assert Path("junit.xml").read_text().count("next: perfsuite ab") >= 3
    for option in ("-v", "--perf-show=tables"):
        assert sum(fnmatch(line, full) for line in stored.run("--perf-gate", option).outlines) >= 3


def test_a_case_that_skips_when_it_is_run_again_stays_open(stored, machine):
    measured = []

    def script(job):
        if job.workload.parameters().get("number") == 1 and measured:
            raise UnsupportedCase("rank 0 on here skipped: no luck today")
        measured.append(job)
        return machine(job)

    machine.factors[1] = 1.1
    stored.driver.script = script
    done = stored.run("--perf-gate", "-k", "cpu-1")
    assert "could not judge" not in done.stdout.str()
    done.stdout.fnmatch_lines(["*it failed in a further run: rank 0 on here skipped: no luck today*"])


def test_without_the_gate_a_verdict_is_shown_and_nothing_fails(stored, machine):
    machine.factors[1] = 1.1
    done = stored.run()
    done.assert_outcomes(passed=3)
    done.stdout.fnmatch_lines(["*test_case[[]cpu-1[]]: inconclusive*", "gate *compared 3 of 3 cases: *"])


def test_settled_in_place_where_a_report_cannot_wait(stored, machine):
    machine.factors[0] = 1.2
    done = stored.run("--perf-gate", "--maxfail=2")
    done.assert_outcomes(failed=1, passed=2)
    done.stdout.fnmatch_lines(["*REGRESSED*"])


XFAIL = {
    "a failure of any kind": ("", {"failed": 1, "xpassed": 2}),
    "another failure": ("raises=ZeroDivisionError", {"failed": 1, "xpassed": 2}),
    "the verdict": ("raises=VerdictFailed", {"xfailed": 1, "xpassed": 2}),
    "the verdict, strictly": ("raises=(KeyError, VerdictFailed), strict=True", {"xfailed": 1, "failed": 2}),
    "the verdict elsewhere": ("False, reason='', raises=VerdictFailed", {"failed": 1, "passed": 2}),
}


@pytest.mark.parametrize(
    ("way", "option"),
    [*((way, []) for way in XFAIL), ("another failure", ["-x"]), ("the verdict, strictly", ["-x"])],
)
def test_a_regression_is_expected_only_where_xfail_names_it(stored, pytester, machine, way, option):
    mark, outcomes = XFAIL[way]
    file = pytester.path / "test_it.py"
    marked = file.read_text().replace("\n@pytest", f"\n@pytest.mark.xfail({mark})\n@pytest")
    file.write_text("from perfsuite import VerdictFailed\n" + marked)
    machine.factors[2] = 1.2  # the last, after which -x has nothing to stop
    if option and "strict" in mark:
        outcomes = {"failed": 1}
    found = stored.run("--perf-gate", *option).parseoutcomes()
    assert found == outcomes
    if way == "the verdict":
        assert stored.run("--perf-gate", "--runxfail").parseoutcomes() == {"failed": 1, "passed": 2}


def test_a_failed_case_is_not_gated_and_out_of_memory_where_the_baseline_fitted_is_a_regression(stored, machine):
    machine.errors.update({1: RanksFailed("rank 0 on here died"), 2: OutOfMemory("OOM at 44.2 GiB of 48 GiB")})
    done = stored.run("--perf-gate", "--junitxml=j.xml")
    assert failures("j.xml") == ["test_case[cpu-1]", "test_case[cpu-2]"]
    done.stdout.fnmatch_lines_random(
        ["rank 0 on here died", "gate *gated 2 of 2 cases: *1 pass*", "*cpu-2*REGRESSED*memory*"]
    )


def test_a_gate_that_compares_nothing_is_a_usage_error(repo):
    repo.refuses("--perf-gate", says="--perf-gate: none of 3 cases has 5 stored runs in *cpu*.json; store some with*")
    Path("baselines/cpu").mkdir(parents=True)
    shutil.copy(EXAMPLE, "baselines/cpu")
    repo.refuses("--perf-gate", says="*the nearest file is of other hardware, cpu-example.json: *, stored *; store*")
    allowed = repo.run("--perf-gate", "--perf-allow-ungated")
    allowed.assert_outcomes(passed=3)
    allowed.stdout.fnmatch_lines(["gate *not gated yet: 0 of 5 runs stored (3 no-baseline); *"])
    required = repo.run("--perf-gate", "--perf-allow-ungated", "--perf-require-baseline")
    required.assert_outcomes(failed=3)


def test_a_damaged_baseline_stops_the_run_before_it_measures(stored):
    damaged = baseline_file().read_text()[:-200]
    baseline_file().write_text(damaged)
    stored.refuses("--perf-gate", says=f"*{baseline_file().name}:*")
    assert baseline_file().read_text() == damaged


def test_markers_say_what_a_case_accepts(stored, machine):
    Path("test_it.py").write_text(
        Path("test_it.py").read_text().replace("\n@pytest", "\n@pytest.mark.perf_tolerance(0.2)\n@pytest")
    )
    machine.factors[1] = 1.1
    stored.run("--perf-gate").assert_outcomes(passed=3)


@pytest.mark.extended
def test_equal_runs_show_the_gates_own_rates(repo):
    repo.run("--perf-runs=12", "--perf-update=append").assert_outcomes(passed=3)
    lines = list(aa_lines(read_and_judge(baseline_file(), splits=50)))
    assert lines[0] == "A/A: 12 equal runs of 3 cases, 50 random splits into stored and new runs"
    assert lines[1].startswith("  false alarms 0.00% of verdicts")


@pytest.mark.extended
def test_stored_files_load_in_pytest_benchmarks_own_comparison(stored):
    for option in ("--benchmark-compare", f"--benchmark-compare={baseline_file()}"):
        done = stored.run(option)
        done.assert_outcomes(passed=3)
        done.stdout.fnmatch_lines(["*benchmark: 6 tests*"])


class TestBase:
    """Confirmation by an A/B with a base revision; its arms are scripted."""

    @pytest.fixture
    def arms(self, stored, machine, monkeypatch):
        commit_all("base")
        return ScriptedArms(machine, monkeypatch)

    def test_a_regression_is_confirmed(self, stored, machine, arms):
        machine.factors[1] = 1.1
        done = stored.run("--perf-gate", "--perf-against=HEAD", "--junitxml=j.xml")
        assert failures("j.xml") == ["test_case[cpu-1]"]
        assert "unconfirmed" not in done.stdout.str()
        assert {name.split(" (")[0] for name in arms.names} == {"base", "new code"}

    @pytest.mark.extended
    def test_a_level_that_was_accepted_after_the_base_is_not_held_against_it(self, stored, machine, arms):
        git = ["git", "-c", "user.name=n", "-c", "user.email=e"]
        subprocess.run([*git, "add", "-f", "baselines"], check=True)
        subprocess.run([*git, "commit", "-qm", "Store baselines"], check=True)
        machine.factors[1] = 2.0
        stored.run("--perf-accept=all", "--perf-reason=wider blocks", "--perf-runs=5").assert_outcomes(passed=3)
        machine.spells[1] = [1.08]  # suspected, and fast again where it is run once more
        passed = stored.run("--perf-gate", "--perf-against=HEAD")
        passed.assert_outcomes(passed=3)
        assert arms.names == []
        machine.factors[1] = 2.4
        slower = stored.run("--perf-gate", "--perf-against=HEAD")
        slower.assert_outcomes(passed=2, failed=1)
        slower.stdout.fnmatch_lines(["*unconfirmed: the base lacks an accepted change (wider blocks)*"])
        subprocess.run([*git, "commit", "-qam", "Merge what was accepted"], check=True)
        arms.factors["base"] = 2.0
        confirmed = stored.run("--perf-gate", "--perf-against=HEAD")
        confirmed.assert_outcomes(passed=2, failed=1)
        assert "unconfirmed" not in confirmed.stdout.str()

    def test_a_base_that_cannot_run_the_case_hides_no_regression(self, stored, machine, arms):
        machine.factors[1] = 2.0
        arms.factors["base"] = None
        done = stored.run("--perf-gate", "--perf-against=HEAD", "--junitxml=j.xml")
        assert failures("j.xml") == ["test_case[cpu-1]"]
        done.stdout.fnmatch_lines(["*unconfirmed: base was not measured: its pytest ended with exit code 4*"])

    @pytest.mark.extended
    def test_a_base_that_can_run_no_case_is_not_tried_again(self, stored, machine, arms):
        machine.factors = dict.fromkeys(range(3), 2.0)
        arms.factors["base"], arms.no_case = None, True
        done = stored.run("--perf-gate", "--perf-against=HEAD", "--junitxml=j.xml")
        cases = [f"test_case[cpu-{number}]" for number in range(3)]
        assert sorted(failures("j.xml")) == [*cases, "the suite as a whole"]
        assert arms.names == ["base (HEAD)"]
        assert done.stdout.str().count("unconfirmed: base was not measured") >= 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--perf-update=maybe"], "*--perf-update: 'maybe' is not a mode; choose append, improved, accept"),
        (["--perf-update=accept"], "*--perf-update=accept replaces stored runs and needs a reason; add --perf-rea*"),
        (["--perf-reason=x"], "*--perf-reason is for --perf-accept*"),
        (["--perf-runs=0"], "*--perf-runs: 0 is not a number of runs*"),
        (["--perf-against=HEAD"], "*--perf-against is an option of the gate; give --perf-gate with it"),
        (["--perf-gate", "--benchmark-disable"], "*--benchmark-disable measures nothing*"),
        (["--perf-gate", "--perf-gate-budget=0"], "*--perf-gate-budget: '0' is not a duration above 0; *none for*"),
        (["--perf-gate", "-o", "perf_gate_budget=long"], "*ini perf_gate_budget: 'long' is not a duration above 0*"),
        (["--perf-gate-budget=60"], "*--perf-gate-budget limits repeated runs of the gate; give --perf-gate or *"),
        (["-o", "perf_tolerance=7"], "*ini perf_tolerance: '7' is not between 0 and 1*"),
        (["--perf-gate", "--perf-against=nowhere"], "*is not in a git repository"),
        (["--perf-gate", "--perf-fail-on=slow"], "*--perf-fail-on: 'slow' is not a verdict that can fail; choose*"),
        (["--perf-gate", "--perf-fail-on=,"], "*--perf-fail-on has no verdict*"),
        (["--perf-fail-on=default"], "*--perf-fail-on is an option of the gate; give --perf-gate with it"),
        (["--perf-accept=some", "--perf-reason=x"], "*'some' is not valid; write environment or all"),
        (["--perf-accept=all"], "*--perf-accept=all replaces stored runs and needs a reason*"),
        (["--perf-gate", "--perf-against=a", "--perf-base=b"], "*two names of one option; leave --perf-base out"),
        (["--perf-base=main"], "*--perf-base is an option of the gate; give --perf-gate with it"),
        (["--perf-accept=environment", "--perf-update=append"], "*leave --perf-update=append out"),
    ],
)
def test_wrong_options_are_one_line(repo, arguments, message):
    repo.refuses(*arguments, says=message)
