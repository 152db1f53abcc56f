"""The gate where telemetry disturbs: own ranks never do, and unusable stored runs are reported with a reason."""

import os

import pytest

from perfsuite.base.errors import RanksFailed
from perfsuite.baselines.baseline import REFERENCE_MOST, first_runs, is_complete
from perfsuite.baselines.runs import why_unusable
from perfsuite.plugin import gating
from test_correctness.helpers import fake_nvml
from test_correctness.helpers.local_driver import ONCE, ROOT, job, local_driver
from test_correctness.helpers.scripted_driver import repository
from test_correctness.helpers.simmusa_ranks import require_built
from test_correctness.helpers.stored_files import run_of

SHARED = "device 0 is shared with 1 other process"
TEST = """
def test_it(perf):
    perf(Product())
"""


@pytest.fixture
def disturbed(monkeypatch):
    """Says after every run what the telemetry of a device would say; nothing at first."""
    said = [""]
    monkeypatch.setattr(gating, "telemetry_of", lambda suite: lambda: said[0])
    return said


def test_update_and_gate_say_that_no_stored_run_is_usable_and_why(pytester, monkeypatch, disturbed):
    there = repository(pytester, monkeypatch, TEST)
    disturbed[0] = SHARED
    told = f"5 stored, none usable: {SHARED}"
    there.run("--perf-update=append", "--perf-runs=5").stdout.fnmatch_lines([f"*test_it[[]cpu[]]: {told}*"])
    gated = there.run("--perf-gate")
    assert 4 == gated.ret
    gated.stderr.fnmatch_lines([f"*none of 1 case has 5 usable stored runs in *.json; {told}; stop the disturb*"])


def test_a_reference_takes_disturbed_runs_only_where_there_are_no_others():
    bad = [run_of(number=number, disturbance=SHARED) for number in range(20)]
    good = [run_of(number=number) for number in range(20, 25)]
    sessions = {each.session: each.session for each in (*bad, *good)}
    assert tuple(bad[:REFERENCE_MOST]) == first_runs(bad, sessions)
    assert not is_complete(bad, sessions)
    assert tuple(good) == first_runs([*bad, *good], sessions)


def test_why_runs_are_unusable_has_the_most_frequent_reason():
    reasons = ["", "unknown", "device 0 is throttled (thermal)", SHARED, SHARED]
    runs = [run_of(number=number, disturbance=reason) for number, reason in enumerate(reasons)]
    assert f"5 stored, 2 usable: {SHARED}" == why_unusable(runs)
    assert "" == why_unusable(runs[:2])


def _idle(rank):
    return lambda: None


def _dies(rank):
    return lambda: os._exit(3)


def test_the_driver_counts_rank_processes_by_device(tmp_path):
    with local_driver(tmp_path) as driver:
        assert {} == driver.contexts()
        for ranks in (2, 1):  # the second rank's process stays, and stays on its device
            driver.run(job(_idle, ranks, budget=ONCE))
            assert {0: 2} == driver.contexts()
        with pytest.raises(RanksFailed):
            driver.run(job(_dies, 2, budget=ONCE))
        assert {0: 2} == driver.contexts()  # they may be listed for a while
        driver.run(job(_idle, budget=ONCE))
        assert {0: 1} == driver.contexts()


REAL = """
from perfsuite.workloads.matmul import Matmul
def test_it(perf):
    perf(Matmul(m=64, k=64, n=64))
"""
TRIALS = 5


@pytest.mark.slow
@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize("strangers", [0, 1], ids=["no stranger", "a stranger"])
def test_a_container_can_gate_unless_a_stranger_is_on_its_device(pytester, monkeypatch, strangers):
    require_built()
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PERFSUITE_FAMILIES", fake_nvml.FAMILY)
    monkeypatch.setenv("SIMMUSA_DEVICES", "1")
    monkeypatch.setenv("SIMMUSA_THROTTLE", "power cap")
    monkeypatch.setenv("SIMMUSA_SHARED", str(pytester.path / "processes"))
    monkeypatch.setenv("SIMMUSA_NAMESPACE", "4000000")
    monkeypatch.setenv("SIMMUSA_STRANGERS", str(strangers))
    pytester.makeconftest('pytest_plugins = ["perfsuite.plugin"]')
    pytester.makeini("[pytest]\naddopts = --import-mode=importlib -p no:cacheprovider\n")
    pytester.makepyfile(REAL)
    options = ("--perf-platform=simmusa", "--benchmark-max-time=0.001")
    for trial in range(1 if strangers else TRIALS):
        here = (*options, "-o", f"perf_simulated_baselines=baselines{trial}")
        assert 0 == pytester.runpytest_subprocess(*here, "--perf-update=append", "--perf-runs=5").ret
        done = pytester.runpytest_subprocess(*here, "--perf-gate")
        assert (4 if strangers else 0) == done.ret
        if strangers:
            done.stderr.fnmatch_lines([f"*5 stored, none usable: {SHARED}*"])
