"""The contents of a baseline file, and pure operations on it: add runs, replace them, merge, prune."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal

from perfsuite.base.errors import BaselineError
from perfsuite.base.units import plural
from perfsuite.baselines.runs import CaseIdentity, RunSummary, days_before, in_order, is_named, moment

SESSION_GAP = timedelta(hours=1)  # Longest pause in a session of the machine, which has one boot and one commit.
REFERENCE_RUNS = 8  # Runs of a complete reference, if they are of REFERENCE_SESSIONS.
REFERENCE_SESSIONS = 3  # Sessions of the machine in a complete reference.
REFERENCE_MOST = 12  # Most runs of a reference.


def machine_sessions(runs: Iterable[RunSummary]) -> dict[str, str]:
    """Return the session of the machine of each pytest session; it is named after its first pytest session.

    Runs within minutes share the host's noise, even if different commands started them.  A new session of the machine
    begins with another boot, with another commit, or after a pause of more than SESSION_GAP.
    """
    starts: dict[str, list[tuple[datetime, str, str]]] = {}
    for run in runs:
        starts.setdefault(run.session, []).append((moment(run.time), run.boot, run.commit))
    firsts = {session: min(times, key=operator.itemgetter(0)) for session, times in starts.items()}
    current: dict[tuple[str, str], tuple[str, datetime]] = {}
    machine_session = {}
    for session, (first, boot, commit) in sorted(firsts.items(), key=lambda item: (item[1][0], item[0])):
        name, last = current.get((boot, commit), (session, first))
        if first - last > SESSION_GAP:
            name = session
        current[boot, commit] = name, max(last, *(time for time, *_ in starts[session]))
        machine_session[session] = name
    return machine_session


def count_sessions(runs: Iterable[RunSummary], machine_session: Mapping[str, str]) -> int:
    """Return the number of the machine's sessions with these runs."""
    return len({machine_session[run.session] for run in runs})


def is_complete(reference: Sequence[RunSummary], machine_session: Mapping[str, str]) -> bool:
    """Return whether a reference takes no more runs; disturbed runs do not count, because no comparison uses them."""
    counted = [run for run in reference if not run.is_disturbed]
    enough = len(counted) >= REFERENCE_RUNS and count_sessions(counted, machine_session) >= REFERENCE_SESSIONS
    return enough or len(counted) >= REFERENCE_MOST


def first_runs(runs: Iterable[RunSummary], machine_session: Mapping[str, str]) -> tuple[RunSummary, ...]:
    """Return the oldest runs of an epoch for its reference, oldest first.

    Disturbed runs are used only if there are no others: undisturbed runs could not be compared with them.
    """
    ordered, taken = in_order(runs), list[RunSummary]()
    undisturbed = tuple(run for run in ordered if not run.is_disturbed)
    for run in undisturbed or ordered[:REFERENCE_MOST]:
        if is_complete(taken, machine_session):
            break
        taken.append(run)
    return tuple(taken)


KEPT_RUNS = 12  # Newest runs kept per case.
SESSION_RUNS = 4
"""Most runs of one session that are added to a case with other runs, so that one session cannot replace all others."""

CaseKey = tuple[str, int, str, str]


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The hard key: the hardware of all runs in a file."""

    platform: str  # Platform name; the folder of the file.
    fingerprint: str  # Short key of the hardware; the name of the file.
    key: Mapping[str, Any]  # The hardware: accelerator model and count, partitioning, link, CPU model, cores used.
    simulated: bool = False  # Whether the device is simulated; such runs are never compared with real ones.


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """The start of a case's epoch: why its runs are accepted although they differ from the earlier ones."""

    reason: str  # Text of --perf-reason.
    session: str  # The session whose runs replaced the older ones; for an improvement the first one with it.
    time: str  # Start of that session's first kept run, UTC, ISO 8601: older runs belong to an earlier epoch.
    kind: Literal["accepted", "improved", "environment"] = "accepted"
    """Accepted by a person, improved in two sessions of the machine, or accepted for another environment."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One case and its stored runs."""

    case: CaseIdentity
    runs: tuple[RunSummary, ...]  # The newest runs, at most KEPT_RUNS, oldest first.
    accepted: Acceptance | None = None  # Start of the epoch; None in the first one.
    reference: tuple[RunSummary, ...] = ()
    """The first accepted runs of the epoch, oldest first, with which the level is compared.

    They may be older than ``runs``.  Default: the oldest of ``runs``.
    """

    def __post_init__(self) -> None:
        """Set the default of the reference."""
        if not self.reference:
            object.__setattr__(self, "reference", first_runs(self.runs, machine_sessions(self.runs)))

    @property
    def newest(self) -> RunSummary:
        """The run that started last."""
        return self.runs[-1]

    @functools.cached_property
    def kept(self) -> tuple[RunSummary, ...]:
        """The runs of the reference and the newest runs, each once, oldest first."""
        return in_order([*self.reference, *self.runs])


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """The content of one file."""

    hardware: Hardware
    entries: Mapping[CaseKey, Entry]
    commit_info: Mapping[str, Any] = field(default_factory=dict)
    """Revision of the newest session, in pytest-benchmark's form."""
    machine_info: Mapping[str, Any] = field(default_factory=dict)
    """The machine in pytest-benchmark's form, without readings that change from run to run."""

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
        """Start of that run; empty without runs."""
        return self.newest.time if self.newest else ""

    @property
    def versions(self) -> Mapping[str, Any]:
        """Versions of the packages of the newest run."""
        packages = self.newest.environment.get("packages") if self.newest else None
        return packages if isinstance(packages, Mapping) else {}


def newest(runs: Iterable[RunSummary]) -> tuple[RunSummary, ...]:
    """Return the newest KEPT_RUNS of the runs, oldest first, each once.

    Raises BaselineError if two runs with one identity differ.
    """
    return in_order(runs)[-KEPT_RUNS:]


def joined(first: Entry, second: Entry, machine_session: Mapping[str, str]) -> Entry:
    """Return the union of two entries of a case, with names and meanings of the newer one.

    The newer epoch is kept with its reference; runs older than the epoch are dropped.  Of two references of one epoch
    the oldest runs are kept.
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
    both = (*first.kept, *second.kept)
    runs = [run for run in both if accepted is None or moment(run.time) >= moment(accepted.time)]
    return Entry(case=later.case, runs=newest([*reference, *runs]), accepted=accepted, reference=reference)


def merge(first: Baseline, second: Baseline) -> Baseline:
    """Return the union of two files of the same hardware, in any order.  Raises BaselineError if hardware differs."""
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
    return dataclasses.replace(later, entries=entries)


def hardware_differences(now: Hardware, stored: Hardware) -> tuple[str, ...]:
    """Return a phrase for each field of the hard key that differs: ``cores 8, stored 4``."""
    left, right = flattened(now.key), flattened(stored.key)
    return tuple(
        f"{name} {left.get(name, 'absent')}, stored {right.get(name, 'absent')}"
        for name in sorted(set(left) | set(right))
        if left.get(name) != right.get(name)
    )


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested mapping as one level with dotted names.

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
    """Return the baseline without some runs or cases, and one line per changed case.

    ``older_than_days`` drops runs by age; ``case`` drops cases by a shell pattern of their node id or by the id;
    ``superseded`` drops entries of a node id that has a newer entry with other parameters, world size or backend.
    A case with remaining runs keeps its reference of any age, because later runs are compared with it.
    """
    kept: dict[CaseKey, Entry] = {}
    lines: list[str] = []
    for key, entry in baseline.entries.items():
        node = entry.case.node
        if is_named(node, case):
            lines.append(f"{node}: dropped with {len(entry.kept)} runs, named")
            continue
        if superseded and baseline.by_node[node][-1] is not entry:
            why = "; ".join(baseline.by_node[node][-1].case.differences(entry.case))
            lines.append(f"{node}: dropped with {len(entry.kept)} runs, superseded ({why})")
            continue
        left: Entry | None = entry
        if older_than_days is not None:
            oldest = days_before(now, older_than_days)
            young = [run for run in entry.runs if moment(run.time) >= oldest]
            left = dataclasses.replace(entry, runs=newest([*entry.reference, *young])) if young else None
            dropped = len(entry.kept) - (len(left.kept) if left else 0)
            if dropped:
                lines.append(f"{node}: {dropped} of {plural(len(entry.kept), 'run')} dropped, too old")
        if left is not None:
            kept[key] = left
    return dataclasses.replace(baseline, entries=kept), tuple(lines)
