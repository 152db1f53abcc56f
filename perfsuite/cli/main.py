"""The command line beside pytest: ``perfsuite env``, ``perfsuite platforms``, ...

``COMMANDS`` lists the subcommands (see :mod:`perfsuite.cli.command`) in the order of ``perfsuite --help``.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import keyword
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn, TextIO, cast

import perfsuite
from perfsuite.base.errors import CaseError, PerfsuiteError, first_line
from perfsuite.base.text import escaped, printable, screen_text
from perfsuite.cli.command import EXIT_OK, EXIT_USAGE, Command, exit_codes

TRACEBACK = "PERFSUITE_TRACEBACK"
"""Variable: what nobody expected is raised, not told in a line."""
_EPILOG = exit_codes("found what was looked for (see each command's --help)")


class _Parser(argparse.ArgumentParser):
    """argparse with our exit code for wrong usage."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message}\n")


class _Screen:
    """A stream on which text of others does nothing but be read."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(screen_text(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # what a terminal or a file cannot hold is no end of a run
    out, err = cast("TextIO", _Screen(sys.stdout)), cast("TextIO", _Screen(sys.stderr))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        return _run(argv)


def _run(argv: Sequence[str] | None) -> int:
    parser = _Parser(prog="perfsuite", description="What pytest does not do for perfsuite.", epilog=_EPILOG)
    parser.add_argument("--version", action="version", version=f"perfsuite {perfsuite.__version__}")
    subcommands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    given = sys.argv[1:] if argv is None else argv
    # A command's modules are loaded where it is asked for: all of them take a second.
    for name in given[:1] if given and given[0] in COMMANDS else COMMANDS:
        command = find_command(name)
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
        # What pytest or ranks said last comes in lines; any other message is one.
        told = str(error) if isinstance(error, CaseError) else escaped(str(error))
        print(f"perfsuite: error: {told}", file=sys.stderr)
        return EXIT_USAGE
    except BrokenPipeError:  # perfsuite env | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except Exception as error:
        if os.environ.get(TRACEBACK):
            raise
        print(f"perfsuite: error: {_unforeseen(error)}", file=sys.stderr)
        return EXIT_USAGE


def _unforeseen(error: Exception) -> str:
    """One line on what no part of perfsuite expected: a file that others wrote, or a defect."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    said = printable(f"{type(error).__name__}: {first_line(error)}")
    where = f"{os.path.basename(place.filename)}, line {place.lineno}"
    return (
        f"{said} ({where}); a file holds a value that perfsuite does not write, or this is a defect: "
        f"{TRACEBACK}=1 prints the traceback to report it with"
    )


def find_command(name: str) -> Command:
    """The subcommand of this name, from the module that is called so."""
    module = f"{name}_" if keyword.iskeyword(name) else name
    command: Command = importlib.import_module(f"perfsuite.cli.{module}").COMMAND
    return command


COMMANDS = (
    "env",
    "platforms",
    "baselines",
    "audit",
    "trace",
    "ab",
    "show",
    "history",
    "import",
    "export",
    "report",
    "calibrate",
    "advise",
    "published",
    "checklist",
    "project",
)
