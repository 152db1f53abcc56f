"""Recompute the tables of docs projection-evidence from the published rows in ``data``."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.backtest import runs
from benchmarks.backtest.leave_one_out import Backtested
from perfsuite.base.errors import ConfigurationError
from perfsuite.base.writing import write_file
from perfsuite.cli.main import EXIT_FOUND, EXIT_OK, json_argument, print_json, print_lines
from perfsuite.projection import softwares
from perfsuite.projection.step import FILE
from perfsuite.record.codec import to_json


def main(arguments: Sequence[str] | None = None) -> int:
    """Recompute, print; EXIT_FOUND where a table is beyond its budget."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.backtest", description=__doc__)
    parser.add_argument("table", nargs="*", metavar="TABLE", help=f"of {', '.join(runs.NAMES)}; default: all")
    parser.add_argument("--rows", action="store_true", help="print every row, and those that were left out")
    parser.add_argument(
        "--write-bands",
        action="store_true",
        help="write bands.json and software_constants.json of perfsuite/projection",
    )
    json_argument(parser)
    options = parser.parse_args(arguments)
    try:
        names = runs.find_tables(options.table)
    except ConfigurationError as error:
        parser.error(str(error))
    tested = [one for name in names for one in runs.run_named(name)]
    if options.write_bands:
        write_file(FILE, json.dumps(runs.bands(), indent=1) + "\n")
        write_file(softwares.FILE, json.dumps([to_json(one) for one in runs.shipped_constants()], indent=1) + "\n")
    if options.json:
        print_json([_json(one) for one in tested])
    else:
        print_lines(_table(tested))
        if options.rows:
            print_lines(line for one in tested for line in _rows(one))
    return EXIT_OK if all(one.within_budget for one in tested) else EXIT_FOUND


def _table(tested: list[Backtested]) -> Iterator[str]:
    yield f"{'table':30} {'rows':>4} {'left out':>8}   {'median / p90 / max %':21} {'at most':10} {'with every row':21}"
    for one in tested:
        errors = " / ".join(f"{value:.1f}" for value in one.summary)
        every = " / ".join(f"{value:.1f}" for value in one.every) if one.beside else ""
        budget = "/".join(f"{value:g}" for value in one.budget)
        over = "" if one.within_budget else "  over"
        line = f"{one.name:30} {len(one.errors):>4} {len(one.left_out):>8}   {errors:21} {budget:10} {every:21}{over}"
        yield line.rstrip()


def _rows(one: Backtested) -> Iterator[str]:
    yield f"\n{one.title}"
    if one.constants:
        yield "  " + ", ".join(f"{name} {value:.3g}" for name, value in one.constants.items()) + " (all rows)"
    for error in one.errors:
        yield f"  {error.row.id:64} {error.percent:+6.1f} %"
    beside = {error.row.id: f"{error.percent:+6.1f} %" for error in one.beside}
    for row, why in one.left_out.items():
        yield f"  {row:64} {beside.get(row, ''):>8} left out: {why}"


def _json(one: Backtested) -> dict[str, Any]:
    median, ninety, most = one.summary
    return {
        "table": one.name,
        "title": one.title,
        "rows": len(one.errors),
        "median_percent": median,
        "p90_percent": ninety,
        "max_percent": most,
        "bias_percent": statistics.fmean(error.percent for error in one.errors),
        "budget_percent": list(one.budget),
        "constants": dict(one.constants),
        "errors": {error.row.id: error.percent for error in one.errors},
        "left_out": dict(one.left_out),
        "errors_left_out": {error.row.id: error.percent for error in one.beside},
        "every_row_percent": list(one.every),
    }


if __name__ == "__main__":
    raise SystemExit(main())
