"""Apply an update to the entries of a baseline: store runs, refuse them, or begin a new epoch."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from perfsuite.base.units import plural
from perfsuite.baselines.baseline import (
    SESSION_RUNS,
    Acceptance,
    CaseKey,
    Entry,
    first_runs,
    is_complete,
    machine_sessions,
    newest,
)
from perfsuite.baselines.hosts import by_host
from perfsuite.baselines.runs import (
    CLEAN_RUNS,
    MIN_CLEAN,
    CaseIdentity,
    RunSummary,
    in_order,
    moment,
    usually_clean,
    why_unusable,
)
from perfsuite.record.describe import headline
from perfsuite.record.own_metrics import Better
from perfsuite.record.verdict import FAILING, Finding, SuiteVerdict, Verdict, VerdictName

UpdateMode = Literal["append", "improved", "accept", "environment"]

_SLOWER = ("regressed", "drifted", "environment")
_ACCEPT = "if that is meant: --perf-accept=all --perf-reason=TEXT"
_REMEDIES: Mapping[str, str] = {
    "impossible": "an error of measurement is never stored",
    "environment": "if that is meant: --perf-accept=environment --perf-reason=TEXT",
}
"""Remedies for cases that are refused for their verdict; _ACCEPT for the others."""


@dataclass(frozen=True, kw_only=True)
class NewRuns:
    """New runs of one case in a session."""

    case: CaseIdentity
    runs: tuple[RunSummary, ...]  # All fresh runs of the session, without those of an A/B's base.
    verdict: VerdictName | None = None  # Verdict of the gate; None without one.
    seen: str = ""  # The verdict with its effect, as text.
    suspected: bool = False
    """Whether a slowdown is suspected and not excluded: the runs are stored, but not in the reference."""
    gains: Mapping[str, float] = field(default_factory=dict)
    """Improved quantities, with the relative gain that another session must exceed to confirm them."""
    tolerance: float = 0.03  # Accepted relative slowdown.
    instrumented: str = ""
    """Tool or debug setting that slowed the ranks, so that the times cannot be stored; empty without one."""


@dataclass(kw_only=True)
class Draft:
    """An update of a file, and its result."""

    mode: UpdateMode
    reason: str
    session_runs: int  # Most runs of the session that are added to a case with other runs.
    added: dict[str, int] = field(default_factory=dict)  # Number of added runs, by node id.
    replaced: list[str] = field(default_factory=list)  # Node ids whose older runs were replaced.
    refused: dict[str, str] = field(default_factory=dict)  # Reasons for storing nothing of a case, by node id.
    alarming: list[str] = field(default_factory=list)
    """Refused cases that are slower than the stored runs or impossible: the run fails."""
    notes: dict[str, str] = field(default_factory=dict)  # Remarks about stored cases, by node id.
    hosts: str = ""  # A sentence about the hosts of the file's runs; empty for one host.
    path: Path = Path()  # The file.
    machine_session: Mapping[str, str] = field(default_factory=dict)

    @property
    def written(self) -> bool:
        """Whether the file changed."""
        return bool(self.added)

    def apply(self, before: Mapping[CaseKey, Entry], offered: Sequence[NewRuns]) -> dict[CaseKey, Entry]:
        """Return the entries after the update."""
        entries = dict(before)
        stored = (run for entry in before.values() for run in entry.kept)
        self.machine_session = machine_sessions([*stored, *(run for new in offered for run in new.runs)])
        for new in offered:
            key = _stored_key(entries, new.case)
            entry = self._entry(entries.get(key), new)
            if entry is not None:
                entries.pop(key, None)
                entries[new.case.key] = entry
                if unusable := why_unusable(entry.kept):
                    node = new.case.node
                    self.notes[node] = "; ".join(filter(None, (self.notes.get(node), unusable)))
        return entries

    def _entry(self, old: Entry | None, new: NewRuns) -> Entry | None:
        """Return the new entry of a case; None if it does not change.

        Cases that the gate fails are refused.  Cases without a verdict, and runs on a disturbed host, are stored.
        """
        node, worse, why_not = new.case.node, new.verdict in _SLOWER, _unfit(new)
        apart = () if old is None else (*new.case.differences(old.case), *new.case.changed_metrics(old.case).values())
        if new.instrumented:
            self.alarming.append(node)
        elif new.verdict == "impossible" or (worse and not self._accepts(new)):
            self.alarming.append(node)
            why_not = f"{new.seen or new.verdict}; {_REMEDIES.get(str(new.verdict), _ACCEPT)}"
        elif not why_not and self.mode == "improved" and new.verdict != "improved":
            why_not = f"its verdict is {new.verdict or 'unknown'}; --perf-update=improved stores improved cases only"
        elif not why_not and apart and self.mode != "accept":
            why_not = f"it is not comparable with the stored runs: {'; '.join(apart)}; {_ACCEPT}"
        if why_not:
            self.refused[node] = why_not
            return None
        changed = new.verdict in ("improved", "not-comparable") or bool(apart) or bool(_slower(old, new))
        anew = self.mode == "accept" and changed
        if old is None or anew or (worse and self._accepts(new)):
            return self._new_epoch(old, new)
        return self._joined(old, new)

    def _accepts(self, new: NewRuns) -> bool:
        return self.mode == "accept" or (self.mode == "environment" and new.verdict == "environment")

    def _new_epoch(self, old: Entry | None, new: NewRuns) -> Entry:
        runs = newest(new.runs)
        self.added[new.case.node] = len(runs)
        accepted = None
        if self.mode == "accept" or (self.mode == "environment" and old is not None):
            kind: Literal["accepted", "environment"] = "accepted" if self.mode == "accept" else "environment"
            accepted = Acceptance(reason=self.reason, session=runs[0].session, time=runs[0].time, kind=kind)
        if old is not None:
            self.replaced.append(new.case.node)
        return Entry(case=new.case, runs=runs, accepted=accepted)

    def _joined(self, old: Entry, new: NewRuns) -> Entry | None:
        """Return the entry with the session's runs, those with enough clean samples first; None if none is stored."""
        node = new.case.node
        there = {run.key for run in old.kept}
        fresh = [run for run in newest(new.runs) if run.key not in there]
        later = [run for run in fresh if old.accepted is None or moment(run.time) >= moment(old.accepted.time)]
        if not later:
            since = f"are older than the epoch that began at {old.accepted.time}" if old.accepted else ""
            self.refused[node] = f"its runs {since}; measure it again" if fresh else "its runs are stored already"
            return None
        if slower := _slower(old, new):
            self.notes[node] = f"{slower}; stored, because the gate has no verdict ({new.verdict})"
        later.sort(key=lambda run: run.is_disturbed)  # a stable sort keeps the order of the others
        if usually_clean(old.runs):
            later.sort(key=lambda run: (run.is_disturbed, not run.has_clean))
            self._note_disturbed(node, later)
        improved = new.verdict == "improved"
        runs = in_order(later[: max(self.session_runs, SESSION_RUNS) if improved else self.session_runs])
        self.added[node] = len(runs)
        if improved:
            return self._improved(old, new, runs)
        # A suspected slowdown must not change a level that exists.
        may_join = not new.suspected or len(old.reference) < CLEAN_RUNS
        return self._appended(old, new.case, runs, into_reference=may_join)

    def _note_disturbed(self, node: str, runs: Sequence[RunSummary]) -> None:
        """Add a note to a case whose clean samples are compared if the newest runs have too few of them."""
        if not runs[0].has_clean and runs[0].outcome == "measured":
            best = max(runs, key=lambda run: run.clean)
            self.notes[node] = (
                f"{best.clean} of {best.samples} samples undisturbed, {MIN_CLEAN} are needed; stored, and compared "
                "after most stored runs have as few"
            )

    def _improved(self, old: Entry, new: NewRuns, runs: tuple[RunSummary, ...]) -> Entry:
        """Return the entry, with a new epoch if another session of the machine confirms the improvement."""
        node = new.case.node
        shown = confirming(old, runs, new.gains, self.machine_session)
        elsewhere = len(by_host(old.reference)) == 1 < len(by_host([*old.reference, *runs]))
        if elsewhere or not shown:
            self.notes[node] = "improved; a second session of the machine confirms it and begins a new epoch"
            if elsewhere:
                self.notes[node] = "improved, on another host than that of the stored runs: no new epoch begins"
            return self._appended(old, new.case, runs, into_reference=False)
        self.notes[node] = "improved in two sessions of the machine: a new epoch begins"
        self.replaced.append(node)
        why = f"improved in sessions {', '.join(dict.fromkeys(run.session for run in shown))}"
        return Entry(
            case=new.case,
            runs=newest(shown),
            accepted=Acceptance(reason=why, session=shown[0].session, time=shown[0].time, kind="improved"),
            reference=first_runs(shown, self.machine_session),
        )

    def _appended(self, old: Entry, case: CaseIdentity, runs: Sequence[RunSummary], *, into_reference: bool) -> Entry:
        """Return the entry with further runs, which join the reference until that is complete."""
        reference = old.reference
        if into_reference and not is_complete(reference, self.machine_session):
            reference = first_runs([*reference, *runs], self.machine_session)
        case = dataclasses.replace(case, metrics={**old.case.metrics, **case.metrics})  # older runs may have more
        return dataclasses.replace(old, case=case, runs=newest([*reference, *old.runs, *runs]), reference=reference)


def _stored_key(entries: Mapping[CaseKey, Entry], case: CaseIdentity) -> CaseKey:
    equal = (key for key, entry in entries.items() if key[:3] == case.key[:3] and not case.differences(entry.case))
    return case.key if case.key in entries else next(equal, case.key)


def _unfit(new: NewRuns) -> str:
    if new.instrumented or not new.runs:
        return new.instrumented or "it has no run"
    reused = any(run.process == "reused" for run in new.runs)
    return "its processes were reused; a baseline takes fresh ones" if reused else ""


def _slower(old: Entry | None, new: NewRuns) -> str:
    if old is None or not (new.suspected or new.verdict in ("learning", "unstable-host")):
        return ""
    slower = slowdown(new.runs, old.reference)
    return f"{100 * slower:.3g} % slower than the {plural(len(old.reference), 'run')} stored" * (slower > new.tolerance)


def log_times(runs: Sequence[RunSummary], *, clean_only: bool) -> list[float]:
    """Return the ln seconds of the measured runs, of their clean samples or of all samples."""
    if clean_only:
        return [run.location for run in runs if run.location is not None and run.has_clean]
    return [math.log(run.median_s) for run in runs if run.quantiles_s]


def gain(runs: Sequence[RunSummary], reference: Sequence[RunSummary], quantity: str, better: Better = "lower") -> float:
    """Return the gain of the runs' median relative to the reference's; 0 if it cannot be computed.

    ``quantity`` is ``time``, a metric with a better direction, or ``memory``: a case that did not fit and fits now has
    a gain of 1.
    """
    if quantity == "memory" and all(run.outcome == "out_of_memory" for run in reference):
        return float(all(run.outcome == "measured" for run in runs))
    if quantity == "time":
        clean_only = usually_clean(reference)
        before, now = (log_times(side, clean_only=clean_only) for side in (reference, runs))
        return math.expm1(statistics.median(before) - statistics.median(now)) if before and now else 0.0
    before, now = ([run.metrics[quantity] for run in side if quantity in run.metrics] for side in (reference, runs))
    if not before or not now or not statistics.median(before):
        return 0.0
    change = statistics.median(now) / statistics.median(before) - 1
    return {"lower": -change, "higher": change, "neither": 0.0}[better]


def confirming(
    entry: Entry, runs: Sequence[RunSummary], gains: Mapping[str, float], machine_session: Mapping[str, str]
) -> tuple[RunSummary, ...]:
    """Return the runs of successive sessions of the machine with the same gain, the present session last.

    The result is empty if only one session has it; runs of the reference do not count.  ``runs`` belong to the
    present session.  ``gains`` holds the gain that must be exceeded, by quantity.
    """
    in_reference = {run.key for run in entry.reference}
    groups: dict[str, list[RunSummary]] = {}
    for run in (*(run for run in entry.runs if run.key not in in_reference), *runs):
        groups.setdefault(machine_session[run.session], []).append(run)
    now = machine_session[runs[-1].session]
    sessions = [group for name, group in groups.items() if name != now]
    for quantity, least in gains.items():
        meaning = entry.case.metrics.get(quantity)
        shown: list[list[RunSummary]] = []
        for group in (groups[now], *reversed(sessions)):
            if not gain(group, entry.reference, quantity, meaning.better if meaning else "lower") > least:
                break
            shown.append(group)
        if len(shown) > 1:
            return in_order(run for group in shown for run in group)
    return ()


def slowdown(runs: Sequence[RunSummary], stored: Sequence[RunSummary]) -> float:
    """Return the relative slowdown of the medians; 0 unless every run is slower than every stored one."""
    clean_only = usually_clean(stored) and all(run.has_clean for run in runs)
    before, now = (log_times(side, clean_only=clean_only) for side in (stored, runs))
    if not before or not now or min(now) <= max(before):
        return 0.0
    return math.expm1(statistics.median(now) - statistics.median(before))


def offered(new: NewRuns, verdict: Verdict, suite: SuiteVerdict | None) -> NewRuns:
    """Return the runs of a case with the verdicts on the case and on the session."""
    name, seen = verdict.name, seen_in(verdict)
    together = suite is not None and suite.seen and suite.name in FAILING and verdict.gated and name not in FAILING
    if suite is not None and together and (name == "inconclusive" or suite.name == "environment"):
        name, seen = suite.name, f"{suite.name} with the whole suite: {suite.line}"
    return dataclasses.replace(
        new, verdict=name, seen=seen, suspected=suspects_slowdown(verdict), gains=gains_in(verdict)
    )


def seen_in(verdict: Verdict) -> str:
    """Return a verdict with its effect, or with its first reason if it has no effect."""
    finding = verdict.decisive
    if finding is None or finding.effect is None:
        return ": ".join([verdict.name, *verdict.reasons[:1]])
    return headline(verdict)


def suspects_slowdown(verdict: Verdict) -> bool:
    """Return whether a slowdown is suspected: neither shown nor excluded, by the gate's rule.

    It is above half the tolerance and above the standard error, about a quarter of the width of the 95 % interval.
    """
    return any(_is_suspect(finding) for finding in verdict.findings if finding.name == "inconclusive")


def _is_suspect(finding: Finding) -> bool:
    seen = [(finding.level.change, finding.level.interval)] if finding.level is not None else []
    if finding.effect is not None:
        seen.append((finding.effect, finding.interval or (finding.effect, finding.effect)))
    return any(effect > max(finding.tolerance / 2, (high - low) / 4) for effect, (low, high) in seen)


def gains_in(verdict: Verdict) -> dict[str, float]:
    """Return the improved quantities with the relative gain that other runs must exceed to confirm them.

    It is the tolerance, or half of the gain for an exact quantity, whose tolerance may be absolute or zero.
    """
    return {
        finding.quantity: abs(finding.effect or 0.0) / 2 if finding.exact else finding.tolerance
        for finding in verdict.findings
        if finding.name == "improved"
    }
