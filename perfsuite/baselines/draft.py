"""What an update makes of the entries of a baseline: which runs are stored, refused, or begin a new epoch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from perfsuite.baselines.baseline import (
    SESSION_RUNS,
    Acceptance,
    CaseKey,
    Entry,
    newest,
)
from perfsuite.baselines.changes import clear_slowdown, confirming
from perfsuite.baselines.runs import CaseIdentity, RunSummary, moment, usually_clean
from perfsuite.baselines.sessions import first_runs, is_complete, machine_sessions
from perfsuite.units import plural
from perfsuite.verdict_names import VerdictName

UpdateMode = Literal["append", "improved", "accept", "environment"]

_SLOWER = ("regressed", "drifted", "environment")
_IF_MEANT = "if that is meant: --perf-update=accept --perf-reason=TEXT"
_ADVICE: Mapping[str, str] = {
    "impossible": "an error of measurement is never stored",
    "unstable-host": "run again when the host is quiet",
    "inconclusive": f"a slowdown is not excluded: run again when the host is quiet; {_IF_MEANT}",
    "environment": "if that is meant: --perf-accept=environment --perf-reason=TEXT",
}
"""What to do about a case that is refused for its verdict; _IF_MEANT for the others."""


@dataclass(frozen=True, kw_only=True)
class NewRuns:
    """Runs of one case that a session offers to the baseline."""

    case: CaseIdentity
    """The case as it ran."""
    runs: tuple[RunSummary, ...]
    """All its fresh runs of the session, without those of an A/B's base."""
    verdict: VerdictName | None = None
    """What the gate said; None where it was not asked."""
    seen: str = ""
    """The verdict with its effect, for a person."""
    suspected: bool = False
    """Inconclusive, and a slowdown was suspected and not excluded."""
    gains: Mapping[str, float] = field(default_factory=dict)
    """Improved: the quantities that are better, and the relative gain from which on another session shows the same."""
    tolerance: float = 0.03
    """Relative slowdown that the case accepts."""


class Draft:
    """What an update makes of the entries of a file, and the account of it."""

    def __init__(self, *, mode: UpdateMode, reason: str, session_runs: int) -> None:
        self.mode = mode
        self.reason = reason
        self.session_runs = session_runs
        self.added: dict[str, int] = {}
        self.replaced: list[str] = []
        self.refused: dict[str, str] = {}
        self.alarming: list[str] = []
        self.notes: dict[str, str] = {}
        self.machine_session: Mapping[str, str] = {}

    def apply(self, before: Mapping[CaseKey, Entry], offered: Sequence[NewRuns]) -> dict[CaseKey, Entry]:
        """The entries afterwards."""
        entries = dict(before)
        stored = (run for entry in before.values() for run in entry.kept)
        self.machine_session = machine_sessions([*stored, *(run for new in offered for run in new.runs)])
        for new in offered:
            key = _stored_key(entries, new.case)
            entry = self._entry(entries.get(key), new)
            if entry is not None:
                entries.pop(key, None)
                entries[new.case.key] = entry
        return entries

    def _entry(self, old: Entry | None, new: NewRuns) -> Entry | None:
        """The entry of a case afterwards; None where it stays as it is."""
        node, worse, why_not = new.case.node, _worse(old, new), _unfit(new)
        apart = new.case.differences(old.case) if old is not None else ()
        if new.verdict in ("impossible", "unstable-host") or (worse and not self._accepts(new)):
            self.alarming.append(node)
            why_not = f"{worse or new.seen or new.verdict}; {_ADVICE.get(new.verdict or '', _IF_MEANT)}"
        elif not why_not and self.mode == "improved" and new.verdict != "improved":
            why_not = f"its verdict is {new.verdict or 'unknown'}; --perf-update=improved stores improved cases only"
        elif not why_not and apart and self.mode != "accept":
            why_not = f"it is not comparable with what is stored: {'; '.join(apart)}; {_IF_MEANT}"
        if why_not:
            self.refused[node] = why_not
            return None
        anew = self.mode == "accept" and (new.verdict in ("improved", "not-comparable") or bool(apart))
        if old is None or anew or (worse and self._accepts(new)):
            return self._new_epoch(old, new)
        return self._joined(old, new)

    def _accepts(self, new: NewRuns) -> bool:
        """Whether a worse case begins a new epoch."""
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
        """The entry with the steady ones of the session's runs; None when none is to be stored."""
        node = new.case.node
        there = {run.key for run in old.kept}
        fresh = [run for run in newest(new.runs) if run.key not in there]
        all_count = not usually_clean(old.runs)
        recent = [run for run in fresh if old.accepted is None or moment(run.time) >= moment(old.accepted.time)]
        steady = [run for run in recent if all_count or run.has_clean or run.outcome == "out_of_memory"]
        if not steady:
            self.refused[node] = _why_none(old, fresh=bool(fresh), recent=len(recent))
            return None
        improved = new.verdict == "improved"
        runs = tuple(steady[: max(self.session_runs, SESSION_RUNS) if improved else self.session_runs])
        self.added[node] = len(runs)
        return self._improved(old, new, runs) if improved else self._appended(old, new.case, runs)

    def _improved(self, old: Entry, new: NewRuns, runs: tuple[RunSummary, ...]) -> Entry:
        """A new epoch when another session of the machine shows the improvement as well."""
        node = new.case.node
        shown = confirming(old, runs, new.gains, self.machine_session)
        if not shown:
            self.notes[node] = "improved; a second session of the machine confirms it and begins a new epoch"
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

    def _appended(
        self, old: Entry, case: CaseIdentity, runs: Sequence[RunSummary], *, into_reference: bool = True
    ) -> Entry:
        """The entry with further runs; they are part of the reference while that is not complete."""
        reference = old.reference
        if into_reference and not is_complete(reference, self.machine_session):
            reference = first_runs([*reference, *runs], self.machine_session)
        return dataclasses.replace(old, case=case, runs=newest([*reference, *old.runs, *runs]), reference=reference)


def _stored_key(entries: Mapping[CaseKey, Entry], case: CaseIdentity) -> CaseKey:
    """Under which key a case is stored: a parameter that is new, and has its default, makes no other case of it."""
    known = (key for key, entry in entries.items() if key[:3] == case.key[:3] and not case.differences(entry.case))
    return case.key if case.key in entries else next(known, case.key)


def _why_none(old: Entry, *, fresh: bool, recent: int) -> str:
    """Why none of a session's runs is stored; ``recent`` of those that are ``fresh`` are of the present epoch."""
    if recent:
        return f"{'its run has' if recent == 1 else f'its {recent} runs have'} too few clean samples"
    since = old.accepted.time if old.accepted is not None else ""
    return f"its runs are older than the epoch that began at {since}" if fresh else "its runs are stored already"


def _unfit(new: NewRuns) -> str:
    """Why runs are none that a baseline takes, whatever they say; empty when they are."""
    if not new.runs:
        return "it has no run"
    if any(run.process == "reused" for run in new.runs):
        return "its processes were reused; a baseline takes fresh ones"
    return ""


def _worse(old: Entry | None, new: NewRuns) -> str:
    """In which way a case is or may be worse than what is stored; empty when it is not."""
    if new.verdict in _SLOWER or new.suspected:
        return new.seen or str(new.verdict)
    if new.verdict == "learning" and old is not None:
        slower = clear_slowdown(new.runs, old.reference, new.tolerance)
        if slower:
            return f"{100 * slower:.3g} % slower than the {plural(len(old.reference), 'run')} stored, which are few"
    return ""
