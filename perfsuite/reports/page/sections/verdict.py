"""The page's beginning: the verdict in words, what to look at first, tiles, what was compared with what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from perfsuite.base.masking import masked_words
from perfsuite.base.text import without_paths
from perfsuite.base.units import format_seconds, plural
from perfsuite.record.run import RunRecord
from perfsuite.reports.changes import NOT_COMPARABLE, verdict_sentence
from perfsuite.reports.document import Block, Grid, Item, Items, Section, Table, Tiles, Tone, Words, grid
from perfsuite.reports.families import tiles
from perfsuite.reports.ids import name_of
from perfsuite.reports.material import Material, named_run
from perfsuite.reports.notable import Notable

_MOST_NOTABLE = 20
_GRAVE = ("impossible", "failed", "regressed", "drifted", "environment")


def section(material: Material) -> Section:
    """Always there: a run without any case has a verdict too."""
    text, is_bad = sentence(material)
    blocks: list[Block] = [Words(text=text, tone="bad" if is_bad else "plain")]
    warnings = [without_paths(text) for one in material.runs for text in _warnings(one.run)]
    blocks += [Words(text=f"warning: {text}", tone="warn") for text in warnings]
    if material.notable:
        items = [
            Item(
                text=f"{without_paths(item.sentence)} ({item.sure})",
                tone=_tone(item),
                case=material.anchors.get(item.case, ""),
                case_name=name_of(item.case),
            )
            for item in material.notable[:_MOST_NOTABLE]
        ]
        left = len(material.notable) - len(items)
        blocks.append(Items(items=items, more=f"and {left} more" if left > 0 else ""))
    shown = list(tiles(material.measured))
    blocks += [Tiles(tiles=shown)] if shown else []
    blocks.append(Table(grid=_facts(material)))
    if differences := _differences(material):
        blocks.append(Table(grid=differences))
    return Section(key="verdict", title="What was found", blocks=blocks)


def _facts_of(record: RunRecord) -> Iterator[tuple[str, str]]:
    """What else is known of a run: label and text, which may be empty."""
    revision = record.revision
    commit = f"{revision.commit}-dirty" if revision.dirty else revision.commit
    yield "session", record.session
    yield "started", record.started_at
    yield "took", format_seconds(record.end.took_s, 3) if record.end else ""
    yield "exit status", str(record.end.exit_status) if record.end else ""
    yield "commit", _short(commit)
    yield "branch", revision.branch
    yield "subject", revision.subject
    yield "command", " ".join(("pytest", *masked_words(record.arguments))) if record.arguments else ""


def _short(commit: str) -> str:
    """Enough of a hash, and whether there was more than it has."""
    full, _, dirty = commit.partition("-")
    return full[:12] + (" with uncommitted changes" if full and dirty else "")


def _warnings(run: RunRecord) -> tuple[str, ...]:
    """What a reader must know of the run as a whole, from its gate and its end."""
    return (*(run.gate.banner if run.gate else ()), *(run.end.warnings if run.end else ()))


def _tone(item: Notable) -> Tone:
    if item.kind == "improved":
        return "good"
    return "bad" if item.kind in _GRAVE else "warn"


def sentence(material: Material) -> tuple[str, bool]:
    """The verdict in words, and whether it is a bad one."""
    counts = Counter(why.partition(":")[0].partition(" ")[0] for why in material.missing.values())
    full = sum(case.outcome == "out_of_memory" for case in material.cases)
    smoke = sum(case.outcome == "smoke" for case in material.cases)
    told = [f"{plural(len(material.measured), 'case')} measured"]
    told += [f"{full} out of memory"] if full else []
    told += [f"{smoke} built, checked and run once, not measured"] if smoke else []
    told += [f"{counts[word]} {word}" for word in ("failed", "interrupted", "skipped") if counts[word]]
    is_bad = bool(counts["failed"]) or any(item.tone == "bad" for item in material.changes)
    apart = sum(item.word.startswith(NOT_COMPARABLE) for item in material.changes)
    compared = len(material.changes) > apart
    left_out = f"{plural(apart, 'case')} ran with other settings than before and cannot be compared" if apart else ""
    if not compared:
        left_out = f"nothing was compared: {left_out or 'there is no baseline here'}"
    decided = verdict_sentence(material.changes, failed=counts["failed"], apart=left_out)
    return f"{decided[:1].upper()}{decided[1:]}. {', '.join(told)}.", is_bad


def _facts(material: Material) -> Grid:
    """What ran where, a column per run."""
    recordings = (*material.runs, *((material.base,) if material.base else ()))
    all_runs = [recording.run for recording in recordings]
    known = [dict(_facts_of(run)) for run in all_runs]
    labels = dict.fromkeys(label for one in known for label in one)
    rows = [
        ("hardware", *(run.hardware for run in all_runs)),
        ("torch", *(run.torch for run in all_runs)),
        *((label, *(without_paths(one.get(label, "")) for one in known)) for label in labels),
    ]
    if any(run.simulated for run in all_runs):
        rows.append(
            ("devices", *("SIMULATED: no time is a measurement" if run.simulated else "real" for run in all_runs))
        )
    names = [*map(named_run, material.runs), *([f"base: {named_run(material.base)}"] if material.base else [])]
    notes = (f"compared: {material.compared}",) if material.compared else ()
    return grid(("run", *names), [row for row in rows if any(row[1:])], notes)


def _differences(material: Material) -> Grid | None:
    """Keys of the environments that are not the same in all runs."""
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
    return grid(("differs", *names), rows, title="Environments: what differs") if rows else None


HIDDEN = ("hostname", "notes", "topology")
"""Fields of an environment that a file for others does not have, or that have a place of their own."""


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if not prefix and name in HIDDEN:
            continue
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", without_paths(str(value))
