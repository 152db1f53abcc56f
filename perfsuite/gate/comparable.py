"""Which stored runs a case may be compared with, and why not with others."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from perfsuite.baselines import store
from perfsuite.baselines.baseline import Baseline, Entry, Hardware, flattened, hardware_differences
from perfsuite.baselines.runs import CaseIdentity, RunSummary, moment
from perfsuite.errors import BaselineError
from perfsuite.gate.evidence import GateCase
from perfsuite.units import plural

STALE_DAYS = 60
"""A baseline whose newest run is older is marked."""
DROPPED_DAYS = 120
"""Runs that are older are not compared with."""
SHOWN_DIFFERENCES = 6
"""Differences of the environment that a verdict names; the rest are counted."""
_NOT_VERSIONS = frozenset({"hostname", "memory_gib", "variables", "declared", "notes", "topology"})
"""Parts of an environment that are not software, whatever their values look like."""
_NOT_TIMED = frozenset({"pytest", "pytest-benchmark", "perfsuite", "nvidia-ml-py", "mthreads-ml-py"})
"""Software that runs outside the timed region."""
_VERSION = re.compile(r"v?(\d+)(\.\d+)+([.+_-][\w.+-]*)?")


@dataclass(frozen=True, kw_only=True)
class Match:
    """What is stored for a case."""

    entry: Entry | None
    """The stored runs of this very case on this hardware."""
    reasons: tuple[str, ...] = ()
    """Without an entry: what differs from the nearest that is stored; empty when nothing is stored anywhere."""


def gate_case(
    case: CaseIdentity,
    *,
    environment: Mapping[str, Any],
    baseline: Baseline | None,
    hardware: Hardware,
    folder: Path,
    tolerance: float | None = None,
    metric_tolerances: Mapping[str, float] | None = None,
    now: datetime | None = None,
) -> GateCase:
    """The case with the stored runs that it may be compared with, or the reason why there are none.

    ``environment`` is the soft key of this session; ``folder`` is searched for other hardware when nothing fits.
    """
    match = find(case, baseline=baseline, hardware=hardware, folder=folder)
    tolerances = dict(metric_tolerances or {})
    if match.entry is None:
        return GateCase(
            case=case,
            tolerance=tolerance,
            metric_tolerances=tolerances,
            refusal="not-comparable" if match.reasons else "no-baseline",
            reasons=match.reasons,
        )
    kept, flags = usable_runs(match.entry, environment, now or datetime.now(timezone.utc))
    return GateCase(
        case=case,
        stored=kept,
        tolerance=tolerance,
        metric_tolerances=tolerances,
        refusal=None if kept else "not-comparable",
        reasons=() if kept else flags,
        flags=flags if kept else (),
        soft_differences=soft_differences(environment, kept[-1].environment) if kept else (),
    )


def find(case: CaseIdentity, *, baseline: Baseline | None, hardware: Hardware, folder: Path) -> Match:
    """The entry of a case, or what keeps it apart from the nearest one: on this hardware, else on another."""
    entries = baseline.by_node.get(case.node, ()) if baseline else ()
    if entries:  # newest last: of equally near ones the newest
        _, entry = min(enumerate(entries), key=lambda pair: (len(case.differences(pair[1].case)), -pair[0]))
        differences = case.differences(entry.case)
        return Match(entry=None if differences else entry, reasons=differences)
    nearest: tuple[str, ...] | None = None
    for other in _others(folder, hardware):
        if any(not case.differences(entry.case) for entry in other.by_node.get(case.node, ())):
            differences = hardware_differences(hardware, other.hardware)
            reasons = (f"nearest stored hardware is {other.hardware.fingerprint}", *differences)
            nearest = min(nearest or reasons, reasons, key=len)
    return Match(entry=None, reasons=nearest or ())


def _others(folder: Path, hardware: Hardware) -> Iterator[Baseline]:
    """Baselines of other hardware of the same platform; damaged ones are no concern of this session."""
    for path in sorted((folder / hardware.platform).glob("*.json")):
        if path.stem != hardware.fingerprint:
            facts = path.stat()
            baseline = _read_once(path, facts.st_mtime_ns, facts.st_size)
            if baseline is not None:
                yield baseline


@functools.lru_cache(maxsize=16)
def _read_once(path: Path, mtime_ns: int, size: int) -> Baseline | None:
    """A file in one state, read once for all cases; None when it is damaged."""
    try:
        return store.read(path)
    except BaselineError:
        return None


def soft_differences(now: Mapping[str, Any], stored: Mapping[str, Any]) -> tuple[str, ...]:
    """Fields of the environment that differ, one phrase each; what only one side knows counts too.

    >>> soft_differences({"packages": {"torch": "2.13.0"}}, {"packages": {"torch": "2.12.1"}})
    ('packages.torch 2.13.0, stored 2.12.1',)
    """
    left, right = flattened(now), flattened(stored)
    phrases = [
        f"{name} {_short(left.get(name, 'absent'))}, stored {_short(right.get(name, 'absent'))}"
        for name in sorted(set(left) | set(right))
        if left.get(name) != right.get(name)
    ]
    rest = len(phrases) - SHOWN_DIFFERENCES
    return (
        tuple(phrases)
        if rest <= 0
        else (*phrases[:SHOWN_DIFFERENCES], f"and {rest} more differences of the environment")
    )


def _short(value: object) -> str:
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def usable_runs(
    entry: Entry, environment: Mapping[str, Any], now: datetime
) -> tuple[tuple[RunSummary, ...], tuple[str, ...]]:
    """Runs that are young enough and from the same major versions, and what a reader must know about the rest."""
    flags = []
    oldest = now - timedelta(days=DROPPED_DAYS)
    young = [run for run in entry.runs if moment(run.time) >= oldest]
    if len(young) < len(entry.runs):
        flags.append(f"{plural(len(entry.runs) - len(young), 'stored run')} not used: older than {DROPPED_DAYS} days")
    changes = [major_changes(environment, run.environment) for run in young]
    kept = [run for run, changed in zip(young, changes, strict=True) if not changed]
    if len(kept) < len(young):
        said = dict.fromkeys(change for changed in changes for change in changed)
        flags.append(f"{plural(len(young) - len(kept), 'stored run')} not used: {'; '.join(said)}")
    age = (now - moment(kept[-1].time)).days if kept else 0
    if age > STALE_DAYS:
        flags.append(f"stale baseline: its newest run is {age} days old; store newer ones with --perf-update=append")
    return tuple(kept), tuple(flags)


def major_changes(now: Mapping[str, Any], stored: Mapping[str, Any]) -> tuple[str, ...]:
    """Versions of the software whose first number differs, one phrase each.

    >>> major_changes({"driver": "550.54", "kernel": "6.1.0-9"}, {"driver": "535.1", "kernel": "6.8.2"})
    ('driver 550.54, stored 535.1',)
    """
    left, right = flattened(now), flattened(stored)
    phrases = []
    for name in sorted(set(left) & set(right)):
        if name.partition(".")[0] in _NOT_VERSIONS or name.rpartition(".")[2] in _NOT_TIMED:
            continue
        mine, theirs = (_VERSION.fullmatch(str(side[name])) for side in (left, right))
        if mine and theirs and mine[1] != theirs[1]:
            phrases.append(f"{name} {left[name]}, stored {right[name]}")
    return tuple(phrases)
