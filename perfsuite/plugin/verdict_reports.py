"""pytest's reports with the gate's verdicts in them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Literal

import pytest

from perfsuite.errors import VerdictFailed
from perfsuite.gate.describe import describe
from perfsuite.gate.verdict import Verdict
from perfsuite.plugin.expected import covers_verdict, failure
from perfsuite.plugin.tables import keep_reason

SUITE_NODE = "perfsuite gate::the suite as a whole"
"""Node id under which a suite that fails stands among the tests; nothing can be selected by it."""


def remade(item: pytest.Item, report: pytest.TestReport, failed: str) -> pytest.TestReport:
    """The call report of a case that passed by itself and fails by its verdict.

    Made here and by no hook: a plugin that runs failed tests again would measure until the verdict is another one.
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
    attributes = vars(new)  # reports carry what plugins put on them
    if covered is None:
        attributes.pop("wasxfail", None)
        attributes["perf_failure"] = failed.partition(" ")[0].rstrip(";:").upper()
    else:
        attributes["wasxfail"] = covered
    keep_reason(item, call, new)
    return new


def with_verdict(properties: Sequence[tuple[str, object]], verdict: Verdict) -> list[tuple[str, object]]:
    """JUnit properties with the verdict in them."""
    kept = [(name, value) for name, value in properties if name != "verdict"]
    return [*kept, ("verdict", verdict.name), ("verdict_detail", describe(verdict))]


def suite_reports(line: str) -> tuple[pytest.TestReport, ...]:
    """The reports of a test that failed, so that every reader of tests, JUnit's among them, sees that the suite did."""
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
