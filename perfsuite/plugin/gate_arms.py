"""What a gated run measures beside itself: the base, the commits that stored runs name, the devices' telemetry."""

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
    """Return how to run the base that --perf-against names; ``trees`` removes the work trees that are made for it.

    Raises PerfsuiteError where the base cannot be checked out.
    """
    session, given, root = suite.session, options.base, config.rootpath
    assert session is not None
    assert given is not None
    python = shutil.which(given) if "/" in given else None
    if python:
        base = Arm(name=f"base ({given})", root=root, interpreter=python)
    else:
        base = trees.enter_context(arm_of(root, given, f"base ({given})"))
    return Base(
        base=base,
        new=Arm(name="new code", root=root),
        arguments=shared_arguments(config),
        case_deadline_s=lambda case: session.deadline_s(case) + suite.settings.budget.asked_s,
        commit="" if python else stamp(revision_of(base.root, options.folder)),
        anchor=lambda commit: trees.enter_context(arm_of(root, commit, f"stored commit ({commit[:10]})")),
    )


def shared_arguments(config: pytest.Config) -> tuple[str, ...]:
    """Options of this run that decide what and how long is measured; the arms of an A/B get the same."""
    option = functools.partial(collisions.option, config)
    names = ["platform", "scale", "timeout", "backend", "world-sizes", "warmup", "sustain"]
    flags = [*(f"perf-{name}" for name in names), "benchmark-max-time", "benchmark-min-rounds"]
    values = {flag: option(flag.replace("-", "_")) for flag in flags}
    given = [f"--{flag}={value}" for flag, value in values.items() if value is not None]
    if option("perf_pin") != "none":  # its default, which an older base may not know
        given.append(f"--perf-pin={option('perf_pin')}")
    if option("perf_shapes") is not None:
        given.append(f"--perf-shapes={config.invocation_params.dir / option('perf_shapes')}")
    given += [f"--perf-{name}" for name in ("oversubscribe", "cache-flush") if option(f"perf_{name.replace('-', '_')}")]
    return tuple(given)


def telemetry_of(suite: Suite) -> Callable[[], str]:
    """Return a function that reads the devices; it says ``unknown`` where an accelerator's cannot be read."""
    family, session = suite.machine.family, suite.session
    telemetry = family.telemetry()

    def word() -> str:
        readings = telemetry.read()
        # Hundreds of files after each case, thousands on a large host: only for whom they matter.
        if session is not None and any(reading.processes for reading in readings):
            said = disturbance(readings, family_of_processes(suite.own_processes()), session.driver.contexts())
        else:
            said = disturbance(readings)
        unread = family.name != "cpu" and all(reading.throttle is None for reading in readings)
        return said or (TELEMETRY_UNKNOWN if unread else "")

    return word
