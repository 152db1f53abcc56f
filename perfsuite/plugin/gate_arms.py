"""The arms of a gated run, the base and the commits of stored runs, and the devices' telemetry."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from perfsuite.baselines.runs import TELEMETRY_UNKNOWN
from perfsuite.platforms.telemetry import disturbance, family_of_processes
from perfsuite.plugin import collisions
from perfsuite.plugin.gate_options import GateOptions
from perfsuite.plugin.revision import revision_of, stamp
from perfsuite.plugin.suite import Suite
from perfsuite.run.arms import Arm, arm_of
from perfsuite.run.settling import Base


def base_of(config: pytest.Config, suite: Suite, options: GateOptions, trees: ExitStack) -> Base:
    """Return the base of --perf-against; ``trees`` removes its work trees.

    Raises PerfsuiteError if the base cannot be checked out.
    """
    session, against, root = suite.session, options.base, config.rootpath
    assert session is not None
    assert against is not None
    python = shutil.which(against) if "/" in against else None
    if python:
        base = Arm(name=f"base ({against})", root=root, interpreter=python)
    else:
        base = trees.enter_context(arm_of(root, against, f"base ({against})"))
    return Base(
        base=base,
        new=Arm(name="new code", root=root),
        arguments=shared_arguments(config),
        case_deadline_s=lambda case: session.deadline_s(case) + suite.settings.budget.asked_s,
        commit="" if python else stamp(revision_of(base.root, options.folder)),
        anchor=lambda commit: trees.enter_context(arm_of(root, commit, f"stored commit ({commit[:10]})")),
    )


def shared_arguments(config: pytest.Config) -> tuple[str, ...]:
    """Return the options of this run that change the measurement, for the arms of an A/B."""
    option = functools.partial(collisions.option, config)
    names = ["platform", "scale", "timeout", "backend", "world-sizes", "warmup", "sustain"]
    flags = [*(f"perf-{name}" for name in names), "benchmark-max-time", "benchmark-min-rounds"]
    values = {flag: option(flag.replace("-", "_")) for flag in flags}
    words = [f"--{flag}={value}" for flag, value in values.items() if value is not None]
    if option("perf_pin") != "none":  # the default is left out for an older base without the option
        words.append(f"--perf-pin={option('perf_pin')}")
    if option("perf_shapes") is not None:
        words.append(f"--perf-shapes={config.invocation_params.dir / option('perf_shapes')}")
    words += [f"--perf-{name}" for name in ("oversubscribe", "cache-flush") if option(f"perf_{name.replace('-', '_')}")]
    return tuple(words)


def telemetry_of(suite: Suite) -> Callable[[], str]:
    """Return a function that reads the devices and returns their disturbance, ``unknown`` if it cannot be read."""
    family, session = suite.machine.family, suite.session
    telemetry = family.telemetry()

    def word() -> str:
        readings = telemetry.read()
        # Listing processes reads hundreds to thousands of files per case, so it is done only if a device has some.
        if session is not None and any(reading.processes for reading in readings):
            found = disturbance(readings, family_of_processes(suite.own_processes()), session.driver.contexts())
        else:
            found = disturbance(readings)
        unread = family.name != "cpu" and all(reading.throttle is None for reading in readings)
        return found or (TELEMETRY_UNKNOWN if unread else "")

    return word
