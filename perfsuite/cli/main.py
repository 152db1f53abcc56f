"""The command line beside pytest: ``perfsuite env``, ``perfsuite platforms``, ...

``COMMANDS`` lists the subcommands (see :mod:`perfsuite.cli.command`) in the order of ``perfsuite --help``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import perfsuite
from perfsuite.cli import (
    ab,
    advise,
    audit,
    backtest,
    baselines,
    calibrate,
    checklist,
    env,
    export,
    history,
    import_,
    platforms,
    project,
    published,
    report,
    schedule,
    show,
    trace,
)
from perfsuite.cli.command import EXIT_OK, EXIT_USAGE, Command, exit_codes
from perfsuite.errors import PerfsuiteError

_EPILOG = exit_codes("found what was looked for (see each command's --help)")


class _Parser(argparse.ArgumentParser):
    """argparse with our exit code for wrong usage."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; the exit code."""
    parser = _Parser(prog="perfsuite", description="What pytest does not do for perfsuite.", epilog=_EPILOG)
    parser.add_argument("--version", action="version", version=f"perfsuite {perfsuite.__version__}")
    subcommands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        sub = subcommands.add_parser(command.name, help=command.help, description=command.help)
        command.arguments(sub)
        sub.epilog = "  ".join(filter(None, [sub.epilog, exit_codes(command.found)]))
        sub.set_defaults(run=command.run)
    arguments = parser.parse_args(argv)
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()  # a closed pipe must show here, not at exit
        return code
    except PerfsuiteError as error:
        print(f"perfsuite: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except BrokenPipeError:  # perfsuite env | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK


COMMANDS: tuple[Command, ...] = (
    env.COMMAND,
    platforms.COMMAND,
    baselines.COMMAND,
    audit.COMMAND,
    schedule.COMMAND,
    trace.COMMAND,
    ab.COMMAND,
    show.COMMAND,
    history.COMMAND,
    import_.COMMAND,
    export.COMMAND,
    report.COMMAND,
    calibrate.COMMAND,
    advise.COMMAND,
    published.COMMAND,
    checklist.COMMAND,
    project.COMMAND,
    backtest.COMMAND,
)
