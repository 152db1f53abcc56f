"""``perfsuite env``: what a run on this machine records; ``perfsuite platforms``: the known device models."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from perfsuite.base.errors import ConfigurationError, PerfsuiteError
from perfsuite.cli.main import EXIT_OK, Command, platform_arguments, print_json, print_lines
from perfsuite.platforms import (
    DeviceModel,
    Fingerprint,
    Host,
    Machine,
    MachineModel,
    detect_machine,
    families,
    fingerprint,
    load_catalog,
    read_environment,
    why_absent,
)
from perfsuite.platforms.environment import installed_torch, require_torch
from perfsuite.record.codec import to_json
from perfsuite.record.result import Peak

_SHOWN_APART = ("declared", "topology", "worker")
"""Fields of an environment that need lines of their own, or ranks: no rank runs here."""


def _env_arguments(parser: argparse.ArgumentParser) -> None:
    platform_arguments(parser)
    parser.add_argument("--platform", metavar="NAME", help="this platform instead of the one found")


def run_env(arguments: argparse.Namespace) -> int:
    """The fingerprint and the environment that a run here would record."""
    catalog = load_catalog(arguments.platform_file)
    machine = detect_machine(catalog, arguments.platform, host=Host())
    if machine.absent:
        raise PerfsuiteError(machine.absent)
    key = fingerprint(machine)
    environment = read_environment(machine, declared=catalog.declared).to_json()
    if arguments.json:
        print_json({"platform": machine.name, "fingerprint": to_json(key), "environment": environment})
    else:
        print_lines(_env_lines(machine, key, environment))
    return EXIT_OK


def _env_lines(machine: Machine, key: Fingerprint, environment: Mapping[str, Any]) -> Iterator[str]:
    yield f"platform     {machine}"
    yield f"fingerprint  {key}"
    yield ""
    yield "hard key: results are compared only where all of it agrees"
    yield from _rows(key.parts)
    yield ""
    yield "environment: recorded with every run, shown when it differs"
    yield from _rows({name: value for name, value in environment.items() if name not in _SHOWN_APART})
    yield ""
    if environment["declared"]:
        yield "declared in [environment] of the platform files"
        yield from _rows(environment["declared"])
    else:
        yield "declared: nothing; a platform file's [environment] says what no tool can tell (docs add-a-platform)"
    try:
        require_torch(machine.family, installed_torch())
    except ConfigurationError as error:
        yield f"problem: {error}"
    if environment["topology"]:
        yield ""
        yield "topology"
        yield from environment["topology"].splitlines()


def _rows(values: Mapping[str, Any]) -> Iterator[str]:
    """``name  value`` lines; tables one level deeper, lists a line each."""
    width = max(len(name) for name in values)
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield f"  {name}"
            yield from (f"  {line}" for line in _rows(value))
        else:
            lines = [str(item) for item in value] if isinstance(value, (list, tuple)) else [str(value)]
            lines = lines if value not in ([], (), {}) else ["none"]
            yield from (f"  {'' if number else name:{width}}  {line}" for number, line in enumerate(lines))


ENV = Command(
    help="print the fingerprint and the environment that a run on this machine records",
    arguments=_env_arguments,
    run=run_env,
)


def _platforms_arguments(parser: argparse.ArgumentParser) -> None:
    platform_arguments(parser)
    parser.add_argument("name", nargs="*", metavar="NAME", help="only these platforms and machines")


def run_platforms(arguments: argparse.Namespace) -> int:
    """Every row with its peaks and where they stand, and which of them is here."""
    catalog = load_catalog(arguments.platform_file)
    known = families(Host())
    machine = detect_machine(catalog, families=known)
    chosen = [name for name in arguments.name if name not in catalog.machines]
    models = [catalog.find(name) for name in chosen] if arguments.name else list(catalog.models.values())
    hosts = [machine for machine in catalog.machines.values() if machine.name in (arguments.name or catalog.machines)]
    here = {  # why each is not here; empty where it is
        model.name: ""
        if model.name == "cpu"
        else why_absent(model.name, machine=machine, catalog=catalog, families=known)
        for model in models
    }
    if arguments.json:
        print_json(
            {
                "here": machine.name,
                "platforms": [{**to_json(model), "absent": here[model.name]} for model in models],
                "machines": [to_json(host) for host in hosts],
            }
        )
        return EXIT_OK
    for model in models:
        print_lines([*_model_lines(model, here[model.name]), ""])
    for host in hosts:
        print_lines([*_machine_lines(host), ""])
    remarks = "; ".join(machine.remarks())
    print(f"this machine: {machine}{f'; {remarks}' if remarks else ''}")
    return EXIT_OK


def _model_lines(model: DeviceModel, absent: str) -> Iterator[str]:
    yield f"{model.name} ({model.family}): {absent or f'{model.title}, here'}"
    peaks: dict[str, Peak | None] = {
        **model.tflops,
        "memory": model.memory,
        "memory_bandwidth": model.memory_bandwidth,
        "link": model.link,
        "host_link": model.host_link,
        "network": model.network,
        "devices_per_node": model.devices_per_node,
    }
    yield from _peak_lines(peaks)
    if not any(peaks.values()):
        yield "  no peaks"
    if model.native:
        yield f"  native without a published peak: {', '.join(model.native)}"
    for note in model.notes:
        yield f"  note: {note}"


def _machine_lines(host: MachineModel) -> Iterator[str]:
    yield f"{host.name} (machine of {host.platform}): {host.title}"
    yield from _peak_lines({"nodes": host.nodes, "devices_per_node": host.devices_per_node, "network": host.network})
    yield f"  inside a node: {host.inside}"


def _peak_lines(peaks: Mapping[str, Peak | None]) -> Iterator[str]:
    for name, peak in peaks.items():
        if peak:
            kind = "" if peak.kind == "published" else f", {peak.kind}"
            yield f"  {name:16} {peak.value:>8g} {peak.unit:6}  {peak.source}{kind}"


PLATFORMS = Command(
    help="print the known device models and machines with their peaks and sources, and which of them is here",
    arguments=_platforms_arguments,
    run=run_platforms,
)
