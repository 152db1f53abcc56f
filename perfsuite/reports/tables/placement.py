"""Places of published rows among measured ones: after their own case, or after the one with the most equal settings.

Every published row has a place; one whose case was not run has a remark.  Notes below the table name the differences
that make two rows not comparable.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from perfsuite.published.differences import Ran, differences, not_stated
from perfsuite.published.lookup import PublishedRun, plain, snake
from perfsuite.published.recipes import why_none
from perfsuite.reports.document import grouped
from perfsuite.reports.tables.case import TableCase
from perfsuite.reports.tables.case_names import case_name
from perfsuite.reports.tables.published import PublishedLine, id_of_row, plain_id, words_of_row
from perfsuite.suite import runnable

NOT_HERE = "not measured here"
_OURS = re.compile(r" \(ours: .*?\), not ")
"""Reason for a setting of a recipe that its report does not state; too long for a note."""


@dataclass(frozen=True, kw_only=True)
class PlacedLine:
    """A published row with its place in a table."""

    line: PublishedLine
    after: int  # Index of the case before it; -1: first.
    case: TableCase | None  # The measured case before it; None if none has similar settings.
    was_run: bool  # Whether that case is the row's run, and not another one of like settings.
    reason: str = ""  # Why its case was not measured, where this run had it.

    @property
    def missing(self) -> str:
        """Text of its last cell."""
        here = "" if self.was_run else f"{NOT_HERE}{f': {self.reason}' if self.reason else ''}"
        return "; ".join(filter(None, (self.line.missing, here)))


def placed(
    lines: Iterable[PublishedLine], cases: Sequence[TableCase], pair_by: Sequence[str], skips: Mapping[str, str]
) -> list[PlacedLine]:
    """Where the published rows of one table stand among its measured rows; every row has a place.

    The rows of one published table and platform go together with one series of cases, which are of one test function,
    strategy and platform: the one that is most of the very runs, then of their platform, then has most of them, then
    differs least.  A row
    follows the case that is its recipe, else has all its settings named in ``pair_by``, of several the one that
    differs least.  A row without such a case follows the row before it in the report; where none of them has a case,
    they stand at the end.  ``skips`` are reasons of cases without a result by node id.
    """
    why = {plain_id(node): reason.removeprefix("skipped: ") for node, reason in skips.items()}
    whole: list[PlacedLine] = []
    for members in grouped(((line.table, line.run.platforms), line) for line in lines).values():
        beside = _beside(members, cases, pair_by)
        first = next((beside[index] for index in range(len(members)) if index in beside), len(cases))
        after = first - 1
        for index, line in enumerate(members):
            after = beside.get(index, after)
            case = cases[after] if index in beside else None
            reason = why.get(id_of_row(line.table, line.line), "")
            was_run = case is not None and (_is_row(case, line) or not differing_settings(case, line.run))
            whole.append(PlacedLine(line=line, after=after, case=case, was_run=was_run, reason=reason))
    return whole


def shared_out(
    lines: Sequence[PublishedLine], groups: Mapping[str, Sequence[TableCase]], pair_by: Sequence[str]
) -> dict[str, list[PublishedLine]]:
    """Which table of several has which published rows: that of their model, one of its own where others have named;
    where no model is one of the reports', the table with most of their like.  A table that is not per model is the only
    one and has no name.

    A table without any case of a row's workload has none: one that emulates a model by sleeping.
    """
    blocks = grouped(((line.table, line.run.model), line) for line in lines)
    models = {plain(model) for _, model in blocks} - {""}
    named = {plain(case.model): name for name, cases in groups.items() for case in cases if plain(case.model) in models}
    shares: dict[str, list[PublishedLine]] = {}
    for (_, model), members in blocks.items():
        workload = members[0].run.workload
        fitting = [name for name in sorted(groups) if any(_does(case, workload) for case in groups[name])]
        best = max(fitting, key=lambda name: len(_beside(members, groups[name], pair_by)), default=None)
        if best is not None:
            alone = model if named and best else best
            shares.setdefault(named.get(plain(model), alone), []).extend(members)
    place = {(line.table, line.line): index for index, line in enumerate(lines)}
    # In the reports' order again: a table that is not per model has rows of several.
    return {name: sorted(shared, key=lambda line: place[line.table, line.line]) for name, shared in shares.items()}


def _does(case: TableCase, workload: str) -> bool:
    return snake(case.workload) == workload


def _beside(lines: Sequence[PublishedLine], cases: Sequence[TableCase], pair_by: Sequence[str]) -> dict[int, int]:
    """Return the index of the case of each row, by index of the row, from the series that fits best."""
    best: dict[int, int] = {}
    best_rank = (0, 0, 0, 0)
    series = (
        (case.platform, case.fingerprint, case.case.partition("[")[0], str(case.parameters.get("strategy", "")))
        for case in cases
    )
    for members in grouped((key, index) for index, key in enumerate(series)).values():
        pairs, differing = {}, []
        for number, line in enumerate(lines):
            at = [index for index in members if _is_row(cases[index], line) or _alike(line, cases[index], pair_by)]
            if at:
                pairs[number] = min(reversed(at), key=lambda index: _distance(cases[index], line))
                differing.append(_distance(cases[pairs[number]], line)[0])
        at_home = sum(cases[index].platform in lines[number].run.platforms for number, index in pairs.items())
        rank = (differing.count(0), at_home, len(pairs), -sum(differing))
        if rank >= best_rank:
            best, best_rank = pairs, rank
    return best


def _is_row(case: TableCase, line: PublishedLine) -> bool:
    return bool(case.case) and plain_id(case.case) == id_of_row(line.table, line.line)


def _distance(case: TableCase, line: PublishedLine) -> tuple[int, bool]:
    own, other = case_name(str(case.settings.get("case_name", ""))), case_name(line.run.name)
    same_group = own is not None and other is not None and own.prefix == other.prefix
    return 0 if _is_row(case, line) else len(differing_settings(case, line.run)), not same_group


def _alike(line: PublishedLine, case: TableCase, pair_by: Sequence[str]) -> bool:
    return _does(case, line.run.workload) and all(
        line.setting(name) is not None and plain(line.setting(name)) == plain(case.settings.get(name))
        for name in pair_by
    )


def notes_of(rows: Sequence[PlacedLine], shown: Mapping[str, str]) -> list[str]:
    """Return notes on the published rows: comparability, labels with reasons, conventions.

    ``shown`` are titles of the columns by metric.
    """
    compared = grouped((_comparable(row.case, row.line), row.line) for row in rows if row.case)
    notes = [f"published, {_places(lines)}: {why}" for why, lines in compared.items()]
    labelled = (
        (f"[{figure.label}] {{}}: {figure.reason}", (row.line, shown[metric]))
        for row in rows
        for metric, figure in row.line.figures.items()
        if metric in shown and figure.label != "M"
    )
    for reason, cells in grouped(labelled).items():
        columns = ", ".join(dict.fromkeys(title for _, title in cells))
        notes.append(reason.format(f"{columns}; {_listed(line.line for line, _ in cells)}"))
    conventions = {
        f"{shown[metric]}: {figure.convention}": None
        for row in rows
        for metric, figure in row.line.figures.items()
        if metric in shown and figure.convention
    }
    if conventions:
        notes.append(f"as published: {'; '.join(conventions)}")
    return [*notes, *_not_here(rows)]


def _not_here(rows: Sequence[PlacedLine]) -> Iterator[str]:
    """Cases that would measure the rows of this platform that were not, and why there are none."""
    platforms = {row.case.platform for row in rows if row.case}
    names = {}
    for row in rows:
        line = row.line
        if not row.was_run and platforms & set(line.run.platforms) and words_of_row(line.table, line.line):
            names[line.line] = words_of_row(line.table, line.line)
        if why := why_none(line.table, line.line):
            yield f"line {line.line} has no case: {why}"
    if names:
        listing = ", ".join(f"{name} (line {number})" for number, name in names.items())
        yield f"{runnable('pytest test_perf -k NAME')} runs those not measured here: {listing}"


def _as_it_ran(case: TableCase) -> Ran:
    nodes = case.settings.get("nodes")
    return Ran(
        workload=case.workload,
        parameters=case.parameters,
        world_size=case.ranks,
        platform=case.platform,
        nodes=nodes if isinstance(nodes, int) else None,
    )


def differing_settings(case: TableCase, run: PublishedRun) -> tuple[str, ...]:
    """Return how a case differs from the run of a published row, a phrase for each setting."""
    phrases = (_OURS.sub(" (ours), not ", phrase) for phrase in differences(_as_it_ran(case), run))
    return tuple(
        phrase.replace(", not None", ", unset here")
        for phrase in phrases
        if not (case.projected and phrase.startswith("nodes "))  # it is projected on nodes of its platform's row
    )


def _comparable(case: TableCase, line: PublishedLine) -> str:
    differing = list(differing_settings(case, line.run))
    if plain(line.run.model) != plain(case.model):  # of another model other differences do not matter
        differing = [difference for difference in differing if difference.startswith(("platform ", "model "))]
    if case.simulated:
        differing.insert(0, "the devices here are simulated")
    if differing:
        row = "measured row" if any(each.startswith("platform ") for each in differing) else "row above"
        return f"not comparable with the {row}: {'; '.join(differing)}"
    remark = not_stated(line.run, _as_it_ran(case))
    return f"the same run{' as is projected above' if case.projected else ''}{remark}"


def _places(lines: Sequence[PublishedLine]) -> str:
    files = grouped((line.file, line.line) for line in lines)
    return "; ".join(f"{_listed(numbers)} of {file}" for file, numbers in files.items())


def _listed(lines: Iterable[int]) -> str:
    numbers = sorted(set(lines))
    return f"line{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
