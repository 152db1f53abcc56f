"""The gate in a pytest run: verdicts become ordinary test failures, baselines are read and written.

With ``--perf-gate`` the reports of measured cases are held until all cases have run: the whole suite shows whether the
host is slow, and suspects are run again.  With -x, --maxfail and --pdb each case is settled at once.  Without
``--perf-gate`` the verdicts are only printed.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from perfsuite.base.errors import CaseStopped, PerfsuiteError, first_line
from perfsuite.base.units import plural
from perfsuite.baselines.runs import usable, why_unusable
from perfsuite.gate.comparable import nearest_hardware
from perfsuite.history.git import stamp
from perfsuite.platforms import fingerprint
from perfsuite.platforms.host import Host, boot_of
from perfsuite.plugin import verdict_reports
from perfsuite.plugin.collect import is_case
from perfsuite.plugin.ending import Out, level_key
from perfsuite.plugin.fixtures import state_key
from perfsuite.plugin.gate_options import GateOptions, gate_options_key, tolerances_of
from perfsuite.plugin.hooks import Judgement
from perfsuite.plugin.options import runs_tests
from perfsuite.plugin.outcome import keep_first_tries
from perfsuite.plugin.state import suite_of
from perfsuite.plugin.suite import Suite
from perfsuite.plugin.verdict_reports import base_of, telemetry_of
from perfsuite.record.describe import SUITE_FAILS, describe, gate_lines, phrases, suite_lines, word
from perfsuite.record.result import Result
from perfsuite.record.run import GateRecord
from perfsuite.record.verdict import Verdict
from perfsuite.run.gatekeeper import Gatekeeper, hardware_of
from perfsuite.run.settling import GateClock

_REASONS = 3  # Most reasons for comparing nothing in one line.
_UPDATE_LINES = 5  # Most lines about stored runs on one screen.


class Gating:
    """State of the gate in one pytest run; registered as a plugin when there are perf cases to run."""

    def __init__(self, config: pytest.Config, suite: Suite, options: GateOptions, cases: Sequence[pytest.Item]) -> None:
        """Raises PerfsuiteError if the baseline file is damaged or the base cannot be checked out."""
        self.config = config
        self.suite = suite
        self.options = options
        self.cases = cases
        self.in_place = bool(config.getoption("maxfail", 0) or config.getoption("usepdb", False))
        self.problem = ""
        self.refused = False  # Whether an update refused a case that is or may be slower: the run fails.
        self.held: list[tuple[pytest.Item, list[pytest.TestReport]]] = []
        self._trees = ExitStack()
        config.add_cleanup(self._trees.close)  # also if the run ends before its tests begin
        self.update_lines: list[str] = []
        assert suite.session is not None
        self.keeper = Gatekeeper(
            session=suite.session,
            settings=options.settings,
            hardware=hardware_of(fingerprint(suite.machine), suite.machine.name, suite.machine.simulated),
            folder=options.folder_for(simulated=suite.machine.simulated),
            backend=suite.machine.family.backend,
            base=base_of(config, suite, options, self._trees) if options.base else None,
            commit=stamp(suite.revision),
            boot=boot_of(Host()),
            links=options.links,
            disturbance=telemetry_of(suite),
            clock=GateClock(asked_s=options.budget_s),
        )

    # -- before the loop -----------------------------------------------------------------------------------------

    def refuse_nothing_gated(self) -> None:
        """Raise UsageError before anything is measured if the gate would compare nothing."""
        if not self.options.gate or self.options.allow_ungated:
            return
        enough, counts = self.options.settings.min_stored, {item.nodeid: 0 for item in self.cases}
        for entry in self.keeper.stored(counts):
            counts[entry.case.node] = max(counts[entry.case.node], usable(entry.reference))
        if max(counts.values()) >= enough:
            return
        hardware = self.keeper.hardware
        nearest = "" if self.keeper.baseline else nearest_hardware(self.keeper.folder, hardware)
        some = [count for count in counts.values() if count]
        few = f"{max(some)} at most, of {plural(len(some), 'case')}" if some else ""
        unusable = self._unusable()
        raise pytest.UsageError(
            f"--perf-gate: none of {plural(len(self.cases), 'case')} has {enough} {'usable ' * bool(unusable)}stored "
            f"runs in {self.keeper.folder / hardware.platform / (hardware.fingerprint + '.json')}; "
            f"{''.join(f'{why}; ' for why in (unusable or few, nearest) if why)}{self._way_on()}"
        )

    def _unusable(self) -> str:
        kept = [entry.kept for entry in self.keeper.stored(item.nodeid for item in self.cases)]
        most = max(kept, key=len, default=())
        return why_unusable(most) if usable(most) < self.options.settings.min_stored else ""

    def _way_on(self) -> str:
        first = "leave --perf-gate out of the first" if self.options.update else "store some with --perf-update=append"
        first = f"stop the disturbance of the devices, then {first}" if self._unusable() else first
        return f"{first}, or add --perf-allow-ungated"

    def _nothing_gated(self) -> str:
        assert self.suite.session is not None
        reasons: Counter[str] = Counter()
        for item in self.cases:
            verdict = self.keeper.verdicts.get(item.nodeid)
            if verdict is not None:
                reasons[f"{verdict.name}{f' ({verdict.reasons[0]})' if verdict.reasons else ''}"] += 1
            elif item.nodeid in self.suite.session.reused:
                reasons["taken from a journal"] += 1
            else:
                reasons["not measured (skipped, failed or interrupted)"] += 1
        phrases_ = [f"{count} {why}" for why, count in reasons.most_common(_REASONS)]
        if others := sum(reasons.values()) - sum(count for _, count in reasons.most_common(_REASONS)):
            phrases_.append(f"{others} for other reasons")
        cases = plural(len(self.cases), "case")
        return f"--perf-gate: none of {cases} was compared: {', '.join(phrases_)}; {self._way_on()}"

    # -- one case ------------------------------------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        """Run a case once, even with a plugin that repeats failed tests, and hold its reports until the verdict."""
        if not self.options.fresh or not is_case(item):
            return None
        hook = item.ihook
        hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        reports = runtestprotocol(item, log=not self.options.gate, nextitem=nextitem)
        if self.options.gate:
            state = item.stash.get(state_key, None)
            if state is None or state.result is None or state.result.case not in self.keeper.taken:
                for report in reports:
                    hook.pytest_runtest_logreport(report=report)
            elif self.in_place:
                self._settle_in_place(item, reports)
            else:
                self.held.append((item, reports))
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _settle_in_place(self, item: pytest.Item, reports: Sequence[pytest.TestReport]) -> None:
        node = item.nodeid
        try:
            with self.suite.running_case():
                self.keeper.settle_one(node, len(self.cases), self._say)
        except CaseStopped as stopped:  # the loop ends before the next case
            self.keeper.conclude(interrupted(stopped), node)
        except KeyboardInterrupt as stopped:
            with self.suite.signals.held():
                self.keeper.conclude(interrupted(stopped), node)
                self._report(item, reports, self.keeper.verdicts[node])
            raise
        verdict_reports.tell_next_steps(self.keeper.verdicts, self.config)
        self.suite.verdicts[node] = word(self.keeper.verdicts[node])
        self._report(item, reports, self.keeper.verdicts[node])

    @pytest.hookimpl(trylast=True)
    def pytest_perfsuite_judge(self, item: pytest.Item, result: Result) -> Judgement | None:
        """Pass every measured case to the gate; its verdict follows after the test."""
        assert self.suite.session is not None
        if result.case not in self.suite.session.reused:
            self.keeper.take(result, tolerances_of(item))
        return None

    # -- after the last case -------------------------------------------------------------------------------------

    def give_up(self) -> None:
        """Report the measured cases of an interrupted run without verdicts."""
        with self.suite.signals.held():  # a second Ctrl-C would leave a registered work tree
            self._release(settled=False)
            self._trees.close()

    def end(self, session: pytest.Session) -> None:
        """Settle the open cases while the ranks still run, then report the held cases."""
        try:
            self._more_runs(session)
            if not (self.options.gate and self.in_place):
                with self.suite.running_case():
                    self.keeper.settle(self._say)
                self._note_verdicts()
            with self.suite.signals.held():
                self._release(settled=True)
            self._update()
        except (CaseStopped, KeyboardInterrupt) as stopped:  # during a repeated run
            with self.suite.signals.held():
                if not self.in_place:
                    self.keeper.conclude(interrupted(stopped))
                self._note_verdicts()
                self._release(settled=True)
            if isinstance(stopped, KeyboardInterrupt):
                raise
            raise session.Interrupted(session.shouldstop) from None
        except Exception:  # a defect of the gate fails the run; the measured cases are still reported
            self.problem = f"the gate could not judge: {traceback.format_exc()}"
        finally:
            self.give_up()

    def _note_verdicts(self) -> None:
        verdict_reports.tell_next_steps(self.keeper.verdicts, self.config)
        for node, verdict in self.keeper.verdicts.items():
            if self.options.gate or verdict.name != "no-baseline":  # printed once below the table, not in every row
                self.suite.verdicts[node] = word(verdict)

    def _more_runs(self, session: pytest.Session) -> None:
        assert self.suite.session is not None
        wanted = self.options.runs
        for number in range(2, wanted + 1):
            for node in list(self.keeper.taken):
                if session.shouldstop:
                    return
                self._say(f"run {number} of {wanted}: {node}")
                try:
                    with self.suite.running_case():
                        self.keeper.take_again(self.suite.session.rerun(node))
                except PerfsuiteError as error:
                    self.update_lines.append(f"{node}: run {number} failed: {first_line(error)}")

    def _release(self, *, settled: bool) -> None:
        held, self.held = self.held, []
        for item, reports in held:
            self._report(item, reports, self.keeper.verdicts.get(item.nodeid) if settled else None)
        if settled and held:
            for line in suite_lines(self.keeper.suite, self.options.fail_on):
                if line.startswith(SUITE_FAILS):
                    for report in verdict_reports.suite_reports(line):
                        self.config.hook.pytest_runtest_logreport(report=report)

    def _report(self, item: pytest.Item, reports: Sequence[pytest.TestReport], verdict: Verdict | None) -> None:
        failure = ""
        if verdict and self.options.gate:
            wrong = verdict.name in self.options.fail_on or verdict.case in self.keeper.instrumented
            failure = "\n  ".join(phrases(verdict)) if wrong else ""
        for report in reports:
            fails = failure and report.when == "call" and not report.skipped  # skipped: it failed as expected
            final = verdict_reports.remade(item, report, failure) if fails else report
            if verdict and final.when in ("call", "teardown"):
                kept = [(name, value) for name, value in final.user_properties if name != "verdict"]
                final.user_properties = [*kept, ("verdict", verdict.name), ("verdict_detail", describe(verdict))]
            item.ihook.pytest_runtest_logreport(report=final)

    def _update(self) -> None:
        if self.options.update is None:
            return
        try:
            done = self.keeper.update(self.options.update, self.options.reason, self.options.runs)
        except PerfsuiteError as error:
            self.problem = str(error)
            return
        count = sum(done.added.values())
        self.update_lines.append(
            f"baseline {done.path}: {plural(count, 'run')} of {plural(len(done.added), 'case')} added"
        )
        self.update_lines += [done.hosts] * bool(done.hosts)
        self.update_lines += [f"{node}: its older runs were replaced" for node in done.replaced]
        self.update_lines += [f"{node}: {note}" for node, note in done.notes.items()]
        self.update_lines += [f"{node}: not stored, {why}" for node, why in done.refused.items()]
        self.refused = bool(done.alarming)
        if not done.added and self.options.update != "improved":
            why = "see above" if done.refused else "no case was measured"
            self.problem = f"the update stored nothing: {why}"

    def record(self) -> GateRecord:
        """Return the verdicts and lines of the gate, for the journal and for reports."""
        suite, fail_on = self.keeper.suite, self.options.fail_on
        return GateRecord(
            gate=self.options.gate,
            fail_on=tuple(sorted(fail_on)),
            verdicts=tuple(self.keeper.verdicts.values()),
            suite=suite.name if suite else None,
            suite_line="".join(suite_lines(suite, fail_on if self.options.gate else ())),
            banner=tuple(self.keeper.banner),
        )

    def finish(self, session: pytest.Session) -> None:
        """Fail the run for an error in the baselines even if every case passed."""
        verdict_reports.shorten(session.config, self.keeper.verdicts)
        if (self.problem or self.refused) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if not self.options.gate or self.keeper.covered:
            return
        why, status = next(iter(self.keeper.instrumented.values()), ""), session.exitstatus
        passes = status == pytest.ExitCode.OK and not self.options.allow_ungated
        if passes or (why and status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)):
            self.problem = f"--perf-gate compared nothing: {why}" if why else self._nothing_gated()
            session.exitstatus = pytest.ExitCode.USAGE_ERROR

    def show(self, terminalreporter: Any) -> None:
        """Print the findings and the stored runs of the gate; the screen has most of them too."""
        if not (self.keeper.taken or self.problem):
            return
        verdict_reports.show(terminalreporter, self.config)
        out, whole = Out(terminalreporter), self.config.stash[level_key] in ("tables", "cases")
        keeper, gate = self.keeper, self.options.gate
        of_suite = list(suite_lines(keeper.suite, self.options.fail_on if gate else frozenset()))
        lines = list(gate_lines(keeper.verdicts, gate)) if whole else []
        lines += self.update_lines[: None if whole else _UPDATE_LINES]
        if not whole and (more := len(self.update_lines) - _UPDATE_LINES) > 0:
            lines.append(f"and {plural(more, 'more line')}: --perf-show=tables")
        if lines or (of_suite and whole) or self.problem:
            out.section("perfsuite gate" if gate else "perfsuite baselines")
        for line in of_suite if whole else ():
            out.line(line, red=line.startswith(SUITE_FAILS))
        for line in lines:
            (out.line if whole else out.fold)(line)  # with tables a line stays whole: a log can be searched
        if self.problem:
            out.line(f"error: {self.problem}", red=True)

    def _say(self, text: str, *, always: bool = False) -> None:
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None and (always or self.config.getoption("verbose", 0) >= 0):
            reporter.ensure_newline()
            reporter.write_line(f"perfsuite: {text}")


def begin(session: pytest.Session, cases: Sequence[pytest.Item]) -> None:
    """Set up the gate after the collection.  Raises UsageError if a baseline is damaged or nothing can be gated."""
    config = session.config
    if not cases or not runs_tests(config) or hasattr(config, "workerinput"):
        return
    options, suite = config.stash[gate_options_key], suite_of(config)
    if suite.session is None or suite.settings.budget.smoke:
        return
    try:
        gating = Gating(config, suite, options, cases)
        gating.refuse_nothing_gated()
    except PerfsuiteError as error:
        raise pytest.UsageError(str(error)) from None
    if options.fresh:
        keep_first_tries(config, cases)
    config.pluginmanager.register(gating, "perfsuite.gating")
    config.pluginmanager.register(verdict_reports, verdict_reports.__name__)


def interrupted(stopped: BaseException) -> str:
    """Return the reason for stopping the gate after a signal."""
    return f"the gate was interrupted by {stopped.signal if isinstance(stopped, CaseStopped) else 'SIGINT'}"
