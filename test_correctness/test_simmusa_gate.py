"""The gate on simulated devices: a slower operation is found, jitter is not, real and simulated never meet."""

from __future__ import annotations

import dataclasses

import pytest

from perfsuite.base.errors import ConfigurationError
from perfsuite.baselines.baseline import Hardware
from perfsuite.platforms import Host, detect_machine, families, fingerprint, load_catalog
from perfsuite.record.verdict import GateSettings
from perfsuite.run.gatekeeper import Gatekeeper, hardware_of
from perfsuite.workloads.matmul import Matmul
from perfsuite.workloads.memory_bandwidth import MemoryCopy, MemoryTriad
from simmusa.costs import Costs
from test_correctness.helpers.scripted_driver import repository
from test_correctness.helpers.simmusa_ranks import (
    FAMILY,
    KERNELS,
    QUICK,
    OneProcess,
    SetCosts,
    measure_on,
    opened,
    require_built,
)

PRICES = Costs(kernel_ns=6_000_000, flops_per_s={"fp32": 1e9}, bytes_per_s=1e7, jitter=0.002)
"""Kernels that take so long that one of them is a sample."""
STORED_SESSIONS = 5


def cases(count):
    """A fifth of them products, twice as many copies, as many triads."""
    found = {}
    for index in range(count // 5):
        found[f"test_matmul[s4000-{index}]"] = Matmul(m=32 + index, k=32, n=32)
    for index in range(2 * count // 5):
        found[f"test_copy[s4000-{index}]"] = MemoryCopy(buffer_bytes=4096 * (index + 1))
        found[f"test_triad[s4000-{index}]"] = MemoryTriad(buffer_bytes=4096 * (index + 1))
    return found


class Simulated:
    """Sessions of the same cases in one rank that lives on."""

    def __init__(self, session, folder, count):
        self.session, self.folder, self.count = session, folder, count
        process = OneProcess(session.driver)
        self.session._driver = process
        self.hardware: Hardware = hardware_of(fingerprint(session.machine), session.machine.name, True)

    def run(self, number, *, slow=None, settings=None):
        """One session's results, taken in by a gate."""
        self.session.id = f"session{number}"
        costs = dataclasses.replace(PRICES, seed=number, slow=slow or {})
        measure_on(self.session, SetCosts(costs=costs.as_dict()), 1)
        keeper = Gatekeeper(
            session=self.session,
            settings=settings or GateSettings(yardstick=False),
            hardware=self.hardware,
            folder=self.folder,
            backend="mccl",
            boot=f"boot{number}",  # a session of the machine of its own
        )
        for name, workload in cases(self.count).items():
            keeper.take(measure_on(self.session, workload, 1, budget=QUICK, name=f"test_x.py::{name}"), (None, {}))
        return keeper


@pytest.fixture(scope="module")
def simulated(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("baselines")
    with opened(PRICES, tmp_path_factory.mktemp("ranks"), KERNELS) as session:
        made = Simulated(session, folder, request.param)
        for number in range(STORED_SESSIONS):
            keeper = made.run(number)
            keeper.settle(silent)
            assert {} == keeper.update("append", "", 1).refused
        yield made


def silent(text, *, always=False):
    """Tell nobody."""


def verdicts(keeper):
    return {node.partition("::")[2]: verdict.name for node, verdict in keeper.settle(silent).items()}


@pytest.mark.slow
@pytest.mark.parametrize("simulated", [200], indirect=True)
def test_an_unchanged_run_with_other_jitter_changes_no_verdict_of_200_cases(simulated):
    found = verdicts(simulated.run(100))
    assert 200 == len(found)
    assert {} == {name: verdict for name, verdict in found.items() if verdict != "pass"}


@pytest.mark.parametrize(
    "simulated",
    [pytest.param(200, marks=pytest.mark.slow), pytest.param(50, marks=pytest.mark.extended)],
    indirect=True,
)
def test_three_per_cent_in_one_operation_are_found_and_named(simulated):
    settings = GateSettings(yardstick=False, tolerance=0.01)
    found = verdicts(simulated.run(101, slow={"aten::mm": 1.03}, settings=settings))
    slowed = {name for name in found if name.startswith("test_matmul")}
    assert (simulated.count, simulated.count // 5) == (len(found), len(slowed))
    assert slowed == {name for name, verdict in found.items() if verdict == "regressed"}
    assert {"pass"} == {verdict for name, verdict in found.items() if name not in slowed}


# -- simulated and real ------------------------------------------------------------------------------------------

TEST = """
def test_it(perf):
    perf(Product())
"""


@pytest.fixture
def simulating(monkeypatch):
    require_built()
    monkeypatch.setenv("PERFSUITE_FAMILIES", FAMILY)


def test_baselines_of_simulated_devices_have_a_folder_of_their_own(simulating, pytester, monkeypatch):
    there = repository(pytester, monkeypatch, TEST)
    done = there.run("--perf-platform=simmusa", "--perf-update=append", "-k", "s4000", "-v")
    done.assert_outcomes(passed=1)
    done.stdout.fnmatch_lines(["*warning: the devices are simulated: no time here is a measurement"])
    (stored,) = pytester.path.rglob("simulated-s4000-8x-*.json")
    assert pytester.path / ".perfsuite" / "simulated-baselines" / "s4000" == stored.parent
    assert not (pytester.path / "baselines").exists()


def test_the_folder_of_real_baselines_is_refused(simulating, pytester, monkeypatch):
    there = repository(pytester, monkeypatch, TEST)
    done = there.run("--perf-platform=simmusa", "--perf-baselines=baselines")
    assert 4 == done.ret
    done.stderr.fnmatch_lines(["*baselines is the folder of real baselines and this session's devices are simulated;*"])


def test_a_simulated_device_bears_the_name_of_what_it_stands_for(simulating):
    machine = detect_machine(load_catalog(), "simmusa", families=families(Host()))
    assert ("s4000", "simmusa", 8, True) == (machine.name, machine.family.name, machine.device_count, machine.simulated)
    assert "cpu" == detect_machine(load_catalog()).name  # never found by itself
    assert "small" == machine.scale
    assert "s4000 (8 x MTT S4000, simulated)" == str(machine)


def test_a_family_is_named_by_a_path(monkeypatch):
    monkeypatch.setenv("PERFSUITE_FAMILIES", "simmusa")
    with pytest.raises(ConfigurationError, match="PERFSUITE_FAMILIES: 'simmusa' is not name=module:Class; write one"):
        families()


def test_without_a_compiler_every_case_says_so(pytester, monkeypatch, tmp_path):
    monkeypatch.setenv("PERFSUITE_FAMILIES", FAMILY)
    monkeypatch.setenv("SIMMUSA_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    there = repository(pytester, monkeypatch, TEST)
    done = there.run("--perf-platform=simmusa", "-rs")
    done.assert_outcomes(skipped=1)
    told = "*simmusa needs a C++ compiler and 'no-such-compiler' is not found; install g++ or set CXX*"
    done.stdout.fnmatch_lines([told])
