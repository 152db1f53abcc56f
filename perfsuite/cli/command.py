"""What a subcommand of ``perfsuite`` is; one file each defines them and :mod:`perfsuite.cli.main` lists them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from perfsuite.base.text import escaped, json_text

EXIT_OK = 0
EXIT_FOUND = 1
"""The command did its work and found what it was asked to look for: a slower case, a contradiction."""
EXIT_USAGE = 4
"""A wrong option, platform name or file: the same number as pytest's."""
USAGE_CODE = f"{EXIT_USAGE} wrong usage or configuration (as pytest's), with one line on stderr that says what to do"


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
    found: str = ""
    """What EXIT_FOUND says of this command; empty where it never ends so."""


def exit_codes(found: str = "") -> str:
    """The exit codes for the end of a help; ``found`` is what EXIT_FOUND says, empty where it is never given."""
    return "; ".join(["exit codes: 0 done", *([f"{EXIT_FOUND} {found}"] if found else []), USAGE_CODE])


def platform_file_argument(parser: argparse.ArgumentParser) -> None:
    """The option of every subcommand that looks platforms up."""
    parser.add_argument(
        "--platform-file",
        action="append",
        default=[],
        metavar="FILE",
        help="TOML file with rows and an [environment] of your own, as in the ini key perf_platforms; repeatable",
    )


def platform_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of every subcommand that prints something about platforms."""
    platform_file_argument(parser)
    json_argument(parser)


def json_argument(parser: argparse.ArgumentParser) -> None:
    """The option of every subcommand that other programs read."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def print_json(value: Any) -> None:
    """For other programs."""
    print(json_text(value, indent=2), end="")


def print_lines(lines: Iterable[str]) -> None:
    """Text for people, whatever the lines hold: none of them becomes two."""
    for line in lines:
        print(escaped(line))
