"""Read the journals of a fleet: identity of nodes, key of their population, log times and judged results."""

from __future__ import annotations

import csv
import io
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from perfsuite.base.errors import ConfigurationError, JournalError
from perfsuite.base.files import content, why
from perfsuite.base.text import listed
from perfsuite.base.units import plural
from perfsuite.baselines.hosts import UUID, HostIdentity, host_of
from perfsuite.expectations.judge import Expected, headline, judge_one, software_of
from perfsuite.expectations.rows import Expectation
from perfsuite.fleet.rule import NodePair, SlowLink, node_pairs, slow_links
from perfsuite.metrics import read_run
from perfsuite.metrics.spec import on_every_device
from perfsuite.record.result import RankFacts, Result
from perfsuite.record.run import RunRecord

PRIORS: Mapping[str, float] = {"memory": 0.01, "host link": 0.01, "compute": 0.02, "communication": 0.02, "other": 0.03}
"""Assumed spread between healthy devices by kind of quantity, if no own row has one; rather too wide. Published are 8 %
on average between GPUs of five clusters under a power cap (Sinha et al., SC22) and 0.1 % between the host links of one
node."""


@dataclass(frozen=True, kw_only=True)
class FleetQuantity:
    """One case that every node of a population runs."""

    case: str
    kind: str  # A key of PRIORS.
    workload: str
    parameters: Mapping[str, Any]
    defaults: Mapping[str, Any]
    platform: str
    ranks_per_node: int
    metric: str  # Metric that is written as an expectation; empty without one.
    unit: str

    @property
    def host_bound(self) -> bool:
        """Return whether it depends on the host: its population needs equal hosts, not only equal devices."""
        return self.kind in ("host link", "communication", "other")


@dataclass(frozen=True, kw_only=True)
class NodeRun:
    """One run of one node from one journal."""

    node: str  # Host name; :func:`read_nodes` makes it unique.
    path: Path
    started_at: str = ""
    boot: str = ""
    devices: Mapping[str, str] = field(default_factory=dict)  # UUID by torch's name of the device; empty if unknown.
    ports: tuple[str, ...] = ()  # Active ports of the network with their rates.
    key: Mapping[str, str] = field(default_factory=dict)  # Parts of the population's key.
    fingerprint: str = ""
    times: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Log seconds by case and device; the device of a node's own time is empty."""
    values: Mapping[str, float] = field(default_factory=dict)  # Value of the quantity's metric by case.
    expected: tuple[Expected, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)
    """Throttle reasons and clocks by device at the end of its last sample."""
    absent: str = ""  # Reason why the journal does not count: unreadable, or without an end.

    @property
    def identity(self) -> tuple[str, ...]:
        """Return the identity of the node of a run: its devices, else its boot; empty if both are unknown."""
        uuids = tuple(sorted(filter(None, self.devices.values())))
        return uuids or ((self.boot,) if self.boot else ())


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """All nodes by name with their runs in order; quantities by case."""

    nodes: Mapping[str, tuple[NodeRun, ...]]
    quantities: Mapping[str, FleetQuantity]
    pairs: Mapping[str, Mapping[NodePair, float]] = field(default_factory=dict)
    """Log seconds of a message by pair of hosts, for cases with rounds of pairs."""
    links: tuple[SlowLink, ...] = ()
    notes: tuple[str, ...] = ()  # Remarks on unusual journals: repeated nodes and host names, cases over several nodes.


def read_nodes(paths: Sequence[Path], rows: Sequence[Expectation]) -> Fleet:
    """Read journals and folders of journals.  Raises ConfigurationError without any. Journals with equal device UUIDs
    or equal boots are further runs of one node. Equal host names of different or unknown nodes are replaced by file
    names. Unreadable journals remain as absent nodes.
    """
    files = [file for path in paths for file in _files_of(path)]
    doubled = sorted({str(file) for file in files if files.count(file) > 1})
    if doubled:
        raise ConfigurationError(f"{doubled[0]} is given twice; give every journal once")
    quantities: dict[str, FleetQuantity] = {}
    over_several: dict[str, Result] = {}
    runs = [run for file in files for run in _runs_of(file, rows, quantities, over_several)]
    rounds = [result for result in over_several.values() if result.workload.endswith(":PairRounds")]
    pairs = {result.case: times for result in rounds if (times := node_pairs(result))}
    notes = []
    if unjudged := sorted(set(over_several) - set(pairs)):
        notes.append(f"not judged here: {plural(len(unjudged), 'case')} over several nodes, as {unjudged[0]}")
    groups: dict[tuple[object, ...], list[NodeRun]] = defaultdict(list)
    for run in runs:
        groups[(run.node, run.identity) if run.identity else (run.node, run.path)].append(run)
    names = [group[0].node for group in groups.values()]
    nodes: dict[str, tuple[NodeRun, ...]] = {}
    for group in groups.values():
        name = group[0].node
        if names.count(name) > 1:
            name = f"{name} ({group[0].path.parent.name}/{group[0].path.name})"
            notes.append(f"host name {group[0].node} repeats: {name} is a node of its own")
        ordered = sorted(group, key=lambda run: (bool(run.absent), run.started_at))
        nodes[name] = tuple(replace(run, node=name) for run in ordered)
        if len(group) > 1:
            first = ordered[0].path
            notes.append(f"{name} has {len(group)} journals: {first} is compared, the later ones are second looks")
    links = tuple(link for result in rounds for link in slow_links(result))
    return Fleet(nodes=nodes, quantities=quantities, pairs=pairs, links=links, notes=tuple(notes))


def several_hosts(runs: Iterable[RunRecord]) -> tuple[str, ...]:
    """Return the host names of runs of equal hardware on different hosts; empty if it may be one host."""
    read = list(runs)
    for run in read[1:]:
        if run.fingerprint == read[0].fingerprint and _identity_of(read[0]).is_other_than(_identity_of(run)):
            return (read[0].hostname, run.hostname)
    return ()


def _identity_of(run: RunRecord) -> HostIdentity:
    ranks = (rank for result in run.results.values() if result.measurement for rank in result.measurement.ranks)
    uuids = frozenset(rank.identity.uuid for rank in ranks if rank.identity is not None and rank.identity.uuid)
    return HostIdentity(name=run.hostname, boot=run.boot, uuids=uuids or host_of(run.environment).uuids)


def _files_of(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(path.rglob("*.jsonl"))
    if not found:
        raise ConfigurationError(f"{path} has no journal (*.jsonl); give journals or a folder that has some")
    return found


def _runs_of(
    path: Path, rows: Sequence[Expectation], quantities: dict[str, FleetQuantity], over_several: dict[str, Result]
) -> list[NodeRun]:
    """Return a run for every host of a journal; an absent one for a journal that does not count."""
    try:
        record = read_run(path)
    except JournalError as error:
        return [NodeRun(node=_name_of(path), path=path, absent=str(error).removeprefix("journal "))]
    host = record.host or str(record.environment.get("hostname") or "") or _name_of(path)
    why_not = "" if record.results else "without a result"
    if record.end is None:
        why_not = "interrupted while it was written" if record.truncated else "without end: its run was killed"
    if why_not:
        return [NodeRun(node=host, path=path, boot=record.boot, absent=f"journal {why_not}")]
    by_host: dict[str, list[Result]] = defaultdict(list)
    for result in record.results.values():
        hosts = {rank.host for rank in result.measurement.ranks} if result.measurement is not None else {host}
        for name in hosts:
            by_host[name].append(result)
        if len(hosts) > 1 and not on_every_device(result):
            over_several[result.case] = result
    measured = (result.measurement for result in record.results.values())
    driver = next((each.ranks[0].host for each in measured if each is not None), host)
    return [
        _run(
            record,
            path,
            node=host if name == driver else name,
            host=name,
            results=results,
            rows=rows,
            quantities=quantities,
            is_driver=name == driver,
        )
        for name, results in by_host.items()
    ]


def _name_of(path: Path) -> str:
    return path.parent.name if path.stem == "journal" and path.parent.name else path.stem


def _run(
    record: RunRecord,
    path: Path,
    *,
    node: str,
    host: str,
    results: Sequence[Result],
    rows: Sequence[Expectation],
    quantities: dict[str, FleetQuantity],
    is_driver: bool,
) -> NodeRun:
    environment = record.environment
    times: dict[str, dict[str, float]] = {}
    values: dict[str, float] = {}
    expected: list[Expected] = []
    facts: dict[str, str] = {}
    for result in results:
        measurement = result.measurement
        if result.outcome != "measured" or measurement is None:
            continue
        own = [rank for rank in measurement.ranks if rank.host == host]
        whole = len(own) == len(measurement.ranks)
        per_device = on_every_device(result) or (len(measurement.ranks) == 1 and own[0].device != "cpu")
        if not whole and not per_device:
            continue
        case = result.case
        logs = {rank.device: math.log(rank.median_s) for rank in own if rank.median_s > 0}
        times[case] = logs if per_device else {"": math.log(measurement.median_s)} if measurement.median_s > 0 else {}
        quantities.setdefault(case, quantity_of(result, len(own)))
        if whole:
            expected += judge_one(result, rows)
            if (value := result.values.get(quantities[case].metric)) is not None:
                values[case] = value
        for rank in own:
            if state := _state_of(rank):
                facts[rank.device] = state
    ranks = [rank for result in results if result.measurement for rank in result.measurement.ranks if rank.host == host]
    names = dict.fromkeys(rank.device for rank in ranks)
    devices = [str(text) for text in environment.get("devices") or ()] if is_driver else []
    identities = {rank.device: rank.identity for rank in ranks if rank.identity is not None}
    uuids = {device: found.uuid for device, found in identities.items()}
    caps = {f"{found.power_cap_w:g} W" for found in identities.values() if found.power_cap_w is not None}
    ports = tuple(dict.fromkeys(port for found in identities.values() for port in found.ports))
    boots = [found.boot for found in identities.values() if found.boot]
    return NodeRun(
        node=node,
        path=path,
        started_at=record.started_at,
        boot=record.boot if is_driver and record.boot else next(iter(boots), ""),
        devices={name: uuids.get(name) or _uuid(name, devices) for name in names if name != "cpu"},
        ports=ports,
        key=_key(record, caps),
        fingerprint=record.fingerprint,
        times=times,
        values=values,
        expected=tuple(expected),
        missing=record.missing,
        facts=facts,
    )


def _uuid(device: str, devices: Sequence[str]) -> str:
    index = device.rpartition(":")[2]
    text = devices[int(index)] if index.isdecimal() and int(index) < len(devices) else ""
    found = UUID.search(text)
    return found[0] if found else ""


def _state_of(rank: RankFacts) -> str:
    """Return clock, temperature and throttle reasons of a rank at the end of its last sample, if known."""
    found, texts = rank.identity, []
    if found is not None and found.clock_mhz is not None:
        most = f" of {found.max_clock_mhz:g}" if found.max_clock_mhz is not None else ""
        texts.append(f"{found.clock_mhz:g}{most} MHz")
    if found is not None and found.temperature_c is not None:
        texts.append(f"{found.temperature_c:g} C")
    return ", ".join([*texts, *(rank.throttle or ())])


def _key(record: RunRecord, own_caps: set[str]) -> dict[str, str]:
    """Return the facts that must agree to compare two nodes in a device kernel, by name."""
    environment = record.environment
    devices = {UUID.sub("", str(text)).strip(" ,") for text in environment.get("devices") or ()}
    caps = own_caps or {str(text) for text in environment.get("power_caps") or ()}
    key = {
        "platform": record.platform,
        "accelerator": "; ".join(sorted(devices)),
        "power cap": "; ".join(sorted(caps)),
        "software": software_of(environment),
        "options": ", ".join(f"{name}={value}" for name, value in (environment.get("options") or {}).items()),
    }
    return {**key, "simulated": "yes"} if record.simulated else key


def quantity_of(result: Result, ranks: int) -> FleetQuantity:
    """Return the quantity that a case measures."""
    work, metric = result.work, headline(result)
    kind = "compute" if work.flops and not work.samples and not work.tokens else "other"
    if work.memory_path:
        kind = "memory" if work.memory_path == "device" else "host link"
    elif work.collective:
        kind = "communication"
    name, unit = (metric.name, metric.unit) if metric is not None else ("", "")
    return FleetQuantity(
        case=result.case,
        kind=kind,
        workload=result.workload.rpartition(":")[2],
        parameters=result.parameters,
        defaults=result.defaults,
        platform=result.platform,
        ranks_per_node=ranks,
        metric=name,
        unit=unit,
    )


def read_names(names_or_count: str) -> list[str] | int:
    """Return the names in a file (one per line), or a number of nodes. Raises ConfigurationError for other text."""
    if names_or_count.isdecimal():
        if not int(names_or_count):
            raise ConfigurationError("--nodes 0 expects no node; give at least 1")
        return int(names_or_count)
    lines = _text(Path(names_or_count), "--nodes").splitlines()
    names = [name for line in lines if (name := line.partition("#")[0].strip())]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigurationError(f"--nodes {names_or_count} has {twice[0]} twice; name every node once")
    if not names:
        raise ConfigurationError(f"--nodes {names_or_count} names no node; write one host name a line")
    return names


def read_groups(path: Path, nodes: Iterable[str]) -> dict[str, str]:
    """Return the group of each node from lines ``node,group``. Raises ConfigurationError with the missing nodes."""
    groups: dict[str, str] = {}
    try:
        rows = list(csv.reader(io.StringIO(_text(path, "--group"))))
    except csv.Error as error:
        raise ConfigurationError(f"--group {path} is not CSV: {error}; write lines node,group") from None
    for number, row in enumerate(rows, 1):
        cells = [cell.strip() for cell in row]
        if not any(cells) or cells[0].startswith("#") or (number == 1 and cells[0].lower() == "node"):
            continue
        if len(cells) != 2 or not all(cells):
            raise ConfigurationError(f"--group {path}, line {number}: {','.join(row)!r:.60} is not node,group")
        if groups.setdefault(cells[0], cells[1]) != cells[1]:
            raise ConfigurationError(f"--group {path}, line {number}: {cells[0]} is in two groups; keep one")
    if lacking := [node for node in nodes if node not in groups]:
        raise ConfigurationError(f"--group {path} lacks {listed(lacking, 3)}; add a line node,group for each")
    return groups


def _text(path: Path, option: str) -> str:
    try:
        return content(path).decode()
    except OSError as error:
        raise ConfigurationError(f"{option}: {path} cannot be read: {why(error)}") from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"{option}: {path} is not UTF-8 text; save it as UTF-8") from None
