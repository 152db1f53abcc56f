"""``perfsuite fleet``: compare journals of many nodes; list those that are slow, below expectation or absent."""

from __future__ import annotations

import argparse
from datetime import datetime, timezone
from pathlib import Path

from perfsuite.base.errors import ConfigurationError
from perfsuite.base.units import plural
from perfsuite.base.writing import write_file
from perfsuite.cli.main import EXIT_FOUND, Command, color_argument, platform_arguments, print_json, print_marked
from perfsuite.expectations.rows import load_expectations
from perfsuite.fleet.lines import fleet_json, fleet_lines, own_rows
from perfsuite.fleet.nodes import read_groups, read_names, read_nodes
from perfsuite.fleet.standing import judge_fleet
from perfsuite.platforms import load_catalog


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "journal",
        nargs="+",
        type=Path,
        metavar="JOURNAL",
        help="read journals or folders of journals; a second journal of a node confirms the findings of the first",
    )
    add = parser.add_argument
    add("--nodes", metavar="FILE|N", help="expect the hosts listed in FILE, or N nodes (default: those with a journal)")
    add("--group", type=Path, metavar="FILE", help="judge groups such as racks, from CSV node,group (default: none)")
    add("--html", type=Path, metavar="FILE", help="write a page with heat maps to FILE (default: no page)")
    add("--good", type=Path, metavar="FILE", help="write the names of passing nodes to FILE (default: no file)")
    add("--bad", type=Path, metavar="FILE", help="write the names of all other nodes to FILE (default: no file)")
    add(
        "--write-expectations",
        type=Path,
        metavar="FILE",
        help="write [[expectation]] rows of the passing nodes, for later nodes of this site (default: no file)",
    )
    color_argument(parser)
    platform_arguments(parser)


def _run(options: argparse.Namespace) -> int | None:
    catalog = load_catalog(options.platform_file)
    rows = load_expectations(options.platform_file, catalog.models)
    expected = read_names(options.nodes) if options.nodes else 0
    fleet = read_nodes(options.journal, rows)
    groups = read_groups(options.group, fleet.nodes) if options.group else None
    standings = judge_fleet(fleet, rows, expected_nodes=expected, groups=groups)
    if options.write_expectations:
        if options.write_expectations.exists():
            raise ConfigurationError(
                f"--write-expectations: {options.write_expectations} exists and is not overwritten; give another file"
            )
        date = datetime.now(timezone.utc).date().isoformat()
        lines = own_rows(standings, fleet, date)
        write_file(options.write_expectations, "\n".join(lines) + "\n", option="--write-expectations")
    if options.html:
        from perfsuite.reports.page.page import write_fleet
        from perfsuite.reports.page.sections.fleet import fleet_sections

        title = f"Fleet: {'PASS' if standings.passes else 'FAIL'}, {plural(len(standings.nodes), 'node')}"
        newest = max((run.started_at for runs in fleet.nodes.values() for run in runs), default="")
        title += f" - {newest[:10]}" if newest else ""
        simulated = any("simulated" in key for key, _ in standings.populations)
        write_fleet(title, fleet_sections(standings, fleet), options.html, simulated=simulated)
    passing = {node.node for node in standings.nodes.values() if node.passes}
    others = set(standings.nodes) - passing
    for path, names, option in ((options.good, passing, "--good"), (options.bad, others, "--bad")):
        if path is not None:
            write_file(path, "".join(f"{name}\n" for name in sorted(names)), option=option)
    if options.json:
        print_json(fleet_json(standings, fleet))
    else:
        print_marked(((line.text, line.mark) for line in fleet_lines(standings, fleet)), options.color)
    return None if standings.passes else EXIT_FOUND


FLEET = Command(
    help="compare the journals of many nodes; list nodes and devices that are slow, below expectation or absent",
    example="perfsuite fleet nodes/*.jsonl --nodes 64 --good good.txt --bad bad.txt",
    arguments=_arguments,
    run=_run,
    found="a node that is slow, below expectation, incomplete, not judged or absent",
)
