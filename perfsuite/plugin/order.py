"""Hooks of pytest at which several concerns act, in order; a hook of one concern only is in the module of the concern.

At a ``yield`` pytest and other plugins do their part of the hook.
"""

from __future__ import annotations

import importlib
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from perfsuite.base.errors import PerfsuiteError, first_line
from perfsuite.plugin import (
    benchmark,
    collect,
    collisions,
    declarations,
    ending,
    fixtures,
    gate_options,
    launch,
    options,
    outcome,
    outputs,
    progress,
    projecting,
    published,
)
from perfsuite.plugin.state import suite_key, suite_of

if TYPE_CHECKING:
    from perfsuite.plugin.gating import Gating

_selected_key = pytest.StashKey[bool]()
"""True once collection has come to its end and every plugin has selected its tests."""


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Declare options and ini keys; ``pytest_configure`` checks their values, because there an error is one line."""
    config: Any = pluginmanager.get_plugin("pytestconfig")
    collisions.give_way(parser, config, declarations.declare)
    launch.return_status(pluginmanager)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config, parser: pytest.Parser) -> Iterator[Any]:
    """Let other plugins and a conftest.py declare options of the same names as perfsuite's."""
    try:
        return (yield)
    finally:
        collisions.settle(parser, early_config, declarations.declare)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Check the options before pytest-benchmark looks at its own, and before anything is measured."""
    collisions.stop_giving_way(config)
    benchmark.take_bare_option(config)
    options.configure(config)
    ending.configure(config)
    gate_options.configure(config)  # runs that count as evidence tighten the options above
    outputs.configure(config)
    projecting.configure(config)
    published.configure(config)
    collect.refuse_dealt_out(config)
    config.pluginmanager.register(_Files(), "perfsuite.base.files")
    if options.short_names(config):
        config.pluginmanager.register(fixtures.ShortNames(), "perfsuite.short_names")


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Use the fixtures of other plugins before perfsuite's of the same name."""
    collisions.let_others_go_first(session)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark every perf case and wrap its run."""
    if collect.is_case(item):
        collect.add_markers(item)
        outcome.wrap(item)
        suite_of(item.config)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse options that need perf cases in a run without one."""
    if suite_key not in config.stash:
        collect.refuse_wrong_cases(config, items)
        published.select(config, items, [], ())
        config.stash[_selected_key] = True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse options that need perf cases, and end the search for agents."""
    if suite_key not in session.config.stash:
        _open(session)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Print the output of a rank other than 0, and options that had no effect."""
    launch.give_output(session.config)
    if suite_key not in session.config.stash:
        ending.tell(session)


def _open(session: pytest.Session) -> bool:
    """Open the journal for the selected cases; return False if that is done or this process is an agent.

    pytest finishes a collection also after an error or Ctrl-C: nothing will run then. ``--looponfail`` of pytest-xdist
    does it twice.
    """
    config = session.config
    if not config.stash.get(_selected_key, False) or ending.cases_key in config.stash:
        return False
    collect.leave_out_measured(session)
    cases = collect.cases_of(session)
    if not launch.take_part(session, cases):
        return False
    config.stash[ending.cases_key] = {item.nodeid: (item.location[0], (item.location[1] or 0) + 1) for item in cases}
    benchmark.give_bare_option_back(session)
    gate_options.refuse_no_cases(session, cases)
    if cases:
        try:
            suite_of(config).open()
        except PerfsuiteError as error:
            raise pytest.UsageError(str(error)) from None
    return True


class WithCases:
    """Wrappers that only a run with a perf case has: they would add frames to the tracebacks of other plugins."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> Iterator[Any]:
        """Turn collected tests into cases, refuse wrong ones, and deselect those that this run does not need."""
        benchmark.give_clock(config, items)
        collect.refuse_wrong_cases(config, items)
        cases, suite = [item for item in items if collect.is_case(item)], suite_of(config)
        published.select(config, items, cases, {suite.machine.name, *suite.named} if cases else ())
        collect.leave_out_extended(config, items)
        returned = yield  # other plugins select too
        if cases:  # stable: the others stay in order
            items.sort(key=lambda item: item.get_closest_marker("soak") is not None and collect.is_case(item))
        config.stash[_selected_key] = True
        return returned

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_finish(self, session: pytest.Session) -> Iterator[Any]:
        """Open the journal and the outputs for the selected cases, and start the gate."""
        if not _open(session):
            return (yield)
        config, cases = session.config, collect.cases_of(session)
        returned = yield  # pytest prints the header and how many tests there are
        progress.begin(session, cases)
        if cases and options.runs_tests(config):
            gating = importlib.import_module("perfsuite.plugin.gating")  # half of perfsuite; the ranks start meanwhile
            config.pluginmanager.register(gating, gating.__name__)
            gating.begin(session, cases)
            if any(collisions.option(config, name) is not None for name in ("perf_expect", "perf_expect_devices")):
                importlib.import_module("perfsuite.plugin.expecting").begin(session, cases)
        outputs.begin(session, cases)
        return returned

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Iterator[Any]:
        """Run the tests; then let the gate settle open cases and measure the peaks again, while the ranks still run."""
        suite, gate = suite_of(session.config), _gate(session.config)
        if launch.is_agent(session.config):
            launch.serve(session, suite.machine)
        suite.signals.phase = "tests"
        try:
            try:
                returned = yield
            except BaseException:  # the user ended the run and does not want to wait
                if gate is not None:
                    gate.give_up()
                raise
            if gate is not None:
                gate.end(session)
            if suite.session is not None:
                suite.session.finish()  # after the repeated runs of the gate, while the ranks still run
            return returned
        finally:
            suite.signals.phase = "ends"

    @pytest.hookimpl(tryfirst=True)
    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Keep one frame of an interrupted run: all frames are pytest's own, and formatting them takes too long."""
        if isinstance(excinfo.value, pytest.Session.Interrupted):
            excinfo.traceback = excinfo.traceback[-1:]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Complete the report of a perf case before other plugins store it."""
        if collect.is_case(item):
            benchmark.drop_foreign_benchmark(item)
        report = yield
        if collect.is_case(item):
            outcome.refuse_unnamed_verdict(item, call, report)
            benchmark.mark_failed(item, report)
            outputs.trace(item, call)
            ending.keep_reason(item, call, report)
            outcome.complete(item, call, report)
        elif call.when == "call":
            suite_of(item.config).signals.plain = False
        return report

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[Any]:
        """End every process before the reports are written, so that no failure there can leave one running."""
        config, suite, gate = session.config, suite_of(session.config), _gate(session.config)
        suite.signals.phase = "ends"
        try:
            if gate is not None:
                gate.finish(session)
            if (expecting := config.pluginmanager.get_plugin("perfsuite.expecting")) is not None:
                expecting.finish(session)
            ending.attempt(config, "the comparison", lambda: benchmark.leave_out_changed(session))
            ending.attempt(config, "the record of the run", lambda: _make_record(session, gate))
            # In a hurry the reports come first: Open MPI kills 0.5 to 1.5 seconds after its SIGTERM, and the remaining
            # rank processes end with this process.
            if not suite.signals.hurried:
                suite.close()
            outputs.write(config, before_others=True)
            return (yield)
        finally:
            if gate is not None and gate.problem and not config.stash.get(ending.summarised_key, False):
                ending.fail(config, first_line(gate.problem))
            ending.tell(session)
            outcome.close(config)


class _Files:
    """Writes the requested files after those of other plugins, such as JUnit's, and before anything is printed."""

    @pytest.hookimpl(hookwrapper=True)  # adds no frame to tracebacks; inside the terminal's, which is registered later
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, Any, None]:
        config, ended = session.config, (yield)
        if suite_key not in config.stash:
            return
        if ended.excinfo and issubclass(ended.excinfo[0], OSError):  # pytest would print only this
            ending.fail(config, f"another plugin could not write its file: {ended.excinfo[1]}")
            ended.force_result([])
        outputs.write(config, before_others=False)
        ending.settle(session)


@pytest.hookimpl(tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print perfsuite's sections, after pytest's failures and before other plugins' tables."""
    config.stash[ending.summarised_key] = True
    if suite_key in config.stash and options.runs_tests(config):
        from perfsuite.plugin.summary import show as show_summary

        show_summary(terminalreporter, config)
        cases = config.stash.get(ending.cases_key, {})
        ending.leave_out_perf_rows(config, cases)
    for line in config.stash.get(benchmark.apart_key, []):
        ending.Out(terminalreporter).fold(line, yellow=True)
    outputs.show(terminalreporter, config, "perf_trace")
    if (gate := _gate(config)) is not None:
        gate.show(terminalreporter)
    outputs.show(terminalreporter, config, "perf_report", "perf_history", "perf_html")
    collect.show_left_out(terminalreporter, config)
    if (expecting := config.pluginmanager.get_plugin("perfsuite.expecting")) is not None:
        expecting.show(terminalreporter)
    if ending.record_key in config.stash:
        from perfsuite.plugin.summary import annotate, show_screen

        annotate(terminalreporter, config)
        show_screen(terminalreporter, config)  # last: it ends with the next command


def _make_record(session: pytest.Session, gate: Gating | None) -> None:
    suite = session.config.stash[suite_key]
    if suite.session is not None and suite.opened:
        from perfsuite.plugin.summary import make_record

        make_record(session, gate.record() if gate is not None and gate.keeper.verdicts else None)


def _gate(config: pytest.Config) -> Gating | None:
    gate: Gating | None = config.pluginmanager.get_plugin("perfsuite.gating")
    return gate
