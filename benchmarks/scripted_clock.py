"""A CPU whose clock moves only where the code under test moves it: what real processes time, no load decides.

``PERFSUITE_FAMILIES=scripted=benchmarks.scripted_clock:Scripted`` with perfsuite's checkout on PYTHONPATH makes it a
platform of any pytest run; a step that takes t seconds adds 1e9 t to ``NOW_NS[0]``.  ``counted`` is no simulated
device and counts context switches by a script too: each sample has one where the variable SWITCHED_OUT is set, else
none has.
"""

from __future__ import annotations

import itertools
import os

from perfsuite.platforms.cpu import Cpu, CpuDevice, PerfCounterClock
from perfsuite.runtime.ranks import timer

SWITCHED_OUT = "SWITCHED_OUT"
VARIABLES = {
    "PERFSUITE_FAMILIES": "scripted=benchmarks.scripted_clock:Scripted,counted=benchmarks.scripted_clock:Counted"
}
NOW_NS = [0]
"""The time of this process."""


class ScriptedClock(PerfCounterClock):
    """Every look takes a microsecond."""

    def stamp(self) -> int:
        NOW_NS[0] += 1000
        return NOW_NS[0]


class ScriptedDevice(CpuDevice):
    """Rank side."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ScriptedClock()


class Scripted(Cpu):
    """Driver side: simulated, so that no time of it meets a real one."""

    name = "scripted"
    stands_for = "cpu"
    simulated = True
    device_code = "benchmarks.scripted_clock:ScriptedDevice"


class CountedDevice(ScriptedDevice):
    """Rank side; the process is this device's alone."""

    def __init__(self) -> None:
        super().__init__()
        timer._involuntary_switches = itertools.count().__next__ if os.environ.get(SWITCHED_OUT) else int
        timer.waits_for_cores = lambda: None  # they are of this machine, and the clock is not


class Counted(Scripted):
    """Driver side: its samples are clean or not, as those of a simulated device never are."""

    name = "counted"
    simulated = False
    device_code = "benchmarks.scripted_clock:CountedDevice"
