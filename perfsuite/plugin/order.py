"""What several concerns do at one hook, in order; a hook that one concern alone needs stands in that concern's module.

Around a ``yield`` stands what the rest of pytest, other plugins included, does at that hook.  One line more is said
after everybody's summary: a driver's exit code, in :mod:`perfsuite.plugin.launch`.
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
    ending,
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


def declare(parser: pytest.Parser) -> None:
    """Declare every option and ini key of the plugin."""
    options.declare(parser)
    published.declare(parser.getgroup("perfsuite", "performance of distributed training").addoption)


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Declare options and ini keys; their values are checked when pytest is configured, where an error is one line."""
    config: Any = pluginmanager.get_plugin("pytestconfig")
    collisions.give_way(parser, config, declare)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config, parser: pytest.Parser) -> Iterator[Any]:
    """Let other plugins and a conftest.py have the options that they declare, also where ours have the same name."""
    try:
        return (yield)
    finally:
        collisions.settle(parser, early_config, declare)


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


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Leave fixtures that other plugins have too to their tests."""
    collisions.let_others_go_first(session)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[Any]:
    """Make the collected tests cases, refuse what is wrong with them, leave out what this run does not ask for."""
    benchmark.give_clock(config, items)
    collect.refuse_wrong_cases(config, items)
    cases = [item for item in items if collect.is_case(item)]
    suite = suite_of(config) if cases else None
    published.select(config, items, cases, {suite.machine.name, *suite.named} if suite else ())
    collect.leave_out_extended(config, items)
    returned = yield  # other plugins select too
    if cases:  # stable: the others stay in order
        items.sort(key=lambda item: item.get_closest_marker("soak") is not None and collect.is_case(item))
    config.stash[_selected_key] = True
    return returned


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> Iterator[Any]:
    """It is known which cases there are: open what keeps them, and find out what would be missing at the end.

    pytest calls this at the end of a collection that an error or Ctrl-C ended, too: nothing will run then.
    """
    if not session.config.stash.get(_selected_key, False):
        return (yield)
    collect.leave_out_measured(session)
    cases = collect.cases_of(session)
    if not launch.take_part(session, cases):
        return (yield)
    session.config.stash[ending.cases_key] = {
        item.nodeid: (item.location[0], (item.location[1] or 0) + 1) for item in cases
    }
    benchmark.give_bare_option_back(session)
    gate_options.refuse_no_cases(session, cases)
    if cases:
        try:
            suite_of(session.config).open()
        except PerfsuiteError as error:
            raise pytest.UsageError(str(error)) from None
    returned = yield  # pytest prints the header and how many tests there are
    progress.begin(session, cases)
    if cases and options.runs_tests(session.config):
        gating = importlib.import_module("perfsuite.plugin.gating")  # half of perfsuite; ranks come up meanwhile
        session.config.pluginmanager.register(gating, gating.__name__)
        gating.begin(session, cases)
        if any(collisions.option(session.config, f"perf_expect{what}") is not None for what in ("", "_devices")):
            importlib.import_module("perfsuite.plugin.expecting").begin(session, cases)
    outputs.begin(session, cases)
    return returned


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> Iterator[Any]:
    """The gate settles what is open and the peaks are measured again while there are ranks to run on."""
    config = session.config
    if launch.is_agent(config):
        launch.serve(session, suite_of(config).machine)
    gate = _gate(config)
    if (suite := config.stash.get(suite_key, None)) is not None:
        suite.signals.phase = "tests"
    try:
        try:
            returned = yield
        except BaseException:  # somebody ended the run, who does not want to wait
            if gate is not None:
                gate.give_up()
            raise
        if gate is not None:
            gate.end(session)
        suite = config.stash.get(suite_key, None)  # a test may have been the first to ask for the platform
        if suite is not None and suite.session is not None:
            suite.session.finish()  # after all that the gate runs again, while there are ranks to run on
        return returned
    finally:
        if (suite := config.stash.get(suite_key, None)) is not None:
            suite.signals.phase = "ends"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What a report of a perf case means to everybody who keeps one."""
    if collect.is_case(item):
        benchmark.drop_foreign_benchmark(item)
    report = yield
    if collect.is_case(item):
        outcome.refuse_unnamed_verdict(item, call, report)
        benchmark.mark_failed(item, report)
        outputs.trace(item, call)
        ending.keep_reason(item, call, report)
        outcome.complete(item, call, report)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[Any]:
    """End every process before the reports are written: whatever happens in those, nothing is left running."""
    config, gate = session.config, _gate(session.config)
    suite = config.stash.get(suite_key, None)
    launch.give_output(config)
    if suite is not None:
        suite.signals.phase = "ends"
    try:
        if gate is not None:
            gate.finish(session)
        if (expecting := config.pluginmanager.get_plugin("perfsuite.expecting")) is not None:
            expecting.finish(session)
        if suite is not None:
            ending.attempt(config, "the comparison", lambda: benchmark.leave_out_changed(session))
            ending.attempt(config, "the record of the run", lambda: _make_record(session, gate))
            # In a hurry the reports come first.  Open MPI kills half a second to a second and a half after its SIGTERM,
            # and what runs then still ends with this process.
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
    """Files that were asked for, after everybody else's such as JUnit's and before anything is printed."""

    @pytest.hookimpl(wrapper=True)  # inside the terminal's, which is registered later, and around pytest-benchmark's
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[Any]:
        config = session.config
        returned = None
        try:
            returned = yield
        except OSError as error:  # pytest would print this and nothing else: no verdict, no summary
            ending.fail(config, f"another plugin could not write its file: {error}")
        outputs.write(config, before_others=False)
        ending.settle(session)
        return returned


@pytest.hookimpl(tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """perfsuite's sections, after pytest's failures and before other plugins' tables."""
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
    if ending.record_key in config.stash:
        from perfsuite.plugin.summary import show_screen

        show_screen(terminalreporter, config)
    if (expecting := config.pluginmanager.get_plugin("perfsuite.expecting")) is not None:
        expecting.show(terminalreporter)
    outputs.show(terminalreporter, config, "perf_report")
    if ending.record_key in config.stash:
        from perfsuite.plugin.summary import annotate

        annotate(terminalreporter, config)
    outputs.show(terminalreporter, config, "perf_history", "perf_html")
    collect.show_left_out(terminalreporter, config)


def _make_record(session: pytest.Session, gate: Gating | None) -> None:
    suite = session.config.stash[suite_key]
    if suite.session is not None and suite.opened:
        from perfsuite.plugin.summary import make_record

        make_record(session, gate.record() if gate is not None and gate.keeper.verdicts else None)


def _gate(config: pytest.Config) -> Gating | None:
    """The gate of this run; None without one, and then its module need not be there."""
    gate: Gating | None = config.pluginmanager.get_plugin("perfsuite.gating")
    return gate
