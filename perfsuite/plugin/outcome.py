"""Turn the outcome of a perf case into pytest's: failures without perfsuite's traceback, skips, verdicts, the end."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, cast

import pytest
from _pytest.skipping import evaluate_xfail_marks, xfailed_key

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

    from perfsuite.plugin.expecting import Expecting
    from perfsuite.plugin.suite import Suite


_properties_key = pytest.StashKey[list[tuple[str, object]]]()  # Properties of the last try of a case.
_tries_key = pytest.StashKey[list[str]]()
_passed_key = pytest.StashKey[dict[str, list[str]]]()


class CaseSkipped(pytest.skip.Exception):  # type: ignore[name-defined, misc] # pytest types the attribute as a value
    """A skip that is reported at the test, not at the line that raised it."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse or skip a perf case before it is set up."""
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


def wrap(item: pytest.Item) -> None:
    """Replace ``runtest`` of a perf case; a hook wrapper would add frames to the tracebacks of other tests."""
    item.runtest = functools.partial(_run_case, item, item.runtest)  # type: ignore[method-assign]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Set for the handlers of signals whether a perf case runs."""
    if (suite := item.config.stash.get(suite_key, None)) is not None:
        suite.signals.plain = not is_case(item)


def _run_case(item: pytest.Item, run: Callable[[], object]) -> None:
    """Turn perfsuite's errors into failures that show only their message, and judge a measured case.

    Plugins that run a failed test again call this for every try, and some call no other hook.  So the properties and
    reasons of a try are updated here.
    """
    suite = suite_of(item.config)
    try:
        try:
            run()
        except BaseException as error:
            shown = _shown_error(item, error)
            if shown is error:
                raise
            raise shown from None
        _judge(item, suite)
    except BaseException as error:
        if (benchmark := getattr(item, "funcargs", {}).get("benchmark")) is not None:
            benchmark.has_error = True  # pytest-benchmark must not keep the samples of this try
        if not isinstance(error, pytest.skip.Exception):
            item.stash.setdefault(_tries_key, []).append(first_line(error) or type(error).__name__)
        raise
    finally:
        _give_properties(item, suite)
    if tries := item.stash.get(_tries_key, []):  # the case has a result now
        item.config.stash[missing_key].pop(item.nodeid, None)
        item.config.stash.setdefault(_passed_key, {})[item.nodeid] = tries


def _shown_error(item: pytest.Item, error: BaseException) -> BaseException:
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
    elif type(error).__name__ == "FixtureAlreadyUsed":  # of pytest-benchmark, which may not be installed
        shown = failure(ONE_RECORD)
    return shown


def _judge(item: pytest.Item, suite: Suite) -> None:
    state = item.stash.get(state_key, None)
    if state is None:
        return
    if not state.called:
        used = getattr(getattr(item, "funcargs", {})["benchmark"], "_mode", None)
        raise failure(ONE_RECORD if used else NEVER_CALLED)
    result = state.result
    if result is None or result.outcome == "smoke":
        return
    judgement = item.config.hook.pytest_perfsuite_judge(item=item, result=result)
    if judgement is not None:
        suite.verdicts[item.nodeid] = judgement.verdict
        if judgement.failure:
            raise failure(judgement.failure, VerdictFailed)
    expecting: Expecting | None = item.config.pluginmanager.get_plugin("perfsuite.expecting")
    if expecting is not None and (below := expecting.judge(result)):
        raise failure(below, VerdictFailed)
    if result.outcome == "out_of_memory" and mark_of(item) is not None:
        torchs = getattr(sys.modules.get("torch"), "OutOfMemoryError", RuntimeError)
        raise failure(result.detail or "out of memory", also(OutOfMemory, torchs))


def complete(item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
    """Attach rank logs to a failure and metrics to JUnit, and report a skip at the test instead of at this file."""
    if call.excinfo is not None and isinstance(call.excinfo.value, CaseSkipped) and isinstance(report.longrepr, tuple):
        file, line, _ = item.location
        report.longrepr = (file, (line or 0) + 1, f"Skipped: {call.excinfo.value.msg}")
    state = item.stash.get(state_key, None)
    if state is not None and call.when == "call":
        if report.failed:
            tails = sorted(state.log_tails.items())
            report.sections.extend((f"log of rank {rank}", tail) for rank, tail in tails)
        report.user_properties = item.user_properties  # the same list: a later try updates it


# -- failures and xfail marks ------------------------------------------------------------------------------------


def failure(message: str, kind: type[BaseException] | None = None) -> BaseException:
    """Return a failure that shows only its message, and is a ``kind`` too for ``xfail(raises=...)``.

    Escape sequences in messages of ranks are escaped.
    """
    from perfsuite.base.text import escaped

    shown = pytest.fail.Exception if kind is None else also(pytest.fail.Exception, kind)
    made: BaseException = shown("\n".join(map(escaped, message.split("\n"))), pytrace=False)
    return made


def mark_of(item: pytest.Item) -> Xfail | None:
    """Return the active ``xfail`` mark of a test; None without one, with a false condition or with --runxfail."""
    if getattr(item.config.option, "runxfail", False):
        return None
    return item.stash.get(xfailed_key, None) or evaluate_xfail_marks(item)  # the test may have added a mark


def shown_type(item: pytest.Item, error: PerfsuiteError) -> type[BaseException]:
    """Return the type of the failure for ``error``: of the ranks' exceptions the first one not expected by ``xfail``.

    So a mark with the exception of one rank does not cover another exception of a second rank.
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
    """Return the reason of an ``xfail`` mark with VerdictFailed in ``raises``; None for any other mark."""
    mark = mark_of(item)
    named = mark.raises if mark else None
    names = named if isinstance(named, tuple) else (named,)
    return cast("Xfail", mark).reason if VerdictFailed in names else None


def refuse_unnamed_verdict(item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
    """Turn a report into a failure again if an ``xfail`` mark without ``raises`` covered its verdict."""
    verdict = call.excinfo is not None and isinstance(call.excinfo.value, VerdictFailed)
    if verdict and report.skipped and covers_verdict(item) is None:
        report.outcome = "failed"
        del report.wasxfail


# -- a case that a plugin such as pytest-retry runs again is one case; its last try counts ---------------------------


def retried_lines(config: pytest.Config) -> Iterable[str]:
    """Yield a warning per case that passed only after it was run again."""
    for node, tries in config.stash.get(_passed_key, {}).items():
        yield f"{node}: passed only at try {len(tries) + 1}; the previous try failed: {tries[-1]}"


def keep_first_tries(config: pytest.Config, cases: Iterable[pytest.Item]) -> None:
    """Stop pytest-retry from running a case again, in a run that counts as evidence."""
    if config.pluginmanager.has_plugin("pytest-retry"):
        for item in cases:
            item.add_marker(pytest.mark.flaky(condition=False), append=False)


# -- the end -----------------------------------------------------------------------------------------------------


def _give_properties(item: pytest.Item, suite: Suite) -> None:
    state = item.stash.get(state_key, None)
    if state is not None:
        old = item.stash.get(_properties_key, [])
        own = item.stash[_properties_key] = properties(state, suite.verdicts.get(item.nodeid, ""))
        item.user_properties[:] = [pair for pair in item.user_properties if pair not in old] + own


def properties(state: CaseState, verdict: str) -> list[tuple[str, object]]:
    """Return the JUnit properties of a case: each metric by name, and the verdict if there is one."""
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


def pytest_unconfigure(config: pytest.Config) -> None:
    """End every process if pytest ends without ``pytest_sessionfinish``."""
    close(config)


def close(config: pytest.Config) -> None:
    """End every process of this run; a second call does nothing."""
    suite: Suite | None = config.stash.get(suite_key, None)
    if suite is not None:
        suite.close()
