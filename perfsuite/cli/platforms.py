"""``perfsuite platforms``: the known device models with their peaks and sources, and which of them is here."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from perfsuite.cli.command import EXIT_OK, Command, platform_arguments, print_json, print_lines
from perfsuite.platforms import (
    DeviceModel,
    Host,
    detect_machine,
    families,
    load_catalog,
    why_absent,
)
from perfsuite.record.codec import to_json
from perfsuite.record.result import Peak


def _platforms_arguments(parser: argparse.ArgumentParser) -> None:
    platform_arguments(parser)
    parser.add_argument("name", nargs="*", metavar="NAME", help="only these platforms")


def _platforms(arguments: argparse.Namespace) -> int:
    """Every row with its peaks and where they stand, and which of them is here."""
    catalog = load_catalog(arguments.platform_file)
    known = families(Host())
    machine = detect_machine(catalog, families=known)
    models = [catalog.find(name) for name in arguments.name] or list(catalog.models.values())
    here = {  # why each is not here; empty where it is
        model.name: ""
        if model.name == "cpu"
        else why_absent(model.name, machine=machine, catalog=catalog, families=known)
        for model in models
    }
    if arguments.json:
        print_json(
            {"here": machine.name, "platforms": [{**to_json(model), "absent": here[model.name]} for model in models]}
        )
        return EXIT_OK
    for model in models:
        print_lines([*_model_lines(model, here[model.name]), ""])
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
    for name, peak in peaks.items():
        if peak:
            kind = "" if peak.kind == "published" else f", {peak.kind}"
            yield f"  {name:16} {peak.value:>8g} {peak.unit:6}  {peak.source}{kind}"
    if not any(peaks.values()):
        yield "  no peaks"
    if model.native:
        yield f"  native without a published peak: {', '.join(model.native)}"
    for note in model.notes:
        yield f"  note: {note}"


COMMAND = Command(
    name="platforms",
    help="print the known device models with their peaks and sources, and which of them is here",
    arguments=_platforms_arguments,
    run=_platforms,
)
