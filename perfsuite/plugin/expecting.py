"""``--perf-expect``: results below what healthy devices reach fail; a line per question, PASS or FAIL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perfsuite.base.errors import ConfigurationError, PerfsuiteError
from perfsuite.base.units import plural
from perfsuite.expectations.judge import Expected, judge_one
from perfsuite.expectations.lines import answer_lines, unused_line, verdict_of
from perfsuite.expectations.rows import Expectation, load_expectations
from perfsuite.plugin import collisions
from perfsuite.plugin.ending import FAILED, Out, missing_key
from perfsuite.plugin.state import suite_of
from perfsuite.record.result import Result


class Expecting:
    """The rows of this run and what they say about its results; registered as ``perfsuite.expecting``."""

    def __init__(self, config: pytest.Config, rows: list[Expectation]) -> None:
        self.config = config
        self.rows = rows
        self.judged: dict[str, list[Expected]] = {}
        """By node id."""

    def judge(self, result: Result) -> str:
        """Return the message with which the case of a result fails; empty where it does not."""
        entries = self.judged[result.case] = judge_one(result, self.rows)
        below = [entry for entry in entries if entry.verdict == "below"]
        return "\n".join(f"below expectation: {entry.metric.name}: {entry.reason}" for entry in below)

    @property
    def entries(self) -> list[Expected]:
        """What was said about every result."""
        return [entry for entries in self.judged.values() for entry in entries]

    @property
    def withheld(self) -> list[str]:
        """Return why this run cannot end in PASS though no result is below expectation."""
        missing = self.config.stash[missing_key]
        failed = [case for case, why in missing.items() if why.startswith(FAILED) and case not in self.judged]
        cut = [case for case, why in missing.items() if "--perf-time-budget" in why]
        told = [f"{plural(len(failed), 'case')} failed without a result"] if failed else []
        return told + ([f"the time budget left out {plural(len(cut), 'case')}"] if cut else [])

    def finish(self, session: pytest.Session) -> None:
        """Make the exit code say that nothing was judged, or that PASS is withheld."""
        if session.exitstatus != pytest.ExitCode.OK:
            return
        if self._nothing_judged and not collisions.option(self.config, "perf_allow_unjudged"):
            session.exitstatus = pytest.ExitCode.USAGE_ERROR
        elif self.withheld:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @property
    def _nothing_judged(self) -> bool:
        return all(entry.verdict == "not judged" for entry in self.entries)

    def show(self, terminalreporter: Any) -> None:
        """Print the answer."""
        out, platform = Out(terminalreporter), suite_of(self.config).machine.name
        out.section("perfsuite expectations")
        for line in answer_lines(self.entries):
            out.line(line.text, red=line.mark == "bad", yellow=line.mark == "doubt")
        if unused := unused_line(self.rows, self.entries, platform):
            out.fold(unused, yellow=True)
        verdict = verdict_of(self.entries, self.withheld)
        if self._nothing_judged:
            verdict += (
                "; add [[expectation]] rows of your own (docs/acceptance.md), compare nodes by perfsuite fleet, "
                "or give --perf-allow-unjudged"
            )
        good = verdict.startswith("PASS")
        out.fold(verdict, green=good, red=not good)


def begin(session: pytest.Session) -> None:
    """Read the rows once it is known which cases there are; raises UsageError for a file that is wrong."""
    config = session.config
    suite = suite_of(config)
    if suite.session is None or suite.settings.budget.smoke:
        return
    given = collisions.option(config, "perf_expect")
    files = [*suite.settings.platform_files, *([config.invocation_params.dir / Path(given)] if given else [])]
    try:
        if given and not files[-1].is_file():
            raise ConfigurationError(f"--perf-expect: {files[-1]} is not a file; name a TOML file of rows")
        rows = load_expectations(files, suite.catalog.models)
    except PerfsuiteError as error:
        raise pytest.UsageError(str(error)) from None
    config.pluginmanager.register(Expecting(config, rows), "perfsuite.expecting")
