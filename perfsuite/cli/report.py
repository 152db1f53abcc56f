"""``perfsuite report``: results in tables of published reports; ``perfsuite checklist``; ``perfsuite trace``."""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from perfsuite.base.errors import ConfigurationError, InvalidParameter
from perfsuite.base.files import content, why
from perfsuite.base.text import printable
from perfsuite.base.units import plural
from perfsuite.base.writing import write_file
from perfsuite.cli.main import EXIT_USAGE, Command, json_argument, platform_file_argument, print_json, print_lines
from perfsuite.cli.show import read_results
from perfsuite.fleet.nodes import several_hosts
from perfsuite.history.file import read as read_history
from perfsuite.history.findings import searched
from perfsuite.history.git import Repository
from perfsuite.imports.formats import read_imported
from perfsuite.metrics import read_run
from perfsuite.platforms import Catalog, load_catalog
from perfsuite.record.codec import to_json
from perfsuite.record.run import RunRecord
from perfsuite.record.step import Timeline
from perfsuite.reports.beside_others import OverTime, foreign_markdown, history_grids, imported_grids
from perfsuite.reports.checklist import ChecklistLine, answers, facts_of
from perfsuite.reports.document import Grid
from perfsuite.reports.layout import fit_markdown, grid_lines
from perfsuite.reports.pipeline import pipeline_grids
from perfsuite.reports.stored import Recording, record_of_baseline
from perfsuite.reports.tables.recording import table_cases
from perfsuite.reports.tables.report import STYLES, best_style, find_style, fitting_styles, report
from perfsuite.reports.timelines.files import check_timeline, write_case
from perfsuite.schedules import replay


def _report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "RESULTS are journals (.perfsuite/journal-*.jsonl) or baseline files (baselines/PLATFORM/FINGERPRINT.json). "
        "Results that fit no table are wrong usage."
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


def _run_report(options: argparse.Namespace) -> None:
    catalog = load_catalog(options.platform_file)
    if options.fill is not None:
        _fill(options, catalog)
        return
    if options.html is not None:
        _write_page(options, catalog)
        return
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
        return
    write_file(options.out, text, option="--out")
    print(f"{options.out}: {', '.join(style.name for style in styles)}")


def _beside(options: argparse.Namespace, runs: Sequence[Recording]) -> str:
    over_time = _over_time(options)
    grids = [*(history_grids(over_time) if over_time else []), *_imported(options, runs)]
    return "".join(f"\n{line}" for grid in grids for line in foreign_markdown(grid)).rstrip("\n") + "\n" * bool(grids)


def _over_time(options: argparse.Namespace) -> OverTime | None:
    if options.history is None:
        return None
    history = read_history(options.history)
    if not history.sessions:
        raise ConfigurationError(f"--history: {options.history} has no session; leave --history out")
    repository = Repository(root=options.history.resolve().parent)
    return OverTime(history=history, findings=searched(history.sessions, repository))


def _imported(options: argparse.Namespace, runs: Sequence[Recording]) -> list[Grid]:
    files = [imported for path in options.imported for imported in read_imported(path)]
    return imported_grids(files, [case for run in runs for case in table_cases(run)])


def _fill(options: argparse.Namespace, catalog: Catalog) -> None:
    from perfsuite.reports.fill import filled

    for name in ("style", "base", "history", "html", "baseline", "imported"):
        if getattr(options, name):
            raise ConfigurationError(f"--{name} has no effect with --fill; leave it out")
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
        return
    place, option = (options.out, "--output") if options.out else (options.fill, "--fill")
    write_file(place, result.text, option=option)
    print(f"{place}: {plural(result.cells, 'cell')} of {tables} filled{f'; still empty: {left}' if left else ''}")


def _write_page(options: argparse.Namespace, catalog: Catalog) -> None:
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


REPORT = Command(
    help="print results in the tables of the published reports, with the published figures",
    example="perfsuite report .perfsuite/journal-20251121T120000.jsonl --html run.html",
    arguments=_report_arguments,
    run=_run_report,
)


_MARKS = {"yes": "[x]", "no": "[ ]", "not measured": "[?]", "does not apply": "[-]"}


def _checklist_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "RESULTS are journals (.perfsuite/journal-*.jsonl) or baseline files of one machine"
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULTS", help="read journals or baseline files")
    json_argument(parser)
    platform_file_argument(parser)


def _run_checklist(options: argparse.Namespace) -> None:
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


def _answer_lines(recordings: list[Recording], found: list[ChecklistLine]) -> Iterator[str]:
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
    example="perfsuite checklist .perfsuite/journal-20251121T120000.jsonl",
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


def _trace_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "journal", type=Path, metavar="JOURNAL", help="read this journal of a run, .perfsuite/journal-*.jsonl"
    )
    parser.add_argument("--case", default="", metavar="TEXT", help="write cases whose id contains TEXT (default: all)")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="write the files into this folder (no default)"
    )
    parser.add_argument(
        "--simulated",
        action="store_true",
        help="write the simulated schedule of each step too; the difference is the time lost between actions",
    )


def _run_trace(options: argparse.Namespace) -> int | None:
    journal = read_run(options.journal)
    timelines = _chosen_timelines(journal, options.case)
    problems = []
    written: list[Path] = []
    for case, timeline in timelines.items():
        try:
            written += write_case(case, timeline, options.out)
            if options.simulated:
                written += write_case(case, simulated_schedule(timeline), options.out)
        except InvalidParameter as problem:
            problems.append(f"{case}: {problem}")
    print_lines(grid_lines(pipeline_grids(journal.results[case] for case in timelines)))
    print_lines(["", *map(str, written)])
    for line in problems:
        print(f"perfsuite: error: {printable(line, 1000)}", file=sys.stderr)
    return EXIT_USAGE if problems else None


def simulated_schedule(timeline: Timeline) -> Timeline:
    """Return the simulated schedule of ``timeline`` with its own durations.  Raises InvalidParameter without one."""
    check_timeline(timeline)
    again = replay(timeline)
    if again.simulated is None:
        raise InvalidParameter(again.reason)
    return again.simulated


def _chosen_timelines(journal: RunRecord, text: str) -> Mapping[str, Timeline]:
    with_one = {
        case: result.measurement.timeline
        for case, result in journal.results.items()
        if result.outcome == "measured" and result.measurement is not None and result.measurement.timeline is not None
    }
    chosen = {case: timeline for case, timeline in with_one.items() if text in case}
    if not with_one:
        raise ConfigurationError(
            f"journal {journal.path} has {plural(len(journal.results), 'case')} and none with a timeline; "
            "give the journal of a run with pipeline cases"
        )
    if not chosen:
        raise ConfigurationError(
            f"--case {text!r}: no id of {plural(len(with_one), 'case')} with a timeline contains it; give a part of "
            f"an id such as {next(iter(with_one))}"
        )
    return chosen


TRACE = Command(
    help="write a Perfetto trace and a picture of each pipeline case of an earlier run, from its journal",
    example="perfsuite trace .perfsuite/journal-20251121T120000.jsonl --out traces",
    arguments=_trace_arguments,
    run=_run_trace,
)
