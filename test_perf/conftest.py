"""Options and fixtures of the suite that ships, beside those of the plugin."""

from __future__ import annotations

import pytest

from perfsuite.plugin.collect import scale_of
from perfsuite.plugin.state import suite_of


def pytest_addoption(parser):
    add = parser.getgroup("perfsuite").addoption
    add(
        "--perf-data", metavar="DIR", help="data sets of your own, a folder per model; see test_perf/test_train_step.py"
    )
    add(
        "--perf-memory-budget",
        metavar="SIZE",
        help="what a rank may allocate in test_largest_batch, e.g. 2GiB; default: 16MiB on a CPU, else the device",
    )


@pytest.fixture
def scale(request, platform):
    """``full`` or ``small``: where a size alone does not say which of two models it is for."""
    return scale_of(platform, suite_of(request.config))
