"""``perfsuite import``: read figures of other tools; ``perfsuite export``: write results for other programs."""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from perfsuite.audit.audit import audit
from perfsuite.audit.table import AuditColumn, AuditTable, Fact, Row
from perfsuite.base.errors import ConfigurationError, ImportFailed
from perfsuite.base.text import escaped, printable
from perfsuite.base.units import plural, significant
from perfsuite.base.writing import write_file
from perfsuite.baselines import store
from perfsuite.cli.main import EXIT_FOUND, EXIT_OK, Command, platform_file_argument, print_lines
from perfsuite.cli.show import first_object, require_file
from perfsuite.exports.formats import EXPORTS, ExportRow, rows_of_baseline, rows_of_history, rows_of_run
from perfsuite.history import file
from perfsuite.imports.formats import FORMATS, find_format, read_file, write_imported
from perfsuite.imports.row import Imported, ImportedRow, ImportOptions
from perfsuite.metrics import read_run
from perfsuite.platforms import DeviceModel, load_catalog
from perfsuite.published.numbers import printed
from perfsuite.record.workload import DTYPES

_ROLES: Mapping[str, tuple[str, str]] = {
    "step_time_ms": ("latency", "ms"),
    "forward_ms": ("forward_time", "ms"),
    "backward_ms": ("backward_time", "ms"),
    "optimizer_ms": ("optimizer_time", "ms"),
    "samples_per_s": ("throughput", ""),
    "samples_per_s_per_device": ("throughput_per_device", ""),
    "tokens_per_s_per_device": ("tokens_per_s_per_device", ""),
    "tflops_per_device": ("tflops", "TFLOPS"),
    "mfu_percent": ("mfu", "%"),
    "loss": ("loss", ""),
    "reserved_memory_gib": ("memory", "GiB"),
}
"""Role and unit of a metric in an audited table."""
_MOST_ROWS = 50  # Most rows of a table: rules compare rows in pairs, and logs have thousands of steps.
_SETTINGS = ("global_batch_size", "local_batch_size", "sequence_length")


Doubt = tuple[str, str, str]
"""Severity (contradiction, mislabel or note, as in findings of the audit), name and message of a broken rule."""


def doubts(imported: Imported, device: DeviceModel | None = None) -> tuple[Doubt, ...]:
    """Return the broken rules; ``device`` has the published figures of their platform."""
    findings = (one for table in _audited_tables(imported, device) for one in audit([table]))
    return (*((one.severity, one.rule, one.message) for one in findings), *_above_peaks(imported.rows, device))


def _audited_tables(imported: Imported, device: DeviceModel | None) -> Iterator[AuditTable]:
    """Yield figures of training steps as tables: a row per name, a column per metric, steps and runs separate.

    A resumed run repeats losses of the previous one; they are not compared.
    """
    facts = {}
    if device is not None and device.memory is not None:
        facts["memory_capacity"] = Fact(text=f"{device.memory.value:g}", unit="GiB")
    tables: dict[tuple[str, str], dict[str, list[ImportedRow]]] = {}
    for row in imported.rows:
        if row.metric in _ROLES and not row.collective:
            step = row.settings.get("step")
            kind = (row.settings.get("run", ""), row.name.partition(step)[0] if step else "")
            tables.setdefault(kind, {}).setdefault(row.name, []).append(row)
    source = imported.source
    for every_row in (list(by_name.values()) for by_name in tables.values()):
        for start in range(0, len(every_row), _MOST_ROWS):
            by_name = every_row[start : start + _MOST_ROWS]
            metrics = dict.fromkeys(row.metric for rows in by_name for row in rows)
            columns = tuple(AuditColumn(name=one, role=_ROLES[one][0], unit=_ROLES[one][1]) for one in metrics)
            shown = tuple(_row_of_table(source, index, rows) for index, rows in enumerate(by_name))
            yield AuditTable(name=source, columns=columns, rows=shown, facts=facts)


def _row_of_table(source: str, index: int, rows: Sequence[ImportedRow]) -> Row:
    first = rows[0]
    facts = {name: Fact(text=text) for name, text in first.settings.items() if name in _SETTINGS}
    facts["config"] = Fact(text=first.name)  # steps of one run do not repeat each other
    if first.ranks:
        facts["devices"] = Fact(text=str(first.ranks))
    return Row(
        name=f"line {first.line} ({first.name})",
        cells={row.metric: printed(_figure(row)) for row in rows},
        facts=facts,
        index={source: index},
    )


def _figure(row: ImportedRow) -> str:
    """Return the figure with the digits of its source, in the unit of the row."""
    with contextlib.suppress(ValueError):
        if float(row.printed.replace(",", "")) == row.value:
            return row.printed
    return f"{row.value:.6g}"


def _above_peaks(rows: Sequence[ImportedRow], device: DeviceModel | None) -> Iterator[Doubt]:
    """Yield shares above 100 %, and rates above the data sheet of the platform."""
    for row in rows:
        where = f"{row.source}:{row.line}: {row.name}: {row.metric} {row.printed}"
        if row.unit == "percent" and row.value > 100:
            yield "contradiction", "share-above-one", f"{where} is more than all of it"
        if device is None:
            continue
        peak = device.tflops.get(row.dtype or "bf16")
        if row.metric == "tflops_per_device" and peak is not None and row.value > peak.value:
            yield "contradiction", "above-peak", f"{where}: above {peak.value:g} {peak.unit} ({peak.source})"
    fast = [row for row in rows if row.metric == "busbw_gb_per_s"]
    link = device.link if device is not None else None
    if link is not None and fast and (row := max(fast, key=lambda row: row.value)).value > link.value:
        yield (
            "note",
            "above-link",
            f"{row.source}:{row.line}: {row.name}: busbw {row.printed}, above the link's {link.value:g} GB/s "
            f"({link.source}); a reduction inside the switch can be, a wrong unit or convention as well",
        )


_DTYPES = (*DTYPES, "fp8", "fp4", "int4")
SHOWN = 12  # Most figures, refusals and doubts of a file to print; --all prints every one.


def _import_arguments(parser: argparse.ArgumentParser) -> None:
    formats = "\n".join(f"{form.name}: {form.about}" for form in FORMATS)
    parser.epilog = f"Imported figures are never a baseline and never gated.\n\nFormats:\n{formats}\n"
    add = parser.add_argument
    shown = "read these files, - for standard input; put a FORMAT of the list below first if it is not recognised"
    add("files", nargs="+", metavar="[FORMAT] FILE", help=shown)
    add("--platform", default="", metavar="NAME", help="compare with this platform's peaks, e.g. h200 (default: no)")
    add("--collective", default="", metavar="NAME", help="set the collective, e.g. all_gather (default: as in the log)")
    add("--ranks", type=_count, metavar="N", help="set the number of ranks (default: as in the log)")
    add("--run", type=_count, dest="nth", metavar="N", help="read run N of files with several (default: all)")
    add(
        "--dtype",
        choices=_DTYPES,
        default="",
        metavar="NAME",
        help="set the dtype, such as bf16 (default: as in the log)",
    )
    add("--ranks-per-node", type=int, metavar="N", help="set FlagPerf's ranks per node (default: as in the log)")
    add("--out", type=Path, metavar="FILE", help="write the figures for perfsuite report --imported (default: no file)")
    add("--all", action="store_true", help="print every figure instead of the first ones of each file")
    platform_file_argument(parser)


def _count(text: str) -> int:
    if not re.fullmatch("[1-9][0-9]{0,6}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a valid count; give a whole number from 1")
    return int(text)


def _run_import(options: argparse.Namespace) -> int:
    catalog = load_catalog(options.platform_file)
    device = catalog.find(options.platform) if options.platform else None
    form = find_format(options.files[0]) if options.files[0] in {form.name for form in FORMATS} else None
    paths = [Path(text) for text in options.files[1 if form else 0 :]]
    if not paths:
        raise ConfigurationError(f"the file is missing; write perfsuite import {options.files[0]} FILE")
    settings = ImportOptions(
        platform=options.platform,
        collective=options.collective,
        ranks_per_node=options.ranks_per_node,
        ranks=options.ranks,
        dtype=options.dtype,
        run=options.nth,
    )
    files: list[Imported] = []
    errors: list[ImportFailed] = []
    for path in paths:
        try:
            files.append(read_file(path, settings, form))
        except ImportFailed as error:
            errors.append(error)
    if not files:
        several = ImportFailed(f"none of {len(errors)} files: {'; '.join(map(str, errors))}")
        raise several if len(errors) > 1 else errors[-1]
    is_doubtful = bool(errors)
    for imported in files:
        doubted = doubts(imported, device)
        print_lines(_lines(imported, doubted, None if options.all else SHOWN))
        is_doubtful |= bool(imported.refused) or any(severity == "contradiction" for severity, *_ in doubted)
    for failed in errors:
        print(f"perfsuite: not imported: {escaped(str(failed))}", file=sys.stderr)
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
    refused = [f"refused, line {one.line}: {printable(one.text)}: {one.why}" for one in imported.refused]
    wrong = [f"{severity} {rule}: {escaped(message)}" for severity, rule, message in doubted]
    for lines, noun in ((rows, "figure"), (refused, "refusal"), (wrong, "doubt")):
        yield from (f"  {line}" for line in lines[:most])
        if most is not None and len(lines) > most:
            yield f"  and {plural(len(lines) - most, f'more {noun}')}"


IMPORT = Command(
    help="read results of nccl-tests, OSU, perftest, SuperBench, FlagPerf, training programs and more",
    example="perfsuite import all_reduce.log --platform h200 --out peers.json",
    arguments=_import_arguments,
    run=_run_import,
    found="a figure or a file was refused, or figures contradict each other",
    mixes=True,
)


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "RESULTS are journals, baseline files (their newest runs) or histories. bencher, github-action-benchmark and "
        "openmetrics take the newest figure of each case; otava needs a history."
    )
    parser.add_argument(
        "results", nargs="+", type=Path, metavar="RESULTS", help="export these journals, baseline files or histories"
    )
    parser.add_argument("--format", required=True, choices=list(EXPORTS), help="write this format (no default)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write to FILE (default: the terminal)")


def _run_export(options: argparse.Namespace) -> None:
    rows = [row for path in options.results for row in _rows(path)]
    if not rows:
        names = ", ".join(map(str, options.results))
        raise ConfigurationError(f"{names}: nothing was measured, so there is nothing to export")
    if len({row.simulated for row in rows}) > 1:
        raise ConfigurationError("real and simulated results cannot be in one export; export them separately")
    text, count, note = EXPORTS[options.format](rows)
    if options.out is None:
        print(text, end="")
        return
    write_file(options.out, text, option="--out")
    left_out = len(rows) - count
    others = f"; {plural(left_out, 'figure')} left out: older ones, or of a metric that this format cannot hold"
    print(f"{options.out}: {plural(count, 'figure')} as {options.format}{others if left_out else ''}")
    if note:
        print(f"  {note}")


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


EXPORT = Command(
    help="write results for other programs: JSON, CSV, Prometheus, Bencher, github-action-benchmark, Otava",
    example="perfsuite export perf-history.jsonl --format otava --out history.csv",
    arguments=_export_arguments,
    run=_run_export,
)
