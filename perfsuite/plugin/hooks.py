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
    """What an implementation of :func:`pytest_perfsuite_judge` says of a measured case."""

    verdict: str
    """A word for the table: ``pass``, ``regressed``, ..."""
    failure: str = ""
    """When not empty the case fails with this message, as an ordinary test failure."""


@pytest.hookspec(firstresult=True)
def pytest_perfsuite_judge(item: pytest.Item, result: Result) -> Judgement | None:
    """Judge a case right after it was measured, inside the call of its test; the first answer that is not None counts.

    Called for measured and out-of-memory cases, never for smoke runs.  For example, in a conftest.py::

        def pytest_perfsuite_judge(item, result):
            if result.outcome == "measured" and result.median_s > 1.0:
                return Judgement(verdict="slow", failure=f"{result.median_s:.3f} s is more than 1 s")
    """


@pytest.hookspec
def pytest_perfsuite_metrics(config: pytest.Config) -> Sequence[OwnMetric]:
    """Register metrics of one's own: every ``rank.record`` of such a name gets unit, direction and rule from here.

    Called once, before the first rank process starts a case.  For example, in a conftest.py::

        def pytest_perfsuite_metrics():
            return [perfsuite.OwnMetric(name="memory", unit="GiB", better="lower", tolerance=0.05)]
    """
    return ()
