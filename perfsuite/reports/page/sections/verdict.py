"""The beginning of a page: verdict, next command, headline figures, findings, warnings; then all changes."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from perfsuite.base.text import bare_name, without_paths
from perfsuite.base.units import change, plural
from perfsuite.record.describe import phrases
from perfsuite.record.run import Revision
from perfsuite.reports.changes import (
    NOT_COMPARABLE,
    UNCHANGED,
    CaseChange,
    changes_sentence,
    failing_suite,
    why_nothing,
    without_memory,
)
from perfsuite.reports.document import (
    MOST_BARS,
    Block,
    Chart,
    Charts,
    Grid,
    Item,
    Items,
    Section,
    Table,
    Tiles,
    Words,
    grid,
)
from perfsuite.reports.families import tiles
from perfsuite.reports.ids import name_of
from perfsuite.reports.material import Material, named_run
from perfsuite.reports.page.charts import rows
from perfsuite.reports.page.charts.look import labels
from perfsuite.reports.questions import slow_lines
from perfsuite.reports.screen import accepted, case_counts, outcomes

_MOST_NOTABLE, _MOST_CHANGES = 20, 3  # Maximum findings, and those of them that the table of changes repeats.
_CHANGES = ("regressed", "drifted", "improved")
_GRAVE = ("impossible", "failed", "regressed", "drifted", "environment")
_COMMANDS = ("perfsuite ", "cd ", "--perf-")  # Beginnings of the commands and options in the phrases of a verdict.


def section(material: Material) -> Section:
    """Return the section; it exists also for a run without cases."""
    text, is_bad = sentence(material)
    blocks: list[Block] = [Words(text=text, tone="bad" if is_bad else "plain")]
    remarks = [remark for one in material.runs if one.run.end is not None for remark in one.run.end.remarks]
    blocks += [Words(text=without_paths(text), tone="bad" if text.startswith("SLOW") else "warn") for text in remarks]
    if not remarks:  # an acceptance run has looked again
        blocks += [Words(text=without_paths(text), tone="bad") for text in slow_lines(material.measured)]
    if material.compared:
        blocks.append(Words(text=f"Compared: {material.compared}."))
    blocks += _next(material)
    if shown := list(tiles(material.measured)):
        blocks.append(Tiles(tiles=shown))
    changed = [one for one in material.notable if one.kind in _CHANGES and one.case]
    findings = [one for one in material.notable if one not in changed[_MOST_CHANGES:]]
    if findings:
        items = [
            Item(
                text=f"{without_paths(item.sentence)} ({item.sure})",
                tone="good" if item.kind == "improved" else "bad" if item.kind in _GRAVE else "warn",
                case=material.anchors.get(item.case, ""),
                case_name=name_of(item.case),
            )
            for item in findings[:_MOST_NOTABLE]
        ]
        left = len(material.notable) - len(items)
        where = "; Changes lists all changed cases" if len(changed) > _MOST_CHANGES else ""
        blocks.append(Items(items=items, more=f"and {left} more{where}" if left > 0 else ""))
    for run in (one.run for one in material.runs):
        warnings = (*(run.gate.banner if run.gate else ()), *(run.end.warnings if run.end else ()))
        blocks += [Words(text=f"warning: {without_paths(text)}", tone="warn") for text in warnings]
    if differences := _differences(material):
        blocks.append(Table(grid=differences))
    return Section(key="verdict", title="Verdict", blocks=blocks)


def title_of(material: Material) -> str:
    """Return ``FAIL: 1 slower, 3 unchanged - 8 x MTT S4000, torch 2.7.1 - commit abc1234 - 2026-11-25``."""
    run = material.runs[-1].run if material.runs else None
    if run is None:
        return f"perfsuite - {_short_verdict(material)}"
    devices = run.environment.get("devices")
    devices = devices if isinstance(devices, Sequence) and devices else [run.platform]
    name = str(devices[0]).partition(",")[0]
    hardware = (f"{len(devices)} x {name}" if len(devices) > 1 else name, f"torch {run.torch}" if run.torch else "")
    commit = f"commit {commit_of(run.revision)}" if run.revision.commit else ""
    parts = (_short_verdict(material), ", ".join(filter(None, hardware)), commit, run.started_at[:10])
    return " - ".join(filter(None, parts))


def _short_verdict(material: Material) -> str:
    """Return ``FAIL: 1 slower, 3 unchanged``; PASS and FAIL where cases failed, or a gate or expectations judged."""
    failures, interrupted, skips = map(material.left, _LEFT)
    verdicts = accepted(one.run for one in material.runs)
    expected = (verdicts or [""])[0].partition("; ")[0].partition(", as ")[0]
    groups = Counter(map(_group, material.changes))
    words = ("slower", "impossible", "faster", "undecided", "unchanged")
    compared = [f"{groups[word]} {word}" for word in words if groups[word]]
    parts = [f"{len(cases)} {word}" for word, cases in (("failed", failures), ("interrupted", interrupted)) if cases]
    parts += compared or [outcomes(material.cases)]
    parts = list(filter(None, parts)) or [case_counts((), (), (), skips)]
    parts = [*filter(None, (expected.partition(": ")[2], _cut(material).removeprefix("the run "))), *parts]
    gates = [one.run.gate for one in material.runs if one.run.gate is not None and one.run.gate.gate]
    judged = [(gate, verdict.name) for gate in gates for verdict in gate.verdicts]
    judged += [(gate, gate.suite) for gate in gates if gate.suite is not None]
    failing = failures or expected.startswith("FAIL") or any(gate.fails(name) for gate, name in judged)
    passing = bool(expected) or bool(gates and set(groups) & {"faster", "unchanged"})
    passing = passing and not any(one.run.end.exit_status for one in material.runs if one.run.end is not None)
    return f"{'FAIL: ' if failing else 'PASS: ' if passing else ''}{', '.join(parts)}"


def _group(one: CaseChange) -> str:
    if one.word.startswith((NOT_COMPARABLE, "impossible")):
        return "impossible" if one.word.startswith("impossible") else ""
    return {"bad": "slower", "good": "faster"}.get(one.tone) or ("unchanged" if one.word in UNCHANGED else "undecided")


def commit_of(revision: Revision) -> str:
    """Return the beginning of the hash, and whether there were uncommitted changes."""
    return revision.commit[:12] + (" with uncommitted changes" if revision.commit and revision.dirty else "")


def _next(material: Material) -> Iterator[Words]:
    """Yield the commands that a reader may run next, the most urgent first."""
    gates = [one.run.gate for one in material.runs if one.run.gate is not None]
    failing = [verdict for gate in gates for verdict in gate.verdicts if gate.fails(verdict.name)]
    effects = {id(verdict): found.effect for verdict in failing if (found := verdict.decisive) is not None}
    for verdict in sorted(failing, key=lambda verdict: -(effects.get(id(verdict)) or 0.0))[:1]:
        for phrase in phrases(verdict):
            text, _, command = phrase.partition(": ")
            if command.startswith(_COMMANDS):
                yield Words(text=f"{text}:", command=without_paths(command))
    for case in list(material.left("failures"))[:1]:
        yield Words(text="run the failed case again:", command=f"pytest {shlex.quote(case)}")
    run = material.runs[-1].run if material.runs else None
    path = run.path or Path(run.name) if run else Path()
    if path.suffix == ".jsonl":
        name = shlex.quote(f".perfsuite/{path.name}" if path.parent.name == ".perfsuite" else path.name)
        if material.measured and not material.changes:
            command = f"perfsuite report {name} --html FILE --base OLDER.jsonl"
            yield Words(text="compare with an earlier run:", command=command)
        undecided = [one for one in material.changes if _group(one) == "undecided"]
        if material.base is not None and undecided:
            case = max(undecided, key=lambda one: abs(one.effect or 0.0)).node
            revision = material.base.run.revision.commit[:10] or "REV"
            yield Words(text="measure both in turns:", command=f"perfsuite ab --a {revision} -- {shlex.quote(case)}")
        yield Words(text="all tables:", command=f"perfsuite show {name} --show=tables")


def _cut(material: Material) -> str:
    """Return how the newest run ended too early; empty if it did not."""
    return material.runs[-1].run.cut if material.runs else ""


_LEFT = ("failures", "interrupted", "skips")


def sentence(material: Material) -> tuple[str, bool]:
    """Return the verdict as a sentence, and whether it is a bad one."""
    failures, interrupted, skips = map(material.left, _LEFT)
    measured = case_counts(material.cases, failures, interrupted, skips)
    verdicts = accepted(one.run for one in material.runs)
    is_bad = bool(failures) or any(item.tone == "bad" for item in material.changes)
    suite = failing_suite(one.run.gate for one in material.runs)
    is_bad |= bool(suite) or any(verdict.startswith("FAIL") for verdict in verdicts)
    apart = sum(item.word.startswith(NOT_COMPARABLE) for item in material.changes)
    left_out = f"{plural(apart, 'case')} ran with other settings than before and cannot be compared" if apart else ""
    if len(material.changes) == apart:
        left_out = f"nothing was compared: {left_out or why_nothing(material.verdicts.values())}"
    decided = changes_sentence(
        material.changes,
        failed=len(failures),
        interrupted=len(interrupted),
        cut=_cut(material),
        out_of_memory=without_memory(material.cases, material.verdicts),
        suite=without_paths(suite),
        apart=left_out,
    )
    sentences = (*map(without_paths, verdicts), f"{decided[:1].upper()}{decided[1:]}", measured)
    return f"{'. '.join(sentences)}.", is_bad


def _differences(material: Material) -> Grid | None:
    all_runs = [one for one in (*material.runs, material.base) if one is not None and one.run.environment]
    flat = [dict(_flat(one.run.environment)) for one in all_runs]
    if len(flat) < 2:
        return None
    keys = dict.fromkeys(key for facts in flat for key in facts)
    rows = [
        (key, *(facts.get(key, "not known") for facts in flat))
        for key in keys
        if len({facts.get(key) for facts in flat}) > 1
    ]
    names = list(map(named_run, all_runs))
    return grid(("key", *names), rows, title="Differences of the environments") if rows else None


HIDDEN = ("hostname", "notes", "topology")  # Keys of an environment that are private or have a place of their own.


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if not prefix and name in HIDDEN:
            continue
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", without_paths(str(value))


_COMPARISON_CHARTS = 2


def comparison(material: Material) -> Section | None:
    """Return charts and a table of the cases that changed, or of all cases where none did."""
    if not material.changes:
        return None
    effects = [one for one in material.changes if one.effect is not None]
    compared = sorted(effects, key=lambda one: (one.tone == "plain", -(one.effect or 0)))
    changed = [one for one in compared if one.tone != "plain"]
    drawn = (changed or compared)[: _COMPARISON_CHARTS * 2 * MOST_BARS]
    parts = [drawn[at : at + 2 * MOST_BARS] for at in range(0, len(drawn), 2 * MOST_BARS)]
    shown = _change_grid(changed or compared, "")
    charts = [_chart(part, None if index else shown, changed=bool(changed)) for index, part in enumerate(parts)]
    blocks: list[Block] = [Charts(charts=charts)] if charts else []
    if changed and (rest := [one for one in compared if one.tone == "plain"]):
        blocks.append(Table(grid=_change_grid(rest, "Unchanged or undecided cases"), folded=True))
    if apart := [(name_of(one.node), one.word) for one in material.changes if one.effect is None]:
        blocks.append(Table(grid=grid(("case", "reason"), apart, (), "Cases that were not compared")))
    return Section(key="comparison", title="Changes", blocks=blocks)


def _chart(changes: Sequence[CaseChange], shown: Grid | None, *, changed: bool) -> Chart:
    names = labels([bare_name(one.node).removeprefix("test_") for one in changes], 30)
    tips = [f"{bare_name(one.node)}: {change(one.effect or 0)} {one.between.strip()} {one.word}" for one in changes]
    spec = rows.changes(changes, names, tips)
    title = f"{'Changed' if changed else 'Compared'} cases"
    if shown is None:
        return Chart(title=f"{title}, continued", spec=spec)
    caption = "bars: 95 % intervals; a point without a bar is one run against one"
    return Chart(title=title, spec=spec, grid=shown, caption=caption)


def _change_grid(changes: Sequence[CaseChange], title: str) -> Grid:
    columns = ("case", "before", "after", "change", "95 % interval, %", "verdict", "evidence")
    cells = [
        (name_of(one.node), one.before, one.after, change(one.effect or 0), one.between.strip(), one.word, one.runs)
        for one in changes
    ]
    return grid(columns, cells, (), title)
