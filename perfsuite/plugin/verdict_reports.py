"""pytest's reports with the gate's verdicts in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import pytest

from perfsuite.gate.describe import describe
from perfsuite.gate.verdict import Verdict

SUITE_NODE = "perfsuite gate::the suite as a whole"
"""Node id under which a suite that fails stands among the tests; nothing can be selected by it."""


def remade(item: pytest.Item, report: pytest.TestReport, failure: str) -> pytest.TestReport:
    """The call report of a case that passed by itself and fails by its verdict.

    It goes through the same hooks as any failure, so that xfail and reports of other plugins work.
    """

    def fail() -> None:
        raise pytest.fail.Exception(failure, pytrace=False)

    call = pytest.CallInfo.from_call(fail, when="call")
    call.duration, call.start, call.stop = report.duration, report.start, report.stop
    if isinstance(item, pytest.Function):
        item.funcargs = {}  # the fixtures are gone; other plugins' hooks would use them
    before = list(item.user_properties)
    new: pytest.TestReport = item.ihook.pytest_runtest_makereport(item=item, call=call)
    item.user_properties[:] = before
    new.user_properties = list(report.user_properties)
    new.sections = list(report.sections)
    new.perf_failure = failure.partition(" ")[0].rstrip(";:").upper()  # type: ignore[attr-defined]  # reports carry what plugins put on them
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
