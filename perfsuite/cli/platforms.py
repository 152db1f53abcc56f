"""``perfsuite env``: print the recorded environment; ``perfsuite platforms``: list the known device models."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from perfsuite.base.errors import ConfigurationError, PerfsuiteError
from perfsuite.cli.main import Command, platform_arguments, print_json, print_lines
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

_SHOWN = ("bf16", "fp16", "fp32")
"""Dtypes of the rate in the list of platforms; the first one that a platform has is printed."""
_SHOWN_APART = ("declared", "topology", "worker")
"""Fields of an environment that are printed on separate lines, or that need ranks: no rank runs here."""


def _env_arguments(parser: argparse.ArgumentParser) -> None:
    platform_arguments(parser)
    parser.add_argument("--platform", metavar="NAME", help="use this platform (default: the one found here)")


def _run_env(arguments: argparse.Namespace) -> None:
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


def _env_lines(machine: Machine, key: Fingerprint, environment: Mapping[str, Any]) -> Iterator[str]:
    yield f"platform     {machine}"
    yield f"fingerprint  {key}"
    yield ""
    yield "hard key: results are compared only if all of it is equal"
    yield from _rows(key.parts)
    yield ""
    yield "environment: recorded with every run, shown when it differs"
    yield from _rows({name: value for name, value in environment.items() if name not in _SHOWN_APART})
    yield ""
    if environment["declared"]:
        yield "declared in [environment] of the platform files"
        yield from _rows(environment["declared"])
    else:
        yield "declared: nothing; write facts that tools cannot read into [environment] of a platform file,"
        yield "  see perfsuite docs add-a-platform"
    try:
        require_torch(machine.family, installed_torch())
    except ConfigurationError as error:
        yield f"problem: {error}"
    if environment["topology"]:
        yield ""
        yield "topology"
        yield from environment["topology"].splitlines()


def _rows(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield ``name  value`` lines; a table one level deeper, an item of a list per line."""
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
    example="perfsuite env --json",
    arguments=_env_arguments,
    run=_run_env,
)


def _platforms_arguments(parser: argparse.ArgumentParser) -> None:
    platform_arguments(parser)
    parser.add_argument(
        "name",
        nargs="*",
        metavar="NAME",
        help="print peaks and sources of these platforms and machines, such as h100 (default: list all)",
    )


def _run_platforms(arguments: argparse.Namespace) -> None:
    catalog = load_catalog(arguments.platform_file)
    found = families(Host())
    machine = detect_machine(catalog, families=found)
    names = arguments.name or [*catalog.models, *catalog.machines]
    models = [catalog.find(name) for name in names if name not in catalog.machines]
    hosts = [catalog.machines[name] for name in names if name in catalog.machines]
    absent = {"cpu": ""}  # the reason, empty for a platform of this machine
    for name in (model.name for model in (models if arguments.name or arguments.json else ()) if model.name != "cpu"):
        absent[name] = why_absent(name, machine=machine, catalog=catalog, families=found)
    if arguments.json:
        plain = [{**to_json(model), "absent": absent[model.name]} for model in models]
        print_json({"here": machine.name, "platforms": plain, "machines": [to_json(host) for host in hosts]})
    elif arguments.name:
        details = [*(_model_lines(model, absent[model.name]) for model in models), *map(_machine_lines, hosts)]
        print_lines(line for number, lines in enumerate(details) for line in ([""] * bool(number) + [*lines]))
    else:
        print_lines(_overview(machine, models, hosts))


def _overview(machine: Machine, models: Sequence[DeviceModel], hosts: Sequence[MachineModel]) -> Iterator[str]:
    yield "; ".join([f"this machine: {machine}", *machine.remarks()])
    width = max(len(name) for name in [*(model.name for model in models), *(host.name for host in hosts)])
    yield from ("", "other platforms")
    for model in models:
        if model.name != machine.name:
            rates = [f"{dtype} {model.tflops[dtype].value:g} TFLOPS" for dtype in _SHOWN if dtype in model.tflops]
            sizes = (f"{peak.value:g} {peak.unit}" for peak in (model.memory, model.memory_bandwidth) if peak)
            yield f"  {model.name:{width}}  {', '.join([model.title, *rates[:1], *sizes])}"
    if hosts:
        yield from ("", "machines of published reports")
        yield from (f"  {host.name:{width}}  {host.title}" for host in hosts)
    yield from ("", "perfsuite platforms NAME prints all peaks with their sources")


def _model_lines(model: DeviceModel, absent: str) -> Iterator[str]:
    yield f"{model.name} ({model.family}): {model.title}{'' if absent else ', on this machine'}"
    if absent:
        yield f"  not on this machine: {absent.removeprefix(f'{model.title} not found: ')}"
    others = ("memory", "memory_bandwidth", "link", "host_link", "network", "devices_per_node")
    peaks: dict[str, Peak | None] = {**model.tflops, **{name: getattr(model, name) for name in others}}
    yield from _peak_lines(peaks)
    if not any(peaks.values()):
        yield "  no peaks"
    if model.native:
        yield f"  native, but without a published peak: {', '.join(model.native)}"
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
            yield f"  {name:16} {peak.value:>8g} {peak.unit:7}  {peak.source}{kind}"


PLATFORMS = Command(
    help="list this machine and the known device models, or print the peaks and sources of some",
    example="perfsuite platforms h100",
    arguments=_platforms_arguments,
    run=_run_platforms,
)
