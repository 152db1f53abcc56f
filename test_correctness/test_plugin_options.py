"""Options: what each does to a case, and one line for each wrong value."""

import dataclasses
import re
import sys

import pytest

from perfsuite.cli import main as cli
from perfsuite.plugin.declarations import GROUPS
from perfsuite.record.journal import read_journal
from perfsuite.record.workload import Budget
from test_correctness.helpers.scripted_driver import ROOT, repository

ONE = "def test_one(perf):\n    perf(step)\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--perf-scale=huge"], "--perf-scale: 'huge' is not a scale; choose full or small"),
        (["--perf-pin=sockets"], "--perf-pin: 'sockets' is not a way to pin ranks; choose none, cores or numa"),
        (["--perf-backend=gloo2"], "--perf-backend: 'gloo2' is not a backend of cpu devices; choose gloo"),
        (["--perf-timeout=soon"], "--perf-timeout: duration 'soon' is not a number followed by us, ms, s, min or h*"),
        (["--perf-timeout=0"], "--perf-timeout: 0 is not above 0; give for example 90s"),
        (["-o", "perf_timeout=never"], "ini perf_timeout: duration 'never' is not a number*"),
        (["--perf-time-budget=-5s"], "--perf-time-budget: duration '-5s' is not a number*"),
        (["--perf-resume=missing.jsonl"], "--perf-resume: */missing.jsonl is not a file; give the journal*"),
        (["--perf-journal=test_it.py"], "--perf-journal: */test_it.py exists and is not overwritten; choose another*"),
        (["--perf-journal=test_it.py/j"], "journal */test_it.py/j cannot be made: *; name another file by --perf-*"),
        (["--perf-platform=h2000"], "platform 'h2000' is unknown, did you mean 'h200'? choose from *"),
        (["--perf-platform=h2000", "-k", "nothing"], "platform 'h2000' is unknown, *"),
        (["-o", "perf_platforms=mine.toml"], "platform file */mine.toml is not TOML: *; correct that line"),
        (["-o", "perf_platforms=nowhere.toml"], "platform file */nowhere.toml cannot be read: *; correct the path*"),
    ],
)
def test_a_wrong_value_is_one_line_and_exit_4(pytester, monkeypatch, arguments, message):
    repo = repository(pytester, monkeypatch, ONE)
    pytester.path.joinpath("mine.toml").write_text("[platform.mine\n")
    repo.refuses(*arguments, says=message)


@pytest.mark.parametrize("quiet", [[], ["-qq"]], ids=" ".join)
def test_a_journal_that_the_root_cannot_take_is_in_the_users_cache(pytester, monkeypatch, capsys, quiet):
    repo = repository(pytester, monkeypatch, ONE)
    pytester.path.joinpath(".perfsuite").write_text("a file in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(pytester.path / "cache"))
    found = repo.run(*quiet)
    assert found.ret == pytest.ExitCode.OK
    (journal,) = pytester.path.glob("cache/perfsuite/journals/*/journal-*.jsonl")
    assert journal.parent.stat().st_mode & 0o777 == 0o700
    told = [line for line in found.outlines if line.startswith("perfsuite: the journal of this run is ")]
    why = f"{pytester.path}/.perfsuite cannot be written: Not a directory"
    assert told == [f"perfsuite: the journal of this run is {journal}: {why}"]
    capsys.readouterr()
    assert cli.main(["show"]) == 0
    assert f"journal {journal}\n" in capsys.readouterr().out


def test_a_run_without_a_place_for_its_journal_is_one_line(pytester, monkeypatch):
    repo = repository(pytester, monkeypatch, ONE)
    for name in (".perfsuite", "cache"):
        pytester.path.joinpath(name).write_text("a file in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(pytester.path / "cache"))
    repo.refuses(says="no place for the journal: */.perfsuite cannot be written: *--perf-journal")


LONGER = {"min_rounds": 9, "max_time_s": 2.5, "warmup_time_s": 2.5}
MOST = {"min_rounds": 5000, "max_rounds": 5000, "warmup_min_s": 3.0}
WATCHED = {"cache_flush": True, "yardstick": True, "timeout_s": 180.0, "fixed_timeout": True}


@pytest.mark.parametrize(
    ("arguments", "changes"),
    [
        ([], {}),
        (["--benchmark-min-rounds=9", "--benchmark-max-time=2.5"], LONGER),
        (["--benchmark-min-rounds=5000", "--perf-warmup=3s"], MOST),
        (["--benchmark-disable"], {"smoke": True}),
        (["--benchmark-disable", "--benchmark-enable"], {}),
        (["-o", "perf_timeout=7"], {"timeout_s": 7.0}),
        (["-o", "perf_timeout=7", "--perf-timeout=500ms"], {"timeout_s": 0.5, "fixed_timeout": True}),
        (["--perf-cache-flush", "--perf-yardstick", "--perf-timeout=3min"], WATCHED),
    ],
)
def test_the_budget_of_a_case(pytester, monkeypatch, arguments, changes):
    repo = repository(pytester, monkeypatch, ONE)
    assert repo.run(*arguments).ret == 0
    assert repo.driver.jobs[0].budget == dataclasses.replace(Budget(), **changes)


def test_markers_change_the_budget_of_their_case(pytester, monkeypatch):
    tests = """
import pytest

@pytest.mark.perf_timeout(90)
@pytest.mark.benchmark(min_rounds=2, max_time=0.5, group="mine")
def test_marked(perf):
    perf(step)

@pytest.mark.perf_timeout(seconds="2min")
def test_text(perf):
    perf(step)
"""
    repo = repository(pytester, monkeypatch, tests)
    assert repo.run().ret == 0
    marked, text = (job.budget for job in repo.driver.jobs)
    assert marked == Budget(min_rounds=2, max_time_s=0.5, warmup_time_s=0.5, timeout_s=90.0, fixed_timeout=True)
    assert text == Budget(timeout_s=120.0, fixed_timeout=True)


@pytest.mark.parametrize("marker", ["perf_timeout(0)", "perf_timeout()", "perf_timeout(1, 2)", "perf_timeout(x=1)"])
def test_a_malformed_timeout_marker_names_the_case(pytester, monkeypatch, marker):
    repo = repository(pytester, monkeypatch, f"import pytest\n@pytest.mark.{marker}\n{ONE}")
    repo.refuses(says="test_it.py::test_one[[]cpu[]]: marker perf_timeout*")


def test_fresh_processes_for_every_case(pytester, monkeypatch):
    repo = repository(pytester, monkeypatch, ONE)
    repo.run()
    repo.run("--perf-fresh")
    assert [job.fresh for job in repo.driver.jobs] == [False, True]


def test_a_repository_without_perf_cases_sees_nothing_of_the_plugin(pytester, monkeypatch):
    repo = repository(pytester, monkeypatch, "def test_plain(benchmark):\n    benchmark(lambda: None)\n")
    monkeypatch.setenv("SLURM_JOB_ID", "7")  # an allocation without a step: refused where there are perf cases
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    found = repo.run("--perf-platform=nonsense", "-o", "perf_platforms=nowhere.toml", "--benchmark-json=out.json")
    found.assert_outcomes(passed=1)
    # pytest itself names an installed plugin in its own line
    said = [line for line in found.outlines if not line.startswith("plugins: ")]
    assert not re.search("perfsuite|journal", "\n".join(said).replace(str(pytester.path), ""))
    assert "perfsuite" not in pytester.path.joinpath("out.json").read_text()
    assert not pytester.path.joinpath(".perfsuite").exists()
    assert repo.driver.started == 0


def test_a_launcher_that_contradicts_itself_is_a_usage_error_where_there_are_perf_cases(pytester, monkeypatch):
    repo = repository(pytester, monkeypatch, ONE)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    repo.refuses(says="RANK=0 WORLD_SIZE=2 without LOCAL_RANK*")


@pytest.mark.parametrize("arguments", [["--collect-only"], ["--benchmark-skip"], ["--fixtures"], ["--markers"]])
def test_nothing_is_started_where_nothing_will_run(pytester, monkeypatch, arguments):
    repo = repository(pytester, monkeypatch, ONE)
    assert repo.run(*arguments).ret == 0
    assert (repo.driver.started, repo.driver.jobs) == (0, [])
    assert not list(pytester.path.glob("**/journal-*"))


def test_workers_start_during_collection_and_are_closed_at_the_end(pytester, monkeypatch):
    repo = repository(pytester, monkeypatch, ONE)
    assert repo.run("-k", "nothing").ret == pytest.ExitCode.NO_TESTS_COLLECTED
    assert repo.driver.started == 1
    assert repo.driver.closed >= 1


@pytest.mark.parametrize(
    "recorded",
    [{}, {"perf-pin": "numa", "perf-backend": "gloo", "perf-warmup": "3s", "perf-sustain": "15s"}],
    ids=["none", "some"],
)
def test_options_that_change_what_is_timed_are_recorded(pytester, monkeypatch, recorded):
    given = [f"--{name}={value}" for name, value in recorded.items()]
    flags, words = (["--perf-cache-flush"], {"perf-cache-flush": "yes"}) if given else ([], {})
    run = repository(pytester, monkeypatch, ONE).run("--perf-journal=j.jsonl", *given, *flags)
    run.assert_outcomes(passed=1)
    (result,) = read_journal(pytester.path / "j.jsonl").results.values()
    assert result.environment["options"] == recorded | words


THEIRS = """
import pytest

def pytest_addoption(parser):
    parser.addoption("--perf-report", action="store_true", help="theirs")
    parser.addoption("--perf-scale", default="x", choices=["x", "y"])
    parser.addoption("--their-runs", dest="perf_runs", default="many")
    parser.addini("perf_timeout", "theirs", default="")

@pytest.fixture
def theirs(pytestconfig):
    return [pytestconfig.getoption(name) for name in ("--perf-report", "perf_scale", "perf_runs")]
"""


@pytest.mark.parametrize("loaded", ["-p", "conftest"])
def test_options_that_a_conftest_declares_are_its_own(pytester, monkeypatch, loaded):
    """Real ones: pytest refuses a second option of one name, whose ever it is.

    What is taken back while others declare theirs is ours alone: an option that a conftest adds to our group stays, as
    test_perf/conftest.py does.
    """
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("PYTEST_PLUGINS", raising=False)
    mine = "def pytest_addoption(parser):\n    parser.getgroup('perfsuite').addoption('--perf-mine', default='none')\n"
    pytester.makeconftest(mine + ('pytest_plugins = ["perfsuite.plugin"]\n' if loaded == "conftest" else ""))
    below = pytester.mkpydir("below")  # another conftest.py: options are taken back once more
    (below / "conftest.py").write_text(THEIRS)
    (below / "test_theirs.py").write_text(
        "import os\ndef test_theirs(theirs, pytestconfig):\n"
        "    assert str([*theirs, pytestconfig.getoption('perf_mine')]) == os.environ['WANTED']\n"
    )
    options = ["-p", "perfsuite.plugin"] if loaded == "-p" else []
    changed = ["--perf-report", "--perf-scale", "y", "--their-runs", "few", "--perf-timeout", "3s", "--perf-mine=here"]
    for given, wanted in (([], [False, "x", "many", "none"]), (changed, [True, "y", "few", "here"])):
        monkeypatch.setenv("WANTED", str(wanted))
        found = pytester.runpytest_subprocess(*options, *given, "below", "-p", "no:hypothesispytest")
        found.assert_outcomes(passed=1)
        assert "perfsuite:" not in found.stdout.str()


def test_help_groups_the_options_by_purpose(pytester, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("PYTEST_PLUGINS", raising=False)
    pytester.makeconftest('pytest_plugins = ["perfsuite.plugin"]\n' + THEIRS)
    found = pytester.runpytest_subprocess("--help", "-p", "no:hypothesispytest").outlines
    titles = [line for line in found if line.startswith("perfsuite: ")]
    assert titles == [f"perfsuite: {purpose}:" for purpose, _ in GROUPS.values()]
    at = {name: number for number, line in enumerate(found) for name in re.findall(r"^  (--perf-[a-z-]+)", line)}
    for title, (_, options) in zip(titles, GROUPS.values(), strict=True):
        for name, *_ in options:
            if name not in THEIRS and name[2:].replace("-", "_") not in THEIRS:
                last = max(number for number, line in enumerate(found[: at[name]]) if line in titles)
                assert found[last] == title


def test_a_run_with_perf_cases_says_which_options_it_does_not_have(pytester, monkeypatch):
    found = repository(pytester, monkeypatch, ONE, conftest=THEIRS).run()
    found.assert_outcomes(passed=1)
    found.stdout.fnmatch_lines(
        ["perfsuite: warning: another plugin or a conftest.py has --perf-scale, *: perfsuite's option * is off"]
    )


INSTALLED = (
    THEIRS
    + """
@pytest.fixture(scope="session")
def platform():
    return "theirs"

@pytest.fixture
def ranks(platform):
    return "ranks of " + platform
"""
)
USES_THEIRS = """
def test_theirs(theirs, platform, ranks, pytestconfig):
    assert theirs == [False, "x", "many"]
    assert (platform, ranks) == ("theirs", "ranks of theirs")
    assert pytestconfig.getini("perf_timeout") == ""
"""


def install(pytester, monkeypatch, code, *, last=False):
    """A plugin ``installed`` with an entry point, loaded before perfsuite or after it."""
    (facts := pytester.path / "site" / "installed-1.dist-info").mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: installed\nVersion: 1\n")
    (facts / "entry_points.txt").write_text("[pytest11]\ninstalled = installed\n")
    (facts.parent / "installed.py").write_text(code)
    monkeypatch.setattr(sys, "path", [*sys.path, str(facts.parent)] if last else [str(facts.parent), *sys.path])


@pytest.mark.parametrize("last", [True, False])
def test_another_installed_plugin_with_the_same_names_keeps_them(pytester, monkeypatch, last):
    """Whichever is loaded first: its options, ini keys and fixtures are its tests', and perf cases have ours."""
    cases = (
        "@world_sizes(2)\ndef test_two(perf, platform, ranks):\n    assert platform.name\n    perf(step, on=ranks)\n"
    )
    repo = repository(pytester, monkeypatch, ONE + cases + USES_THEIRS)
    (pytester.path / "conftest.py").unlink()
    install(pytester, monkeypatch, INSTALLED, last=last)
    found = repo.run("--perf-gate", "--perf-allow-ungated")
    found.assert_outcomes(passed=3)
    found.stdout.fnmatch_lines(["perfsuite: warning: another plugin or a conftest.py has --perf-scale, *"])


def test_values_of_others_are_taken_for_no_option_of_ours(pytester, monkeypatch):
    """Those too that are read after pytest was configured: summary, annotations, hosts, the page."""
    repo = repository(pytester, monkeypatch, ONE)
    names = ("--perf-summary", "--perf-annotations", "--perf-show-hosts", "--perf-html", "--perf-time-budget")
    declared = "".join(f"    parser.addoption({name!r}, default=['theirs'])\n" for name in names)
    inis = "".join(f"    parser.addini({name!r}, 'theirs', default='yes')\n" for name in ("perf_html", "perf_report"))
    install(pytester, monkeypatch, f"def pytest_addoption(parser):\n{declared}{inis}", last=True)
    found = repo.run()
    found.assert_outcomes(passed=1)
    assert not list(pytester.path.glob("**/*.html"))


def test_a_fixture_perf_of_another_plugin_goes_first_and_that_is_said(pytester, monkeypatch):
    repo = repository(pytester, monkeypatch, "def test_it(perf, ranks):\n    pass\n")
    install(pytester, monkeypatch, "import pytest\n@pytest.fixture\ndef perf():\n    return None\n")
    found = repo.run()
    found.stdout.fnmatch_lines(["perfsuite: warning: plugin installed has a fixture perf too, which 1 test uses; *"])
