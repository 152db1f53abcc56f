"""Plausibility rules for performance tables: what arithmetic, data sheets and published bounds do not allow.

The rules run on any table whose columns have roles (:data:`perfsuite.published.roles.ROLES`); a rule that lacks a
role says nothing.  Numbers are intervals of what rounds to the printed digits, so correct rounding is never flagged.
A finding implies a label for what it falls on: M? (mislabelled or anomalous), R (ratios usable, absolutes not) or
X (contradictory); what no rule touches is M (measured, plausible).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from perfsuite.audit import across, compute, memory, parts, pipeline, rates, repeats, scaling
from perfsuite.audit.rule import AuditFinding, Hit, Rule, TablePlace, finding_of, rules_in
from perfsuite.audit.table import AuditTable, join
from perfsuite.published.records import LABELS, Label
from perfsuite.published.roles import DEGREES

RULES: tuple[Rule, ...] = tuple(
    rule for family in (scaling, parts, compute, rates, memory, pipeline, repeats, across) for rule in rules_in(family)
)
"""Every rule, by family; findings come in this order."""

_STANDS_FOR: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "devices": ("devices", "nodes", *DEGREES),
        "global_batch_size": ("global_batch_size", "local_batch_size", "micro_batch_size"),
        "flops_per_sample": ("flops_per_sample", "parameters", "active_parameters"),
    }
)


def audit(tables: Sequence[AuditTable]) -> list[AuditFinding]:
    """Every finding in every table, then in the joins of tables of one run set, then between tables."""
    findings = [finding for table in tables for finding in _audit_one(table)]
    known = {(finding.rule, finding.places) for finding in findings}
    for run_set in dict.fromkeys(table.run_set for table in tables if table.run_set):
        members = tuple(table for table in tables if table.run_set == run_set)
        joined = _audit_one(join(members)) if len(members) > 1 else []
        findings += [finding for finding in joined if (finding.rule, finding.places) not in known]
    for rule in RULES:
        if rule.across:
            findings += [finding_of(rule, table, hit) for table, hit in rule.across(tuple(tables))]
    return findings


def _audit_one(table: AuditTable) -> Iterator[AuditFinding]:
    for rule in RULES:
        if rule.check:
            yield from (finding_of(rule, table, hit) for hit in _once(rule.check(table)))


def _once(hits: Iterable[Hit]) -> Iterator[Hit]:
    """Hits as they come; one that only facts of the whole table cause is the table's, and yielded once."""
    seen: set[str] = set()
    for hit in hits:
        if hit.columns:
            yield hit
            continue
        message = hit.message
        for row in hit.rows:
            message = message.removeprefix(f"{row.name}: ")
        if message not in seen:
            seen.add(message)
            yield Hit(message=message, gap=hit.gap)


def applicable(rule: Rule, table: AuditTable) -> bool:
    """Whether the table speaks of every role that the rule needs.

    ``a|b`` is satisfied by either; a number of devices also by the sizes of a mesh.
    """
    return not _lacking(rule, table)


def _lacking(rule: Rule, table: AuditTable) -> list[str]:
    """The needs of the rule that the table does not satisfy."""
    lacking = []
    for need in rule.roles:
        roles = [other for role in need.split("|") for other in _STANDS_FOR.get(role, (role,))]
        if not any(table.says(role) for role in roles):
            lacking.append(need)
    return lacking


def more_with(tables: Sequence[AuditTable]) -> dict[str, int]:
    """Role -> how many more rules could be checked if a table told it too, most first.

    Rules that lack more than one role are left out.
    """
    gains: Counter[str] = Counter()
    for rule in RULES:
        lacking = [_lacking(rule, table) for table in tables]
        if rule.check and all(lacking):
            gains.update({role for needs in lacking if len(needs) == 1 for role in needs[0].split("|")})
    return dict(gains.most_common())


def derived_label(
    findings: Iterable[AuditFinding], table: str, *, row: int | None = None, column: str | None = None
) -> Label:
    """The worst label that findings imply for a cell, a row, a column or (without either) the whole table."""

    def covers(place: TablePlace) -> bool:
        return place.table == table and place.row in (None, row) and place.column in (None, column)

    implied = [
        finding.label for finding in findings if finding.label and any(covers(place) for place in finding.places)
    ]
    return max(implied, key=LABELS.index, default="M")
