"""``perfsuite audit``: run the plausibility rules on the shipped reference tables or on a user's own."""

from __future__ import annotations

import argparse
import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfsuite.audit.audit import RULES, AuditFinding, applicable, audit, derived_label, more_with
from perfsuite.audit.read import parse_facts, parse_roles, read_tables, tables_of, with_peaks
from perfsuite.audit.table import AuditTable
from perfsuite.base.errors import ConfigurationError
from perfsuite.base.units import plural
from perfsuite.cli.main import EXIT_FOUND, EXIT_OK, Command, json_argument, print_json, print_lines
from perfsuite.platforms import load_catalog
from perfsuite.published.lookup import shipped
from perfsuite.published.records import Label, LabelJudgement, PublishedReport, PublishedTable, read_report
from perfsuite.published.roles import ROLES, SCALES

SHOWN_ROLES = 4
"""Roles that are advised; --json has them all."""


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        nargs="*",
        type=Path,
        metavar="FILE",
        help="JSON of the published schema, or CSV, TSV or Markdown with --roles; without any, the shipped tables",
    )
    parser.add_argument(
        "--roles",
        nargs="+",
        action="extend",
        default=[],
        metavar="COLUMN=ROLE[:UNIT]",
        help="what the columns of a CSV or Markdown table mean; --list-roles prints the roles",
    )
    parser.add_argument(
        "--fact",
        nargs="+",
        action="extend",
        default=[],
        metavar="ROLE=VALUE[:UNIT]",
        help="what holds for every row of a CSV or Markdown table: peak_tflops=312 memory_capacity=80:GB",
    )
    json_argument(parser)
    listing = parser.add_mutually_exclusive_group()
    listing.add_argument("--labels", action="store_true", help="print the labels of the tables as Markdown")
    listing.add_argument("--list-rules", action="store_true", help="print every rule as Markdown")
    listing.add_argument("--list-roles", action="store_true", help="print every role and its units")


def run(options: argparse.Namespace) -> int:
    """Audit; EXIT_FOUND for a contradiction in a user's file or a shipped label that its own rules do not give.

    Raises PerfsuiteError for wrong usage.
    """
    if options.list_roles:
        print_lines(role_lines())
        return EXIT_OK
    if options.list_rules:
        print_lines(rule_lines())
        return EXIT_OK
    if not options.file and (options.roles or options.fact):
        raise ConfigurationError("--roles and --fact describe a file's table; name the file before them")
    audited = [_read(path, options) for path in options.file] if options.file else [_of(report) for report in shipped()]
    for source in audited:
        _require_checked(source)
    if options.labels:
        print_lines(label_lines([source.report for source in audited if source.report]))
        return EXIT_OK
    if options.json:
        print_json([_json(source) for source in audited])
    else:
        print_lines(line for source in audited for line in _lines(source))
    if options.file:
        is_wrong = any(finding.severity == "contradiction" for source in audited for finding in source.findings)
    else:
        is_wrong = any(source.disagreements for source in audited)
    return EXIT_FOUND if is_wrong else EXIT_OK


@dataclass(frozen=True, kw_only=True)
class _Audited:
    """What was audited, and the outcome."""

    name: str
    tables: Sequence[AuditTable]
    findings: Sequence[AuditFinding]
    report: PublishedReport | None = None
    disagreements: Sequence[str] = ()
    """Labels that say they follow from the rules and do not."""
    is_given: bool = False
    """A file of the user's, who may have more columns than were named."""


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
            raise ConfigurationError(f"{path}: a JSON file of tables names its own roles; leave --roles and --fact out")
        return dataclasses.replace(_of(read_report(path)), is_given=True)
    if not options.roles:
        raise ConfigurationError(f"{path}: say what its columns mean: --roles 'step (ms)=latency' gpus=devices")
    tables = with_peaks(read_tables(path, parse_roles(options.roles), parse_facts(options.fact)), load_catalog(()))
    return _Audited(name=str(path), tables=tables, findings=audit(tables), is_given=True)


def _require_checked(source: _Audited) -> None:
    """Raise ConfigurationError where nothing can be found, whatever the figures are."""
    if not any(table.rows for table in source.tables):
        raise ConfigurationError(f"{source.name}: no row to audit; give a table with figures")
    if not any(applicable(rule, table) for rule in RULES for table in source.tables if table.rows):
        raise ConfigurationError(f"{source.name}: no rule applies to these roles; name more columns or add --fact")


def label_disagreements(
    report: PublishedReport, table: PublishedTable, findings: Sequence[AuditFinding]
) -> Iterator[str]:
    """Cells whose label is said to follow from the rules, with what follows instead."""
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
    """Findings by table and rule, the sum, and columns or facts that would let more rules be checked."""
    yield f"{audited.name}"
    judged = _published(audited)
    for table in audited.tables:
        mine = [finding for finding in audited.findings if table.name in finding.tables]
        rules = sum(applicable(rule, table) for rule in RULES)
        label = _shown_label(judged.get(table.name), derived_label(audited.findings, table.name))
        if mine or rules:
            yield f"  {table.name} {label}, {rules} of {len(RULES)} rules apply, {_count(mine)}"
        groups = dict.fromkeys((finding.severity, finding.rule, finding.label) for finding in mine)
        for severity, rule, implied in groups:
            yield f"    {severity}: {rule}{f' -> {implied}' if implied else ''}"
            same = (finding for finding in mine if (finding.severity, finding.rule) == (severity, rule))
            yield from (f"      {finding.message}" for finding in same)
    yield from (f"  LABEL {line}" for line in audited.disagreements)
    yield f"  {len(audited.tables)} tables, {_count(audited.findings)}"
    gains = list(more_with(audited.tables).items()) if audited.is_given else []  # the best first
    for role, count in gains[:SHOWN_ROLES]:
        about = ROLES[role].about
        yield f"  with a column or --fact of {role} ({about}), {plural(count, 'more rule')} could be checked"


def _published(audited: _Audited) -> Mapping[str, PublishedTable]:
    """The published tables by name; none for a file of the user's."""
    report = audited.report
    return {f"{report.report}/{table.id}": table for table in report.tables} if report else {}


def _shown_label(table: PublishedTable | None, derived: Label) -> str:
    if table is None:
        return f"[{derived}]"
    basis = "" if table.judgement.basis == "rules" else ", by outside knowledge"
    return f"[{table.judgement.label}{basis}]"


def _count(findings: Sequence[AuditFinding]) -> str:
    """How many findings of each severity: ``2 contradictions, 1 note``."""
    counts = Counter(finding.severity for finding in findings)
    shown = [f"{counts[name]} {name}{'s' * (counts[name] > 1)}" for name in ("contradiction", "mislabel", "note")]
    return ", ".join(text for text in shown if not text.startswith("0 ")) or "nothing found"


def _json(audited: _Audited) -> dict[str, Any]:
    judged = _published(audited)
    return {
        "name": audited.name,
        "disagreements": list(audited.disagreements),
        "more_rules_with": more_with(audited.tables) if audited.is_given else {},
        "tables": [
            {
                "table": table.name,
                "label": judged[table.name].judgement.label if table.name in judged else None,
                "derived_label": derived_label(audited.findings, table.name),
                "rules_applied": [rule.name for rule in RULES if applicable(rule, table)],
                "findings": [
                    {
                        "rule": finding.rule,
                        "severity": finding.severity,
                        "label": finding.label,
                        "rows": list(finding.rows),
                        "columns": list(finding.details),
                        "message": finding.message,
                    }
                    for finding in audited.findings
                    if table.name in finding.tables
                ],
            }
            for table in audited.tables
        ],
    }


def label_lines(reports: Sequence[PublishedReport]) -> Iterator[str]:
    """Every label and its reason as a Markdown table, exceptions under their table."""
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


def rule_lines() -> Iterator[str]:
    """Every rule as a Markdown table."""
    yield "| rule | severity | label | checks | source |"
    yield "|---|---|---|---|---|"
    for rule in RULES:
        label = f"{rule.label} ({rule.reach})" if rule.label else "none"
        yield f"| {rule.name} | {rule.severity} | {label} | {rule.checks} | {rule.source} |"


def role_lines() -> Iterator[str]:
    """Every role with its units."""
    for name, role in ROLES.items():
        units = ", ".join(unit for unit in SCALES.get(role.dimension, {}) if unit)
        yield f"{name:26} {role.about}{f' [{units}]' if units else ''}"


AUDIT = Command(
    help="check tables for what arithmetic, peaks and bounds do not allow: the published ones, or your own",
    arguments=_arguments,
    run=run,
    found="a contradiction in a file of yours, or a shipped label that its own rules do not give",
)
