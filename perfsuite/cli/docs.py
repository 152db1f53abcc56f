"""``perfsuite docs``: print a page of the documentation."""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

from perfsuite.base.errors import ConfigurationError, did_you_mean
from perfsuite.base.files import shipped
from perfsuite.cli.main import EXIT_FOUND, EXIT_OK, Command, print_lines


def _listing(found: dict[str, Path]) -> list[str]:
    width = max(map(len, found)) + 2
    lines = []
    for folder, names in itertools.groupby(found, key=lambda name: found[name].parent.name):
        lines.append(folder)
        for name in names:
            title = found[name].read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
            lines.append(f"  {name:<{width}}{title}")
    return lines


def _run(arguments: argparse.Namespace) -> int:
    folder = shipped("docs", "docs", "*/*.md", ConfigurationError)
    found = {path.stem: path for path in sorted(folder.glob("*/*.md"))}
    if arguments.page is not None:
        name = Path(arguments.page).stem
        if name not in found:
            raise ConfigurationError(f"page {arguments.page!r} is unknown; {did_you_mean(name, found)}")
        found = {name: found[name]}
    if arguments.find is not None:
        texts = {name: path.read_text(encoding="utf-8").splitlines() for name, path in found.items()}
        pairs = ((name, line) for name, lines in texts.items() for line in lines)
        lines = [f"{name}: {line.strip()}" for name, line in pairs if arguments.find.lower() in line.lower()]
        if not lines:
            print(f"no line contains {arguments.find!r} in {', '.join(found)}", file=sys.stderr)
            return EXIT_FOUND
        print_lines(lines)
    elif arguments.page is not None:
        print(found[name].read_text(encoding="utf-8"), end="")
    else:
        print_lines(_listing(found))
    return EXIT_OK


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("page", nargs="?", metavar="PAGE", help="print this page (default: list all pages)")
    parser.add_argument(
        "--find", metavar="WORDS", help="print the lines that contain these words (default: whole pages)"
    )


DOCS = Command(
    help="print a page of the documentation, or list the pages",
    example="perfsuite docs gate",
    arguments=_arguments,
    run=_run,
    found="no line contains the words of --find",
)
