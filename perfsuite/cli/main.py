"""The command ``perfsuite``: find the subcommand, run it, and turn errors into one line and an exit code."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import io
import os
import re
import shutil
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TextIO, cast

import perfsuite
from perfsuite.base.errors import CaseError, PerfsuiteError, did_you_mean, first_line
from perfsuite.base.text import escaped, folded, json_text, printable, screen_text

EXIT_OK = 0
EXIT_FOUND = 1  # The command worked and found a finding of its kind: a slower case, a contradiction.
EXIT_USAGE = 4  # A wrong option, platform name or file: the same number as pytest's.
USAGE_CODE = f"{EXIT_USAGE} wrong usage or configuration (as pytest's), with one line on stderr that says what to do"
TRACEBACK = "PERFSUITE_TRACEBACK"
"""Environment variable: with it an unexpected exception is raised instead of printed in one line."""
GROUPS = {
    "look at results": {"show": "show", "report": "report", "checklist": "report", "trace": "report"},
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

    help: str  # One line.
    example: str  # A call with the usual options.
    arguments: Callable[[argparse.ArgumentParser], None]  # Add the options to the parser.
    run: Callable[[argparse.Namespace], int | None]
    """Do the work and return the exit code, or None for EXIT_OK; a PerfsuiteError becomes one line and EXIT_USAGE."""
    found: str = ""  # Meaning of EXIT_FOUND for this command; empty if the command never returns it.
    mixes: bool = False  # Whether options may appear between the positional arguments.


_LONG_WORD = re.compile(r"(\S{250})\S{250,}")  # A name in a file of others; a message stays readable without its rest.


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a character outside of the encoding must not end the run
    out, err = cast("TextIO", _Screen(sys.stdout)), cast("TextIO", _Screen(sys.stderr))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = _run(list(sys.argv[1:] if argv is None else argv))
            sys.stdout.flush()  # raises here if the pipe is closed, not at exit
            return code
        except BrokenPipeError:  # perfsuite env | head
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return EXIT_OK


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(_overview())
        return EXIT_OK
    parser = _Parser(prog="perfsuite")
    parser.add_argument("--version", action="version", version=f"perfsuite {perfsuite.__version__}")
    if not words[0].startswith("-") and words[0] not in COMMANDS:
        parser.error(f"command {words[0]!r} is unknown; {did_you_mean(words[0], COMMANDS)}")
    subcommands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    # Only the modules of this command are loaded: loading all of them takes a second.
    for name in words[:1] if words[0] in COMMANDS else ():
        add_command(subcommands, name)
    arguments = parser.parse_args(words)
    try:
        code: int = arguments.run(arguments) or EXIT_OK
        return code
    except PerfsuiteError as error:
        # A CaseError carries lines printed by pytest or the ranks; any other message is one line.
        message = str(error) if isinstance(error, CaseError) else escaped(_LONG_WORD.sub(r"\1...", str(error)))
        print(f"perfsuite: error: {message}", file=sys.stderr)
        return EXIT_USAGE
    except Exception as error:
        if os.environ.get(TRACEBACK) or isinstance(error, BrokenPipeError):
            raise
        place = traceback.extract_tb(error.__traceback__)[-1]
        print(
            f"perfsuite: error: {printable(f'{type(error).__name__}: {first_line(error)}')} "
            f"({os.path.basename(place.filename)}, line {place.lineno}); a file holds a value that perfsuite does not "
            f"write, or this is a defect: {TRACEBACK}=1 prints the traceback to report it with",
            file=sys.stderr,
        )
        return EXIT_USAGE


def add_command(subcommands: Any, name: str) -> _Parser:
    """Add the parser of the subcommand ``name`` to those of argparse and return it."""
    command = find_command(name)
    sub: _Parser = subcommands.add_parser(name, help=command.help, description=command.help)
    command.arguments(sub)
    sub.epilog = "\n".join(filter(None, [f"example: {command.example}", sub.epilog, exit_codes(command.found)]))
    sub.set_defaults(run=command.run)
    sub.mixes = command.mixes
    return sub


def _overview() -> str:
    width, columns = max(map(len, COMMANDS)) + 4, shutil.get_terminal_size().columns
    fill = functools.partial(textwrap.fill, width=columns, subsequent_indent=" " * width)
    lines = ["usage: perfsuite COMMAND ...  (perfsuite COMMAND --help explains one; pytest measures)"]
    for title, names in GROUPS.items():
        lines += ["", title]
        lines += [fill(f"  {name:<{width - 2}}{find_command(name).help}") for name in names]
    codes = exit_codes("found a finding (see each command's --help)")
    return "\n".join([*lines, "", "-h, --help, --version", textwrap.fill(codes, columns)])


def find_command(name: str) -> Command:
    """Return the subcommand of this name."""
    command: Command = getattr(importlib.import_module(f"perfsuite.cli.{COMMANDS[name]}"), name.upper())
    return command


def exit_codes(found: str = "") -> str:
    """Return the line of exit codes for a help text; ``found`` is the meaning of EXIT_FOUND, empty if it is unused."""
    return "; ".join(["exit codes: 0 done", *([f"{EXIT_FOUND} {found}"] if found else []), USAGE_CODE])


def platform_file_argument(parser: argparse.ArgumentParser) -> None:
    """Add --platform-file, for every subcommand that looks up platforms."""
    parser.add_argument(
        "--platform-file",
        action="append",
        default=[],
        metavar="FILE",
        help="add the platforms and [environment] of a TOML file, as ini perf_platforms; repeatable (default: none)",
    )


def platform_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --platform-file and --json."""
    platform_file_argument(parser)
    json_argument(parser)


def json_argument(parser: argparse.ArgumentParser) -> None:
    """Add --json."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def print_json(value: Any) -> None:
    """Print a value as JSON."""
    print(json_text(value, indent=2), end="")


def screen_width() -> int | None:
    """Return the columns of the terminal, or of the variable COLUMNS; None if stdout is a file or a pipe."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return int(columns)
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def print_lines(lines: Iterable[str]) -> None:
    """Print text, folded at the width of the terminal; a control character cannot begin a new line."""
    print_marked((line, "") for line in lines)


_COLOURS = {"bad": 31, "doubt": 33, "good": 32}  # Codes of red, yellow and green by mark.


def print_marked(lines: Iterable[tuple[str, str]], color: str = "no") -> None:
    """Print pairs of a line and its mark like :func:`print_lines`, coloured by the mark.

    ``color``: yes, no, or auto, which decides as pytest does (PY_COLORS, NO_COLOR, FORCE_COLOR, a terminal).
    """
    width, stream = screen_width(), sys.stdout
    is_coloured = color == "yes" or (color == "auto" and _colours_by_default())
    for line, mark in lines:
        plain = escaped(line)
        indent = " " * (len(plain) - len(plain.lstrip()) + 4)
        text = "\n".join(folded(plain, width, indent)) if width else plain
        if is_coloured and mark in _COLOURS and isinstance(stream, _Screen):
            stream.coloured(text, _COLOURS[mark])
        else:
            print(text)


def _colours_by_default() -> bool:
    asked = os.environ.get("PY_COLORS")
    if asked in ("0", "1"):
        return asked == "1"
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or (sys.stdout.isatty() and os.environ.get("TERM") != "dumb")


def color_argument(parser: argparse.ArgumentParser) -> None:
    """Add --color."""
    parser.add_argument(
        "--color",
        choices=("auto", "yes", "no"),
        default="auto",
        help="print findings in colour (default: auto, in a terminal or with FORCE_COLOR=1; NO_COLOR=1 turns it off)",
    )


class _Parser(argparse.ArgumentParser):
    """argparse with exit code 4 for wrong usage, and with the line breaks of an epilog."""

    mixes = False  # Whether options may appear between the positional arguments.

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"formatter_class": _Paragraphs, **settings})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments, the options first if they are mixed."""
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
    """Wrap every line of an epilog on its own."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(textwrap.fill(line, width, initial_indent=indent) for line in text.splitlines())


class _Screen:
    """A stream that escapes control characters and commands of CI services."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(screen_text(text))

    def coloured(self, text: str, code: int) -> None:
        """Write escaped lines in the colour of this code, the only control characters that pass."""
        self._stream.write("".join(f"\x1b[{code}m{line}\x1b[0m\n" for line in screen_text(text).split("\n")))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
