"""``perfsuite report``: results in the tables of published reports; ``perfsuite checklist``: the tuning checklist."""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from perfsuite.base.errors import ConfigurationError
from perfsuite.base.files import content, why, write_file
from perfsuite.base.units import plural
from perfsuite.cli.main import EXIT_OK, Command, json_argument, platform_file_argument, print_json, print_lines
from perfsuite.cli.results import read_results
from perfsuite.fleet.nodes import several_hosts
from perfsuite.history.file import read as read_history
from perfsuite.history.findings import searched
from perfsuite.history.git import Repository
from perfsuite.imports.formats import read_imported
from perfsuite.platforms import Catalog, load_catalog
from perfsuite.record.codec import to_json
from perfsuite.record.run import RunRecord
from perfsuite.reports.beside_others import OverTime, foreign_markdown, history_grids, imported_grids
from perfsuite.reports.checklist import Answer, answers, facts_of
from perfsuite.reports.document import Grid
from perfsuite.reports.layout import fit_markdown
from perfsuite.reports.stored import Recording, record_of_baseline
from perfsuite.reports.tables.recording import table_cases
from perfsuite.reports.tables.report import STYLES, best_style, find_style, fitting_styles, report


def _report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "RESULTS are journals (.perfsuite/journal-*.jsonl) or baseline files (baselines/PLATFORM/FINGERPRINT.json); "
        "results that fit no table are wrong usage"
    )
    add = parser.add_argument
    add("results", nargs="+", type=Path, metavar="RESULTS", help="report these journals or baseline files")
    add("--show-hosts", action="store_true", help="keep host names on the page of --html")
    platform_file_argument(parser)
    add = parser.add_argument_group("form").add_argument
    add("--style", choices=[*STYLES, "all"], help="print this style (default: the one with most rows)")
    add("--out", "--output", type=Path, metavar="FILE", help="write Markdown to FILE (default: the terminal)")
    add(
        "--fill",
        type=Path,
        metavar="FILE",
        help="fill the empty cells of a report's Markdown tables, in place or to --output (default: no file)",
    )
    add("--html", type=Path, metavar="FILE", help="write a page with charts to FILE (default: no page)")
    add = parser.add_argument_group("results to compare with").add_argument
    add(
        "--base",
        type=Path,
        metavar="FILE",
        help="compare with the results of another machine, or with --html of any (default: none)",
    )
    add("--baseline", type=Path, metavar="FILE", help="compare the page of --html with stored runs (default: none)")
    add("--history", type=Path, metavar="FILE", help="add the changes over time of a history (default: none)")
    add(
        "--imported",
        action="append",
        type=Path,
        default=[],
        metavar="FILE",
        help="add figures of other tools, from perfsuite import --out or a file of the tool; repeatable "
        "(default: none)",
    )


def _run_report(options: argparse.Namespace) -> int:
    catalog = load_catalog(options.platform_file)
    if options.fill is not None:
        return _fill(options, catalog)
    if options.html is not None:
        return _write_page(options, catalog)
    if options.baseline is not None:
        raise ConfigurationError("--baseline is for a page; give --html FILE too, or compare with --base")
    runs = _read_of_one_machine(options.results, catalog)
    base = _read(options.base, catalog) if options.base else None
    fitting = styles = fitting_styles(runs)
    if options.style != "all" and (options.style or fitting):
        styles = (find_style(options.style) if options.style else best_style(runs, fitting),)
    if not styles:
        names = ", ".join(recording.run.name for recording in runs)
        raise ConfigurationError(
            f"{names}: no report has a table for these results; run cases of test_perf, or choose --style: "
            f"{', '.join(STYLES)}"
        )
    text = report(runs, styles, base) + _beside(options, runs)
    others = [style.name for style in fitting if style not in styles]
    if others and options.style is None:
        text += f"\nOther tables of these results: --style={', --style='.join(others)}, or --style=all.\n"
    if options.out is None:
        width = shutil.get_terminal_size().columns - 1
        print("\n".join(fit_markdown(text, width)) + "\n" if sys.stdout.isatty() else text, end="")
        return EXIT_OK
    write_file(options.out, text, option="--out")
    print(f"{options.out}: {', '.join(style.name for style in styles)}")
    return EXIT_OK


def _beside(options: argparse.Namespace, runs: Sequence[Recording]) -> str:
    over_time = _over_time(options)
    grids = [*(history_grids(over_time) if over_time else []), *_imported(options, runs)]
    return "".join(f"\n{line}" for grid in grids for line in foreign_markdown(grid)).rstrip("\n") + "\n" * bool(grids)


def _over_time(options: argparse.Namespace) -> OverTime | None:
    if options.history is None:
        return None
    history = read_history(options.history)
    repository = Repository(root=options.history.resolve().parent)
    return OverTime(history=history, findings=searched(history.sessions, repository))


def _imported(options: argparse.Namespace, runs: Sequence[Recording]) -> list[Grid]:
    files = [imported for path in options.imported for imported in read_imported(path)]
    return imported_grids(files, [case for run in runs for case in table_cases(run)])


def _fill(options: argparse.Namespace, catalog: Catalog) -> int:
    from perfsuite.reports.fill import filled

    for name in ("style", "base", "history", "html", "baseline", "imported"):
        if getattr(options, name):
            raise ConfigurationError(f"--fill only fills cells of {options.fill}; run it without --{name}")
    try:
        text = content(options.fill).decode("utf-8")
    except OSError as error:
        raise ConfigurationError(f"--fill: {options.fill} cannot be read: {why(error)}; give a Markdown file") from None
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"--fill: {options.fill}: byte {error.start} is not UTF-8; save it as UTF-8") from None
    result = filled(text, str(options.fill), [_read(path, catalog) for path in options.results])
    left = "; ".join(f"{reason} ({count})" for reason, count in result.left.items())
    tables = ", ".join(result.tables)
    if not result.cells and left:
        raise ConfigurationError(f"{options.fill}: no cell of {tables} was filled, nothing was written: {left}")
    if not result.cells:
        print(f"{options.fill}: {tables}: no cell is empty, nothing was written")
        return EXIT_OK
    place, option = (options.out, "--output") if options.out else (options.fill, "--fill")
    write_file(place, result.text, option=option)
    print(f"{place}: {plural(result.cells, 'cell')} of {tables} filled{f'; still empty: {left}' if left else ''}")
    return EXIT_OK


def _write_page(options: argparse.Namespace, catalog: Catalog) -> int:
    from perfsuite.reports.material import material_of
    from perfsuite.reports.page.page import page_line, write_page

    for value, name in ((options.style, "--style"), (options.out, "--out")):
        if value is not None:
            raise ConfigurationError(f"{name} is for a report in Markdown; run perfsuite report again without --html")
    if options.base is not None and options.baseline is not None:
        raise ConfigurationError("--base and --baseline cannot be used together; give one of them")
    runs = _read_of_one_machine(options.results, catalog)
    base = options.base or options.baseline
    material = material_of(runs, _read(base, catalog) if base else None, show_hosts=options.show_hosts)
    beside = _imported(options, runs) if options.imported else []
    material = dataclasses.replace(material, over_time=_over_time(options), beside=tuple(beside))
    write_page(material, options.html)
    print(f"page {page_line(options.html)}")
    return EXIT_OK


REPORT = Command(
    help="print results in the tables of the published reports, with the published figures",
    arguments=_report_arguments,
    run=_run_report,
)


_MARKS = {"yes": "[x]", "no": "[ ]", "not measured": "[?]", "does not apply": "[-]"}


def _checklist_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "RESULTS are journals (.perfsuite/journal-*.jsonl) or baseline files of one machine"
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULTS", help="read journals or baseline files")
    json_argument(parser)
    platform_file_argument(parser)


def _run_checklist(options: argparse.Namespace) -> int:
    catalog = load_catalog(options.platform_file)
    recordings = _read_of_one_machine(options.results, catalog)
    if not any(recording.run.results for recording in recordings):
        raise ConfigurationError(
            f"{', '.join(map(str, options.results))}: nothing was measured, so nothing can be answered; run cases of "
            "test_perf and give their journal"
        )
    found = list(answers(facts_of(recordings)))
    if options.json:
        print_json([to_json(answer) for answer in found])
    else:
        print_lines(_answer_lines(recordings, found))
    return EXIT_OK


def _answer_lines(recordings: list[Recording], found: list[Answer]) -> Iterator[str]:
    yield f"tuning checklist for {recordings[-1].run.hardware}"
    if any(recording.run.simulated for recording in recordings):
        yield "the devices are simulated: no time here is a measurement"
    yield ""
    for answer in found:
        yield f"{_MARKS[answer.verdict]} {answer.line}: {answer.verdict}"
        if answer.evidence:
            yield f"      {answer.evidence}"
        if answer.advice:
            yield f"      -> {answer.advice}"


CHECKLIST = Command(
    help="answer the tuning checklist from results, with evidence and advice",
    arguments=_checklist_arguments,
    run=_run_checklist,
)


def _read_of_one_machine(paths: Sequence[Path], catalog: Catalog) -> list[Recording]:
    read = [_read(path, catalog) for path in paths]
    hosts = several_hosts(recording.run for recording in read)
    if hosts:
        raise ConfigurationError(
            f"the results are of several hosts ({', '.join(hosts)}) with equal hardware; give those of one host, or "
            "compare nodes by perfsuite fleet"
        )
    return read


def _read(path: Path, catalog: Catalog) -> Recording:
    """Return the run of a journal, or the newest runs of a baseline file.  Raises PerfsuiteError if damaged."""
    results = read_results(path)
    if isinstance(results, RunRecord):
        run = dataclasses.replace(results, name=str(path))
    else:
        run = record_of_baseline(results, f"{path}, newest run of each case")
    return Recording(run=run, device=catalog.models.get(run.platform))
