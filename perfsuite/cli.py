"""The command line beside pytest: ``perfsuite env``, ``perfsuite platforms``, ...

``COMMANDS`` lists the subcommands (see :mod:`perfsuite.command`) in the order of ``perfsuite --help``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from perfsuite import ab, cli_audit, cli_baselines, cli_report, cli_schedule, cli_trace
from perfsuite.command import EXIT_OK, EXIT_USAGE, Command
from perfsuite.errors import PerfsuiteError
from perfsuite.platforms import (
    Catalog,
    DeviceModel,
    Family,
    Fingerprint,
    Host,
    Machine,
    detect_machine,
    families,
    fingerprint,
    load_catalog,
    read_environment,
    why_absent,
)
from perfsuite.records import Peak, to_json

_SHOWN_APART = ("declared", "topology", "worker")
"""Fields of an environment that need lines of their own, or ranks: no rank runs here."""
_EPILOG = (
    "exit codes: 0 done; 4 wrong usage or configuration (as pytest's), with one line on stderr that says what to do"
)


class _Parser(argparse.ArgumentParser):
    """argparse with our exit code for wrong usage."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; the exit code."""
    parser = _Parser(prog="perfsuite", description="What pytest does not do for perfsuite.", epilog=_EPILOG)
    subcommands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        sub = subcommands.add_parser(command.name, help=command.help, description=command.help, epilog=_EPILOG)
        command.arguments(sub)
        sub.set_defaults(run=command.run)
    arguments = parser.parse_args(argv)
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()  # a closed pipe must show here, not at exit
        return code
    except PerfsuiteError as error:
        print(f"perfsuite: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except BrokenPipeError:  # perfsuite env | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK


def _platform_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of every subcommand that prints something about platforms."""
    parser.add_argument(
        "--platform-file",
        action="append",
        default=[],
        metavar="FILE",
        help="TOML file with rows and an [environment] of your own, as in the ini key perf_platforms; repeatable",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def _env_arguments(parser: argparse.ArgumentParser) -> None:
    _platform_arguments(parser)
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
        _print_json({"platform": machine.name, "fingerprint": to_json(key), "environment": environment})
    else:
        print("\n".join(_env_lines(machine, key, environment)))
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
            yield from (f"  {name if first else '':{width}}  {line}" for first, line in _first_of(lines))


def _first_of(lines: list[str]) -> Iterator[tuple[bool, str]]:
    return ((index == 0, line) for index, line in enumerate(lines))


def _platforms_arguments(parser: argparse.ArgumentParser) -> None:
    _platform_arguments(parser)
    parser.add_argument("name", nargs="*", metavar="NAME", help="only these platforms")


def _platforms(arguments: argparse.Namespace) -> int:
    """Every row with its peaks and where they stand, and which of them is here."""
    catalog = load_catalog(arguments.platform_file)
    known = families(Host())
    machine = detect_machine(catalog, families=known)
    models = [catalog.find(name) for name in arguments.name] or list(catalog.models.values())
    here = {model.name: _absence(model, machine, catalog, known) for model in models}
    if arguments.json:
        _print_json(
            {"here": machine.name, "platforms": [{**to_json(model), "absent": here[model.name]} for model in models]}
        )
        return EXIT_OK
    for model in models:
        print("\n".join([*_model_lines(model, here[model.name]), ""]))
    remarks = "; ".join(machine.remarks())
    print(f"this machine: {machine}{f'; {remarks}' if remarks else ''}")
    return EXIT_OK


def _absence(model: DeviceModel, machine: Machine, catalog: Catalog, known: Mapping[str, Family]) -> str:
    """Why the platform is not here; empty when it is."""
    if model.name == "cpu":
        return ""
    return why_absent(model.name, machine=machine, catalog=catalog, families=known)


def _model_lines(model: DeviceModel, absent: str) -> Iterator[str]:
    yield f"{model.name} ({model.family}): {absent or f'{model.title}, here'}"
    peaks: dict[str, Peak | None] = {
        **model.tflops,
        "memory": model.memory,
        "memory_bandwidth": model.memory_bandwidth,
        "link": model.link,
        "host_link": model.host_link,
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


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


COMMANDS: tuple[Command, ...] = (
    Command(
        name="env",
        help="print the fingerprint and the environment that a run on this machine records",
        arguments=_env_arguments,
        run=_env,
    ),
    Command(
        name="platforms",
        help="print the known device models with their peaks and sources, and which of them is here",
        arguments=_platforms_arguments,
        run=_platforms,
    ),
    cli_baselines.COMMAND,
    cli_audit.COMMAND,
    cli_schedule.COMMAND,
    cli_trace.COMMAND,
    ab.COMMAND,
    cli_report.COMMAND,
)


if __name__ == "__main__":
    sys.exit(main())
