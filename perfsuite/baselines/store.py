"""Baseline files: read, update and merge them.  Nothing else writes them.

``<folder>/<platform>/<fingerprint>.json`` holds the runs of every case on one kind of hardware.  A file that cannot be
read as it should is named with line and reason and never touched.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from perfsuite.baselines.baseline import (
    KEPT_RUNS,
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
from perfsuite.baselines.decode import decode
from perfsuite.baselines.encode import encode
from perfsuite.baselines.lock import locked, replace
from perfsuite.baselines.renames import baseline_of_today
from perfsuite.baselines.runs import CaseIdentity, RunSummary, moment, usually_clean
from perfsuite.baselines.sessions import first_runs, is_complete, machine_sessions
from perfsuite.baselines.text import Fault, dump, line_of, parse
from perfsuite.errors import BaselineError, ConfigurationError
from perfsuite.records import VerdictName

UpdateMode = Literal["append", "improved", "accept"]


@dataclass(frozen=True, kw_only=True)
class NewRuns:
    """Runs of one case that a session offers to the baseline."""

    case: CaseIdentity
    """The case as it ran."""
    runs: tuple[RunSummary, ...]
    """All its fresh runs of the session, without those of an A/B's base."""
    verdict: VerdictName | None = None
    """What the gate said; None where it was not asked."""


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


def path_of(folder: Path, hardware: Hardware) -> Path:
    """The file of this hardware in a baselines folder."""
    return folder / hardware.platform / f"{hardware.fingerprint}.json"


def read(path: Path) -> Baseline:
    """The baseline in a file, in the names of today; BaselineError names file, line and reason."""
    return baseline_of_today(_as_stored(path))[0]


def _as_stored(path: Path) -> Baseline:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BaselineError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        return decode(parse(data))
    except Fault as fault:
        line = fault.line or line_of(data.decode(), fault.where)
        raise BaselineError(
            f"{path}:{line}: {fault}; the file is left as it is: repair it, restore it from version control or move it"
        ) from None


def load(folder: Path, hardware: Hardware) -> Baseline | None:
    """The baseline of this hardware, None when there is none yet; BaselineError when its file is another machine's."""
    path = path_of(folder, hardware)
    if not path.exists():
        return None
    baseline = read(path)
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
) -> UpdateReport:
    """Add a session's runs to the file of this hardware, under its lock.

    ``append`` adds runs and refuses regressed cases; ``improved`` replaces the runs of improved cases and touches no
    other; ``accept`` replaces the runs of regressed and improved cases, adds those of the others and notes ``reason``.
    Impossible results and reused processes are never stored.  ``session_runs`` is how many runs of the session join
    older ones (``--perf-runs N`` asks for N).  Raises ConfigurationError for accept without a reason.
    """
    if mode == "accept" and not reason.strip():
        raise ConfigurationError("--perf-update=accept was given without a reason; say why with --perf-reason=TEXT")
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

    written = _change(path, hardware, change, lambda: bool(draft.added))
    return UpdateReport(
        path=path, written=written, added=draft.added, replaced=tuple(draft.replaced), refused=draft.refused
    )


def _change(
    path: Path, hardware: Hardware, change: Callable[[Baseline | None], Baseline], wanted: Callable[[], bool]
) -> bool:
    """Read, change and replace a file under its lock; True when it was replaced."""
    with locked(path):
        before = read(path) if path.exists() else None
        if before is not None:
            _require_same(path, before, hardware)
        after = change(before)
        if not wanted():
            return False
        _write(path, after)
        return True


def _write(path: Path, baseline: Baseline) -> None:
    try:
        text = dump(encode(baseline))
    except (TypeError, ValueError) as error:
        raise BaselineError(
            f"{path}: a run has a value that JSON cannot hold ({error}); the file is as it was"
        ) from None
    replace(path, text)


class _Draft:
    """What an update makes of the entries of a file, and the account of it."""

    def __init__(self, *, mode: UpdateMode, reason: str, session_runs: int) -> None:
        self.mode = mode
        self.reason = reason
        self.session_runs = session_runs
        self.added: dict[str, int] = {}
        self.replaced: list[str] = []
        self.refused: dict[str, str] = {}
        self.machine_session: Mapping[str, str] = {}

    def apply(self, before: Mapping[CaseKey, Entry], offered: Sequence[NewRuns]) -> dict[CaseKey, Entry]:
        """The entries afterwards."""
        entries = dict(before)
        stored = (run for entry in before.values() for run in entry.kept)
        self.machine_session = machine_sessions([*stored, *(run for new in offered for run in new.runs)])
        for new in offered:
            why_not = self._refusal(new)
            if why_not:
                self.refused[new.case.node] = why_not
                continue
            entries[new.case.key] = self._entry(entries.get(new.case.key), new)
        return entries

    def _refusal(self, new: NewRuns) -> str:
        if not new.runs:
            return "it has no run"
        if any(run.process == "reused" for run in new.runs):
            return "its processes were reused; a baseline takes fresh ones"
        if new.verdict in ("impossible", "unstable-host"):
            return f"its verdict is {new.verdict}"
        if new.verdict == "regressed" and self.mode == "append":
            return "it has regressed; if that is meant, use --perf-update=accept with --perf-reason"
        if new.verdict != "improved" and self.mode == "improved":
            return f"its verdict is {new.verdict or 'unknown'}; --perf-update=improved stores improved cases only"
        return ""

    def _entry(self, old: Entry | None, new: NewRuns) -> Entry:
        node = new.case.node
        if (
            old is None
            or self.mode == "improved"
            or (self.mode == "accept" and new.verdict in ("regressed", "improved"))
        ):
            runs = newest(new.runs)[:KEPT_RUNS]
            self.added[node] = len(runs)
            if old is not None:
                self.replaced.append(node)
            accepted = None
            if self.mode == "accept":
                accepted = Acceptance(reason=self.reason, session=runs[0].session, time=runs[0].time)
            elif old is not None:
                accepted = Acceptance(reason="improved", session=runs[0].session, time=runs[0].time)
            return Entry(case=new.case, runs=runs, accepted=accepted)
        there = {run.key for run in old.kept}
        fresh = [run for run in newest(new.runs) if run.key not in there]
        all_count = not usually_clean(old.runs)
        steady = [run for run in fresh if all_count or run.has_clean or run.outcome == "out_of_memory"]
        if not steady:
            self.refused[node] = "its runs are unstable" if fresh else "its runs are stored already"
            return old
        runs = tuple(steady[: self.session_runs])
        self.added[node] = len(runs)
        return self._appended(old, new.case, runs)

    def _appended(self, old: Entry, case: CaseIdentity, runs: Sequence[RunSummary]) -> Entry:
        """The entry with further runs; they are part of the reference while that is not complete."""
        if old.accepted is not None:
            runs = [run for run in runs if moment(run.time) >= moment(old.accepted.time)]
        reference = old.reference
        if not is_complete(reference, self.machine_session):
            reference = first_runs([*reference, *runs], self.machine_session)
        return dataclasses.replace(old, case=case, runs=newest([*reference, *old.runs, *runs]), reference=reference)


def merge_files(target: Path, sources: Sequence[Path]) -> Baseline:
    """Make ``target`` the union of itself, when it exists, and the sources; BaselineError leaves it as it was."""
    parts = [read(source) for source in sources]
    with locked(target):
        if target.exists():
            parts.insert(0, read(target))
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
) -> tuple[str, ...]:
    """Drop from a file what :func:`perfsuite.baselines.baseline.prune` says; one line per case that lost something."""
    with locked(path):
        kept, said = prune(read(path), now=now, older_than_days=older_than_days, case=case, superseded=superseded)
        if said and not dry_run:
            _write(path, kept)
    return said


def rename_file(path: Path, *, dry_run: bool = False) -> tuple[str, ...]:
    """Write a file in the names of today; one line per case that had others, and no write without any."""
    with locked(path):
        renamed, said = baseline_of_today(_as_stored(path))
        if said and not dry_run:
            _write(path, renamed)
    return said
