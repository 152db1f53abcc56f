"""Looks at the devices while a case is timed: when they are taken, what is kept, what a reader is told."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from perfsuite.platforms.telemetry import Reading
from perfsuite.record.step import DeviceLook
from perfsuite.record.workload import Budget
from perfsuite.reports.devices import sustained_lines, throttled_lines
from perfsuite.runtime.assembly import Deadline, DeviceWatch
from perfsuite.runtime.protocol import TIMING
from perfsuite.runtime.ranks.timer import Timer
from test_correctness.test_metrics import measured


class Falling:
    """A device that is held down from the third look on."""

    def __init__(self):
        self.looks = 0

    def read(self):
        self.looks += 1
        held = self.looks > 2
        seen = {"clock_mhz": 1200.0, "throttle": ("power cap",)} if held else {"clock_mhz": 1980.0, "throttle": ()}
        return Reading(index=0, **seen), Reading(index=1)


def watched(phases_by_time):
    clock, telemetry = SimpleNamespace(now_s=0.0), Falling()
    watch = DeviceWatch(telemetry, now=lambda: clock.now_s)
    for clock.now_s, phases in phases_by_time:
        watch.tick(phases)
    return watch.looks, telemetry.looks


def test_it_looks_while_ranks_are_timing_and_not_more_often_than_there_is_to_see():
    timing = [TIMING, "checking before timing"]
    timed = [(at_s, timing) for at_s in (10.0, 10.1, 10.5, 11.0)]
    looks, asked = watched([(9.0, ["building"]), *timed, (11.5, ["checking after"])])
    assert 3 == asked
    assert [0.0, 0.5, 1.0] == [look.at_s for look in looks if look.device == 0]
    assert [(), (), ("power cap",)] == [look.throttle for look in looks if look.device == 0]
    assert [None] * 3 == [look.throttle for look in looks if look.device == 1]


def result(looks, times=(1.0, 1.0, 1.0, 1.1, 1.1, 1.1)):
    measurement = replace(measured(1.0), times_s=times, involuntary_switches=(), looks=looks)
    return SimpleNamespace(case="t.py::test_x", measurement=measurement)


def test_a_device_that_was_held_down_while_it_was_timed_is_named():
    looks, _ = watched([(float(second), [TIMING]) for second in range(4)])
    (line,) = throttled_lines([result(tuple(looks))])
    assert line == (
        "t.py::test_x: device 0 was held down (power cap) in 2 of 4 looks while it was timed, "
        "clock 1980 to 1200 MHz (lowest 1200, highest 1980)"
    )
    unknown = tuple(look for look in looks if look.device == 1)
    assert [] == throttled_lines([result(unknown)])  # unknown is not held down


def test_a_sustained_run_says_how_its_end_differs_from_its_beginning():
    looks = tuple(DeviceLook(device=0, at_s=float(at), power_w=600.0 + at, temperature_c=50.0 + at) for at in range(3))
    first, device = sustained_lines([result(looks)])
    assert first == "t.py::test_x: 6 samples, median of the first third 1 s, of the last 1.1 s (+10.0%)"
    told = "power 600 to 602 W (lowest 600, highest 602), temperature 50 to 52 °C (lowest 50, highest 52)"
    assert device == f"  device 0, {told}"
    assert "nothing can be read" in sustained_lines([result((DeviceLook(device=0, at_s=0.0),))])[1]


@pytest.mark.parametrize(("elapsed_s", "taken", "enough"), [(5.0, 9, False), (15.0, 9, True), (15.0, 2, False)])
def test_a_sustained_run_goes_on_for_its_time_whatever_else_would_end_it(elapsed_s, taken, enough):
    budget = Budget(min_rounds=5, max_rounds=8, max_time_s=0.1, sustain_s=15.0)
    member = SimpleNamespace(code=SimpleNamespace(clock=None))
    timer = Timer(member, budget, spans=None, aligned=True)  # type: ignore[arg-type]
    timer._shared_elapsed_s = elapsed_s
    assert enough == timer._enough(taken)


def test_a_deadline_does_not_count_time_in_which_the_driver_was_stopped():
    now = [100.0]
    deadline = Deadline(10.0, now=lambda: now[0])
    for _ in range(8):
        now[0] += 0.5
        left_s = deadline.left_s()
    assert left_s == 6.0
    now[0] += 3600.0  # Ctrl-Z, and fg an hour later
    assert deadline.left_s() == 6.0
    now[0] += 0.5
    deadline.shorten(2.0)
    assert deadline.left_s() == 2.0
    deadline.shorten(60.0)
    now[0] += 2.5
    assert deadline.left_s() == -0.5


def test_a_driver_that_is_held_up_again_and_again_comes_to_its_deadline():
    now = [100.0]
    deadline = Deadline(10.0, now=lambda: now[0])
    turns = 0
    while deadline.left_s() > 0:
        now[0] += 4.0
        turns += 1
    assert turns == 6
