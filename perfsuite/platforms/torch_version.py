"""Is the torch that is installed new enough: read from its metadata, before anything imports it."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from perfsuite.base.errors import ConfigurationError
from perfsuite.platforms.base import Family
from perfsuite.platforms.quirks import numbers

OLDEST = (2, 5)
"""torch's version from which on perfsuite runs."""


def installed_torch() -> str:
    """Version of the installed torch; empty where there is none."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""


def require_importable_torch() -> None:
    """Raise ConfigurationError, one line, where ranks would find no torch at all, whatever its version."""
    if not installed_torch() and find_spec("torch") is None:
        raise ConfigurationError(
            f"torch is not installed for {sys.executable}, and ranks measure with it; run pytest by the Python that "
            "has it (a vendor's image has its own), or install it"
        )


def require_torch(family: Family, installed: str) -> None:
    """Raise ConfigurationError, one line that says what to do, for a torch that is too old; unknown ones pass.

    A pre-release of the oldest counts as it: a vendor's build of 2.5.0a0 has all that is needed.
    """
    parts = numbers(installed)
    if parts and parts[:2] < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ConfigurationError(
            f"torch {installed} is installed, perfsuite needs {oldest} or newer: {family.newer_torch()}"
        )
