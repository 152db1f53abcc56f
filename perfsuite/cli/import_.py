"""``perfsuite import``: figures that other tools measured, read, converted and held against the rules."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from perfsuite.base.errors import ConfigurationError
from perfsuite.base.text import escaped, printable
from perfsuite.base.units import plural, significant
from perfsuite.cli.command import EXIT_FOUND, EXIT_OK, Command, platform_file_argument, print_lines
from perfsuite.imports.formats import FORMATS, find_format, read_file, write_imported
from perfsuite.imports.plausibility import Doubt, doubts
from perfsuite.imports.row import Imported, Told
from perfsuite.platforms import load_catalog

SHOWN = 12
"""Figures, refusals and doubts of a file that are printed; --all prints every one."""
_FOUND = "a figure was refused, or contradicts another"


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    formats = "; ".join(f"{known.name}: {known.about}" for known in FORMATS)
    parser.epilog = f"formats: {formats}; the figures are never a baseline and never gated"
    parser.add_argument(
        "what",
        nargs="+",
        metavar="[FORMAT] FILE",
        help=f"files, after their format ({', '.join(known.name for known in FORMATS)}) where that is not unambiguous",
    )
    parser.add_argument(
        "--platform", default="", metavar="NAME", help="what they were measured on: holds its peaks to them"
    )
    parser.add_argument("--collective", default="", metavar="NAME", help="of a log that does not name its own")
    parser.add_argument("--ranks-per-node", type=int, metavar="N", help="of FlagPerf's bandwidth between nodes")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write them for perfsuite report --imported FILE")
    parser.add_argument("--all", action="store_true", help="print every figure, not the first ones of each file")
    platform_file_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Carry out ``perfsuite import``; EXIT_FOUND where a figure was refused or contradicts another."""
    catalog = load_catalog(options.platform_file)
    device = catalog.find(options.platform) if options.platform else None
    known = find_format(options.what[0]) if options.what[0] in {known.name for known in FORMATS} else None
    paths = [Path(text) for text in options.what[1 if known else 0 :]]
    if not paths:
        raise ConfigurationError(f"no file is named; perfsuite import {options.what[0]} FILE")
    told = Told(platform=options.platform, collective=options.collective, ranks_per_node=options.ranks_per_node)
    files = [read_file(path, told, known) for path in paths]
    is_doubtful = False
    for imported in files:
        doubted = doubts(imported, device)
        print_lines(_lines(imported, doubted, None if options.all else SHOWN))
        is_doubtful |= bool(imported.refused) or any(doubt.severity == "contradiction" for doubt in doubted)
    if options.out:
        write_imported(options.out, files)
        print(f"{options.out}: {sum(len(imported.rows) for imported in files)} figures")
    return EXIT_FOUND if is_doubtful else EXIT_OK


def _lines(imported: Imported, doubted: Sequence[Doubt], most: int | None) -> Iterator[str]:
    notes = "".join(f"; {note}" for note in imported.notes)
    yield f"{imported.source}: {imported.tool}, {plural(len(imported.rows), 'figure')}{escaped(notes)}"
    rows = [
        f"{significant(row.value):>12} {row.unit:10} {row.metric:24} {printable(row.name)}  (line {row.line}: "
        f"{printable(row.printed)}; {row.convention})"
        for row in imported.rows
    ]
    yield from _some(rows, most, "figure")
    yield from _some(
        [f"refused, line {one.line}: {printable(one.text)}: {one.why}" for one in imported.refused], most, "refusal"
    )
    yield from _some([f"{one.severity} {one.rule}: {escaped(one.message)}" for one in doubted], most, "doubt")


def _some(lines: Sequence[str], most: int | None, what: str) -> Iterator[str]:
    yield from (f"  {line}" for line in lines[:most])
    if most is not None and len(lines) > most:
        yield f"  and {plural(len(lines) - most, f'more {what}')}"


COMMAND = Command(
    name="import",
    help="read results of nccl-tests, SuperBench, FlagPerf, torchtitan, Megatron, DeepSpeed or pytest-benchmark",
    arguments=arguments,
    run=run,
    found=_FOUND,
)
