"""``perfsuite env``: the fingerprint and the environment that a run on this machine records."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from perfsuite.base.errors import ConfigurationError, PerfsuiteError
from perfsuite.cli.command import EXIT_OK, Command, platform_arguments, print_json, print_lines
from perfsuite.platforms import Fingerprint, Host, Machine, detect_machine, fingerprint, load_catalog, read_environment
from perfsuite.platforms.environment import installed_torch, require_torch
from perfsuite.record.codec import to_json

_SHOWN_APART = ("declared", "topology", "worker")
"""Fields of an environment that need lines of their own, or ranks: no rank runs here."""


def _env_arguments(parser: argparse.ArgumentParser) -> None:
    platform_arguments(parser)
    parser.add_argument("--platform", metavar="NAME", help="this platform instead of the one found")


def _env(arguments: argparse.Namespace) -> int:
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
        yield "declared: nothing; a platform file's [environment] says what no tool can tell (docs/add-a-platform.md)"
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


COMMAND = Command(
    name="env",
    help="print the fingerprint and the environment that a run on this machine records",
    arguments=_env_arguments,
    run=_env,
)
