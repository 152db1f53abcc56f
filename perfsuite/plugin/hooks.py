"""Hooks that this plugin calls; a conftest.py or another plugin may implement them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perfsuite.record.own_metrics import OwnMetric
    from perfsuite.record.result import Result


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The verdict that an implementation of :func:`pytest_perfsuite_judge` returns for a measured case."""

    verdict: str  # A word for the table: ``pass``, ``regressed``, ...
    failure: str = ""  # Message with which the case fails as an ordinary test; empty if it passes.


@pytest.hookspec(firstresult=True)
def pytest_perfsuite_judge(item: pytest.Item, result: Result) -> Judgement | None:
    """Judge a case after it was measured, during the call of its test; pytest uses the first result that is not None.

    Called for measured and out-of-memory cases, never for smoke runs.  Example of a conftest.py::

        def pytest_perfsuite_judge(item, result):
            if result.outcome == "measured" and result.median_s > 1.0:
                return Judgement(verdict="slow", failure=f"{result.median_s:.3f} s is more than 1 s")
    """


@pytest.hookspec
def pytest_perfsuite_metrics(config: pytest.Config) -> Sequence[OwnMetric]:
    """Register the project's metrics: they give unit, direction and rule of every ``rank.record`` of their name.

    Called once, before the first rank process starts a case.  Example of a conftest.py::

        def pytest_perfsuite_metrics():
            return [perfsuite.OwnMetric(name="memory", unit="GiB", better="lower", tolerance=0.05)]
    """
    return ()
