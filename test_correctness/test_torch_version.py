"""An image whose torch or Python is too old, or whose torch cannot use the device: told once, and no run is green."""

import sys
from types import SimpleNamespace

import pytest
import torch

from perfsuite.base.errors import ConfigurationError
from perfsuite.platforms import environment, families
from perfsuite.platforms.environment import require_torch
from perfsuite.record.workload import Process
from perfsuite.runtime.driver import Driver
from perfsuite.runtime.transports.base import Place
from test_correctness.helpers import machines
from test_correctness.helpers.local_driver import ROOT
from test_correctness.helpers.processes import run_python


@pytest.mark.parametrize("version", ["2.0.0", "2.2.0a0+git1a2b3c4", "1.13.1+cu117"])
def test_an_old_torch_is_one_line_that_names_the_releases_that_have_a_newer_one(version, monkeypatch):
    monkeypatch.setattr("perfsuite.platforms.musa.package_version", lambda family: "2.0.1")
    known = families()
    with pytest.raises(ConfigurationError) as caught:
        require_torch(known["musa"], version)
    said = str(caught.value)
    assert said.startswith(f"torch {version} is installed, perfsuite needs 2.5 or newer: ")
    assert "torch_musa 2.1.0, 2.1.1 and 2.5.0 come with torch 2.5.0" in said
    assert "this is torch_musa 2.0.1; use the image registry.mthreads.com/" in said
    assert said.endswith("(perfsuite docs musa)")
    assert "\n" not in said
    with pytest.raises(ConfigurationError, match="install a newer one"):
        require_torch(known["cpu"], version)


@pytest.mark.parametrize("version", ["2.5.0", "2.5.0a0+git1a2b3c4", "2.7.1", "2.13.0+cpu", "3.0", "", "unknown"])
def test_a_torch_that_is_new_enough_or_unknown_passes(version):
    require_torch(families()["musa"], version)


def test_pytest_says_it_and_runs_nothing(pytester, monkeypatch):
    monkeypatch.setattr("perfsuite.plugin.suite.installed_torch", lambda: "2.2.0")
    pytester.makepyfile("def test_mine(perf):\n    perf(lambda rank: None)\n")
    result = pytester.runpytest_inprocess("--perf-platform=cpu")
    assert pytest.ExitCode.USAGE_ERROR == result.ret
    result.stderr.fnmatch_lines(["ERROR: torch 2.2.0 is installed, perfsuite needs 2.5 or newer: *"])
    assert "Traceback" not in result.stderr.str() + result.stdout.str()


def test_without_torch_a_case_fails_in_one_line_and_nothing_is_started(pytester, monkeypatch):
    monkeypatch.setattr("perfsuite.platforms.environment.installed_torch", lambda: "")
    monkeypatch.setattr("perfsuite.platforms.environment.find_spec", lambda name: None)
    pytester.makepyfile(
        """
        import pytest

        def test_mine(perf):
            perf(lambda rank: None)

        @pytest.mark.skip
        def test_left_out(perf):
            perf(lambda rank: None)
        """
    )
    result = pytester.runpytest_inprocess("--perf-platform=cpu")
    result.assert_outcomes(failed=1, skipped=1)
    result.stdout.fnmatch_lines([f"*torch is not installed for {sys.executable}, but ranks need it; run *"])
    assert "Traceback" not in result.stderr.str() + result.stdout.str()
    assert pytester.runpytest_inprocess("--perf-platform=cpu", "-k", "left_out").ret == pytest.ExitCode.OK


def test_an_old_python_is_one_line():
    code = "import sys; sys.version_info = (3, 8, 10, 'final', 0); import perfsuite"
    done = run_python("-c", code, cwd=ROOT)
    assert (1, "") == (done.returncode, done.stdout)
    assert done.stderr.startswith("perfsuite needs Python 3.10 or newer, this is 3.8: ")
    assert 1 == done.stderr.count("\n")


def test_ranks_get_the_familys_variables_unless_they_are_set(tmp_path):
    def given(environ, process=None):
        family = families(machines.s4000(tmp_path, environ=environ))["musa"]
        at = Place(slot=0, host="a", local_rank=0, local_world_size=0, cores=())
        here = SimpleNamespace(capacity=None, place=lambda rank: at)
        driver = Driver(transport=here, family=family, rootpath=tmp_path, device_count=8)  # type: ignore[arg-type]
        return driver._environment_of(process, 1)

    assert {"MUSA_KERNEL_TIMEOUT": "3600000"} == given({})
    assert {} == given({"MUSA_KERNEL_TIMEOUT": "5000"})
    asked = Process(env={"MCCL_PROTOS": "2", "MUSA_KERNEL_TIMEOUT": "1"})
    assert {"MUSA_KERNEL_TIMEOUT": "1", "MCCL_PROTOS": "2"} == given({}, asked)


def test_the_installed_torch_is_read_without_importing_it():
    assert torch.__version__.split("+")[0] == environment.installed_torch().split("+")[0]


FAMILY = """
from perfsuite.platforms.base import DetectedDevice
from perfsuite.platforms.cuda import Cuda


class TooOld(Cuda):
    name = "tooold"

    def detect(self):
        return tuple(DetectedDevice(index=index, reported_name="Card", capability="9.0") for index in range(2))
"""


@pytest.mark.extended
def test_the_first_case_fails_and_the_others_say_of_which_cause(tmp_path):
    (tmp_path / "too_old.py").write_text(FAMILY)
    options = ["-p", "no:cacheprovider", "-rs", f"--perf-journal={tmp_path / 'run.jsonl'}", "--perf-scale=small"]
    options += ["-k", "256x256x256", "--perf-platform=tooold"]
    environ = {"PERFSUITE_FAMILIES": "tooold=too_old:TooOld", "PYTHONPATH": str(tmp_path)}
    done = run_python("-m", "pytest", "test_perf/test_matmul.py", *options, cwd=ROOT, **environ)
    text = " ".join(done.stdout.split())
    assert (1, True) == (done.returncode, "1 failed" in text), done.stdout
    assert "cannot open device cuda:0" in text
    assert "install a torch built for this device and its driver" in text
    assert "not tried, as in test_perf/test_matmul.py::test_matmul[" in text
