"""Start the arms of a gated run, read the devices' telemetry, and put the verdicts into pytest's reports."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import os
import shutil
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal

import pytest

from perfsuite.base.errors import VerdictFailed
from perfsuite.base.git import GitFailed
from perfsuite.base.units import plural
from perfsuite.baselines.runs import TELEMETRY_UNKNOWN
from perfsuite.history.git import Repository, revision_of, stamp
from perfsuite.platforms.telemetry import disturbance, family_of_processes
from perfsuite.plugin import collisions
from perfsuite.plugin.ending import Out, keep_reason, level_key
from perfsuite.plugin.gate_options import GateOptions
from perfsuite.plugin.outcome import covers_verdict, failure
from perfsuite.plugin.suite import Suite
from perfsuite.record.describe import headline
from perfsuite.record.verdict import Verdict
from perfsuite.run.arms import Arm, arm_of
from perfsuite.run.settling import Base


def base_of(config: pytest.Config, suite: Suite, options: GateOptions, trees: ExitStack) -> Base:
    """Return the base of --perf-against; ``trees`` removes its work trees.

    Raises PerfsuiteError if the base cannot be checked out.
    """
    session, against, root = suite.session, options.base, config.rootpath
    assert session is not None
    assert against is not None
    python = shutil.which(against) if "/" in against else None
    if python:
        base = Arm(name=f"base ({against})", root=root, interpreter=python)
    else:
        base = trees.enter_context(arm_of(root, against, f"base ({against})"))
    return Base(
        base=base,
        new=Arm(name="new code", root=root),
        arguments=shared_arguments(config),
        case_deadline_s=lambda case: session.deadline_s(case) + suite.settings.budget.asked_s,
        commit="" if python else stamp(revision_of(base.root, options.folder)),
        anchor=lambda commit: trees.enter_context(arm_of(root, commit, f"stored commit ({commit[:10]})")),
    )


def shared_arguments(config: pytest.Config) -> tuple[str, ...]:
    """Return the options of this run that change the measurement, for the arms of an A/B."""
    option = functools.partial(collisions.option, config)
    names = ["platform", "scale", "timeout", "backend", "world-sizes", "warmup", "sustain"]
    flags = [*(f"perf-{name}" for name in names), "benchmark-max-time", "benchmark-min-rounds"]
    values = {flag: option(flag.replace("-", "_")) for flag in flags}
    words = [f"--{flag}={value}" for flag, value in values.items() if value is not None]
    if option("perf_pin") != "none":  # the default is left out for an older base without the option
        words.append(f"--perf-pin={option('perf_pin')}")
    if option("perf_shapes") is not None:
        words.append(f"--perf-shapes={config.invocation_params.dir / option('perf_shapes')}")
    words += [f"--perf-{name}" for name in ("oversubscribe", "cache-flush") if option(f"perf_{name.replace('-', '_')}")]
    return tuple(words)


def telemetry_of(suite: Suite) -> Callable[[], str]:
    """Return a function that reads the devices and returns their disturbance, ``unknown`` if it cannot be read."""
    family, session = suite.machine.family, suite.session
    telemetry = family.telemetry()

    def word() -> str:
        readings = telemetry.read()
        # Listing processes reads hundreds to thousands of files per case, so it is done only if a device has some.
        if session is not None and any(reading.processes for reading in readings):
            found = disturbance(readings, family_of_processes(suite.own_processes()), session.driver.contexts())
        else:
            found = disturbance(readings)
        unread = family.name != "cpu" and all(reading.throttle is None for reading in readings)
        return found or (TELEMETRY_UNKNOWN if unread else "")

    return word


IN_FULL = 3  # Failing verdicts that the terminal prints in full; each of the others is one line.
_shortened_key = pytest.StashKey[list[Verdict]]()
SUITE_NODE = "perfsuite gate::the suite as a whole"
"""Node id of a failed suite in the reports; no test can be selected by it."""


def remade(item: pytest.Item, report: pytest.TestReport, failed: str) -> pytest.TestReport:
    """Return the call report of a case that passed as a test and fails by its verdict.

    No hook is called: a plugin that runs failed tests again would measure until the verdict changes.
    """

    def fail() -> None:
        raise failure(failed, VerdictFailed)

    call = pytest.CallInfo.from_call(fail, when="call")
    assert call.excinfo is not None
    new = copy.copy(report)
    new.longrepr = item.repr_failure(call.excinfo)
    new.sections = list(report.sections)
    covered = covers_verdict(item)
    new.outcome = "failed" if covered is None else "skipped"
    attributes = vars(new)  # plugins may add attributes to a report
    if covered is None:
        attributes.pop("wasxfail", None)
        attributes["perf_failure"] = failed.partition(" ")[0].rstrip(";:").upper()
    else:
        attributes["wasxfail"] = covered
    keep_reason(item, call, new)
    return new


def _why_no_ab(repository: Repository, commit: str) -> str:
    if not repository.is_there():
        return repository.refusal or "the tests are not in a git repository with a commit"
    if not commit or repository.commit(commit):
        return ""
    return repository.why_missing() or "this repository does not have it: it was rewritten, or is not fetched"


def tell_next_steps(verdicts: MutableMapping[str, Verdict], config: pytest.Config) -> None:
    """Add to failing verdicts whether and in which folder their next command works: it needs the stored commit."""
    failing = {node: verdict for node, verdict in verdicts.items() if verdict.name in ("regressed", "drifted")}
    if not failing:
        return
    repository = Repository(root=config.rootpath)
    folder = os.path.relpath(config.rootpath, config.invocation_params.dir)
    for node, verdict in failing.items():
        try:
            why = _why_no_ab(repository, verdict.stored_commit)
        except GitFailed as failed:
            why = str(failed)
        verdicts[node] = dataclasses.replace(verdict, no_ab=why, ab_folder="" if folder == "." else folder)


def suite_reports(line: str) -> tuple[pytest.TestReport, ...]:
    """Return the reports of a failed test for the suite, so that all plugins, such as JUnit's, report it."""
    file, _, name = SUITE_NODE.partition("::")

    def report(when: Literal["setup", "call", "teardown"], outcome: Literal["passed", "failed"]) -> pytest.TestReport:
        return pytest.TestReport(
            nodeid=SUITE_NODE,
            location=(file, None, name),
            keywords={},
            outcome=outcome,
            longrepr=line if outcome == "failed" else None,
            when=when,
            duration=0.0,
            start=0.0,
            stop=0.0,
        )

    return report("setup", "passed"), report("call", "failed"), report("teardown", "passed")


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: Any, config: pytest.Config) -> tuple[str, str, str] | None:
    """Return the word of a failed verdict for verbose output."""
    if getattr(report, "perf_failure", "") and report.when == "call" and report.failed:
        return "failed", "F", str(report.perf_failure)
    return None


def shorten(config: pytest.Config, verdicts: Mapping[str, Verdict]) -> None:
    """Put the suite's failure first and print only a few verdicts in full; reports of other plugins stay complete."""
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    failed: list[Any] = reporter.stats.get("failed", []) if reporter is not None else []
    failed.sort(key=lambda report: report.nodeid != SUITE_NODE)
    judged = [report for report in failed if getattr(report, "perf_failure", "")]
    whole = config.stash[level_key] in ("tables", "cases") or config.option.tbstyle in ("line", "no")
    shortened = [] if whole else _beyond([verdicts[report.nodeid] for report in judged])
    hidden = {verdict.case for verdict in shortened}
    for index, report in enumerate(failed):
        if report in judged and report.nodeid in hidden:
            failed[index] = copy.copy(report)
            failed[index]._pdbshown = True  # pytest's own mark of a failure that was printed before
    config.stash[_shortened_key] = shortened


def show(terminalreporter: Any, config: pytest.Config) -> None:
    """Print a line for each verdict that was not printed in full, and their common reasons once."""
    shortened = config.stash.get(_shortened_key, [])
    if not shortened:
        return
    out = Out(terminalreporter)
    terminalreporter.write_sep("_", plural(len(shortened), "more failing case"), red=True, bold=True)
    heads = [headline(verdict) for verdict in shortened]
    for head, verdict in zip(heads, shortened, strict=True):
        out.line(f"{head.ljust(max(map(len, heads)))}  {verdict.case}")
    for reason in shortened[0].reasons:
        if all(reason in verdict.reasons for verdict in shortened):
            out.fold(f"  all of them: {reason}")
    out.line("  each in full: perfsuite show JOURNAL --case TEXT with the journal below, or -v in another run")


def _beyond(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Return the verdicts after the first IN_FULL; one of every kind comes first, then the largest effects."""

    def effect(verdict: Verdict) -> float:
        finding = verdict.decisive
        return abs(finding.effect) if finding is not None and finding.effect is not None else math.inf

    largest = sorted(verdicts, key=effect, reverse=True)
    first = {verdict.name: verdict for verdict in reversed(largest)}.values()
    others = [verdict for verdict in largest if verdict not in first]
    kept = [*first, *others][:IN_FULL]
    return [verdict for verdict in verdicts if verdict not in kept]
