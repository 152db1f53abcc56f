"""Check the options of the gate and of the baselines; read them once into frozen :class:`GateOptions`."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import pytest

from perfsuite.base.errors import ConfigurationError
from perfsuite.base.units import parse_duration
from perfsuite.plugin import collisions
from perfsuite.plugin.options import UPDATE_MODES, runs_tests, settings_key
from perfsuite.record.verdict import FAILING, GateSettings

if TYPE_CHECKING:
    from perfsuite.baselines.draft import UpdateMode
    from perfsuite.record.verdict import VerdictName
    from perfsuite.run.gatekeeper import Tolerances

UNCOVERED: frozenset[VerdictName] = frozenset({"no-baseline", "not-comparable", "learning"})
"""Verdicts of cases that were not compared."""
FAIL_ON_CHOICES: frozenset[VerdictName] = FAILING | UNCOVERED | {"inconclusive", "unstable-host", "improved"}
MARKER = "perf_tolerance"


@dataclass(frozen=True, kw_only=True)
class GateOptions:
    """The use of baselines in this run."""

    gate: bool  # Whether regressions fail their case.
    base: str | None  # Revision or interpreter of the A/B that confirms suspects.
    fail_on: frozenset[VerdictName]  # Verdicts that fail their case, and the session if the suite has them.
    allow_ungated: bool
    update: UpdateMode | None
    reason: str
    runs: int  # Fresh runs of each case in this session.
    budget_s: float | None
    """Seconds of the gate after the first run of every case; None: the default, infinite: no limit."""
    folder: Path  # Baselines of real devices.
    simulated_folder: Path  # Baselines of simulated devices.
    folder_of_real: Path  # Baselines of real devices without --perf-baselines.
    links: bool  # Whether a baseline file may be a symbolic link out of its folder.
    settings: GateSettings

    def folder_for(self, *, simulated: bool) -> Path:
        """Return the folder of this session's baselines.

        Raises ConfigurationError if real and simulated baselines would be in one folder.
        """
        if simulated and self.simulated_folder.resolve() == self.folder_of_real.resolve():
            raise ConfigurationError(
                f"{self.simulated_folder} is the folder of real baselines and this session's devices are simulated; "
                "leave --perf-baselines out, or give another folder"
            )
        return self.simulated_folder if simulated else self.folder

    @property
    def fresh(self) -> bool:
        """Whether every run must use new processes, because it counts as evidence."""
        return self.gate or self.update is not None or self.runs > 1


gate_options_key = pytest.StashKey[GateOptions]()


def configure(config: pytest.Config) -> None:
    """Check the options and keep them in the stash; runs that count as evidence change perfsuite's other settings."""
    config.addinivalue_line(
        "markers", f"{MARKER}(time, **metrics): accepted slowdown, e.g. {MARKER}(0.05, busbw_gb_per_s=0.1)"
    )
    options = config.stash[gate_options_key] = _read(config)
    if options.fresh:
        settings = config.stash[settings_key]
        budget = replace(settings.budget, yardstick=True)
        config.stash[settings_key] = replace(settings, fresh=True, budget=budget)


def _read(config: pytest.Config) -> GateOptions:
    option, ini = (functools.partial(read, config) for read in (collisions.option, collisions.ini))
    mode, reason = _update_of(config)
    if option("perf_runs") < 1:
        raise pytest.UsageError(f"--perf-runs: {option('perf_runs')} is not a number of runs; give at least 1")
    for name in ("perf_against", "perf_base", "perf_fail_on", "perf_require_baseline", "perf_allow_ungated"):
        if option(name) and not option("perf_gate"):
            raise pytest.UsageError(f"--{name.replace('_', '-')} is an option of the gate; give --perf-gate with it")
    smoke = option("benchmark_disable") and not option("benchmark_enable")
    if smoke and (option("perf_gate") or mode or option("perf_expect") is not None or option("perf_history")):
        raise pytest.UsageError(
            "--benchmark-disable measures nothing, but a gate, an update, expectations or a history need measurements; "
            "leave it out"
        )
    return GateOptions(
        gate=option("perf_gate"),
        base=_against(config),
        fail_on=_fail_on(config),
        allow_ungated=option("perf_allow_ungated"),
        update=mode,
        reason=reason,
        runs=option("perf_runs"),
        budget_s=_budget(config),
        folder=config.rootpath / (option("perf_baselines") or ini("perf_baselines")),
        simulated_folder=config.rootpath / (option("perf_baselines") or ini("perf_simulated_baselines")),
        folder_of_real=config.rootpath / ini("perf_baselines"),
        links=ini("perf_baselines_links"),
        settings=GateSettings(
            tolerance=_tolerance(ini("perf_tolerance"), "ini perf_tolerance"),
            remeasure=option("perf_gate") or mode is not None,
        ),
    )


def _against(config: pytest.Config) -> str | None:
    new: str | None = collisions.option(config, "perf_against")
    old: str | None = collisions.option(config, "perf_base")
    if new and old and new != old:
        raise pytest.UsageError(
            f"--perf-against={new} and --perf-base={old} are two names of one option; leave --perf-base out"
        )
    return new or old


def _update_of(config: pytest.Config) -> tuple[UpdateMode | None, str]:
    mode, accepts, reason = (collisions.option(config, f"perf_{name}") for name in ("update", "accept", "reason"))
    if mode not in (None, *UPDATE_MODES):
        raise pytest.UsageError(f"--perf-update: {mode!r} is not a mode; choose {', '.join(UPDATE_MODES)}")
    if accepts not in (None, "environment", "all"):
        raise pytest.UsageError(f"--perf-accept: {accepts!r} is not valid; write environment or all")
    if accepts and mode:
        raise pytest.UsageError(
            f"--perf-accept={accepts} stores this session's runs by itself; leave --perf-update={mode} out"
        )
    if (mode == "accept" or accepts) and not reason.strip():
        option = f"--perf-accept={accepts}" if accepts else "--perf-update=accept"
        raise pytest.UsageError(f"{option} replaces stored runs and needs a reason; add --perf-reason=TEXT")
    if reason and mode != "accept" and not accepts:
        raise pytest.UsageError("--perf-reason is for --perf-accept; leave it out, or add --perf-accept=all")
    return cast("UpdateMode | None", "accept" if accepts == "all" else accepts or mode), reason


def _fail_on(config: pytest.Config) -> frozenset[VerdictName]:
    option = collisions.option(config, "perf_fail_on")
    where = "--perf-fail-on" if option is not None else "ini perf_fail_on"
    written = option if option is not None else collisions.ini(config, "perf_fail_on")
    names = [name.strip() for name in written.split(",") if name.strip()]
    for name in names:
        if name not in (*FAIL_ON_CHOICES, "default"):
            choices = ("default", *sorted(FAIL_ON_CHOICES))
            raise pytest.UsageError(f"{where}: {name!r} is not a verdict that can fail; choose {', '.join(choices)}")
    if not names:
        raise pytest.UsageError(f"{where} has no verdict, so nothing could fail; leave --perf-gate out instead")
    chosen = frozenset(cast("VerdictName", name) for name in names if name != "default")
    default = FAILING if "default" in names else frozenset()
    uncovered = UNCOVERED if collisions.option(config, "perf_require_baseline") else frozenset()
    accepted = {collisions.option(config, "perf_accept")}
    return (chosen | default | uncovered) - accepted


def _budget(config: pytest.Config) -> float | None:
    option = functools.partial(collisions.option, config)
    asked = option("perf_gate_budget")
    where = "--perf-gate-budget" if asked is not None else "ini perf_gate_budget"
    written = (asked if asked is not None else collisions.ini(config, "perf_gate_budget")).strip()
    if asked is not None and not (option("perf_gate") or option("perf_update")):
        raise pytest.UsageError(f"{where} limits repeated runs of the gate; give --perf-gate or --perf-update with it")
    if not written and asked is None:
        return None
    if written == "none":
        return math.inf
    try:
        seconds = parse_duration(written)
    except ConfigurationError:
        seconds = 0.0
    if seconds <= 0:
        raise pytest.UsageError(
            f"{where}: {written!r} is not a duration above 0; write seconds such as 300, 10min, or none for no limit"
        )
    return seconds


_NEEDS_CASES: Mapping[str, str] = MappingProxyType(
    {
        "--perf-gate": "compared",
        "--perf-expect": "judged",
        "--perf-update": "stored",
        "--perf-accept": "stored",
        "--perf-expect-devices": "checked",
        "--perf-project": "projected",
        **dict.fromkeys(
            ("--perf-history", "--perf-html", "--perf-journal", "--perf-report", "--perf-summary", "--perf-trace"),
            "written",
        ),
    }
)
"""The missing result of each option without a perf case."""


def asked_on_the_command_line(config: pytest.Config) -> list[str]:
    """Return the options of perfsuite on the command line that need a perf case."""
    words = {str(argument).partition("=")[0] for argument in config.invocation_params.args}
    asked = [name for name in _NEEDS_CASES if name in words]
    return [name for name in asked if collisions.option(config, name[2:].replace("-", "_")) not in (None, False)]


def without_tests(config: pytest.Config) -> list[str]:
    """Return a line for each option on the command line that has no effect because this run starts no test."""
    asked = [] if runs_tests(config) else asked_on_the_command_line(config)
    return [f"{name}: this command runs no test, so nothing is {_NEEDS_CASES[name]}" for name in asked]


def refuse_no_cases(session: pytest.Session, cases: Sequence[pytest.Item]) -> None:
    """Raise UsageError for a check or a file on the command line if no perf case was collected.

    In ``addopts`` the options are accepted: they are used for runs of other tests too.  Without any test pytest itself
    fails.
    """
    config = session.config
    if cases or not session.items or not runs_tests(config) or hasattr(config, "workerinput"):
        return
    for name in asked_on_the_command_line(config):
        allow = {"--perf-gate": "--perf-allow-ungated", "--perf-expect": "--perf-allow-unjudged"}.get(name, "")
        if not (allow and collisions.option(config, allow[2:].replace("-", "_"))):
            raise pytest.UsageError(
                f"{name}: no selected test is a perf case, so nothing would be {_NEEDS_CASES[name]}; select perf "
                f"cases, {f'leave {name} out, or add {allow}' if allow else f'or leave {name} out'}"
            )


def tolerances_of(item: pytest.Item) -> Tolerances:
    """Return the tolerances of the ``perf_tolerance`` marker of a case.  Raises UsageError if they are not valid."""
    mark = item.get_closest_marker(MARKER)
    if mark is None:
        return None, {}
    if len(mark.args) > 1:
        raise pytest.UsageError(
            f"{item.nodeid}: marker {MARKER} takes one number for the time, and metrics by name; "
            f"write for example {MARKER}(0.05, memory=0.1)"
        )
    where = f"{item.nodeid}: marker {MARKER}"
    metrics: Mapping[str, Any] = mark.kwargs
    by_name = {name: _tolerance(value, f"{where}, {name}") for name, value in metrics.items()}
    return _tolerance(mark.args[0], where) if mark.args else None, by_name


def _tolerance(written: object, where: str) -> float:
    try:
        value = float(str(written))
    except ValueError:
        value = math.nan
    if not 0 < value < 1:
        raise pytest.UsageError(f"{where}: {written!r} is not between 0 and 1; write 0.03 for 3 %")
    try:
        GateSettings(tolerance=value)
    except ConfigurationError as error:
        raise pytest.UsageError(f"{where}: {error}") from None
    return value
