"""The command line beside pytest: ``perfsuite env``, ``perfsuite platforms``, ...

``GROUPS`` lists the subcommands in the order of ``perfsuite --help``, each with the module that has it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import io
import os
import shutil
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TextIO, cast

import perfsuite
from perfsuite.base.errors import CaseError, PerfsuiteError, did_you_mean, first_line
from perfsuite.base.text import escaped, json_text, printable, screen_text

EXIT_OK = 0
EXIT_FOUND = 1
"""The command did its work and found what it was asked to look for: a slower case, a contradiction."""
EXIT_USAGE = 4
"""A wrong option, platform name or file: the same number as pytest's."""
USAGE_CODE = f"{EXIT_USAGE} wrong usage or configuration (as pytest's), with one line on stderr that says what to do"
TRACEBACK = "PERFSUITE_TRACEBACK"
"""Variable: what nobody expected is raised, not told in a line."""
GROUPS = {
    "look at results": {"show": "show", "report": "report", "checklist": "report", "trace": "trace"},
    "compare": {"ab": "ab", "fleet": "fleet", "history": "history", "published": "published", "explain": "explain"},
    "gate": {"baselines": "baselines"},
    "project": {"project": "project", "advise": "advise", "calibrate": "calibrate"},
    "exchange with other tools": {"import": "exchange", "export": "exchange", "audit": "audit"},
    "this machine": {"env": "platforms", "platforms": "platforms"},
    "read": {"docs": "docs"},
}
"""Commands in the groups of ``perfsuite --help``, each with the module of this package that has it as ``ENV``."""
COMMANDS = {name: module for group in GROUPS.values() for name, module in group.items()}


@dataclass(frozen=True, kw_only=True)
class Command:
    """One subcommand."""

    help: str
    """One line."""
    arguments: Callable[[argparse.ArgumentParser], None]
    """Adds the options."""
    run: Callable[[argparse.Namespace], int]
    """Does the work and returns the exit code; a PerfsuiteError becomes one line and EXIT_USAGE."""
    found: str = ""
    """What EXIT_FOUND says of this command; empty where it never ends so."""
    mixes: bool = False
    """Whether options may also stand between the positional arguments."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # what a terminal or a file cannot hold is no end of a run
    out, err = cast("TextIO", _Screen(sys.stdout)), cast("TextIO", _Screen(sys.stderr))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        return _run(argv)


def _run(argv: Sequence[str] | None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    if not given or given[0] in ("-h", "--help"):
        print(_overview())
        return EXIT_OK
    parser = _Parser(prog="perfsuite")
    parser.add_argument("--version", action="version", version=f"perfsuite {perfsuite.__version__}")
    if not given[0].startswith("-") and given[0] not in COMMANDS:
        parser.error(f"command {given[0]!r} is unknown; {did_you_mean(given[0], COMMANDS)}")
    subcommands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    # A command's modules are loaded where it is asked for: all of them take a second.
    for name in given[:1] if given[0] in COMMANDS else ():
        command = find_command(name)
        sub = subcommands.add_parser(name, help=command.help, description=command.help)
        command.arguments(sub)
        sub.epilog = "\n".join(filter(None, [sub.epilog, exit_codes(command.found)]))
        sub.set_defaults(run=command.run)
        sub.mixes = command.mixes
    arguments = parser.parse_args(given)
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


def _overview() -> str:
    """Return the help of ``perfsuite`` alone: the commands in groups, a line each or more."""
    width, columns = max(map(len, COMMANDS)) + 4, shutil.get_terminal_size().columns
    fill = functools.partial(textwrap.fill, width=columns, subsequent_indent=" " * width)
    lines = ["usage: perfsuite COMMAND ...  (perfsuite COMMAND --help explains one; pytest measures)"]
    for title, names in GROUPS.items():
        lines += ["", title]
        lines += [fill(f"  {name:<{width - 2}}{find_command(name).help}") for name in names]
    codes = exit_codes("found the thing looked for (see each command's --help)")
    return "\n".join([*lines, "", "-h, --help, --version", textwrap.fill(codes, columns)])


def find_command(name: str) -> Command:
    """The subcommand of this name."""
    command: Command = getattr(importlib.import_module(f"perfsuite.cli.{COMMANDS[name]}"), name.upper())
    return command


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


class _Parser(argparse.ArgumentParser):
    """argparse with our exit code for wrong usage, and with the line breaks of an epilog."""

    mixes = False
    """Whether options may also stand between the positional arguments."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"formatter_class": _Paragraphs, **settings})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments; where they are mixed, options first."""
        if not self.mixes:
            return super().parse_known_args(args, namespace)
        self.mixes = False  # argparse calls this method for both parts
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self.mixes = True

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message}\n")


class _Paragraphs(argparse.HelpFormatter):
    """Fills every line of an epilog by itself."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(textwrap.fill(line, width, initial_indent=indent) for line in text.splitlines())


class _Screen:
    """A stream on which text of others does nothing but be read."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(screen_text(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
