"""Plugins that run tests in other processes or threads: a case there is refused, and other tests run as before."""

from __future__ import annotations

import pytest

from perfsuite.record.journal import read_journal
from test_correctness.helpers.scripted_driver import ids, repository

FORKS = """
import os, pickle
from _pytest.runner import runtestprotocol

def pytest_runtest_protocol(item, nextitem):
    reader, writer = os.pipe()
    if os.fork() == 0:
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        os.write(writer, pickle.dumps([each._to_json() for each in reports]))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as sent:
        reports = [pytest.TestReport._from_json(each) for each in pickle.load(sent)]
    os.wait()
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    return True
"""
THREADS = """
import threading
from _pytest.runner import runtestprotocol

def pytest_runtest_protocol(item, nextitem):
    thread = threading.Thread(target=runtestprotocol, args=(item,), kwargs={"nextitem": nextitem})
    thread.start()
    thread.join()
    return True
"""
IN_CALLS = """
import threading

@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    errors = []
    def call():
        try:
            pyfuncitem.obj(**arguments)
        except BaseException as error:
            errors.append(error)
    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return True
"""
TWICE = """
def pytest_collection(session):
    items = session.perform_collect()
    session.config.hook.pytest_collection_modifyitems(session=session, config=session.config, items=items)
    session.config.hook.pytest_collection_finish(session=session)
    return True
"""
"""As --looponfail of pytest-xdist does: perform_collect has called both hooks."""
TESTS = "def test_perf(perf):\n    perf(step)\n\ndef test_plain():\n    pass\n"


@pytest.mark.parametrize(
    ("plugin", "where"), [(FORKS, "process"), (THREADS, "thread"), (IN_CALLS, "thread")], ids=["fork", "thread", "call"]
)
def test_a_case_in_a_process_or_thread_of_another_plugin_is_refused(pytester, monkeypatch, plugin, where):
    repo = repository(pytester, monkeypatch, TESTS, conftest=plugin)
    found = repo.run("--perf-journal=j.jsonl")
    found.assert_outcomes(passed=1, failed=1)
    found.stdout.fnmatch_lines([f"perf was called in a {where} that a plugin such as pytest-forked*-m 'not perf'*"])
    assert "cases kept" not in found.stdout.str() + found.stderr.str()
    assert repo.driver.timed() == []


GIVES_PERF = """
def pytest_generate_tests(metafunc):
    for name in ("kind", "perf"):
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, [1, 2])
"""


@pytest.mark.parametrize("tests", ["def test_it(perf):\n    assert perf in (1, 2)\n", None], ids=["alone", "later"])
def test_a_conftest_that_gives_the_values_of_perf_has_no_cases(pytester, tests):
    pytester.makeconftest(GIVES_PERF)
    pytester.makepyfile(tests or "def test_it(kind, perf):\n    assert kind and perf in (1, 2)\n")
    found = pytester.runpytest_inprocess("-v", "-p", "no:randomly")
    ids = [line.partition("::")[2].split()[0] for line in found.outlines if "PASSED" in line]
    assert (["test_it[1]", "test_it[2]"] if tests else [f"test_it[{a}-{b}]" for a in (1, 2) for b in (1, 2)]) == ids
    assert "perfsuite: cpu" not in found.stdout.str()


def test_a_case_is_named_before_the_parametrizations_of_a_conftest(pytester, monkeypatch):
    kinds = "def test_it(perf, kind):\n    perf(step)\n"
    repo = repository(pytester, monkeypatch, kinds, conftest=GIVES_PERF.replace(', "perf"', ","))
    assert ["test_it[cpu-1]", "test_it[cpu-2]"] == ids(repo.run("--collect-only", "-q"))


def test_a_test_that_tries_names_of_fixtures_gets_none_of_perfsuite(pytester):
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.parametrize("name", ["perf", "ranks", "platform", "perf_ranks"])
        def test_it(request, name):
            with pytest.raises(pytest.FixtureLookupError):
                request.getfixturevalue(name)
        """
    )
    pytester.runpytest_inprocess().assert_outcomes(passed=4)


def test_a_collection_that_is_finished_twice_opens_one_journal(pytester, monkeypatch):
    found = repository(pytester, monkeypatch, TESTS, conftest=TWICE).run("--perf-journal=j.jsonl")
    found.assert_outcomes(passed=2)
    assert list(read_journal(pytester.path / "j.jsonl").results) == ["test_it.py::test_perf[cpu]"]


def test_tracebacks_of_other_tests_have_no_frames_of_the_plugin(pytester, monkeypatch):
    repo = repository(pytester, monkeypatch, "def test_perf(perf):\n    perf(step)\n\ndef test_plain():\n    1 / 0\n")
    found = repo.run("--tb=native")
    found.assert_outcomes(passed=1, failed=1)
    found.stdout.fnmatch_lines(["*in test_plain", "ZeroDivisionError*"])
    traceback = found.stdout.str().partition("Traceback")[2].partition("ZeroDivisionError")[0]
    assert "pluggy" in traceback
    assert "perfsuite/plugin" not in traceback


HOOKS = (
    "generate_tests(metafunc) itemcollected(item) collection_modifyitems(items) runtestloop(session) "
    "runtest_protocol(item) runtest_makereport(item) collection_finish(session) report_collectionfinish(config) "
    "terminal_summary(config) sessionfinish(session) unconfigure(config)"
)


@pytest.mark.parametrize("hook", HOOKS.split())
def test_errors_in_hooks_of_a_conftest_have_no_frames_of_the_plugin(pytester, hook):
    pytester.makeconftest(f"def pytest_{hook}:\n    1 / 0\n")
    pytester.makepyfile("def test_it():\n    pass\n")
    found = pytester.runpytest_subprocess()
    text = found.stdout.str() + found.stderr.str()
    assert "ZeroDivisionError" in text
    assert "perfsuite" not in text.partition("Traceback")[2]


def test_an_error_of_a_conftest_at_the_end_is_shown_as_without_the_plugin(pytester):
    pytester.makeconftest("def pytest_sessionfinish(session):\n    raise ConnectionError('no server')\n")
    pytester.makepyfile("def test_it():\n    pass\n")
    found = pytester.runpytest_subprocess()
    found.stderr.fnmatch_lines(["Traceback*", "ConnectionError: no server"])
    assert "perfsuite: error" not in found.stdout.str()


@pytest.mark.parametrize("options", [(), ("-n1",)], ids=["alone", "xdist"])
def test_a_bare_compare_without_a_case_warns_as_without_the_plugin(pytester, options):
    pytester.makepyfile("def test_it(benchmark):\n    benchmark(int)\n")
    found = pytester.runpytest_subprocess("--benchmark-compare", "--benchmark-storage=nosuch", *options)
    found.assert_outcomes(passed=1, warnings=0)
    assert 1 + len(options) == found.stderr.str().count("PytestBenchmarkWarning: Can't compare")


def test_an_xfail_mark_that_the_test_adds_is_that_of_the_case(pytester, monkeypatch):
    added = "    request.node.add_marker(__import__('pytest').mark.xfail(raises=VerdictFailed))\n"
    test = f"from perfsuite import VerdictFailed\ndef test_perf(perf, request):\n{added}    perf(step)\n"
    judge = 'def pytest_perfsuite_judge(item, result):\n    return Judgement(verdict="slow", failure="too slow")\n'
    conftest = "from perfsuite.plugin.hooks import Judgement\n" + judge
    repository(pytester, monkeypatch, test, conftest=conftest).run().assert_outcomes(xfailed=1)


@pytest.mark.parametrize(
    ("arguments", "autoload", "has_options"),
    [
        (("-p", "no:perfsuite"), True, False),
        (("-p", "no:perfsuite.plugin"), True, False),
        (("-p", "perfsuite"), False, True),
        ((), False, False),
    ],
)
def test_the_plugin_is_switched_on_and_off_by_the_name_of_the_package(
    pytester, monkeypatch, arguments, autoload, has_options
):
    if not autoload:
        monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    found = pytester.runpytest_subprocess("-W", "error", *arguments, "--help")
    assert found.ret == 0
    assert ("--perf-gate" in found.stdout.str()) is has_options
