"""``perfsuite audit``: check the published tables or a user's tables by the plausibility rules."""

from __future__ import annotations

import argparse
import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfsuite.audit.audit import RULES, AuditFinding, applicable, audit, derived_label, more_with, unnoticed
from perfsuite.audit.read import parse_facts, parse_roles, read_tables, tables_of, with_peaks
from perfsuite.audit.repeats import not_compared
from perfsuite.audit.table import AuditTable
from perfsuite.base.errors import ConfigurationError
from perfsuite.base.text import escaped
from perfsuite.base.units import plural
from perfsuite.cli.main import EXIT_FOUND, EXIT_OK, Command, json_argument, print_json, print_lines
from perfsuite.platforms import load_catalog
from perfsuite.published.lookup import shipped
from perfsuite.published.records import ROLES, SCALES, LabelJudgement, PublishedReport, PublishedTable, read_report

SHOWN_CELLS = 10  # Most unreadable cells to print for a table; --json has all.
SHOWN_ROLES = 4  # Most roles to print as advice; --json has all.


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        nargs="*",
        type=Path,
        metavar="FILE",
        help="check JSON of the published schema, or with --roles CSV, TSV, Markdown or HTML (default: shipped tables)",
    )
    parser.add_argument(
        "--roles",
        nargs="+",
        action="extend",
        default=[],
        metavar="COLUMN=ROLE[:UNIT]",
        help="set the meaning of columns, such as 'step (ms)=latency' gpus=devices (default: none); see --list-roles",
    )
    parser.add_argument(
        "--fact",
        nargs="+",
        action="extend",
        default=[],
        metavar="ROLE=VALUE[:UNIT]",
        help="set a figure of every row, such as peak_tflops=312 memory_capacity=80:GB (default: none)",
    )
    json_argument(parser)
    listing = parser.add_mutually_exclusive_group()
    listing.add_argument("--labels", action="store_true", help="print the labels of the tables as Markdown")
    listing.add_argument("--list-rules", action="store_true", help="print every rule as Markdown")
    listing.add_argument("--list-roles", action="store_true", help="print every role and its units")


def _run(options: argparse.Namespace) -> int:
    if options.list_roles or options.list_rules:
        print("\n".join(_role_lines() if options.list_roles else _rule_lines()))
        return EXIT_OK
    if not options.file and (options.roles or options.fact):
        raise ConfigurationError("--roles and --fact need a file; write perfsuite audit FILE --roles ...")
    audited = [_read(path, options) for path in options.file] if options.file else [_of(report) for report in shipped()]
    for source in audited:
        if not any(table.rows for table in source.tables):
            unread = next((fault for table in source.tables for fault in table.unread), "")
            raise ConfigurationError(f"{source.name}: no row to audit; {unread or 'give a table with figures'}")
        if not any(applicable(rule, table) for rule in RULES for table in source.tables if table.rows):
            raise ConfigurationError(f"{source.name}: no rule applies to these roles; name more columns or add --fact")
    if options.labels:
        print("\n".join(map(escaped, label_lines([source.report for source in audited if source.report]))))
        return EXIT_OK
    if options.json:
        print_json([_json(source) for source in audited])
    else:
        print_lines(line for source in audited for line in _lines(source))
    if options.file:
        is_wrong = any(finding.severity == "contradiction" for source in audited for finding in source.findings)
        is_wrong |= any(table.unread for source in audited for table in source.tables)
    else:
        is_wrong = any(source.disagreements for source in audited)
    return EXIT_FOUND if is_wrong else EXIT_OK


@dataclass(frozen=True, kw_only=True)
class _Audited:
    """The tables of one source with the findings of the rules."""

    name: str
    tables: Sequence[AuditTable]
    findings: Sequence[AuditFinding]
    report: PublishedReport | None = None
    disagreements: Sequence[str] = ()  # Labels that claim to follow from the rules and do not.
    is_given: bool = False  # Whether it is a file of the user, which may have more columns than those in use.
    unread: Sequence[str] = ()  # Names of tables in the file that have no column with a role.


def _of(report: PublishedReport) -> _Audited:
    tables = tables_of(report)
    findings = audit(tables)
    return _Audited(
        name=f"report {report.report}: {report.title}",
        tables=tables,
        findings=findings,
        report=report,
        disagreements=[line for table in report.tables for line in label_disagreements(report, table, findings)],
    )


def _read(path: Path, options: argparse.Namespace) -> _Audited:
    if path.suffix.lower() == ".json":
        if options.roles or options.fact:
            raise ConfigurationError(f"{path}: a JSON file of tables has its own roles; leave --roles and --fact out")
        return dataclasses.replace(_of(read_report(path)), is_given=True)
    if not options.roles:
        raise ConfigurationError(f"{path}: the columns have no roles; add --roles 'step (ms)=latency' gpus=devices")
    tables = with_peaks(read_tables(path, parse_roles(options.roles), parse_facts(options.fact)), load_catalog(()))
    read = [table for table in tables if table.columns]
    unread = [table.name for table in tables if not table.columns]
    return _Audited(name=str(path), tables=read, findings=audit(read), is_given=True, unread=unread)


def label_disagreements(
    report: PublishedReport, table: PublishedTable, findings: Sequence[AuditFinding]
) -> Iterator[str]:
    """Yield a line for each label that claims to follow from the rules and differs from the derived label."""
    name = f"{report.report}/{table.id}"
    if table.judgement.basis == "rules" and derived_label(findings, name) != table.judgement.label:
        yield f"{name}: labelled {table.judgement.label}, the rules give {derived_label(findings, name)}"
    for index, row in enumerate(table.rows):
        for column in table.columns:
            judgement = table.judge(row, column)
            if column.prose or table.cell(row, column) is None or judgement.basis != "rules":
                continue
            derived = derived_label(findings, name, row=index, column=column.name)
            if derived != judgement.label:
                yield f"{name}, line {row.line}, {column.name}: labelled {judgement.label}, the rules give {derived}"


def _lines(audited: _Audited) -> Iterator[str]:
    yield audited.name
    judged = _published(audited)
    for table in audited.tables:
        findings = [finding for finding in audited.findings if table.name in finding.tables]
        rules = sum(applicable(rule, table) for rule in RULES)
        own = judged.get(table.name)
        basis = "" if own is None or own.judgement.basis == "rules" else ", by outside knowledge"
        label = f"[{own.judgement.label if own else derived_label(audited.findings, table.name)}{basis}]"
        if findings or rules:
            yield f"  {table.name} {label}, {rules} of {len(RULES)} rules apply, {_count(findings)}"
        if table.summaries:
            yield f"    not checked, as they summarise other rows: {', '.join(table.summaries)}"
        full = [row.name for row in table.rows if any(cell.out_of_memory for cell in row.cells.values())]
        if audited.is_given and full:
            yield f"    out of memory: {', '.join(full)}"
        yield from (f"    not checked, cannot be read: {fault}" for fault in table.unread[:SHOWN_CELLS])
        if (more := len(table.unread) - SHOWN_CELLS) > 0:
            yield f"    not checked, cannot be read: {plural(more, 'more cell')} (--json has all)"
        groups = dict.fromkeys((finding.severity, finding.rule, finding.label) for finding in findings)
        for severity, rule, implied in groups:
            yield f"    {severity}: {rule}{f' -> {implied}' if implied else ''}"
            same = (finding for finding in findings if (finding.severity, finding.rule) == (severity, rule))
            yield from (f"      {finding.message}" for finding in same)
        if audited.is_given and (names := unnoticed(table)):
            yield f"    no rule notices a figure 3 times too large or too small in: {', '.join(names)}"
    if audited.unread:
        yield f"  not checked (no column with a role, merged cells, or lines of +---+): {', '.join(audited.unread)}"
    if audited.is_given and (pairs := not_compared(audited.tables)):
        yield (
            f"  not compared: {plural(pairs, 'pair')} of rows with other throughputs for one model, device and batch, "
            "as headings, lines before the tables or cells without a role differ"
        )
    yield from (f"  LABEL {line}" for line in audited.disagreements)
    yield f"  {plural(len(audited.tables), 'table')}, {_count(audited.findings)}"
    gains = list(more_with(audited.tables).items()) if audited.is_given else []  # sorted, the largest gain first
    for role, count in gains[:SHOWN_ROLES]:
        about = ROLES[role].about
        yield f"  with a column or --fact of {role} ({about}), {plural(count, 'more rule')} could be checked"


def _published(audited: _Audited) -> Mapping[str, PublishedTable]:
    report = audited.report
    return {f"{report.report}/{table.id}": table for table in report.tables} if report else {}


def _count(findings: Sequence[AuditFinding]) -> str:
    counts = Counter(finding.severity for finding in findings)
    shown = [f"{counts[name]} {name}{'s' * (counts[name] > 1)}" for name in ("contradiction", "mislabel", "note")]
    return ", ".join(text for text in shown if not text.startswith("0 ")) or "nothing found"


def _json(audited: _Audited) -> dict[str, Any]:
    judged = _published(audited)
    return {
        "name": audited.name,
        "disagreements": list(audited.disagreements),
        "more_rules_with": more_with(audited.tables) if audited.is_given else {},
        "not_checked": list(audited.unread),
        "not_compared": not_compared(audited.tables) if audited.is_given else 0,
        "tables": [
            {
                "table": table.name,
                "label": judged[table.name].judgement.label if table.name in judged else None,
                "derived_label": derived_label(audited.findings, table.name),
                "summaries": list(table.summaries),
                "unread": list(table.unread),
                "unnoticed": unnoticed(table) if audited.is_given else [],
                "rules_applied": [rule.name for rule in RULES if applicable(rule, table)],
                "findings": [_finding(finding) for finding in audited.findings if table.name in finding.tables],
            }
            for table in audited.tables
        ],
    }


def _finding(finding: AuditFinding) -> dict[str, Any]:
    same = {name: getattr(finding, name) for name in ("rule", "severity", "label")}
    return {**same, "rows": list(finding.rows), "columns": list(finding.details), "message": finding.message}


def label_lines(reports: Sequence[PublishedReport]) -> Iterator[str]:
    """Yield every label and its reason as a Markdown table, exceptions below their table."""
    yield "| table | what | label | basis | reason |"
    yield "|---|---|---|---|---|"
    for report in reports:
        for table in report.tables:
            yield _label_line(f"{report.report}/{table.id}", table.title, table.judgement)
            for column in table.columns:
                if column.judgement:
                    yield _label_line("", f"column {column.name}", column.judgement)
            for row in table.rows:
                if row.judgement:
                    yield _label_line("", f"line {row.line}", row.judgement)
                for name in row.cell_judgements:
                    column = next(column for column in table.columns if column.name == name)
                    yield _label_line("", f"line {row.line}, {name}", table.judge(row, column))


def _label_line(table: str, what: str, judgement: LabelJudgement) -> str:
    return f"| {table} | {what} | {judgement.label} | {judgement.basis} | {judgement.reason} |"


def _rule_lines() -> Iterator[str]:
    yield "| rule | severity | label | checks | source |"
    yield "|---|---|---|---|---|"
    for rule in RULES:
        label = f"{rule.label} ({rule.reach})" if rule.label else "none"
        yield f"| {rule.name} | {rule.severity} | {label} | {rule.checks} | {rule.source} |"


def _role_lines() -> Iterator[str]:
    for name, role in ROLES.items():
        units = ", ".join(unit for unit in SCALES.get(role.dimension, {}) if unit)
        yield f"{name:26} {role.about}{f' [{units}]' if units else ''}"


AUDIT = Command(
    help="check published tables or your own for figures that arithmetic, peaks or bounds rule out",
    example="perfsuite audit results.csv --roles gpus=devices samples/s=throughput",
    arguments=_arguments,
    run=_run,
    found="a contradiction or an unreadable cell in a file of yours, or a shipped label that the rules do not give",
)
