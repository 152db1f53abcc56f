"""From a run's record or a baseline file to what the page shows; both sides of a comparison come together here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePath

from perfsuite.base.masking import masked_words
from perfsuite.base.units import format_seconds
from perfsuite.baselines.baseline import Baseline
from perfsuite.platforms import DeviceModel
from perfsuite.record.result import Result
from perfsuite.record.run import RunRecord
from perfsuite.reports.hosts import hosts_of
from perfsuite.reports.notable import notable
from perfsuite.reports.page.effects import changes_between, changes_of_verdicts
from perfsuite.reports.page.material import CaseChange, Material, PageCase, Run, case_of_result, joined
from perfsuite.reports.stored import stored_result


def run_of_record(record: RunRecord, device: DeviceModel | None) -> Run:
    """A session that just ended, or a journal."""
    results = tuple(record.results.values())
    return Run(
        name=PurePath(record.name).name,
        platform=record.platform,
        fingerprint=record.fingerprint,
        cases=tuple(map(case_of_result, results)),
        missing=record.missing,
        verdicts=record.gate.by_case if record.gate else {},
        environment=results[-1].environment if results else {},
        versions=record.versions,
        facts={label: text for label, text in _facts(record) if text},
        warnings=(*(record.gate.banner if record.gate else ()), *(record.end.warnings if record.end else ())),
        device=device,
        simulated=any(result.simulated for result in results),
        record=record,
    )


def _facts(record: RunRecord) -> Iterator[tuple[str, str]]:
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


def run_of_baseline(baseline: Baseline, name: str, device: DeviceModel | None) -> Run:
    """The newest run of each case that a baseline file keeps."""
    hardware = baseline.hardware
    newest = baseline.newest
    entries = sorted(baseline.entries.items(), key=lambda pair: pair[0])
    return Run(
        name=name,
        platform=hardware.platform,
        fingerprint=hardware.fingerprint,
        cases=tuple(case_of_result(stored_result(entry, hardware)) for _, entry in entries),
        environment=newest.environment if newest else {},
        versions=baseline.versions,
        facts={"newest run": newest.time, "commit": _short(newest.commit)} if newest else {},
        device=device,
        simulated=hardware.simulated,
    )


def material_of(runs: Sequence[Run], base: Run | None = None, *, show_hosts: bool = False) -> Material:
    """All that a page shows of these runs, beside ``base`` where one is given.

    Without a base the verdicts of the gate are the comparison, where it judged.  ``show_hosts``: keep names of hosts.
    """
    notes = tuple(one for run in runs[-1:] if run.record is not None for one in notable(run.record))
    alone = Material(runs=tuple(runs), base=base, notable=notes)
    if base is not None:
        changes = tuple(changes_between(base.cases, alone.cases))
        compared = f"{', '.join(run.name for run in runs)} with {base.name}"
    else:
        changes = tuple(changes_of_verdicts(alone.verdicts.values()))
        compared = "the stored runs of the baseline, by the gate" if changes else ""
    hidden = () if show_hosts else hosts_of(_results((*runs, *((base,) if base else ()))))
    return Material(runs=tuple(runs), base=base, notable=notes, changes=changes, compared=compared, hidden_hosts=hidden)


def _results(runs: Sequence[Run]) -> Iterator[Result]:
    return (case.result for run in runs for case in run.cases if case.result is not None)


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


def _arm(runs: Sequence[Sequence[Result]], name: str) -> Run:
    """One arm: the newest run of each case with the times of all."""
    all_results = [result for results in runs for result in results]
    cases: dict[str, PageCase] = {}
    for result in all_results:
        cases[result.case] = joined(cases.get(result.case), case_of_result(result))
    newest = all_results[-1] if all_results else None
    return Run(
        name=name,
        platform=newest.platform if newest else "",
        fingerprint=newest.fingerprint if newest else "",
        cases=tuple(cases.values()),
        environment=newest.environment if newest else {},
        simulated=any(result.simulated for result in all_results),
    )
