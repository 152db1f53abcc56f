"""What an old torch cannot do is a skip with its reason in the tests too, never a failure of perfsuite."""

from __future__ import annotations

import re
from collections.abc import Generator
from importlib.metadata import version

import pytest

from perfsuite.errors import UnsupportedCase

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
