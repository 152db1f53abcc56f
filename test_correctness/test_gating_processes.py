"""The gate in whole pytest runs with real rank processes, on a device whose clock the case moves: no load decides."""

from __future__ import annotations

import textwrap

pytest_plugins = ["pytester"]

FAMILY = """
    import random
    import os
    from perfsuite.platforms.clocks import PerfCounterClock
    from perfsuite.platforms.cpu import Cpu, CpuDevice

    NOW_NS = [0]

    class ScriptedClock(PerfCounterClock):
        def stamp(self):
            NOW_NS[0] += 1000
            return NOW_NS[0]

    class ScriptedDevice(CpuDevice):
        def __init__(self):
            super().__init__()
            self.clock = ScriptedClock()

    class Scripted(Cpu):
        name = "scripted"
        stands_for = "cpu"
        simulated = True
        device_code = "scripted:ScriptedDevice"

    def lasting(rank, number=0):
        slow = float(os.environ.get("SLOW", "1")) if number == 1 else 1.0
        run_ns = 20e6 * slow * random.uniform(0.998, 1.002)  # bounded: no draw is far from the others

        def step():
            NOW_NS[0] += round(run_ns * random.uniform(0.998, 1.002))

        return step
"""
REAL = """
    import pytest
    from scripted import lasting

    @pytest.mark.parametrize("number", range(2))
    def test_lasting(perf, number):
        perf(lasting, number=number)
"""


def test_a_real_case_slowed_twofold_is_caught(pytester, pytestconfig, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(pytestconfig.rootpath))
    monkeypatch.setenv("PERFSUITE_FAMILIES", "scripted=scripted:Scripted")
    monkeypatch.syspath_prepend(pytester.path)
    options = "--benchmark-max-time=0.1 --perf-platform=scripted -p no:hypothesispytest -p no:cacheprovider"
    pytester.makeini(f"[pytest]\npythonpath = .\naddopts = {options}\n")
    pytester.makeconftest('pytest_plugins = ["perfsuite.plugin"]')
    pytester.makepyfile(scripted=textwrap.dedent(FAMILY), test_suite=textwrap.dedent(REAL))
    pytester.runpytest_subprocess("--perf-update=append", "--perf-runs=6").assert_outcomes(passed=2)
    pytester.runpytest_subprocess("--perf-gate").assert_outcomes(passed=2)
    monkeypatch.setenv("SLOW", "2")
    slowed = pytester.runpytest_subprocess("--perf-gate")
    slowed.assert_outcomes(passed=1, failed=1)
    slowed.stdout.fnmatch_lines(["REGRESSED *test_lasting[[]scripted-1[]]*"])
