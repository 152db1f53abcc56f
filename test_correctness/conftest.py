"""How the tests run: Hypothesis repeats itself or explores, and what an old torch cannot do is a skip."""

from __future__ import annotations

import re
from collections.abc import Generator
from importlib.metadata import version

import pytest
from hypothesis import HealthCheck, settings

from perfsuite.errors import UnsupportedCase

# No deadline: how long an example takes is up to whatever else the machine does.
settings.register_profile(
    "gate", derandomize=True, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
# Other examples in every run (tox -e explore); what fails prints the blob that brings it back under either profile.
settings.register_profile("explore", settings.get_profile("gate"), derandomize=False, database=None, max_examples=500)
settings.load_profile("gate")  # --hypothesis-profile is read later and decides

COMPLETE = (2, 8)
"""2.5.0 and 2.7.1 cannot do all that the tests run on a CPU; of newer ones a test that cannot run is a failure."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Skip where an older torch than :data:`COMPLETE` made a case unsupported; elsewhere it is a failure."""
    try:
        yield
    except UnsupportedCase as error:
        if tuple(map(int, re.findall(r"\d+", version("torch"))[:2])) >= COMPLETE:
            raise
        pytest.skip(str(error))
