"""What a subcommand of ``perfsuite`` is; one file each defines them and :mod:`perfsuite.cli` lists them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

EXIT_OK = 0
EXIT_FOUND = 1
"""The command did its work and found what it was asked to look for: a slower case, a contradiction."""
EXIT_USAGE = 4
"""A wrong option, platform name or file: the same number as pytest's."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """One subcommand."""

    name: str
    help: str
    """One line."""
    arguments: Callable[[argparse.ArgumentParser], None]
    """Adds the options."""
    run: Callable[[argparse.Namespace], int]
    """Does the work and returns the exit code; a PerfsuiteError becomes one line and EXIT_USAGE."""
