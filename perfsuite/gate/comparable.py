"""Select the stored runs that a case can be compared with, with reasons for excluding others."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from perfsuite.base.errors import BaselineError
from perfsuite.base.units import plural
from perfsuite.baselines import store
from perfsuite.baselines.baseline import Baseline, Entry, Hardware, flattened, hardware_differences
from perfsuite.baselines.hosts import by_host, host_of
from perfsuite.baselines.runs import CaseIdentity, RunSummary, moment, usable
from perfsuite.gate.evidence import GateCase
from perfsuite.metrics import REGISTRY
from perfsuite.record.verdict import GateSettings

STALE_DAYS = 60  # Age of the newest run above which a baseline is flagged.
DROPPED_DAYS = 120  # Age of the newest run above which a baseline is not used.
SHOWN_DIFFERENCES = 6  # Most differences of the environment in a verdict; the others are counted.
_NOT_TIMED = frozenset({"pytest", "pytest-benchmark", "perfsuite", "nvidia-ml-py", "mthreads-ml-py"})
"""Software that runs outside the timed region."""
_NO_CAUSES = frozenset({"hostname", "notes"})  # Parts of an environment that do not change the speed of a case.
_WHICH_CORES = "cores.which"  # A batch system gives other cores of the same kind to every job.
_UNKNOWN = "unknown"
_ANOTHER_HOST = "another host of equal hardware"
"""Without the host's name, because reports and pages repeat the causes of a verdict."""


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
    boot: str = "",
) -> GateCase:
    """Return the case with the comparable stored runs, or with the reason why there are none.  ``environment`` is the
    soft key of this session, ``boot`` the boot of its host; ``folder`` is searched for other hardware if no stored case
    matches.
    """
    found = find(case, baseline=baseline, hardware=hardware, folder=folder)
    plain = GateCase(case=case, specs=REGISTRY, tolerance=tolerance, metric_tolerances=dict(metric_tolerances or {}))
    if not isinstance(found, Entry):
        return dataclasses.replace(plain, refusal="not-comparable" if found else "no-baseline", reasons=found)
    stored, flags = usable_runs(found, now or datetime.now(timezone.utc))
    # Only runs of different sessions of the machine scatter independently, so those are the sessions of the gate.
    sessions = baseline.machine_session if baseline else {}
    there = {run.key for run in found.reference}  # a key has the name of the pytest session
    later = tuple(run for run in stored if run.key not in there)
    compared, later, hosts, elsewhere = _of_this_host(found.reference if stored else (), later, environment, boot)
    reference, newest = (
        tuple(dataclasses.replace(run, session=sessions.get(run.session, run.session)) for run in runs)
        for runs in (compared, later)
    )
    before = _nearest([run.environment for run in reference], environment)
    changed = case.changed_metrics(found.case)
    alike = {name: meaning for name, meaning in case.metrics.items() if name not in changed}
    return dataclasses.replace(
        plain,
        case=dataclasses.replace(case, metrics=alike),
        stored_metrics=found.case.metrics,
        changed_metrics=changed,
        stored=reference,
        newest=newest,
        refusal=None if stored else "not-comparable",
        reasons=() if stored else flags,
        flags=flags if stored else (),
        soft_differences=shortened(soft_differences(environment, before)),
        environment_changes=shortened(causes(environment, before)),
        hosts=hosts,
        elsewhere=elsewhere,
    )


def _of_this_host(
    reference: tuple[RunSummary, ...], later: tuple[RunSummary, ...], environment: Mapping[str, Any], boot: str
) -> tuple[tuple[RunSummary, ...], tuple[RunSummary, ...], str, tuple[str, ...]]:
    """Return the runs to compare with, a sentence about their hosts, and the host as a possible cause of a change.  A
    reference of several hosts is reduced to the runs of this host if there are enough. The host is a possible cause
    only if all runs are of one other host: the scatter of several hosts is part of the noise.
    """
    here, hosts = host_of(environment, boot), by_host(reference)
    own = [not any(host_of(run.environment, run.boot).is_other_than(here) for run in host) for host in hosts]
    if own == [False]:
        return reference, later, "all stored runs are of another host of equal hardware", (_ANOTHER_HOST,)
    if len(hosts) < 2:
        return reference, later, "", ()
    local = hosts[own.index(True)] if True in own else []
    text = f"stored runs are of {len(hosts)} hosts of equal hardware, {len(local)} of {len(reference)} of this host"
    if usable(local) < GateSettings.min_stored:
        return reference, later, f"{text}: all are compared with, and differences between hosts count as noise", ()
    later = tuple(run for run in later if not host_of(run.environment, run.boot).is_other_than(here))
    return tuple(local), later, f"{text}: only these are compared with", ()


def _nearest(stored: Sequence[Mapping[str, Any]], now: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the stored environment with the fewest differences from this session's, the newest of equal ones."""
    distinct = {id(environment): environment for environment in reversed(stored)}
    return min(distinct.values(), key=lambda environment: len(causes(now, environment)), default=now)


def find(case: CaseIdentity, *, baseline: Baseline | None, hardware: Hardware, folder: Path) -> Entry | tuple[str, ...]:
    """Return the entry of a case, or its differences from the nearest entry on any hardware; empty without one."""
    entries = baseline.by_node.get(case.node, ()) if baseline else ()
    if entries:  # newest last: of equally near ones the newest
        entry = min(reversed(entries), key=lambda entry: len(case.differences(entry.case)))
        return case.differences(entry.case) or entry
    reasons = (
        (f"nearest stored hardware is {other.hardware.fingerprint}", *hardware_differences(hardware, other.hardware))
        for other in _others(folder, hardware)
        if any(not case.differences(entry.case) for entry in other.by_node.get(case.node, ()))
    )
    return min(reasons, key=len, default=())


def nearest_hardware(folder: Path, hardware: Hardware) -> str:
    """Return the file of the platform with the fewest differences in hardware, with these; empty without one."""
    others = {
        other.hardware.fingerprint: hardware_differences(hardware, other.hardware)
        for other in _others(folder, hardware)
    }
    if not others:
        return ""
    name = min(others, key=lambda fingerprint: (len(others[fingerprint]), fingerprint))
    return f"the nearest file is of other hardware, {name}.json: {'; '.join(others[name])}"


def _others(folder: Path, hardware: Hardware) -> Iterator[Baseline]:
    for path in sorted((folder / hardware.platform).glob("*.json")):
        if path.stem != hardware.fingerprint:
            facts = path.stat()
            if (baseline := _read_once(path, facts.st_mtime_ns, facts.st_size)) is not None:
                yield baseline


@functools.lru_cache(maxsize=16)
def _read_once(path: Path, mtime_ns: int, size: int) -> Baseline | None:
    """Return the baseline in one state of a file, read once for all cases; None for a damaged file."""
    try:
        return store.read(path)
    except BaselineError:
        return None


def soft_differences(now: Mapping[str, Any], stored: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a phrase for each field of the environment that differs, or that only one side has.

    >>> soft_differences({"packages": {"torch": "2.13.0"}}, {"packages": {"torch": "2.12.1"}})
    ('packages.torch 2.13.0, stored 2.12.1',)
    """
    return tuple(phrase for _, _, phrase in _differences(now, stored))


def causes(now: Mapping[str, Any], stored: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the differences that can slow a case, without the host's name and software outside of the timed region.

    >>> causes({"hostname": "a", "packages": {"pytest": "9.1"}, "kernel": "6.2"}, {"hostname": "b", "kernel": "6.1"})
    ('kernel 6.2, stored 6.1',)

    A field that one side could not read does not count.

    >>> causes({"governor": "powersave", "cpu": "X; CPU quota: unknown"}, {"governor": "performance", "cpu": "X"})
    ('governor powersave, stored performance',)
    """
    return tuple(
        phrase
        for name, values, phrase in _differences(now, stored)
        if name.partition(".")[0] not in _NO_CAUSES
        and name.rpartition(".")[2] not in _NOT_TIMED
        and name != _WHICH_CORES
        and _UNKNOWN not in values
    )


def _parts(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of an environment by dotted name; the description of the CPU is split into its parts.

    >>> _parts({"cpu": "EPYC; sockets: 1; cores used: 2; CPU quota: 1.5 cores"})
    {'cpu': 'EPYC', 'sockets': '1', 'cores used': '2', 'CPU quota': '1.5 cores'}
    """
    parts = flattened(environment)
    if isinstance(parts.get("cpu"), str):
        parts["cpu"], *facts = parts["cpu"].split("; ")
        parts |= dict(fact.partition(": ")[::2] for fact in facts)
    return parts


def _differences(now: Mapping[str, Any], stored: Mapping[str, Any]) -> Iterator[tuple[str, tuple[Any, Any], str]]:
    left, right = _parts(now), _parts(stored)
    for name in sorted(set(left) | set(right)):
        if left.get(name) != right.get(name):
            lacking = "none" if name == "CPU quota" else "absent"
            values = left.get(name, lacking), right.get(name, lacking)
            yield name, values, f"{name} {_short(values[0])}, stored {_short(values[1])}"


def shortened(phrases: Sequence[str]) -> tuple[str, ...]:
    """Return the first SHOWN_DIFFERENCES phrases, and the number of the others."""
    rest = len(phrases) - SHOWN_DIFFERENCES
    if rest <= 0:
        return tuple(phrases)
    return (*phrases[:SHOWN_DIFFERENCES], f"and {rest} more differences of the environment")


def _short(value: object) -> str:
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def usable_runs(entry: Entry, now: datetime) -> tuple[tuple[RunSummary, ...], tuple[str, ...]]:
    """Return the runs of an entry, unless the newest is too old, and flags about their age.  The reference of an epoch
    does not expire while runs are appended: otherwise it would follow a slow drift.
    """
    age = (now - moment(entry.newest.time)).days
    if age > DROPPED_DAYS:
        return (), (f"{plural(len(entry.kept), 'stored run')} not used: the newest is older than {DROPPED_DAYS} days",)
    if age > STALE_DAYS:
        why = f"stale baseline: its newest run is {age} days old; store newer ones with --perf-update=append"
        return entry.kept, (why,)
    return entry.kept, ()
