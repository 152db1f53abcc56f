"""Which stored runs a case may be compared with, and why not with others."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from perfsuite.baselines import store
from perfsuite.baselines.baseline import Baseline, Entry, Hardware, flattened, hardware_differences, moment
from perfsuite.baselines.casework import GateCase
from perfsuite.baselines.runs import Case, Run
from perfsuite.errors import BaselineError

STALE_DAYS = 60
"""A baseline whose newest run is older is marked."""
DROPPED_DAYS = 120
"""Runs that are older are not compared with."""
_DECISIVE = frozenset({"torch", "torch_musa", "driver", "cuda", "musa", "nccl", "mccl", "kernel", "python"})
"""Versions whose first number changes what is measured: runs from before such a change are dropped."""


def gate_case(
    case: Case,
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
    entry = baseline.entries.get(case.key) if baseline else None
    tolerances = dict(metric_tolerances or {})
    if entry is None:
        reasons = _differing_case(case, baseline) or _differing_hardware(case, hardware, folder)
        return GateCase(
            case=case,
            tolerance=tolerance,
            metric_tolerances=tolerances,
            refusal="not-comparable" if reasons else "no-baseline",
            reasons=reasons,
        )
    now = now or datetime.now(timezone.utc)
    kept, flags = _usable(entry, environment, now)
    if not kept:
        return GateCase(
            case=case, tolerance=tolerance, metric_tolerances=tolerances, refusal="not-comparable", reasons=flags
        )
    return GateCase(
        case=case,
        stored=kept,
        tolerance=tolerance,
        metric_tolerances=tolerances,
        flags=flags,
        soft_differences=soft_differences(environment, kept[-1].environment),
    )


def soft_differences(now: Mapping[str, Any], stored: Mapping[str, Any]) -> tuple[str, ...]:
    """Fields of the environment that differ, one phrase each.

    >>> soft_differences({"packages": {"torch": "2.13.0"}}, {"packages": {"torch": "2.12.1"}})
    ('packages.torch 2.13.0, stored 2.12.1',)
    """
    left, right = flattened(now), flattened(stored)
    return tuple(
        f"{name} {left.get(name, 'absent')}, stored {right.get(name, 'absent')}"
        for name in sorted(set(left) | set(right))
        if left.get(name) != right.get(name)
    )


def _usable(entry: Entry, environment: Mapping[str, Any], now: datetime) -> tuple[tuple[Run, ...], tuple[str, ...]]:
    """Runs that are young enough and from the same major versions, and what a reader must know."""
    flags = []
    oldest = now - timedelta(days=DROPPED_DAYS)
    young = [run for run in entry.runs if moment(run.time) >= oldest]
    if len(young) < len(entry.runs):
        flags.append(f"{len(entry.runs) - len(young)} stored runs dropped, older than {DROPPED_DAYS} days")
    kept = []
    changes: dict[str, None] = {}
    for run in young:
        changed = major_changes(environment, run.environment)
        changes.update(dict.fromkeys(changed))
        if not changed:
            kept.append(run)
    if changes:
        flags.append(f"{len(young) - len(kept)} stored runs dropped: {'; '.join(changes)}")
    if kept and now - moment(kept[-1].time) > timedelta(days=STALE_DAYS):
        flags.append(f"the newest stored run is {(now - moment(kept[-1].time)).days} days old: store newer ones")
    return tuple(kept), tuple(flags)


def major_changes(now: Mapping[str, Any], stored: Mapping[str, Any]) -> tuple[str, ...]:
    """Decisive versions whose first number differs, one phrase each.

    >>> major_changes({"driver": "550.54"}, {"driver": "535.1"})
    ('driver 550.54, stored 535.1',)
    """
    left, right = flattened(now), flattened(stored)
    return tuple(
        f"{name} {left[name]}, stored {right[name]}"
        for name in sorted(set(left) & set(right))
        if name.rpartition(".")[2] in _DECISIVE and _major(left[name]) != _major(right[name])
    )


def _major(version: object) -> str:
    """The first number of a version; the text itself when it has none."""
    found = re.match(r"\s*v?(\d+)", str(version))
    return found[1] if found else str(version)


def _differing_case(case: Case, baseline: Baseline | None) -> tuple[str, ...]:
    """What keeps the case apart from the entry of the same node id that is nearest to it."""
    candidates: Iterable[Entry] = baseline.by_node.get(case.node, ()) if baseline else ()
    found = [case.differences(entry.case) for entry in candidates]
    return min(found, key=len) if found else ()


def _differing_hardware(case: Case, hardware: Hardware, folder: Path) -> tuple[str, ...]:
    """What differs from the nearest other hardware of the platform that has the case; empty without any."""
    nearest: tuple[str, ...] = ()
    name = ""
    for path in sorted((folder / hardware.platform).glob("*.json")):
        try:
            other = store.read(path)
        except BaselineError:
            continue  # a damaged file of other hardware is no concern of this run
        if other.hardware.fingerprint == hardware.fingerprint or case.node not in other.by_node:
            continue
        differences = hardware_differences(hardware, other.hardware)
        if not name or len(differences) < len(nearest):
            nearest, name = differences, other.hardware.fingerprint
    return (f"nearest stored hardware is {name}", *nearest) if name else ()
