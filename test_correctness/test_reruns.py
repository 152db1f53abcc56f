"""Plugins that run a failed test again: one case, whose last try counts; nothing is run until the gate passes it."""

import json

import pytest

from perfsuite.base.errors import RanksFailed
from perfsuite.record.journal import read_journal
from test_correctness.helpers.scripted_driver import junit, measurement, repository

IN_A_REPORT = """
class Named:
    pass

@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    wanted = item.get_closest_marker("flaky").kwargs.get("condition") is not False
    if not (wanted and call.when == "call" and call.excinfo is not None and report.failed):
        return
    item.ihook.pytest_runtest_teardown(item=item, nextitem=None)
    item._initrequest()
    item.ihook.pytest_runtest_setup(item=item)
    again = pytest.CallInfo.from_call(lambda: item.ihook.pytest_runtest_call(item=item), when="call")
    tried = pytest.TestReport.from_item_and_call(item, again)
    report.outcome, report.longrepr = tried.outcome, tried.longrepr

@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.flaky(retries=1))

def pytest_configure(config):
    config.addinivalue_line("markers", "flaky: run again")
    config.pluginmanager.register(Named(), "pytest-retry")
"""
"""What pytest-retry does: no hook but this one sees that a test is run again."""
IN_THE_PROTOCOL = """
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    from _pytest.runner import runtestprotocol
    reports = runtestprotocol(item, nextitem=nextitem, log=False)
    if any(report.failed for report in reports):
        item._initrequest()
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    return True
"""
"""What flaky and others do."""
PLUGINS = {"rerunfailures": "", "retry": IN_A_REPORT, "protocol": IN_THE_PROTOCOL}
ONCE = """
TRIES = []

def test_first(perf):
    perf(step, name="first")

def test_second(perf):
    TRIES.append(1)
    assert perf(step, name="second").median_s > 0
    assert len(TRIES) > 1, "the first try is never good"

def test_bad(perf):
    perf(step)
    assert False, "as ever"
"""


@pytest.fixture
def rerunning(pytester, monkeypatch):
    pytest.importorskip("pytest_rerunfailures")

    def make(plugin, tests, script=measurement):
        repo = repository(pytester, monkeypatch, tests, script, conftest=PLUGINS[plugin])
        options = ["-p", "rerunfailures", "--reruns=2"] if plugin == "rerunfailures" else []
        return lambda *more: repo.run(*options, *more)

    return make


def failing_first():
    """A script in which the first case fails once."""
    jobs = []

    def script(job):
        jobs.append(job.workload.parameters().get("name"))
        if jobs.count("first") == 1 and jobs[-1] == "first":
            raise RanksFailed("rank 0 on here raised RuntimeError: a transient fault")
        return measurement(job)

    return script


@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_case_that_is_run_again_is_one_case_which_passes_or_fails_once(rerunning, pytester, plugin):
    found = rerunning(plugin, ONCE, failing_first())("--junitxml=j.xml", "--benchmark-json=out.json")
    outcomes = found.parseoutcomes()
    assert (found.ret, outcomes["passed"], outcomes["failed"]) == (1, 2, 1)
    assert "3 measured, 1 failed (1 of them measured);" in found.stdout.str()
    entries = json.loads((pytester.path / "out.json").read_text())["benchmarks"]
    assert [entry["name"] for entry in entries] == ["test_first[cpu]", "test_second[cpu]"]
    for case in junit("j.xml").values():
        names = [each.attrib["name"] for each in case.iter("property")]
        assert len(names) == len(set(names)), "each try's properties take the place of those before"
    printed = " ".join(found.stdout.str().split())  # a long warning is folded
    cause = "rank 0 on here raised RuntimeError: a "
    assert f"test_first[cpu]: passed only at try 2; the previous try failed: {cause}" in printed
    assert "test_bad[cpu]: passed only" not in printed
    (file,) = pytester.path.glob(".perfsuite/journal-*")
    journal = read_journal(file)
    assert set(journal.results) == {f"test_it.py::test_{name}[cpu]" for name in ("first", "second", "bad")}
    assert "a transient fault" in file.read_text(), "the first try is not lost"
    assert "the first try is never good" in file.read_text()


COUNTED = """
import pathlib
import pytest

@pytest.mark.parametrize("number", range(3))
def test_case(perf, number):
    with open(pathlib.Path(__file__).with_name("calls"), "a") as file:
        file.write(str(number))
    perf(step, number=number)
"""


@pytest.mark.extended
@pytest.mark.parametrize("option", [[], ["-x"]], ids=["at the end", "in place"])
@pytest.mark.parametrize("plugin", PLUGINS)
def test_the_gate_takes_the_first_try_of_every_case(stored, pytester, machine, plugin, option):
    pytest.importorskip("pytest_rerunfailures")
    file = pytester.path / "test_it.py"
    file.write_text(file.read_text().partition("import pytest")[0] + COUNTED)
    pytester.makeconftest('import pytest\npytest_plugins = ["perfsuite.plugin"]\n' + PLUGINS[plugin])
    reruns = ["-p", "rerunfailures", "--reruns=2"] if plugin == "rerunfailures" else []
    machine.factors[2] = 1.2
    assert stored.run("--perf-gate", *reruns, *option).parseoutcomes() == {"failed": 1, "passed": 2}
    assert (pytester.path / "calls").read_text() == "012"
    machine.factors[2], machine.errors[2] = 1.0, RanksFailed("rank 0 on here died")
    assert stored.run("--perf-gate", *reruns, *option).parseoutcomes() == {"failed": 1, "passed": 2}
    assert (pytester.path / "calls").read_text() == "012012"


def test_repeated_cases_are_cases_of_their_own(pytester, monkeypatch):
    repeats = "def pytest_generate_tests(metafunc):\n    metafunc.parametrize('again', range(3))\n"
    repo = repository(pytester, monkeypatch, "def test_it(perf, again):\n    perf(step)\n", conftest=repeats)
    repo.run().assert_outcomes(passed=3)
    assert len(repo.driver.jobs) >= 3


@pytest.mark.skipif(pytest.version_tuple < (9,), reason="pytest has the fixture subtests from 9.0 on")
def test_perf_is_called_once_in_a_test_whatever_it_is_made_of(pytester, monkeypatch):
    tests = """
def test_parts(perf, subtests):
    for number in range(2):
        with subtests.test(number=number):
            perf(step, number=number)
"""
    found = repository(pytester, monkeypatch, tests).run()
    assert found.ret == 1
    found.stdout.fnmatch_lines(["*perf was called twice in one test, but one test is one case*"])
