"""``perfsuite report``: the tables of the published reports out of journals and baseline files."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from perfsuite.baselines import store
from perfsuite.cli.command import EXIT_OK, Command
from perfsuite.errors import ConfigurationError, first_line
from perfsuite.history.file import read as read_history
from perfsuite.history.findings import findings_of
from perfsuite.history.git import Repository
from perfsuite.history.order import in_order
from perfsuite.imports.file import read_imported
from perfsuite.journal import Journal, read_journal
from perfsuite.platforms import Catalog, load_catalog
from perfsuite.reports.beside_others import foreign_markdown, imported_grids
from perfsuite.reports.over_time import history_grids
from perfsuite.reports.tables.case import from_entry
from perfsuite.reports.tables.markdown import Grid
from perfsuite.reports.tables.recording import Recording, recording_of
from perfsuite.reports.tables.report import find_style, fitting_styles, report
from perfsuite.reports.tables.styles import STYLES

if TYPE_CHECKING:
    from perfsuite.reports.page.material import Run


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
    parser.add_argument("--baseline", type=Path, metavar="FILE", help="with --html: stored runs to compare with")
    parser.add_argument(
        "--platform-file", action="append", default=[], metavar="FILE", help="TOML file with platforms of your own"
    )


def run(options: argparse.Namespace) -> int:
    """Carry out ``perfsuite report``."""
    catalog = load_catalog(options.platform_file)
    if options.html is not None:
        return _write_page(options, catalog)
    if options.baseline is not None:
        raise ConfigurationError("--baseline says what a page compares with; give --html FILE too")
    runs = [read_run(path, catalog) for path in options.results]
    base = read_run(options.base, catalog) if options.base else None
    styles = (find_style(options.style),) if options.style else fitting_styles(runs)
    if not styles:
        names = ", ".join(run.name for run in runs)
        raise ConfigurationError(
            f"{names}: nothing was measured that any report has a table for; run cases of test_perf, or name a "
            f"style: {', '.join(STYLES)}"
        )
    text = report(runs, styles, base) + _beside(options, runs)
    if options.out is None:
        print(text, end="")
        return EXIT_OK
    try:
        options.out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"--out: {options.out} cannot be written: {error.strerror}") from None
    print(f"{options.out}: {', '.join(style.name for style in styles)}")
    return EXIT_OK


def _beside(options: argparse.Namespace, runs: Sequence[Recording]) -> str:
    """The sections of a history and of imported figures, where they are asked for."""
    grids = _grids(options, runs)
    return "".join(f"\n{line}" for grid in grids for line in foreign_markdown(grid)).rstrip("\n") + "\n" * bool(grids)


def _grids(options: argparse.Namespace, runs: Sequence[Recording]) -> list[Grid]:
    grids: list[Grid] = []
    if options.history is not None:
        history = read_history(options.history)
        timeline = in_order(history.sessions, Repository(root=options.history.resolve().parent))
        grids += history_grids(history, findings_of(timeline))
    files = [imported for path in options.imported for imported in read_imported(path)]
    return [*grids, *imported_grids(files, [case for run in runs for case in run.cases])]


def _write_page(options: argparse.Namespace, catalog: Catalog) -> int:
    """Carry out ``perfsuite report --html``."""
    from perfsuite.reports.page.page import write_page
    from perfsuite.reports.page.runs import material_of

    for given, name in ((options.style, "--style"), (options.out, "--out")):
        if given is not None:
            raise ConfigurationError(f"{name} is of the report in Markdown; run perfsuite report again without --html")
    if options.base is not None and options.baseline is not None:
        raise ConfigurationError("--base and --baseline both say what is compared with; give one of them")
    runs = [_page_run(path, catalog) for path in options.results]
    base = options.base or options.baseline
    material = material_of(runs, _page_run(base, catalog) if base else None)
    if options.history is not None or options.imported:
        beside = _grids(options, [read_run(path, catalog) for path in options.results])
        material = dataclasses.replace(material, beside=tuple(beside))
    write_page(material, options.html)
    print(f"page {options.html}")
    return EXIT_OK


def _page_run(path: Path, catalog: Catalog) -> Run:
    """What the page shows of a journal or baseline file."""
    from perfsuite.reports.page.runs import run_of_baseline, run_of_record

    require_file(path)
    if is_journal(path):
        record = read_journal(path).record
        return run_of_record(record, catalog.models.get(record.platform))
    baseline = store.read(path)
    return run_of_baseline(baseline, path.name, catalog.models.get(baseline.hardware.platform))


def require_file(path: Path) -> None:
    """Raise ConfigurationError unless there is a file."""
    if not path.is_file():
        raise ConfigurationError(f"{path} is no file; give a journal or a baseline file")


def read_run(path: Path, catalog: Catalog) -> Recording:
    """The results in a journal or baseline file; PerfsuiteError when it is neither, or damaged."""
    require_file(path)
    if is_journal(path):
        return _run_of_journal(read_journal(path), catalog)
    return _run_of_baseline(path, catalog)


def is_journal(path: Path) -> bool:
    """Whether the first line is a JSON object with a header; a baseline file has no object on one line alone."""
    with path.open("rb") as file:
        first = file.readline()
    try:
        plain = json.loads(first)
    except ValueError:
        return path.suffix == ".jsonl"
    return isinstance(plain, dict) and "header" in plain


def _run_of_journal(journal: Journal, catalog: Catalog) -> Recording:
    header = journal.header
    missing = {case: f"failed: {first_line(message)}" for case, message in journal.failures.items()}
    missing.update({case: f"interrupted by {signal}" for case, signal in journal.interrupted.items()})
    missing.update({case: f"skipped: {reason}" for case, reason in journal.skips.items()})
    return recording_of(
        journal.results.values(),
        name=str(journal.path),
        platform=header.platform,
        fingerprint=header.fingerprint,
        missing=missing,
        versions=header.versions,
        device=catalog.models.get(header.platform),
    )


def _run_of_baseline(path: Path, catalog: Catalog) -> Recording:
    baseline = store.read(path)
    hardware = baseline.hardware
    newest = max((entry.newest for entry in baseline.entries.values()), key=lambda run: run.time, default=None)
    environment = newest.environment if newest else {}
    packages = environment.get("packages", {})
    return Recording(
        name=f"{path}, newest run of each case",
        platform=hardware.platform,
        fingerprint=hardware.fingerprint,
        cases=tuple(
            from_entry(
                entry, platform=hardware.platform, fingerprint=hardware.fingerprint, simulated=hardware.simulated
            )
            for _, entry in sorted(baseline.entries.items())
        ),
        environment=environment,
        versions=packages if isinstance(packages, dict) else {},
        device=catalog.models.get(hardware.platform),
        simulated=hardware.simulated,
    )


COMMAND = Command(
    name="report",
    help="print the tables of the published reports out of results, published figures beside them",
    arguments=arguments,
    run=run,
)
