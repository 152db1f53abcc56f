"""Baseline files: read, update and merge them.  Nothing else writes them.

``<folder>/<platform>/<fingerprint>.json`` holds the runs of every case on one kind of hardware.  A file that cannot be
read as it should is named with line and reason and never touched.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from perfsuite.baselines import files
from perfsuite.baselines.baseline import (
    SESSION_RUNS,
    Acceptance,
    Baseline,
    CaseKey,
    Entry,
    Hardware,
    merge,
    newest,
    prune,
)
from perfsuite.baselines.changes import clear_slowdown, confirming
from perfsuite.baselines.decode import decode
from perfsuite.baselines.encode import encode
from perfsuite.baselines.lock import locked
from perfsuite.baselines.renames import baseline_of_today
from perfsuite.baselines.runs import CaseIdentity, RunSummary, moment, usually_clean
from perfsuite.baselines.sessions import first_runs, is_complete, machine_sessions
from perfsuite.baselines.text import Fault, dump, line_of, parse
from perfsuite.errors import BaselineError, ConfigurationError
from perfsuite.records import VerdictName
from perfsuite.units import plural

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


@dataclass(frozen=True, kw_only=True)
class UpdateReport:
    """What an update did."""

    path: Path
    """The file."""
    written: bool
    """Whether the file changed."""
    added: Mapping[str, int] = field(default_factory=dict)
    """Runs added, by node id."""
    replaced: tuple[str, ...] = ()
    """Node ids whose older runs were dropped for the new ones."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Why nothing of a case was stored, by node id."""
    alarming: tuple[str, ...] = ()
    """Those of them that are or may be slower than what is stored, or no measurement at all: the run is to fail."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """What a reader must know of a case that was stored, by node id."""


def path_of(folder: Path, hardware: Hardware) -> Path:
    """The file of this hardware in a baselines folder."""
    return folder / hardware.platform / f"{hardware.fingerprint}.json"


def read(path: Path, *, folder: Path | None = None, links: bool = False) -> Baseline:
    """The baseline in a file, in the names of today; BaselineError names file, line and reason.

    ``folder`` is the baselines folder, out of which a symbolic link leads only where ``links`` allows it; without it
    the file's own.
    """
    return baseline_of_today(_as_stored(path, folder=folder, links=links))[0]


def _as_stored(path: Path, *, folder: Path | None, links: bool) -> Baseline:
    data = files.content(path, folder=folder, links=links)
    try:
        return decode(parse(data))
    except Fault as fault:
        line = fault.line or line_of(data.decode(), fault.where)
        raise BaselineError(
            f"{path}:{line}: {fault}; the file is left as it is: repair it, restore it from version control or move it"
        ) from None


def load(folder: Path, hardware: Hardware, *, links: bool = False) -> Baseline | None:
    """The baseline of this hardware, None when there is none yet; BaselineError when its file is another machine's."""
    path = path_of(folder, hardware)
    if not path.exists():
        return None
    baseline = read(path, folder=folder, links=links)
    _require_same(path, baseline, hardware)
    return baseline


def _require_same(path: Path, baseline: Baseline, hardware: Hardware) -> None:
    stored = baseline.hardware
    if (stored.platform, stored.fingerprint) != (hardware.platform, hardware.fingerprint):
        raise BaselineError(
            f"{path}:1: holds runs of {stored.platform}/{stored.fingerprint}, its name says "
            f"{hardware.platform}/{hardware.fingerprint}; give the file its own name back"
        )
    if stored.simulated != hardware.simulated:
        raise BaselineError(
            f"{path}:1: holds {_reality(stored)} runs and this session's are {_reality(hardware)}; "
            "the two never meet: keep simulated baselines in a folder of their own"
        )


def _reality(hardware: Hardware) -> str:
    return "simulated" if hardware.simulated else "real"


def update(
    folder: Path,
    hardware: Hardware,
    offered: Sequence[NewRuns],
    *,
    mode: UpdateMode,
    reason: str = "",
    session_runs: int = SESSION_RUNS,
    commit_info: Mapping[str, Any] | None = None,
    machine_info: Mapping[str, Any] | None = None,
    links: bool = False,
) -> UpdateReport:
    """Add a session's runs to the file of this hardware, under its lock.

    ``append`` adds runs and refuses cases that are or may be slower; ``improved`` does so with improved cases only.  In
    both an improvement that a second session of the machine shows begins a new epoch.  ``accept`` begins one, noting
    ``reason``, for every case that is slower, improved or not comparable any more, ``environment`` for those whose
    verdict is environment; both append the others.  Impossible results and reused processes are never stored.
    ``session_runs`` is how many runs of the session join older ones (``--perf-runs N`` asks for N), ``links`` allows a
    file that is a symbolic link out of ``folder``.  Raises ConfigurationError without a reason that is needed.
    """
    if mode in ("accept", "environment") and not reason.strip():
        option = "--perf-update=accept" if mode == "accept" else "--perf-accept=environment"
        raise ConfigurationError(f"{option} was given without a reason; say why with --perf-reason=TEXT")
    path = path_of(folder, hardware)
    draft = _Draft(mode=mode, reason=reason.strip(), session_runs=max(session_runs, 1))

    def change(before: Baseline | None) -> Baseline:
        entries = draft.apply(before.entries if before else {}, offered)
        old = before or Baseline(hardware=hardware, entries={})
        return dataclasses.replace(
            old,
            entries=entries,
            commit_info=dict(commit_info or old.commit_info),
            machine_info=dict(machine_info or old.machine_info),
        )

    files.refuse_foreign(path, folder=folder, links=links)
    with locked(path):
        before = load(folder, hardware, links=links)
        after = change(before)
        written = bool(draft.added)
        if written:
            _write(path, after)
    return UpdateReport(
        path=path,
        written=written,
        added=draft.added,
        replaced=tuple(draft.replaced),
        refused=draft.refused,
        alarming=tuple(draft.alarming),
        notes=draft.notes,
    )


def _write(path: Path, baseline: Baseline) -> None:
    try:
        text = dump(encode(baseline))
    except (TypeError, ValueError) as error:
        raise BaselineError(
            f"{path}: a run has a value that JSON cannot hold ({error}); the file is as it was"
        ) from None
    files.write(path, text)


class _Draft:
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
            entry = self._entry(entries.get(new.case.key), new)
            if entry is not None:
                entries[new.case.key] = entry
        return entries

    def _entry(self, old: Entry | None, new: NewRuns) -> Entry | None:
        """The entry of a case afterwards; None where it stays as it is."""
        node, worse, why_not = new.case.node, _worse(old, new), _unfit(new)
        if new.verdict in ("impossible", "unstable-host") or (worse and not self._accepts(new)):
            self.alarming.append(node)
            why_not = f"{worse or new.seen or new.verdict}; {_ADVICE.get(new.verdict or '', _IF_MEANT)}"
        elif not why_not and self.mode == "improved" and new.verdict != "improved":
            why_not = f"its verdict is {new.verdict or 'unknown'}; --perf-update=improved stores improved cases only"
        if why_not:
            self.refused[node] = why_not
            return None
        anew = self.mode == "accept" and new.verdict in ("improved", "not-comparable")
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
        steady = [run for run in fresh if all_count or run.has_clean or run.outcome == "out_of_memory"]
        if old.accepted is not None:
            steady = [run for run in steady if moment(run.time) >= moment(old.accepted.time)]
        if not steady:
            self.refused[node] = (
                "its runs are unstable or older than the epoch" if fresh else "its runs are stored already"
            )
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


def merge_files(target: Path, sources: Sequence[Path], *, links: bool = False) -> Baseline:
    """Make ``target`` the union of itself, when it exists, and the sources; BaselineError leaves it as it was."""
    parts = [read(source, links=links) for source in sources]
    files.refuse_foreign(target, folder=None, links=links)
    with locked(target):
        if target.exists():
            parts.insert(0, read(target, links=links))
        if not parts:
            raise BaselineError(f"{target}: nothing to merge was given; name at least one file")
        whole = parts[0]
        for part in parts[1:]:
            whole = merge(whole, part)
        _write(target, whole)
    return whole


def prune_file(
    path: Path,
    *,
    now: datetime,
    older_than_days: float | None = None,
    case: str = "",
    superseded: bool = False,
    dry_run: bool = False,
    links: bool = False,
) -> tuple[str, ...]:
    """Drop from a file what :func:`perfsuite.baselines.baseline.prune` says; one line per case that lost something."""
    with locked(path):
        whole = read(path, links=links)
        kept, said = prune(whole, now=now, older_than_days=older_than_days, case=case, superseded=superseded)
        if said and not dry_run:
            _write(path, kept)
    return said


def rename_file(path: Path, *, dry_run: bool = False, links: bool = False) -> tuple[str, ...]:
    """Write a file in the names of today; one line per case that had others, and no write without any."""
    with locked(path):
        renamed, said = baseline_of_today(_as_stored(path, folder=None, links=links))
        if said and not dry_run:
            _write(path, renamed)
    return said
