"""What the devices' telemetry says after each run that the gate or the baseline takes in."""

from __future__ import annotations

from collections.abc import Callable

from perfsuite.baselines.runs import TELEMETRY_UNKNOWN
from perfsuite.platforms.telemetry import disturbance, family_of_processes
from perfsuite.plugin.suite import Suite


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
