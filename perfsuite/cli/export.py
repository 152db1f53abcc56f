"""``perfsuite export``: results as other programs read them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from perfsuite.base.errors import ConfigurationError
from perfsuite.base.files import write_file
from perfsuite.baselines import store
from perfsuite.cli.command import EXIT_OK, Command
from perfsuite.cli.results import first_object, require_file
from perfsuite.exports.formats import EXPORTS
from perfsuite.exports.row import ExportRow, rows_of_baseline, rows_of_history, rows_of_run
from perfsuite.history import file
from perfsuite.metrics import read_run


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    parser.epilog = (
        "RESULTS are journals, baseline files (their newest runs) or histories; bencher, github-action-benchmark and "
        "openmetrics take the newest figure of each case, otava wants a history"
    )
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULTS", help="journal, baseline file or history")
    parser.add_argument("--format", required=True, choices=list(EXPORTS), help="who reads it")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write there instead of to the terminal")


def run(options: argparse.Namespace) -> int:
    """Carry out ``perfsuite export``."""
    rows = [row for path in options.results for row in _rows(path)]
    if not rows:
        names = ", ".join(map(str, options.results))
        raise ConfigurationError(f"{names}: nothing was measured, so there is nothing to export")
    if len({row.simulated for row in rows}) > 1:
        raise ConfigurationError("real and simulated results never meet; export them apart")
    text = EXPORTS[options.format](rows)
    if options.out is None:
        print(text, end="")
        return EXIT_OK
    write_file(options.out, text, option="--out")
    print(f"{options.out}: {len(rows)} figures as {options.format}")
    return EXIT_OK


def _rows(path: Path) -> Iterator[ExportRow]:
    require_file(path, "a journal, a baseline file or a history")
    first = first_object(path) or {}
    if "header" in first:
        run = read_run(path)
        yield from rows_of_run(run, simulated=any(result.simulated for result in run.results.values()))
    elif path.suffix == ".jsonl" or "session" in first:
        yield from rows_of_history(file.read(path))
    else:
        yield from rows_of_baseline(store.read(path))


COMMAND = Command(
    name="export",
    help="results as other programs read them: JSON, CSV, Prometheus, Bencher, github-action-benchmark, Otava",
    arguments=arguments,
    run=run,
)
