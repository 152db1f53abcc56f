"""What a baseline file holds, and the pure operations on it: add runs, replace them, merge, prune."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from perfsuite.base.errors import BaselineError
from perfsuite.base.units import plural
from perfsuite.baselines.runs import CaseIdentity, RunSummary, days_before, in_order, moment
from perfsuite.baselines.sessions import first_runs, machine_sessions

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
    """What began the epoch of a case: why its runs are right although they differ from those before."""

    reason: str
    """As given with --perf-reason."""
    session: str
    """The session whose runs replaced the older ones; of an improvement the first that showed it."""
    time: str
    """When that session's first kept run started, UTC, ISO 8601: older runs belong to an earlier epoch."""
    kind: Literal["accepted", "improved", "environment"] = "accepted"
    """Accepted by a person, an improvement that two sessions of the machine showed, or another environment."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One case and its stored runs."""

    case: CaseIdentity
    """Identity of the case."""
    runs: tuple[RunSummary, ...]
    """The newest, oldest first, at most KEPT_RUNS."""
    accepted: Acceptance | None = None
    """What began the epoch; None in the first one."""
    reference: tuple[RunSummary, ...] = ()
    """What the level is judged against: the first accepted runs of the epoch (perfsuite/baselines/sessions.py).

    Oldest first; those that are not among ``runs`` are older.  Left out: the oldest of ``runs``.
    """

    def __post_init__(self) -> None:
        """Fill in a reference that was left out."""
        if not self.reference:
            object.__setattr__(self, "reference", first_runs(self.runs, machine_sessions(self.runs)))

    @property
    def newest(self) -> RunSummary:
        """The run that started last."""
        return self.runs[-1]

    @functools.cached_property
    def kept(self) -> tuple[RunSummary, ...]:
        """Every run that is kept, those of the reference and the newest, each once, oldest first."""
        return in_order([*self.reference, *self.runs])


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

    @functools.cached_property
    def machine_session(self) -> Mapping[str, str]:
        """The session of the machine of each pytest session in the file."""
        return machine_sessions(run for entry in self.entries.values() for run in entry.kept)

    @property
    def newest(self) -> RunSummary | None:
        """The run that started last; None without runs."""
        return max((entry.newest for entry in self.entries.values()), key=lambda run: run.time, default=None)

    @property
    def newest_time(self) -> str:
        """When that run started; empty without runs."""
        return self.newest.time if self.newest else ""

    @property
    def versions(self) -> Mapping[str, Any]:
        """Versions of the packages that the newest run had."""
        packages = self.newest.environment.get("packages") if self.newest else None
        return packages if isinstance(packages, Mapping) else {}


def newest(runs: Iterable[RunSummary]) -> tuple[RunSummary, ...]:
    """The newest KEPT_RUNS of the runs, oldest first; a run that is there twice counts once.

    Raises BaselineError when two runs with one identity differ.
    """
    return in_order(runs)[-KEPT_RUNS:]


def joined(first: Entry, second: Entry, machine_session: Mapping[str, str]) -> Entry:
    """One entry out of two of the same case: the union of their runs, names and meanings from the newer one.

    The newer epoch counts: runs older than it are left out, they were replaced for a reason, and the reference is its
    own.  Of two references of one epoch the older runs are taken.
    """
    later = max(first, second, key=lambda entry: (moment(entry.newest.time), entry.newest.key))
    accepted = max(
        (entry.accepted for entry in (first, second) if entry.accepted),
        key=lambda acceptance: (moment(acceptance.time), acceptance.session, acceptance.kind, acceptance.reason),
        default=None,
    )
    references = [entry.reference for entry in (first, second) if entry.accepted == accepted]
    reference = references[0]
    if reference != references[-1]:
        reference = first_runs((run for part in references for run in part), machine_session)
    runs = [*first.kept, *second.kept]
    if accepted is not None:
        runs = [run for run in runs if moment(run.time) >= moment(accepted.time)]
    return Entry(case=later.case, runs=newest([*reference, *runs]), accepted=accepted, reference=reference)


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
    machine_session = machine_sessions(
        run for side in (first, second) for entry in side.entries.values() for run in entry.kept
    )
    entries = dict(first.entries)
    for key, entry in second.entries.items():
        entries[key] = joined(entries[key], entry, machine_session) if key in entries else entry
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
    A case that keeps any run keeps its reference, whatever its age: it says what later runs are judged against.
    """
    kept: dict[CaseKey, Entry] = {}
    said: list[str] = []
    for key, entry in baseline.entries.items():
        node = entry.case.node
        if case and (node == case or fnmatch.fnmatchcase(node, case)):
            said.append(f"{node}: dropped with {len(entry.kept)} runs, named")
            continue
        if superseded and baseline.by_node[node][-1] is not entry:
            why = "; ".join(baseline.by_node[node][-1].case.differences(entry.case))
            said.append(f"{node}: dropped with {len(entry.kept)} runs, superseded ({why})")
            continue
        left: Entry | None = entry
        if older_than_days is not None:
            left = _younger(entry, days_before(now, older_than_days))
            dropped = len(entry.kept) - (len(left.kept) if left else 0)
            if dropped:
                said.append(f"{node}: {dropped} of {plural(len(entry.kept), 'run')} dropped, too old")
        if left is not None:
            kept[key] = left
    return dataclasses.replace(baseline, entries=kept), tuple(said)


def _younger(entry: Entry, oldest: datetime) -> Entry | None:
    """An entry without its older runs, those of the reference apart; None when no run is young enough."""
    young = [run for run in entry.runs if moment(run.time) >= oldest]
    return dataclasses.replace(entry, runs=newest([*entry.reference, *young])) if young else None
