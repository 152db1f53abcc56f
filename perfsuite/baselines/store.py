"""Read, update and merge baseline files; no other module writes them.

``<folder>/<platform>/<fingerprint>.json`` holds the runs of every case on one kind of hardware.  An error prints the
line and the reason; a damaged file is never changed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from perfsuite.base import files, writing
from perfsuite.base.errors import BaselineError, ConfigurationError
from perfsuite.baselines.baseline import SESSION_RUNS, Baseline, Hardware, merge, prune
from perfsuite.baselines.document import Fault, dumps, loads
from perfsuite.baselines.draft import Draft, NewRuns, UpdateMode
from perfsuite.baselines.hosts import host_note

MAX_BYTES = 128 << 20  # Largest file that is read.  10,000 cases with 24 runs each, the most per case, need 98 MiB.
_HEAD_BYTES = 4096


def path_of(folder: Path, hardware: Hardware) -> Path:
    """Return the file of this hardware in a baselines folder."""
    return folder / hardware.platform / f"{hardware.fingerprint}.json"


def read(path: Path, *, folder: Path | None = None, links: bool = False) -> Baseline:
    """Return the baseline in a file.  Raises BaselineError with file, line and reason.

    A symbolic link may leave the baselines ``folder`` (default: the file's own) only with ``links``.
    """
    _refuse_link(path, folder, links)
    try:
        return loads(content(path, MAX_BYTES, "give a file that perfsuite wrote"))
    except Fault as fault:
        remedy = "the file was not changed: repair it, restore it from version control or move it"
        raise BaselineError(f"{path}:{fault.line}: {fault}; {remedy}") from None


def _refuse_link(path: Path, folder: Path | None, links: bool) -> None:
    if not links:
        keys = "ini key perf_baselines_links = true, perfsuite baselines --links"
        refuse_foreign(path, folder, remedy=f", or allow links ({keys})")


def load(folder: Path, hardware: Hardware, *, links: bool = False) -> Baseline | None:
    """Return the baseline of this hardware; None without a file.  Raises BaselineError if the file is another's."""
    path = path_of(folder, hardware)
    if not path.exists():
        return None
    baseline = read(path, folder=folder, links=links)
    stored = baseline.hardware
    if (stored.platform, stored.fingerprint) != (hardware.platform, hardware.fingerprint):
        raise BaselineError(
            f"{path}:1: holds runs of {stored.platform}/{stored.fingerprint}, but it is named after "
            f"{hardware.platform}/{hardware.fingerprint}; rename the file"
        )
    if stored.simulated != hardware.simulated:
        kinds = ("simulated", "real") if stored.simulated else ("real", "simulated")
        raise BaselineError(
            f"{path}:1: holds {kinds[0]} runs and this session's are {kinds[1]}; "
            "the two are never compared: keep simulated baselines in another folder"
        )
    return baseline


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
) -> Draft:
    """Add a session's runs to the file of this hardware, under its lock.

    ``append`` adds runs and refuses cases that the gate fails; ``improved`` adds only improved cases.  In both an
    improvement that a second session of the machine confirms begins a new epoch.  ``accept`` begins one with ``reason``
    for every case that is slower, improved or no longer comparable, ``environment`` for cases with that verdict; both
    append the others.  Impossible results and runs of reused processes are never stored.  ``session_runs`` is the
    number of runs that join older ones (``--perf-runs``); ``links`` allows a symbolic link out of ``folder``.  Raises
    ConfigurationError without a required reason.
    """
    if mode in ("accept", "environment") and not reason.strip():
        option = "--perf-update=accept" if mode == "accept" else "--perf-accept=environment"
        raise ConfigurationError(f"{option} needs a reason; add --perf-reason=TEXT")
    path = path_of(folder, hardware)
    draft = Draft(mode=mode, reason=reason.strip(), session_runs=max(session_runs, 1), path=path)

    _refuse_link(path, folder, links)
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
    if draft.added:
        draft.hosts = host_note(run for entry in entries.values() for run in entry.kept)
    return draft


def _write(path: Path, baseline: Baseline) -> None:
    try:
        data = dumps(baseline).encode()
    except (TypeError, ValueError) as error:
        raise BaselineError(
            f"{path}: a run has a value that JSON cannot hold ({error}); the file was not changed"
        ) from None
    with contextlib.suppress(OSError), open(path, "rb") as file:
        data = data.replace(b"\n", b"\r\n") if file.readline(_HEAD_BYTES).endswith(b"\r\n") else data
    replace(path, data, MAX_BYTES, "drop cases with perfsuite baselines prune")


def merge_files(target: Path, sources: Sequence[Path], *, links: bool = False) -> Baseline:
    """Write the union of ``target``, if it exists, and the sources into it.  BaselineError leaves it unchanged."""
    parts = [read(source, links=links) for source in sources]
    _refuse_link(target, None, links)
    with locked(target):
        if target.exists():
            parts.insert(0, read(target, links=links))
        if not parts:
            raise BaselineError(f"{target}: no file to merge; give at least one")
        whole = functools.reduce(merge, parts)
        _write(target, whole)
    return whole


def merge_branches(base: Path, target: Path, other: Path) -> Baseline:
    """Write the union of two branches' files to ``target``.  BaselineError leaves it unchanged.

    ``base`` is the file of their common ancestor, empty without one.  A case that one branch dropped, and that the
    other did not run since, stays dropped.
    """
    first, second = read(target), read(other)
    before = read(base).entries if base.stat().st_size else {}
    whole = merge(first, second)
    dropped = {
        key
        for key, entry in before.items()
        for one, two in ((first, second), (second, first))
        if key not in one.entries and key in two.entries and two.entries[key].kept == entry.kept
    }
    whole = dataclasses.replace(whole, entries={k: entry for k, entry in whole.entries.items() if k not in dropped})
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
    """Apply :func:`perfsuite.baselines.baseline.prune` to a file; return one line per changed case."""
    with locked(path):
        whole = read(path, links=links)
        kept, lines = prune(whole, now=now, older_than_days=older_than_days, case=case, superseded=superseded)
        if lines and not dry_run:
            _write(path, kept)
    return lines


DEADLINE_S = 60.0  # Seconds that a writer waits for other writers.
_POLL_S = 0.02


@contextlib.contextmanager
def locked(path: Path, deadline_s: float = DEADLINE_S) -> Iterator[None]:
    """Hold the lock of ``path``: the file ``.<name>.lock`` in the same folder, which exists only while it is locked.

    The file is removed while it is still locked; a waiting writer then sees that the name is gone and starts again.  A
    crash leaves an unlocked file, which the next writer uses.  Raises BaselineError after ``deadline_s`` seconds, and
    if the folder cannot be written.
    """
    side = path.with_name(f".{path.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _acquire(side, time.monotonic() + deadline_s)
    except OSError as error:
        raise BaselineError(
            f"{side} cannot be locked: {files.why(error)}; use a folder that can be written and locked"
        ) from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # the next writer uses a side file that could not be removed
            side.unlink()
        with contextlib.suppress(OSError):
            os.close(descriptor)


def _acquire(side: Path, until: float) -> int:
    while True:
        made = not side.exists()
        descriptor = os.open(side, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_named(descriptor, side):
                return descriptor
        except BlockingIOError:
            if time.monotonic() > until:
                os.close(descriptor)
                raise BaselineError(
                    f"{side} has been locked by another process for too long; end that process and run again"
                ) from None
            time.sleep(_POLL_S)
        except OSError:  # a file system without locks: no other process holds it
            os.close(descriptor)
            if made:
                side.unlink(missing_ok=True)
            raise
        os.close(descriptor)


def _is_named(descriptor: int, side: Path) -> bool:
    """Return whether ``side`` is still the locked file: its last holder may have removed it."""
    try:
        return os.path.samestat(side.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def content(path: Path, most_bytes: int, remedy: str) -> bytes:
    """Return the bytes of a file.  Raises BaselineError if it is too large or cannot be read."""
    try:
        return files.content(path, most_bytes)
    except OSError as error:
        raise BaselineError(f"{path}: cannot be read: {files.why(error)}; {remedy}") from None


def refuse_foreign(path: Path, folder: Path | None = None, *, remedy: str = "") -> None:
    """Raise BaselineError if ``path`` is a symbolic link out of ``folder`` (default: its own)."""
    target = files.foreign_target(path, folder)
    if target is not None:
        raise BaselineError(
            f"{path}: is a link to {target}, outside {folder or path.parent}; results are stored in their own folder: "
            f"move the file there, or give the path of the file{remedy}"
        )


def replace(path: Path, data: bytes, most_bytes: int, remedy: str) -> None:
    """Replace a file; the caller holds its lock.  Raises BaselineError if it is too large to be read again."""
    if len(data) > most_bytes:
        raise BaselineError(
            f"{path}: would have {len(data)} bytes, but at most {most_bytes} can be read; the file was not changed: "
            f"{remedy}"
        )
    try:
        writing.put(path, data, draft="new")
    except writing.WriteFailed as error:
        raise BaselineError(f"{path} {error}") from None
