"""What several concerns do at one hook, in order; a hook that one concern alone needs stands in that concern's module.

Around a ``yield`` stands what the rest of pytest, other plugins included, does at that hook.  One line more is said
after everybody's summary: the driver's exit code, in :mod:`perfsuite.plugin.launch`.
"""

from __future__ import annotations

import importlib
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from perfsuite.plugin import (
    benchmark,
    ci,
    collect,
    compare,
    distributed,
    gate_options,
    history,
    options,
    outcome,
    output,
    page,
    progress,
    projecting,
    recorded,
    tables,
    trace,
)
from perfsuite.plugin.state import suite_key

if TYPE_CHECKING:
    from perfsuite.plugin.gating import Gating


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare options and ini keys; their values are checked when pytest is configured, where an error is one line."""
    options.declare(parser)
    output.declare(parser)
    ci.declare(parser)
    gate_options.declare(parser)
    tables.declare(parser)
    projecting.declare(parser)
    history.declare(parser)
    page.declare(parser)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Check the options before pytest-benchmark looks at its own, and before anything is measured."""
    compare.take_bare_option(config)
    options.configure(config)
    output.configure(config)
    gate_options.configure(config)  # runs that count as evidence tighten the options above
    tables.configure(config)
    projecting.configure(config)
    history.configure(config)
    page.configure(config)
    distributed.configure(config)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Make the collected tests cases, refuse what is wrong with them, leave out what this run does not ask for."""
    benchmark.give_clock(config, items)
    collect.refuse_wrong_cases(config, items)
    collect.leave_out_extended(config, items)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> Iterator[Any]:
    """It is known which cases there are: open what keeps them, and find out what would be missing at the end."""
    distributed.leave_out_measured(session)
    cases = collect.cases_of(session)
    session.config.stash[recorded.cases_key] = frozenset(item.nodeid for item in cases)
    compare.give_bare_option_back(session)
    gate_options.refuse_no_cases(session, cases)
    collect.open_journal(session, cases)
    returned = yield  # pytest prints the header and how many tests there are
    progress.begin(session, cases)
    if cases and options.runs_tests(session.config):
        gating = importlib.import_module("perfsuite.plugin.gating")  # half of perfsuite; ranks come up meanwhile
        session.config.pluginmanager.register(gating, gating.__name__)
        gating.begin(session, cases)
    trace.begin(session, cases)
    tables.begin(session, cases)
    ci.begin(session, cases)
    history.begin(session, cases)
    page.begin(session, cases)
    return returned


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> Iterator[Any]:
    """The gate settles what is open and the peaks are measured again while there are ranks to run on."""
    outcome.fail_the_case_on_sigterm(session)
    gate = _gate(session.config)
    try:
        returned = yield
    except BaseException:  # somebody ended the run, who does not want to wait
        if gate is not None:
            gate.give_up()
        raise
    if gate is not None:
        gate.end(session)
    outcome.finish(session)
    return returned


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What a report of a perf case means to everybody who keeps one."""
    report = yield
    if collect.is_case(item):
        benchmark.mark_failed(item, report)
        trace.add(item, call)
        tables.keep_reason(item, call, report)
        outcome.complete(item, call, report)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[Any]:
    """End every process before the reports are written: whatever happens in those, nothing is left running."""
    gate = _gate(session.config)
    try:
        if gate is not None:
            gate.finish(session)
        if suite_key in session.config.stash:
            compare.leave_out_changed(session)
            recorded.end(session, gate)
        outcome.close_unless_hurried(session.config)
        ci.write(session.config)
        history.finish(session)
        return (yield)
    finally:
        outcome.close(session.config)


@pytest.hookimpl(tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """perfsuite's sections, after pytest's failures and before other plugins' tables."""
    if suite_key in config.stash and options.runs_tests(config):
        from perfsuite.plugin.summary import show as show_summary

        show_summary(terminalreporter, config)
        output.leave_out_perf_rows(config, config.stash[recorded.cases_key])
    for line in config.stash.get(compare.apart_key, []):
        output.Out(terminalreporter).fold(line, yellow=True)
    trace.show(terminalreporter, config)
    if _gate(config) is not None:
        from perfsuite.plugin.gating import show as show_gate

        show_gate(terminalreporter, config)
    page.write(config)
    if recorded.record_key in config.stash:
        importlib.import_module("perfsuite.plugin.summary").show_screen(terminalreporter, config)
    tables.show(terminalreporter, config)
    ci.show(terminalreporter, config)
    history.show(terminalreporter, config)
    page.show(terminalreporter, config)
    distributed.show(terminalreporter, config)


def _gate(config: pytest.Config) -> Gating | None:
    """The gate of this run; None without one, and then its module need not be there."""
    gate: Gating | None = config.pluginmanager.get_plugin("perfsuite.gating")
    return gate
