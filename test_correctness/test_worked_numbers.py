"""Every worked number in a docstring holds."""

import doctest
import importlib
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "perfsuite"
DOCUMENTED = sorted(path for path in PACKAGE.glob("**/*.py") if "\n    >>> " in path.read_text())


@pytest.mark.parametrize("path", DOCUMENTED, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_worked_numbers_hold(path):
    name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    failed, tried = doctest.testmod(importlib.import_module(name))
    assert tried > 0
    assert failed == 0
