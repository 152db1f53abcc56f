"""What a baseline file holds, and the pure operations on it: add runs, replace them, merge, prune."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any

from perfsuite.baselines.runs import CaseIdentity, RunSummary
from perfsuite.errors import BaselineError

KEPT_RUNS = 12
"""Newest runs kept per case."""
SESSION_RUNS = 4
"""Runs of one session that are added to a case which has other runs: one session must not push out the others."""

CaseKey = tuple[str, int, str, str]


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The hard key: what a file's runs have in common."""

    platform: str
    """Platform name; the folder of the file."""
    fingerprint: str
    """Short key of the hardware; the name of the file."""
    key: Mapping[str, Any]
    """The hardware itself: accelerator model and count, partitioning, link, CPU model, cores used."""
    simulated: bool = False
    """Runs of a simulated device; they never meet real ones."""


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """A person's statement that the runs of a case are right although they differ from those before."""

    reason: str
    """As given with --perf-reason."""
    session: str
    """The session whose runs replaced the older ones."""
    time: str
    """When that session's first kept run started, UTC, ISO 8601."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One case and its stored runs."""

    case: CaseIdentity
    """Identity of the case."""
    runs: tuple[RunSummary, ...]
    """Oldest first, at most KEPT_RUNS."""
    accepted: Acceptance | None = None
    """The last acceptance, if there was one."""

    @property
    def newest(self) -> RunSummary:
        """The run that started last."""
        return self.runs[-1]

    @property
    def sessions(self) -> int:
        """Number of different sessions among the runs."""
        return len({run.session for run in self.runs})


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """The content of one file."""

    hardware: Hardware
    """The hard key."""
    entries: Mapping[CaseKey, Entry]
    """Entries by the key of their case."""
    commit_info: Mapping[str, Any] = field(default_factory=dict)
    """Revision of the newest session, in pytest-benchmark's form."""
    machine_info: Mapping[str, Any] = field(default_factory=dict)
    """The machine in pytest-benchmark's form; readings are not part of it, so that it does not change by itself."""

    @functools.cached_property
    def by_node(self) -> Mapping[str, tuple[Entry, ...]]:
        """Entries by node id, the one with the newest run last."""
        entries_of: dict[str, list[Entry]] = {}
        for entry in self.entries.values():
            entries_of.setdefault(entry.case.node, []).append(entry)
        return {
            node: tuple(sorted(entries, key=lambda entry: entry.newest.time)) for node, entries in entries_of.items()
        }

    @property
    def newest_time(self) -> str:
        """When the newest run started; empty without runs."""
        return max((entry.newest.time for entry in self.entries.values()), default="")


def moment(text: str) -> datetime:
    """A stored time; ValueError unless it is ISO 8601 with a date and a time.  Without an offset it is UTC.

    >>> moment("2025-11-21T02:44:12.123Z").isoformat()
    '2025-11-21T02:44:12.123000+00:00'
    """
    time = datetime.fromisoformat(text[:-1] + "+00:00" if text.endswith("Z") else text)
    return time if time.tzinfo else time.replace(tzinfo=timezone.utc)


def newest(runs: Iterable[RunSummary]) -> tuple[RunSummary, ...]:
    """The newest KEPT_RUNS of the runs, oldest first; a run that is there twice counts once.

    Raises BaselineError when two runs with one identity differ: one of them was changed.
    """
    unique: dict[tuple[str, str, int], RunSummary] = {}
    for run in runs:
        if unique.setdefault(run.key, run) != run:
            raise BaselineError(
                f"two different runs are both number {run.ordinal} of session {run.session} at {run.time}; "
                "one of them was changed after it was measured, so drop it before merging"
            )
    ordered = sorted(unique.values(), key=lambda run: (moment(run.time), run.session, run.ordinal))
    return tuple(ordered[-KEPT_RUNS:])


def joined(first: Entry, second: Entry) -> Entry:
    """One entry out of two of the same case: the union of their runs, names and meanings from the newer one.

    Runs older than the newest acceptance are left out: they were replaced for a reason.
    """
    later = max(first, second, key=lambda entry: (moment(entry.newest.time), entry.newest.key))
    accepted = max(
        (entry.accepted for entry in (first, second) if entry.accepted),
        key=lambda acceptance: (moment(acceptance.time), acceptance.session, acceptance.reason),
        default=None,
    )
    runs = [*first.runs, *second.runs]
    if accepted is not None:
        runs = [run for run in runs if moment(run.time) >= moment(accepted.time)]
    return Entry(case=later.case, runs=newest(runs), accepted=accepted)


def merge(first: Baseline, second: Baseline) -> Baseline:
    """The union of two files of the same hardware; the order of the two does not matter.

    Raises BaselineError when the hardware differs.
    """
    if first.hardware != second.hardware:
        raise BaselineError(
            f"baselines of {first.hardware.platform}/{first.hardware.fingerprint} and "
            f"{second.hardware.platform}/{second.hardware.fingerprint} differ in hardware "
            f"({'; '.join(hardware_differences(second.hardware, first.hardware)) or 'one is simulated'}); "
            "only files of one fingerprint can be merged"
        )
    entries = dict(first.entries)
    for key, entry in second.entries.items():
        entries[key] = joined(entries[key], entry) if key in entries else entry
    later = max(
        first, second, key=lambda baseline: (baseline.newest_time, sorted(map(str, baseline.commit_info.items())))
    )
    return dataclasses.replace(later, entries=entries, commit_info=later.commit_info, machine_info=later.machine_info)


def hardware_differences(now: Hardware, stored: Hardware) -> tuple[str, ...]:
    """Fields of the hard key that differ, one phrase each: ``cores 8, stored 4``."""
    left, right = flattened(now.key), flattened(stored.key)
    return tuple(
        f"{name} {left.get(name, 'absent')}, stored {right.get(name, 'absent')}"
        for name in sorted(set(left) | set(right))
        if left.get(name) != right.get(name)
    )


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested mapping as one level with dotted names.

    >>> flattened({"torch": {"version": "2.13.0"}, "driver": "535.1"})
    {'torch.version': '2.13.0', 'driver': '535.1'}
    """
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat.update(flattened(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def prune(
    baseline: Baseline, *, now: datetime, older_than_days: float | None = None, case: str = "", superseded: bool = False
) -> tuple[Baseline, tuple[str, ...]]:
    """The baseline without what is named, and one line per case that lost something.

    ``older_than_days`` drops runs by age, ``case`` drops the cases whose node id matches this shell pattern (or is it),
    ``superseded`` drops entries of a node id that has a newer entry with other parameters, world size or backend.
    """
    kept: dict[CaseKey, Entry] = {}
    said: list[str] = []
    for key, entry in baseline.entries.items():
        node = entry.case.node
        if case and (node == case or fnmatch.fnmatchcase(node, case)):
            said.append(f"{node}: dropped with {len(entry.runs)} runs, named")
            continue
        if superseded and baseline.by_node[node][-1] is not entry:
            why = "; ".join(baseline.by_node[node][-1].case.differences(entry.case))
            said.append(f"{node}: dropped with {len(entry.runs)} runs, superseded ({why})")
            continue
        runs = entry.runs
        if older_than_days is not None:
            oldest = now - timedelta(days=older_than_days)
            runs = tuple(run for run in runs if moment(run.time) >= oldest)
            if len(runs) < len(entry.runs):
                said.append(f"{node}: {len(entry.runs) - len(runs)} of {len(entry.runs)} runs dropped, too old")
        if runs:
            kept[key] = dataclasses.replace(entry, runs=runs)
    return dataclasses.replace(baseline, entries=kept), tuple(said)
