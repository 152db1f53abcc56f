"""Full-size cases field by field beside the line of the report that each reproduces.

    python benchmarks/recipes.py --sample 20 --reports FOLDER

``FOLDER`` has the reports themselves; without it a line's number stands for the line.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from perfsuite.base.units import plural
from perfsuite.published.differences import equality
from perfsuite.published.lookup import PublishedRun, rows, shipped
from perfsuite.published.recipes import recipe_of


def main() -> None:
    """Print evenly spaced recipes of all that have rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=20, metavar="N", help="print N of the rows; default: 20")
    parser.add_argument("--reports", type=Path, metavar="FOLDER", help="the folder with the reports' text")
    options = parser.parse_args()
    having = [row for row in rows(shipped()) if recipe_of(f"{row.report}/{row.table}", row.line)]
    step = max(1, len(having) // options.sample)
    for row in having[::step][: options.sample]:
        _show(row, options.reports)


def _show(row: PublishedRun, folder: Path | None) -> None:
    recipe = recipe_of(f"{row.report}/{row.table}", row.line)
    assert recipe is not None, "only rows that have a recipe are shown"
    print(f"\n{row.source}")
    if folder is not None:
        print(f"  report:  {(folder / row.source.partition(',')[0]).read_text().splitlines()[row.line - 1].strip()}")
    print(f"  stated:  {row.world_size} devices, {row.model}, {dict(row.parameters)}")
    ranks, nodes = plural(recipe.world_size, "rank"), plural(recipe.nodes, "node")
    print(f"  case:    {recipe.case(row.platforms[0])}, {ranks} on {nodes}")
    for name, value in recipe.parameters.items():
        print(f"    {name} = {value!r}")
    print(f"  {equality(recipe, row)}")


if __name__ == "__main__":
    main()
