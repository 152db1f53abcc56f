"""An accelerator of somebody else's: the files of examples/platform, from detection to the record.

``torch_acme`` is a stand-in here: a device module of its own whose tensors live in host memory, with events that read
the host's clock and a c10d backend ``accl`` that is gloo.  It has no C++, so its cases are of one rank: torch's barrier
asks for a device's C++ hooks.
"""

import json
import os
import re

import pytest

from test_correctness.helpers import device_names
from test_correctness.helpers.processes import run_python
from test_correctness.helpers.scripted_driver import ROOT

EXAMPLE = ROOT / "examples" / "platform"
ENTRY_POINT = re.search(r'"(perfsuite.families)"\]\n(\w+) = "(.*)"', (EXAMPLE / "pyproject.toml").read_text()).groups()
DOCUMENT = (ROOT / "docs" / "how-to" / "add-a-platform.md").read_text(encoding="utf-8")
TORCH_ACME = """
import sys, time
from types import SimpleNamespace

import torch
import torch.distributed as dist

__version__ = "0.1"


class Event:
    def __init__(self, enable_timing=False):
        assert enable_timing

    def record(self):
        self.at_ns = time.perf_counter_ns()

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return (end.at_ns - self.at_ns) / 1e6


def set_device(index):
    assert 0 <= index < 2


def current_device():
    return 0


def nothing(device=None):
    pass


synchronize = empty_cache = reset_peak_memory_stats = nothing


def max_memory_allocated(device=None):
    return 5 << 20


def mem_get_info(device=None):
    return (30 << 30, 32 << 30)


def get_device_properties(device):
    return SimpleNamespace(L2_cache_size=1 << 20)


def group(store, rank, size, timeout):
    return dist.ProcessGroupGloo(store, rank, size, timeout)


torch.utils.rename_privateuse1_backend("acme")
torch._register_device_module("acme", sys.modules[__name__])
dist.Backend.register_backend("accl", group, devices=["cpu"])
"""
IN_HOST_MEMORY = """

class AcmeDevice(AcmeDevice):  # the document's, but its tensors are where a test has memory
    def open(self, index):
        import torch

        assert torch.device("acme", index) == super().open(index)
        return torch.device("cpu")
"""
TESTS = """
from perfsuite import dtypes, world_sizes
from perfsuite.workloads.collective import AllReduce
from perfsuite.workloads.matmul import Matmul


@dtypes("fp32", "int8")
def test_matmul(perf, platform, dtype):
    assert ("a1", "acme") == (platform.name, platform.family)
    result = perf(Matmul(m=64, k=64, n=64, dtype=dtype))
    peak = result.metric("tflops").peak
    assert ("a1", 40, "Acme A1 data sheet") == (result.platform, peak.value, peak.source)
    assert "0.1" == result.environment["worker"]["torch_acme"]


@world_sizes(4)
def test_all_reduce(perf, ranks):
    perf(AllReduce(message_bytes=4096), on=ranks)
"""


@pytest.fixture
def shop(tmp_path):
    """A repository of tests, on a machine with two Acme A1 and their vendor's software."""
    site, tools, tests = (tmp_path / name for name in ("site", "bin", "tests"))
    nodes = repr(str(tmp_path / "dev" / "acme[0-9]*")[1:])
    device = (EXAMPLE / "acme.py").read_text().replace('"dev/acme[0-9]*"', nodes)
    assert str(tmp_path)[1:] in device
    files = {
        site / "acme.py": device + IN_HOST_MEMORY,
        site / "torch_acme.py": TORCH_ACME,
        site / "perfsuite-0.1.0.dist-info" / "METADATA": "Metadata-Version: 2.1\nName: perfsuite\nVersion: 0.1.0\n",
        site / "perfsuite-0.1.0.dist-info" / "entry_points.txt": "[pytest11]\nperfsuite.plugin = perfsuite.plugin\n",
        site / "acme-1.0.dist-info" / "METADATA": "Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n",
        site / "acme-1.0.dist-info" / "entry_points.txt": "[{}]\n{} = {}\n".format(*ENTRY_POINT),
        tools / "acme-smi": "#!/bin/sh\necho '0: Acme A1, 32768 MiB, ACME-0'\necho '1: Acme A1, 32768 MiB, ACME-1'\n",
        tests / "test_acme.py": TESTS,
        tests / "acme.toml": (EXAMPLE / "acme.toml").read_text(),
        tests / "pytest.ini": (
            "[pytest]\nperf_platforms = acme.toml\n"
            "addopts = -p no:cacheprovider --import-mode=importlib --benchmark-max-time=0.05\n"
        ),
        **{tmp_path / "dev" / f"acme{index}": "" for index in range(2)},
    }
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tools / "acme-smi").chmod(0o755)
    return tests


def run(shop, *arguments, **environ):
    """Exit code and output of ``python -m ...`` in the repository."""
    places = {
        "PATH": os.pathsep.join([str(shop.parent / "bin"), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(shop.parent / "site"), str(ROOT)]),
    }
    done = run_python("-m", *arguments, cwd=shop, **{**places, "PYTEST_ADDOPTS": "", **environ})
    return done.returncode, done.stdout + done.stderr


def stored(shop):
    return {each["name"]: each for each in json.loads((shop / "out.json").read_text())["benchmarks"]}


def test_the_device_file_is_about_fifty_lines():
    assert len([line for line in (EXAMPLE / "acme.py").read_text().splitlines() if line.strip()]) <= 50


@pytest.mark.extended
def test_a_device_of_somebody_elses_is_found_timed_and_recorded_under_its_row(shop):
    code, output = run(shop, "pytest", "-rs", "--perf-show=tables", "--benchmark-json=out.json", "--perf-update=append")
    assert 0 == code, output
    assert "1 passed, 2 skipped" in output
    assert "no native int8 on 2 x Acme A1: acme has no native int8" in output
    assert "4 ranks on a host with 2 devices" in output
    found = stored(shop)
    assert {"test_matmul[a1-fp32]"} == set(found)
    about, median_s = found["test_matmul[a1-fp32]"]["extra_info"], found["test_matmul[a1-fp32]"]["stats"]["median"]
    assert ("a1", "accl") == (about["platform"], about["backend"])
    assert pytest.approx(2 * 64**3 / median_s / 1e12) == about["tflops"]
    assert "clock acme.Event" in output
    (baseline,) = (shop / "baselines" / "a1").glob("a1-2x-*.json")
    assert "torch_acme" in baseline.read_text()


def test_it_is_not_there_where_its_devices_are_hidden(shop):
    code, output = run(shop, "pytest", "-rs", "-k", "a1 and matmul", "--perf-platform=a1", ACME_VISIBLE_DEVICES="")
    assert 0 == code, output
    assert "2 skipped" in output
    assert "Acme A1 not found: ACME_VISIBLE_DEVICES='' hides 2 x Acme A1; unset it or name a device" in output


def test_the_command_line_knows_it(shop):
    code, output = run(shop, "perfsuite.cli", "env", "--platform-file", "acme.toml")
    assert 0 == code, output
    assert output.startswith("platform     a1 (2 x Acme A1)\nfingerprint  a1-2x-")


def test_without_its_package_the_case_says_what_is_missing(shop):
    site = shop.parent / "site"
    (site / "torch_acme.py").unlink()
    device = (site / "acme.py").read_text()
    (site / "acme.py").write_text(device.replace('start_method = "exec"', 'start_method = "fork"'))
    code, output = run(shop, "pytest", "-rs", "-k", "matmul and fp32")
    assert 0 == code, output
    assert "1 skipped" in output
    assert "torch_acme cannot be imported (No module named 'torch_acme'); install it" in output


@pytest.mark.extended
def test_the_names_that_the_document_lists_are_those_in_use():
    (said,) = re.findall(r"^`Accelerator` uses these names.*?\n\n.*?\n\n", DOCUMENT, re.MULTILINE | re.DOTALL)
    listed = set(re.findall(r"`(\w+)(?:\(\w+=True\))?`", said)) - {"Accelerator"}
    package = ROOT / "perfsuite"
    uses = device_names.uses(device_names.device_layer(package, without=("cuda.py", "musa.py")))
    used = {use.name for use in uses if use.owner.startswith("torch.musa") and not use.optional}
    assert used == listed
