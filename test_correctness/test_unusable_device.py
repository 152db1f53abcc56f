"""A device that the vendor's tool finds and torch cannot use: one failure that says so, never a green run."""

import pytest

from test_correctness.helpers.processes import run_python
from test_correctness.helpers.scripted_driver import ROOT

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
