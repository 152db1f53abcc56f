"""What several concerns do at one hook, in order; a hook that one concern alone needs stands in that concern's module.

Around a ``yield`` stands what the rest of pytest, other plugins included, does at that hook.  One line more is said
after everybody's summary: a driver's exit code, in :mod:`perfsuite.plugin.launch`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from perfsuite.base.errors import first_line
from perfsuite.plugin import (
    benchmark,
    ci,
    collect,
    collisions,
    compare,
    distributed,
    expected,
    gate_options,
    history,
    launch,
    options,
    outcome,
    output,
    page,
    progress,
    projecting,
    recorded,
    tables,
    trace,
    written,
)
from perfsuite.plugin.state import suite_key

if TYPE_CHECKING:
    from perfsuite.plugin.gating import Gating

_selected_key = pytest.StashKey[bool]()
"""True once collection has come to its end and every plugin has selected its tests."""


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Declare options and ini keys; their values are checked when pytest is configured, where an error is one line."""
    config: Any = pluginmanager.get_plugin("pytestconfig")
    collisions.give_way(parser, config, _declare)


def _declare(parser: pytest.Parser) -> None:
    options.declare(parser)
    output.declare(parser)
    ci.declare(parser)
    gate_options.declare(parser)
    tables.declare(parser)
    projecting.declare(parser)
    history.declare(parser)
    page.declare(parser)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config, parser: pytest.Parser) -> Iterator[Any]:
    """Let other plugins and a conftest.py have the options that they declare, also where ours have the same name."""
    try:
        return (yield)
    finally:
        collisions.settle(parser, early_config, _declare)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Check the options before pytest-benchmark looks at its own, and before anything is measured."""
    collisions.stop_giving_way(config)
    compare.take_bare_option(config)
    options.configure(config)
    output.configure(config)
    gate_options.configure(config)  # runs that count as evidence tighten the options above
    tables.configure(config)
    projecting.configure(config)
    history.configure(config)
    page.configure(config)
    distributed.configure(config)
    config.pluginmanager.register(_Files(), "perfsuite.base.files")


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Leave fixtures that other plugins have too to their tests."""
    collisions.let_others_go_first(session)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[Any]:
    """Make the collected tests cases, refuse what is wrong with them, leave out what this run does not ask for."""
    benchmark.give_clock(config, items)
    collect.refuse_wrong_cases(config, items)
    collect.leave_out_extended(config, items)
    returned = yield  # other plugins select too
    config.stash[_selected_key] = True
    return returned


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> Iterator[Any]:
    """It is known which cases there are: open what keeps them, and find out what would be missing at the end.

    pytest calls this at the end of a collection that an error or Ctrl-C ended, too: nothing will run then.
    """
    if not session.config.stash.get(_selected_key, False):
        return (yield)
    distributed.leave_out_measured(session)
    cases = collect.cases_of(session)
    if not launch.take_part(session, cases):
        return (yield)
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
    written.begin(session, cases)
    return returned


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> Iterator[Any]:
    """The gate settles what is open and the peaks are measured again while there are ranks to run on."""
    launch.serve(session)
    gate = _gate(session.config)
    outcome.begin(session, "tests")
    try:
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
    finally:
        outcome.begin(session, "ends")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What a report of a perf case means to everybody who keeps one."""
    if collect.is_case(item):
        benchmark.drop_foreign_benchmark(item)
    report = yield
    if collect.is_case(item):
        expected.refuse_unnamed_verdict(item, call, report)
        benchmark.mark_failed(item, report)
        trace.add(item, call)
        tables.keep_reason(item, call, report)
        outcome.complete(item, call, report)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[Any]:
    """End every process before the reports are written: whatever happens in those, nothing is left running."""
    config, gate = session.config, _gate(session.config)
    launch.give_output(config)
    outcome.begin(session, "ends")
    try:
        if gate is not None:
            gate.finish(session)
        if suite_key in config.stash:
            written.attempt(config, "the comparison", lambda: compare.leave_out_changed(session))
            written.attempt(config, "the record of the run", lambda: recorded.end(session, gate))
        outcome.close_unless_hurried(config)
        written.attempt(config, "the summary was not written", lambda: ci.write(config))
        written.attempt(config, "nothing was added to the history", lambda: history.finish(session))
        return (yield)
    finally:
        if gate is not None and gate.problem and not config.stash.get(written.summarised_key, False):
            written.fail(config, first_line(gate.problem))
        written.tell(session)
        outcome.close(config)


class _Files:
    """Files that were asked for, after everybody else's such as JUnit's and before anything is printed."""

    @pytest.hookimpl(wrapper=True)  # inside the terminal's, which is registered later, and around pytest-benchmark's
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[Any]:
        config = session.config
        returned = None
        try:
            returned = yield
        except OSError as error:  # pytest would print this and nothing else: no verdict, no summary
            written.fail(config, f"another plugin could not write its file: {error}")
        written.attempt(config, "--perf-trace", lambda: trace.write(config))
        for what, place, write in (
            ("page", config.stash.get(page.page_key, None), page.write),
            ("report", config.stash[tables.state_key].path, tables.write),
        ):
            written.attempt(config, f"{what} {place} was not written", functools.partial(write, config))
        written.settle(session)
        return returned


@pytest.hookimpl(tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """perfsuite's sections, after pytest's failures and before other plugins' tables."""
    config.stash[written.summarised_key] = True
    if suite_key in config.stash and options.runs_tests(config):
        from perfsuite.plugin.summary import show as show_summary

        show_summary(terminalreporter, config)
        output.leave_out_perf_rows(config, config.stash.get(recorded.cases_key, frozenset()))
    for line in config.stash.get(compare.apart_key, []):
        output.Out(terminalreporter).fold(line, yellow=True)
    trace.show(terminalreporter, config)
    if _gate(config) is not None:
        from perfsuite.plugin.gating import show as show_gate

        show_gate(terminalreporter, config)
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
