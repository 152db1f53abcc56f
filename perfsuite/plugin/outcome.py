"""What becomes of a perf case in pytest's eyes: failures without our traceback, skips, judgements, signals, the end."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, cast

import pytest
from _pytest.skipping import xfailed_key

from perfsuite.base.errors import (
    AgentLost,
    CaseStopped,
    ExpectedFailure,
    OutOfMemory,
    PerfsuiteError,
    RanksFailed,
    UnsupportedCase,
    VerdictFailed,
    also,
    first_line,
)
from perfsuite.base.units import format_seconds
from perfsuite.plugin.benchmark import ONE_RECORD, require_benchmark
from perfsuite.plugin.collect import is_case
from perfsuite.plugin.ending import missing_key
from perfsuite.plugin.fixtures import NEVER_CALLED, CaseState, state_key
from perfsuite.plugin.state import suite_key, suite_of

if TYPE_CHECKING:
    from _pytest.skipping import Xfail

    from perfsuite.plugin.suite import Suite


_given_key = pytest.StashKey[list[tuple[str, object]]]()
"""Properties that the last try of a case gave its test."""
_tries_key = pytest.StashKey[list[str]]()
_passed_key = pytest.StashKey[dict[str, list[str]]]()


class CaseSkipped(pytest.skip.Exception):  # type: ignore[name-defined, misc] # pytest types the attribute as a value
    """A skip whose place is the test, not the line here that raised it."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse or skip a perf case before anything of it is set up."""
    if not is_case(item):
        return
    require_benchmark(item)
    suite = suite_of(item.config)
    left_s = suite.budget_left_s()
    if left_s is not None and left_s <= 0 and item.get_closest_marker("skip") is None:
        total_s = suite.settings.time_budget_s or 0.0
        journal = suite.session.journal.path if suite.session and suite.session.journal else None
        raise CaseSkipped(
            f"--perf-time-budget of {format_seconds(total_s)} is used up"
            + (f"; go on by --perf-resume={journal}" if journal else "")
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[Any]:
    """Turn perfsuite's errors into failures that show their message alone, and have a measured case judged.

    Plugins that run a failed test again call this for every try, and some call no other hook: so what a try leaves for
    the reports is put in order here.
    """
    if not is_case(item):
        with _plain(item.config):
            return (yield)
    try:
        try:
            returned = yield
        except BaseException as error:
            shown = _as_pytest_has_it(item, error)
            if shown is error:
                raise
            raise shown from None
        _require_called(item)
        _judge(item)
        _expect_out_of_memory(item)
    except BaseException as error:
        _keep_try(item, error)
        raise
    finally:
        give_properties(item)
    _passed(item)
    return returned


@contextmanager
def _plain(config: pytest.Config) -> Iterator[None]:
    """While a test runs that is no perf case."""
    suite: Suite | None = config.stash.get(suite_key, None)
    if suite is None:
        yield
        return
    suite.signals.plain = True
    try:
        yield
    finally:
        suite.signals.plain = False


def _as_pytest_has_it(item: pytest.Item, error: BaseException) -> BaseException:
    """What pytest is to see in place of an ``error`` that a perf case ended with."""
    shown = error
    if isinstance(error, UnsupportedCase):
        shown = CaseSkipped(str(error))
    elif isinstance(error, ExpectedFailure):
        shown = pytest.xfail.Exception(str(error), pytrace=False)
    elif isinstance(error, PerfsuiteError):
        if isinstance(error, AgentLost):
            item.session.shouldstop = f"perfsuite: {first_line(error)}"
            suite_of(item.config).signals.hurried = True
        shown = failure(str(error), shown_type(item, error))
    elif isinstance(error, CaseStopped):
        shown = failure("; ".join(filter(None, (str(error), suite_of(item.config).lost_agents()))))
    elif type(error).__name__ == "FixtureAlreadyUsed":  # pytest-benchmark's, which need not be installed
        shown = failure(ONE_RECORD)
    return shown


def _require_called(item: pytest.Item) -> None:
    """A test that measured nothing must not look like one whose case is well."""
    state = item.stash.get(state_key, None)
    if state is None or state.called:
        return
    benchmark = getattr(item, "funcargs", {})["benchmark"]
    used = getattr(benchmark, "_mode", None)
    raise failure(ONE_RECORD if used else NEVER_CALLED)


def _judge(item: pytest.Item) -> None:
    state = item.stash.get(state_key, None)
    if state is None or state.result is None or state.result.outcome == "smoke":
        return
    judgement = item.config.hook.pytest_perfsuite_judge(item=item, result=state.result)
    if judgement is not None:
        suite_of(item.config).verdicts[item.nodeid] = judgement.verdict
        if judgement.failure:
            raise failure(judgement.failure, VerdictFailed)


def _expect_out_of_memory(item: pytest.Item) -> None:
    """Out of memory is a result and no failure, except of a case that is expected to fail."""
    state = item.stash.get(state_key, None)
    result = state.result if state else None
    if result is not None and result.outcome == "out_of_memory" and mark_of(item) is not None:
        torchs = getattr(sys.modules.get("torch"), "OutOfMemoryError", RuntimeError)
        raise failure(result.detail or "out of memory", also(OutOfMemory, torchs))


def complete(item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
    """Attach the logs of the ranks to a failure, metrics to JUnit, and place a skip at the test, not in this file."""
    if call.excinfo is not None and isinstance(call.excinfo.value, CaseSkipped) and isinstance(report.longrepr, tuple):
        file, line, _ = item.location
        report.longrepr = (file, (line or 0) + 1, f"Skipped: {call.excinfo.value.msg}")
    state = item.stash.get(state_key, None)
    if state is not None and call.when == "call":
        if report.failed:
            tails = sorted(state.log_tails.items())
            report.sections.extend((f"log of rank {rank}", tail) for rank, tail in tails)
        report.user_properties = item.user_properties  # the very list: a try that follows brings it up to date


# -- failures and xfail marks ------------------------------------------------------------------------------------


def failure(message: str, kind: type[BaseException] | None = None) -> BaseException:
    """Return a failure that shows its message alone, and is a ``kind`` too for ``xfail(raises=...)``.

    What ranks wrote may hold escape sequences, and a terminal is not theirs to colour.
    """
    from perfsuite.base.text import escaped

    shown = pytest.fail.Exception if kind is None else also(pytest.fail.Exception, kind)
    made: BaseException = shown("\n".join(map(escaped, message.split("\n"))), pytrace=False)
    return made


def mark_of(item: pytest.Item) -> Xfail | None:
    """The ``xfail`` mark that holds for this test: its condition is true and --runxfail was not given."""
    if getattr(item.config.option, "runxfail", False):
        return None
    return item.stash.get(xfailed_key, None)


def shown_type(item: pytest.Item, error: PerfsuiteError) -> type[BaseException]:
    """The type that stands for ``error``: of what ranks raised the first that the test's ``xfail`` does not expect.

    So a mark that names the exception of one rank does not cover another one that a second rank raised.
    """
    mark = mark_of(item)
    types: list[type[BaseException]] = [also(RanksFailed, each) for each in getattr(error, "raised", ())] or [
        type(error)
    ]
    raises = mark.raises if mark else None
    if isinstance(raises, type | tuple):
        return next((each for each in types if not issubclass(each, raises)), types[0])
    return types[0]


def covers_verdict(item: pytest.Item) -> str | None:
    """The reason of an ``xfail`` mark that expects a verdict: only one that names VerdictFailed does."""
    mark = mark_of(item)
    named = mark.raises if mark else None
    names = named if isinstance(named, tuple) else (named,)
    return cast("Xfail", mark).reason if VerdictFailed in names else None


def refuse_unnamed_verdict(item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
    """Make a report a failure again whose verdict an ``xfail`` without ``raises`` has covered."""
    verdict = call.excinfo is not None and isinstance(call.excinfo.value, VerdictFailed)
    if verdict and report.skipped and covers_verdict(item) is None:
        report.outcome = "failed"
        del report.wasxfail


# -- a case that a plugin such as pytest-retry runs again is one case, whose last try counts ------------------------


def _keep_try(item: pytest.Item, error: BaseException) -> None:
    """Keep why a try failed; pytest-benchmark must not keep what it measured."""
    benchmark = getattr(item, "funcargs", {}).get("benchmark")
    if benchmark is not None:
        benchmark.has_error = True
    if not isinstance(error, pytest.skip.Exception):
        item.stash.setdefault(_tries_key, []).append(first_line(error) or type(error).__name__)


def _passed(item: pytest.Item) -> None:
    """The case is well now: earlier tries are no reason for a missing result."""
    tries = item.stash.get(_tries_key, [])
    if tries:
        item.config.stash[missing_key].pop(item.nodeid, None)
        item.config.stash.setdefault(_passed_key, {})[item.nodeid] = tries


def retried_lines(config: pytest.Config) -> Iterable[str]:
    """A warning per case that passed only when it was run again."""
    for node, tries in config.stash.get(_passed_key, {}).items():
        yield f"{node}: passed only at try {len(tries) + 1}; the one before failed: {tries[-1]}"


def keep_first_tries(config: pytest.Config, cases: Iterable[pytest.Item]) -> None:
    """In a run that counts as evidence: keep pytest-retry, which acts inside a report, from running a case again."""
    if config.pluginmanager.has_plugin("pytest-retry"):
        for item in cases:
            item.add_marker(pytest.mark.flaky(condition=False), append=False)


# -- the end -----------------------------------------------------------------------------------------------------


def give_properties(item: pytest.Item) -> None:
    """Replace the properties of the last try by those of this one."""
    state = item.stash.get(state_key, None)
    if state is not None:
        given = item.stash.get(_given_key, [])
        own = properties(state, suite_of(item.config).verdicts.get(item.nodeid, ""))
        item.user_properties[:] = [pair for pair in item.user_properties if pair not in given] + own
        item.stash[_given_key] = own


def properties(state: CaseState, verdict: str) -> list[tuple[str, object]]:
    """JUnit properties of a case: each metric by name, and the verdict if there is one."""
    pairs: list[tuple[str, object]] = []
    if state.result is not None:
        pairs += [
            (metric.name, metric.value)
            for metric in state.result.metrics
            if metric.value is not None and not metric.moves_with_peak
        ]
        if state.result.outcome != "measured":
            pairs.append(("outcome", state.result.outcome))
    return pairs + ([("verdict", verdict)] if verdict else [])


def finish(session: pytest.Session) -> None:
    """Finish the session after the last case and all that the gate runs again, while there are ranks to run on."""
    suite: Suite | None = session.config.stash.get(suite_key, None)
    if suite is not None and suite.session is not None:
        suite.session.finish()


def begin(session: pytest.Session, phase: Literal["tests", "ends"]) -> None:
    """A signal means something else from here on, where there are perf cases."""
    suite: Suite | None = session.config.stash.get(suite_key, None)
    if suite is not None:
        suite.signals.phase = phase


@pytest.hookimpl(tryfirst=True)
def pytest_keyboard_interrupt(excinfo: pytest.ExceptionInfo[BaseException]) -> None:
    """A run that was told to stop has nothing but pytest's own frames to show; to format them all takes too long."""
    if isinstance(excinfo.value, pytest.Session.Interrupted):
        excinfo.traceback = excinfo.traceback[-1:]


def close_unless_hurried(config: pytest.Config) -> None:
    """End every process before the reports are written.

    In a hurry the reports come first.  Open MPI kills half a second to a second and a half after its SIGTERM, and what
    runs then still ends with this process.
    """
    suite: Suite | None = config.stash.get(suite_key, None)
    if suite is None or not suite.signals.hurried:
        close(config)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Also on ways out that have no session finish."""
    close(config)


def close(config: pytest.Config) -> None:
    """End every process of this run.  Idempotent."""
    suite: Suite | None = config.stash.get(suite_key, None)
    if suite is not None:
        suite.close()
