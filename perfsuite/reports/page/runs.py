"""What a page shows of runs; both sides of a comparison come together here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import PurePath

from perfsuite.base.masking import masked_words
from perfsuite.base.units import format_seconds
from perfsuite.record.result import Result
from perfsuite.record.run import RunRecord
from perfsuite.reports.hosts import hosts_of
from perfsuite.reports.notable import notable
from perfsuite.reports.page.effects import changes_between, changes_of_verdicts
from perfsuite.reports.page.material import CaseChange, Material, PageCase, case_of_result, joined, page_cases
from perfsuite.reports.tables.recording import Recording


def facts(record: RunRecord) -> Iterator[tuple[str, str]]:
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


def material_of(runs: Sequence[Recording], base: Recording | None = None, *, show_hosts: bool = False) -> Material:
    """All that a page shows of these runs, beside ``base`` where one is given.

    Without a base the verdicts of the gate are the comparison, where it judged.  ``show_hosts``: keep names of hosts.
    """
    notes = tuple(one for recording in runs[-1:] for one in notable(recording.run))
    alone = Material(runs=tuple(runs), base=base, notable=notes)
    if base is not None:
        changes = tuple(changes_between(page_cases(base), alone.cases))
        compared = f"{', '.join(map(named_run, runs))} with {named_run(base)}"
    else:
        changes = tuple(changes_of_verdicts(alone.verdicts.values()))
        compared = "the stored runs of the baseline, by the gate" if changes else ""
    hidden = () if show_hosts else hosts_of(_results((*runs, *((base,) if base else ()))))
    return Material(runs=tuple(runs), base=base, notable=notes, changes=changes, compared=compared, hidden_hosts=hidden)


def run_warnings(run: RunRecord) -> tuple[str, ...]:
    """What a reader must know of the run as a whole, from its gate and its end."""
    return (*(run.gate.banner if run.gate else ()), *(run.end.warnings if run.end else ()))


def named_run(recording: Recording) -> str:
    """The name of a run without its folder: a page is for others."""
    return PurePath(recording.run.name).name


def _results(runs: Sequence[Recording]) -> Iterator[Result]:
    return (result for recording in runs for result in recording.run.results.values())


def material_of_arms(
    a: Sequence[Sequence[Result]],
    b: Sequence[Sequence[Result]],
    names: Sequence[str],
    changes: Sequence[CaseChange],
    compared: str,
) -> Material:
    """The page of an A/B: every run of both arms, arm b beside arm a."""
    arms = [_arm(results, name) for results, name in zip((a, b), names, strict=True)]
    hidden = hosts_of(_results(arms))
    return Material(runs=(arms[1],), base=arms[0], changes=tuple(changes), compared=compared, hidden_hosts=hidden)


def _arm(runs: Sequence[Sequence[Result]], name: str) -> Recording:
    """One arm: the newest run of each case with the times of all."""
    cases: dict[str, PageCase] = {}
    for result in (result for results in runs for result in results):
        cases[result.case] = joined(cases.get(result.case), case_of_result(result))
    newest = next((results[-1] for results in reversed(runs) if results), None)
    run = RunRecord(
        name=name,
        platform=newest.platform if newest else "",
        fingerprint=newest.fingerprint if newest else "",
        results={case: one.result for case, one in cases.items()},
    )
    return Recording(run=run, times_s={case: one.times_s for case, one in cases.items()})


MOST_CASES = 150
"""Of more the tables would be longer than anybody reads, and the page slower than it may be."""


def recordings(material: Material) -> list[Recording]:
    """A recording per run: its training steps, then its collectives, no more than MOST_CASES together."""
    left = MOST_CASES
    told = []
    for recording in reversed(material.runs):
        shown = filter(_of_a_report, recording.run.results.values())
        ordered = sorted(shown, key=lambda result: bool(result.values.get("busbw_gb_per_s")))
        run = dataclasses.replace(recording.run, results={result.case: result for result in ordered[:left]})
        told.append(dataclasses.replace(recording, run=run))
        left -= len(run.results)
    return told[::-1]


def _of_a_report(result: Result) -> bool:
    return result.outcome != "smoke" and ("model" in result.parameters or "busbw_gb_per_s" in result.values)
