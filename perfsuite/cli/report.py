"""``perfsuite report``: the tables of the published reports out of journals and baseline files."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from perfsuite.base.errors import ConfigurationError
from perfsuite.base.files import write_file
from perfsuite.cli.command import EXIT_OK, Command, platform_file_argument
from perfsuite.cli.results import read_recording
from perfsuite.history.file import read as read_history
from perfsuite.history.findings import searched
from perfsuite.history.git import Repository
from perfsuite.imports.formats import read_imported
from perfsuite.platforms import Catalog, load_catalog
from perfsuite.reports.beside_others import foreign_markdown, imported_grids
from perfsuite.reports.document import Grid
from perfsuite.reports.over_time import OverTime, history_grids
from perfsuite.reports.recording import Recording
from perfsuite.reports.tables.recording import table_cases
from perfsuite.reports.tables.report import find_style, fitting_styles, report
from perfsuite.reports.tables.styles import STYLES


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    parser.epilog = (
        "RESULTS are journals (.perfsuite/journal-*.jsonl) or baseline files (baselines/PLATFORM/FINGERPRINT.json); "
        "where they hold nothing that a table shows, that is wrong usage."
    )
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULTS", help="journal or baseline file")
    parser.add_argument("--style", choices=list(STYLES), help="whose tables; default: those that fit what was measured")
    parser.add_argument(
        "--base", type=Path, metavar="FILE", help="results to compare with: of another machine; with --html of any"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write Markdown there instead of to the terminal")
    parser.add_argument("--history", type=Path, metavar="FILE", help="what changed over time, from a history")
    parser.add_argument(
        "--imported",
        action="append",
        type=Path,
        default=[],
        metavar="FILE",
        help="figures of other tools beside these: what perfsuite import --out wrote, or a file of theirs; repeatable",
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write one page with charts there, docs/page.md")
    parser.add_argument("--show-hosts", action="store_true", help="with --html: keep names of hosts on the page")
    parser.add_argument("--baseline", type=Path, metavar="FILE", help="with --html: stored runs to compare with")
    platform_file_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Carry out ``perfsuite report``."""
    catalog = load_catalog(options.platform_file)
    if options.html is not None:
        return _write_page(options, catalog)
    if options.baseline is not None:
        raise ConfigurationError("--baseline says what a page compares with; give --html FILE too")
    runs = [read_recording(path, catalog) for path in options.results]
    base = read_recording(options.base, catalog) if options.base else None
    styles = (find_style(options.style),) if options.style else fitting_styles(runs)
    if not styles:
        names = ", ".join(recording.run.name for recording in runs)
        raise ConfigurationError(
            f"{names}: nothing was measured that any report has a table for; run cases of test_perf, or name a "
            f"style: {', '.join(STYLES)}"
        )
    text = report(runs, styles, base) + _beside(options, runs)
    if options.out is None:
        print(text, end="")
        return EXIT_OK
    write_file(options.out, text, option="--out")
    print(f"{options.out}: {', '.join(style.name for style in styles)}")
    return EXIT_OK


def _beside(options: argparse.Namespace, runs: Sequence[Recording]) -> str:
    """The sections of a history and of imported figures, where they are asked for."""
    over_time = _over_time(options)
    grids = [*(history_grids(over_time) if over_time else []), *_imported(options, runs)]
    return "".join(f"\n{line}" for grid in grids for line in foreign_markdown(grid)).rstrip("\n") + "\n" * bool(grids)


def _over_time(options: argparse.Namespace) -> OverTime | None:
    """The history that was asked for, and what it shows on the branch that is checked out beside it."""
    if options.history is None:
        return None
    history = read_history(options.history)
    repository = Repository(root=options.history.resolve().parent)
    return OverTime(history=history, findings=searched(history.sessions, repository))


def _imported(options: argparse.Namespace, runs: Sequence[Recording]) -> list[Grid]:
    files = [imported for path in options.imported for imported in read_imported(path)]
    return imported_grids(files, [case for run in runs for case in table_cases(run)])


def _write_page(options: argparse.Namespace, catalog: Catalog) -> int:
    """Carry out ``perfsuite report --html``."""
    from perfsuite.reports.material import material_of
    from perfsuite.reports.page.page import write_page

    for given, name in ((options.style, "--style"), (options.out, "--out")):
        if given is not None:
            raise ConfigurationError(f"{name} is of the report in Markdown; run perfsuite report again without --html")
    if options.base is not None and options.baseline is not None:
        raise ConfigurationError("--base and --baseline both say what is compared with; give one of them")
    runs = [read_recording(path, catalog) for path in options.results]
    base = options.base or options.baseline
    material = material_of(runs, read_recording(base, catalog) if base else None, show_hosts=options.show_hosts)
    beside = _imported(options, runs) if options.imported else []
    material = dataclasses.replace(material, over_time=_over_time(options), beside=tuple(beside))
    write_page(material, options.html)
    print(f"page {options.html}")
    return EXIT_OK


COMMAND = Command(
    name="report",
    help="print the tables of the published reports out of results, published figures beside them",
    arguments=arguments,
    run=run,
)
