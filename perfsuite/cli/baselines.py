"""``perfsuite baselines``: list, check, merge and prune the contents of baseline files."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

from perfsuite.base.errors import BaselineError, ConfigurationError
from perfsuite.base.units import format_seconds, plural
from perfsuite.baselines import store
from perfsuite.baselines.baseline import Baseline, Entry, count_sessions
from perfsuite.baselines.hosts import host_note
from perfsuite.baselines.runs import moment
from perfsuite.cli.main import EXIT_FOUND, EXIT_OK, Command, exit_codes, json_argument, print_json, print_lines
from perfsuite.record.codec import to_json

_DAY_S = 86400.0
_DAMAGED = "a file is damaged"


def _arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = actions.add_parser("list", help="list the files: hardware, cases, runs, age")
    show = actions.add_parser("show", help="print the cases of a file: runs, sessions, newest median and spread")
    show.add_argument("--case", default="", metavar="TEXT", help="print cases whose id contains TEXT (default: all)")
    verify = actions.add_parser("verify", help="read every file and report damage")
    for parser_of in (listing, show, verify):
        parser_of.add_argument(
            "path",
            nargs="*",
            type=Path,
            default=[Path("baselines")],
            metavar="PATH",
            help="read these files or folders (default: baselines)",
        )
        json_argument(parser_of)
    merge = actions.add_parser("merge", help="add the runs of other files to FILE")
    merge.add_argument("path", type=Path, metavar="FILE", help="write the union into this file")
    merge.add_argument("sources", nargs="+", type=Path, metavar="OTHER", help="add these files of the same hardware")
    driver = actions.add_parser(
        "merge-driver", help="merge the files of two branches for git; see perfsuite docs baselines"
    )
    for name, text in (
        ("base", "read the common ancestor (%%O)"),
        ("ours", "write our file (%%A)"),
        ("theirs", "read the other file (%%B)"),
    ):
        driver.add_argument(name, type=Path, metavar=name.upper(), help=text)
    driver.epilog = exit_codes()
    prune = actions.add_parser("prune", help="drop old runs, cases or superseded entries of a file")
    prune.add_argument("path", type=Path, metavar="FILE", help="change this file")
    prune.add_argument("--older-than", type=float, metavar="DAYS", help="drop runs older than DAYS (default: none)")
    prune.add_argument(
        "--case", default="", metavar="PATTERN", help="drop cases whose id matches a shell pattern (default: none)"
    )
    prune.add_argument("--superseded", action="store_true", help="drop entries whose case has a newer one")
    prune.add_argument("--dry-run", action="store_true", help="print the changes without making them")
    for parser_of in (listing, show, verify, merge, prune):
        parser_of.epilog = exit_codes(_DAMAGED if parser_of is verify else "")
        parser_of.add_argument("--links", action="store_true", help="allow symbolic links that leave their folder")


def _read(file: Path, options: argparse.Namespace) -> Baseline:
    folder = next((path for path in options.path if path.is_dir() and file.is_relative_to(path)), None)
    return store.read(file, folder=folder, links=options.links)


def _run(options: argparse.Namespace) -> int | None:
    if options.action == "merge-driver":
        store.merge_branches(options.base, options.ours, options.theirs)
        return None
    actions = {"list": _list, "show": _show, "verify": _verify, "merge": _merge, "prune": _prune}
    return actions[options.action](options)


def _files_in(paths: Sequence[Path]) -> list[Path]:
    """Return the baseline files among and below ``paths``, without folders published and examples below a path."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            left_out = {"published", "examples"}
            files += (file for file in sorted(path.rglob("*.json")) if not left_out & {*file.relative_to(path).parts})
        elif path.exists():
            files.append(path)
        else:
            raise ConfigurationError(f"{path} does not exist; give a baseline file or a folder of them")
    return files


def _none_in(paths: Sequence[Path]) -> str:
    return f"no baseline file in {', '.join(map(str, paths))}; a run with --perf-update=append stores one"


def _list(options: argparse.Namespace) -> None:
    baselines = [(file, _read(file, options)) for file in _files_in(options.path)]
    if options.json:
        facts = ({"cases": len(one.entries), "runs": _runs(one), "age": _age(one.newest_time)} for _, one in baselines)
        print_json([{"file": str(file), **fact} for (file, _), fact in zip(baselines, facts, strict=True)])
        return
    for file, baseline in baselines:
        simulated = ", simulated" if baseline.hardware.simulated else ""
        print_lines([f"{file}: {_counts(baseline)}, newest {_age(baseline.newest_time)}{simulated}"])
        _print_hosts(baseline)
    if not baselines:
        print_lines([_none_in(options.path)])


def _runs(baseline: Baseline) -> int:
    return sum(len(entry.kept) for entry in baseline.entries.values())


def _counts(baseline: Baseline) -> str:
    return f"{plural(len(baseline.entries), 'case')}, {plural(_runs(baseline), 'run')}"


def _age(time: str) -> str:
    if not time:
        return "never"
    days = (datetime.now(timezone.utc) - moment(time)).total_seconds() / _DAY_S
    return f"{days:.0f} days ago" if days >= 1 else "today"


def _require_files(options: argparse.Namespace) -> list[Path]:
    files = _files_in(options.path)
    if not files:
        raise ConfigurationError(_none_in(options.path))
    return files


def _show(options: argparse.Namespace) -> None:
    for file in _require_files(options):
        baseline = _read(file, options)
        entries = [entry for entry in baseline.entries.values() if options.case in entry.case.node]
        if options.json:
            print_json({"file": str(file), "cases": [to_json(entry) for entry in entries]})
            continue
        print_lines([str(file), *(f"  {name}: {value}" for name, value in baseline.hardware.key.items())])
        print_lines(f"  {line}" for line in _entry_lines(entries, baseline.machine_session))
        if not entries:
            print_lines([f"  no case{f' whose id contains {options.case!r}' if options.case else ''}"])


def _entry_lines(entries: Sequence[Entry], machine_session: Mapping[str, str]) -> Iterator[str]:
    width = max((len(entry.case.node) for entry in entries), default=0)
    for entry in sorted(entries, key=lambda entry: entry.case.node):
        medians = [run.median_s for run in entry.runs if run.quantiles_s]
        time = "out of memory"
        if medians:
            spread = max(medians) / min(medians) - 1
            time = f"{format_seconds(medians[-1])}, runs within {spread:.1%}"
        epoch = f", {entry.accepted.kind}: {entry.accepted.reason}" if entry.accepted else ""
        runs, reference = (
            f"{plural(len(part), 'run')} of {plural(count_sessions(part, machine_session), 'session')}"
            for part in (entry.runs, entry.reference)
        )
        before = [run.median_s for run in entry.reference if run.quantiles_s]
        level = format_seconds(statistics.median(before)) if before else "out of memory"
        newest = f"newest {_age(entry.newest.time)}: {time}"
        yield f"{entry.case.node:{width}}  {runs}, {newest}; reference {level} ({reference}){epoch}"


def _verify(options: argparse.Namespace) -> int:
    damaged = {}
    files = _require_files(options)
    for file in files:
        try:
            _read(file, options)
        except BaselineError as error:
            damaged[str(file)] = str(error)
    if options.json:
        print_json({"files": len(files), "damaged": damaged})
    else:
        print_lines([*damaged.values(), f"{len(files) - len(damaged)} of {len(files)} files are sound"])
    return EXIT_FOUND if damaged else EXIT_OK


def _merge(options: argparse.Namespace) -> None:
    whole = store.merge_files(options.path, options.sources, links=options.links)
    print_lines([f"{options.path}: {_counts(whole)}"])
    _print_hosts(whole)


def _print_hosts(baseline: Baseline) -> None:
    if hosts := host_note(run for entry in baseline.entries.values() for run in entry.kept):
        print_lines([f"  {hosts}"])


def _prune(options: argparse.Namespace) -> None:
    if options.older_than is None and not options.case and not options.superseded:
        raise ConfigurationError("prune has nothing to drop; give --older-than, --case or --superseded")
    changes = store.prune_file(
        options.path,
        now=datetime.now(timezone.utc),
        older_than_days=options.older_than,
        case=options.case,
        superseded=options.superseded,
        dry_run=options.dry_run,
        links=options.links,
    )
    print_lines(f"would drop: {line}" if options.dry_run else line for line in changes)
    if not changes:
        print("nothing to drop")


BASELINES = Command(
    help="list, show, verify, merge and prune baseline files",
    example="perfsuite baselines list",
    arguments=_arguments,
    run=_run,
    found=f"verify: {_DAMAGED}",
)
