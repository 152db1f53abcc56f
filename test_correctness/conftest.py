"""What an old torch cannot do is a skip with its reason in the tests too, never a failure of perfsuite."""

from __future__ import annotations

import re
from collections.abc import Generator
from importlib.metadata import version

import pytest

from perfsuite.errors import UnsupportedCase

COMPLETE = (2, 6)
"""Since this torch everything that the tests run works on a CPU."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Skip where an older torch than :data:`COMPLETE` made a case unsupported; elsewhere it is a failure."""
    try:
        yield
    except UnsupportedCase as error:
        if tuple(map(int, re.findall(r"\d+", version("torch"))[:2])) >= COMPLETE:
            raise
        pytest.skip(str(error))
