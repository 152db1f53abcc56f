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
from typing import Any

from perfsuite.base.errors import BaselineError, ConfigurationError
from perfsuite.base.files import WriteFailed, foreign_target, put, why
from perfsuite.base.files import content as read_content
from perfsuite.baselines.baseline import (
    SESSION_RUNS,
    Baseline,
    Hardware,
    merge,
    prune,
)
from perfsuite.baselines.decode import decode
from perfsuite.baselines.draft import Draft, NewRuns, UpdateMode
from perfsuite.baselines.encode import encode
from perfsuite.baselines.hosts import told_hosts
from perfsuite.baselines.lock import locked
from perfsuite.baselines.text import Fault, dump, line_of, parse


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
    """Those of them that are slower than what is stored, or no measurement at all: the run is to fail."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """What a reader must know of a case that was stored, by node id."""
    hosts: str = ""
    """A sentence about the hosts of the file's runs; empty where they are of one."""


def path_of(folder: Path, hardware: Hardware) -> Path:
    """The file of this hardware in a baselines folder."""
    return folder / hardware.platform / f"{hardware.fingerprint}.json"


def read(path: Path, *, folder: Path | None = None, links: bool = False) -> Baseline:
    """The baseline in a file; BaselineError names file, line and reason.

    ``folder`` is the baselines folder, out of which a symbolic link leads only where ``links`` allows it; without it
    the file's own.
    """
    data = content(path, folder=folder, links=links)
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

    ``append`` adds runs and refuses cases that the gate fails; ``improved`` does so with improved cases only.  In
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
    draft = Draft(mode=mode, reason=reason.strip(), session_runs=max(session_runs, 1))

    refuse_foreign(path, folder=folder, links=links)
    with locked(path):
        old = load(folder, hardware, links=links) or Baseline(hardware=hardware, entries={})
        entries = draft.apply(old.entries, offered)
        if draft.added:
            new = dataclasses.replace(
                old,
                entries=entries,
                commit_info=dict(commit_info or old.commit_info),
                machine_info=dict(machine_info or old.machine_info),
            )
            _write(path, new)
    return UpdateReport(
        path=path,
        written=bool(draft.added),
        added=draft.added,
        replaced=tuple(draft.replaced),
        refused=draft.refused,
        alarming=tuple(draft.alarming),
        notes=draft.notes,
        hosts=told_hosts(run for entry in entries.values() for run in entry.kept) if draft.added else "",
    )


def _write(path: Path, baseline: Baseline) -> None:
    try:
        text = dump(encode(baseline))
    except (TypeError, ValueError) as error:
        raise BaselineError(
            f"{path}: a run has a value that JSON cannot hold ({error}); the file is as it was"
        ) from None
    write(path, text)


def merge_files(target: Path, sources: Sequence[Path], *, links: bool = False) -> Baseline:
    """Make ``target`` the union of itself, when it exists, and the sources; BaselineError leaves it as it was."""
    parts = [read(source, links=links) for source in sources]
    refuse_foreign(target, folder=None, links=links)
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


def merge_branches(base: Path, ours: Path, theirs: Path) -> Baseline:
    """Write the union of two branches' files to ``ours``; BaselineError leaves it as it was.

    ``base`` is the file of their common ancestor, empty where they have none.  A case that one branch dropped, and the
    other did not run since, stays dropped.
    """
    first, second = read(ours), read(theirs)
    before = read(base).entries if base.stat().st_size else {}
    whole = merge(first, second)
    dropped = {
        key
        for key, entry in before.items()
        for kept, other in ((first, second), (second, first))
        if key not in kept.entries and key in other.entries and other.entries[key].kept == entry.kept
    }
    whole = dataclasses.replace(whole, entries={k: entry for k, entry in whole.entries.items() if k not in dropped})
    _write(ours, whole)
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


MAX_BYTES = 128 << 20
"""Larger files are refused unread.  10,000 cases with 24 runs each, the most that is kept of one, are 98 MiB."""
_HEAD_BYTES = 4096


def content(path: Path, *, folder: Path | None, links: bool) -> bytes:
    """What a file holds.  BaselineError when it lies elsewhere (:func:`refuse_foreign`), is too large or unreadable."""
    refuse_foreign(path, folder=folder, links=links)
    try:
        return read_content(path, MAX_BYTES)
    except OSError as error:
        raise BaselineError(f"{path}: cannot be read: {why(error)}") from None


def refuse_foreign(path: Path, *, folder: Path | None, links: bool) -> None:
    """BaselineError when a symbolic link leads from ``path`` out of its baselines folder, unless ``links`` allows it.

    Without ``folder`` it is the file's own.
    """
    target = None if links else foreign_target(path, folder)
    if target is not None:
        raise BaselineError(
            f"{path}: is a link to {target}, outside {folder or path.parent}; a baseline is read and written in its "
            "own folder: put the file there, name the file itself, or allow links (ini key "
            "perf_baselines_links = true, perfsuite baselines --links)"
        )


def write(path: Path, text: str) -> None:
    """Put a text in place of a file, its lines ending as they did.  Call it with the lock held.

    Raises BaselineError when it would be too large to be read, or cannot be written.
    """
    data = text.encode(errors="backslashreplace").replace(b"\n", _line_end(path))
    if len(data) > MAX_BYTES:
        raise BaselineError(
            f"{path}: would have {len(data)} bytes, more than the {MAX_BYTES} that a baseline may have; the file is as "
            "it was: drop cases with perfsuite baselines prune"
        )
    try:
        put(path, data, draft="new")
    except WriteFailed as error:
        raise BaselineError(f"{path} {error}") from None


def _line_end(path: Path) -> bytes:
    """The line ending of a file's first line; a newline where the file or the line is missing."""
    try:
        with open(path, "rb") as file:
            first, newline, _ = file.read(_HEAD_BYTES).partition(b"\n")
    except OSError:
        return b"\n"
    return b"\r\n" if newline and first.endswith(b"\r") else b"\n"
