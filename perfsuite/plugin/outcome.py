"""What becomes of a perf case in pytest's eyes: failures without our traceback, skips, judgements, signals, the end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import pytest
from pytest_benchmark.fixture import FixtureAlreadyUsed

from perfsuite.errors import AgentLost, CaseStopped, ExpectedFailure, PerfsuiteError, UnsupportedCase, first_line
from perfsuite.plugin.benchmark import ONE_RECORD
from perfsuite.plugin.collect import is_case
from perfsuite.plugin.fixtures import NEVER_CALLED, CaseState, state_key
from perfsuite.plugin.state import suite_key, suite_of
from perfsuite.units import format_seconds

if TYPE_CHECKING:
    from perfsuite.plugin.suite import Suite


class CaseSkipped(pytest.skip.Exception):  # type: ignore[name-defined, misc] # pytest types the attribute as a value
    """A skip whose place is the test, not the line here that raised it."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse or skip a perf case before anything of it is set up."""
    if not is_case(item):
        return
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
    """Turn perfsuite's errors into failures that show their message alone, and have a measured case judged."""
    if not is_case(item):
        return (yield)
    try:
        returned = yield
    except UnsupportedCase as missing:
        raise CaseSkipped(str(missing)) from None
    except ExpectedFailure as expected:
        raise pytest.xfail.Exception(str(expected), pytrace=False) from None
    except PerfsuiteError as error:
        if isinstance(error, AgentLost):
            item.session.shouldstop = f"perfsuite: {first_line(error)}"
            suite_of(item.config).signals.hurried = True
        raise _failure(str(error)) from None
    except CaseStopped as stopped:
        causes = (str(stopped), suite_of(item.config).lost_agents())
        raise _failure("; ".join(filter(None, causes))) from None
    except FixtureAlreadyUsed:
        raise pytest.fail.Exception(ONE_RECORD, pytrace=False) from None
    _require_called(item)
    _judge(item)
    return returned


def _failure(message: str) -> BaseException:
    """The message alone; what ranks wrote may hold escape sequences, and a terminal is not theirs to colour."""
    from perfsuite.text import escaped

    return pytest.fail.Exception("\n".join(map(escaped, message.split("\n"))), pytrace=False)


def _require_called(item: pytest.Item) -> None:
    """A test that measured nothing must not look like one whose case is well."""
    state = item.stash.get(state_key, None)
    if state is None or state.called:
        return
    benchmark = getattr(item, "funcargs", {})["benchmark"]
    used = getattr(benchmark, "_mode", None)
    raise pytest.fail.Exception(ONE_RECORD if used else NEVER_CALLED, pytrace=False)


def _judge(item: pytest.Item) -> None:
    state = item.stash.get(state_key, None)
    if state is None or state.result is None or state.result.outcome == "smoke":
        return
    judgement = item.config.hook.pytest_perfsuite_judge(item=item, result=state.result)
    if judgement is not None:
        suite_of(item.config).verdicts[item.nodeid] = judgement.verdict
        if judgement.failure:
            raise pytest.fail.Exception(judgement.failure, pytrace=False)


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
        item.user_properties.extend(properties(state, suite_of(item.config).verdicts.get(item.nodeid, "")))
        report.user_properties = list(item.user_properties)


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
