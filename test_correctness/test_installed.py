"""perfsuite installed plainly, not editable, and used from another directory: nothing of the checkout is in reach."""

import contextlib
import json
import shutil
import subprocess
import sys

import pytest

from perfsuite.run.arms import Arm, LiveArm
from perfsuite.suite import pytest_arguments
from test_correctness.helpers.processes import run_python
from test_correctness.helpers.scripted_driver import ROOT

TESTS = """
import enum
from dataclasses import dataclass

import perfsuite
import pytest
import torch

class Way(enum.Enum):
    UP = "up"
    DOWN = "down"

@dataclass(frozen=True, kw_only=True)
class Shape:
    rows: int
    way: Way = Way.UP

@dataclass(frozen=True, kw_only=True)
class Fill(perfsuite.Workload):
    shape: Shape
    dtype: torch.dtype
    metrics = ("latency_us",)

    def work(self, shape):
        return perfsuite.Work()

    def build(self, rank):
        assert type(self.dtype) is torch.dtype, self
        return perfsuite.CallableStep(step(rank, self.shape, {1: self.dtype}, place=perfsuite.__file__))

def step(rank, shape, by_stage, place):
    assert perfsuite.__file__ == place
    assert shape == Shape(rows=2, way=Way.DOWN), shape
    assert shape.way is Way.DOWN
    assert by_stage == {1: torch.bfloat16}, by_stage
    ones = torch.ones(shape.rows, dtype=by_stage[1])
    return lambda: torch.distributed.all_reduce(ones)

SHAPES = pytest.mark.parametrize("shape", [Shape(rows=2, way=Way.DOWN)])

@perfsuite.world_sizes(2)
@SHAPES
def test_function(perf, ranks, shape):
    perf(step, on=ranks, shape=shape, by_stage={1: torch.bfloat16}, place=perfsuite.__file__)

@perfsuite.world_sizes(2)
@SHAPES
@pytest.mark.parametrize("kind", [torch.bfloat16])
def test_class(perf, ranks, shape, kind):
    perf(Fill(shape=shape, dtype=kind), on=ranks)

@perfsuite.world_sizes(2)
def test_refused(perf, ranks):
    perf(step, on=ranks, shape=object(), by_stage={}, place="")

@perfsuite.world_sizes(2)
def test_lambda(perf, ranks):
    perf(lambda rank: rank, on=ranks)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Where the wheel, built of nothing but what a source distribution has, was installed to."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    ignore = shutil.ignore_patterns("__pycache__")
    for directory in ("perfsuite", "baselines/published"):
        shutil.copytree(ROOT / directory, source / directory, ignore=ignore)
    for file in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / file, source)
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--no-build-isolation", "--no-compile"]
    subprocess.run([*pip, "--target", target, source], check=True, capture_output=True, text=True)
    return target


def run(installed, directory, *command):
    """A command in ``directory`` of somebody who has only the installed package."""
    return run_python(*command, cwd=directory, PYTHONPATH=str(installed), PERFSUITE_FAMILIES="")


@pytest.mark.extended
def test_the_wheel_has_every_file_of_the_package(installed):
    def files(place):
        found = (path for path in (place / "perfsuite").rglob("*.*") if "__pycache__" not in path.parts)
        return {str(path.relative_to(place)) for path in found}

    suite = {f"perfsuite/suite/{path.relative_to(ROOT)}" for path in (ROOT / "test_perf").glob("*.py")}
    assert files(ROOT) | suite == files(installed)


@pytest.mark.parametrize(
    "way",
    [
        "--pyargs perfsuite.suite",
        pytest.param("--pyargs perfsuite.suite.test_perf.test_matmul", marks=pytest.mark.extended),
        pytest.param("{installed}/perfsuite/suite", marks=pytest.mark.extended),
    ],
)
def test_the_suite_of_the_package_has_the_ids_of_the_repository(installed, tmp_path, way):
    chosen = ["-m", "pytest", "--collect-only", "-q", "--perf-platform=cpu", "-k", "test_matmul.py and fp32"]
    stored = (ROOT / "test_correctness" / "ids" / "cpu.txt").read_text().splitlines()
    cases = {line for line in stored if line.startswith("test_perf/test_matmul.py::") and "fp32" in line}
    assert len(cases) == 4
    found = run(installed, tmp_path, *chosen, *way.format(installed=installed).split(" "))
    assert cases == {line for line in found.stdout.splitlines() if "::" in line}, found.stdout + found.stderr


@pytest.mark.extended
def test_the_suite_of_the_package_measures_into_the_folder_of_the_user(installed, tmp_path):
    case = "test_perf/test_matmul.py::test_matmul[cpu-256x256x256-fp32]"
    command = ["-m", "pytest", *pytest_arguments([case], tmp_path), "--benchmark-max-time=0.05", "--perf-loss-steps=3"]
    found = run(installed, tmp_path, *command, "--perf-update=append", "--perf-journal=journal")
    assert found.returncode == 0, found.stdout + found.stderr
    (stored,) = (tmp_path / "baselines").rglob("*.json")
    assert [case] == [entry["fullname"] for entry in json.loads(stored.read_text())["benchmarks"]]


@pytest.mark.extended
def test_an_arm_measures_a_case_of_the_installed_suite(installed, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(installed))
    case = "test_perf/test_matmul.py::test_matmul[cpu-256x256x256-fp32]"
    arm = LiveArm(Arm(name="base", root=tmp_path), ["--benchmark-max-time=0.05"], [case])
    with contextlib.closing(arm):
        arm.start(300)
        assert set(arm.measure([case], 300)) == {case}


@pytest.mark.extended
def test_another_repository_measures_with_it(installed, tmp_path):
    (tmp_path / "test_mine.py").write_text(TESTS)
    quick = ("--benchmark-max-time=0.05", "--benchmark-min-rounds=2")
    found = run(installed, tmp_path, "-m", "pytest", *quick, "--perf-journal=journal", "--perf-update=append")
    said = found.stdout + found.stderr
    assert found.returncode == 1, said
    assert "2 failed, 2 passed" in said, said
    refusals = (
        "step(shape=...) is a object, which cannot be sent to the ranks; pass numbers, strings, ",
        "test_lambda.<locals>.<lambda> of test_mine is not an attribute of its module, "
        "so the ranks cannot find it; move it to module level",
    )
    for refusal in refusals:
        assert any(line.startswith(refusal) for line in said.splitlines()), said
    shape = {"Shape": {"rows": 2, "way": "Way.DOWN"}}
    lines = [json.loads(line) for line in (tmp_path / "journal").read_text().splitlines()]
    parameters = {line["result"]["case"]: line["result"]["parameters"] for line in lines if "result" in line}
    function = "test_mine.py::test_function[cpu-ws2-Shape(rows=2,way=DOWN)]"
    workload = "test_mine.py::test_class[cpu-ws2-bfloat16-Shape(rows=2,way=DOWN)]"
    assert {function, workload} == set(parameters)
    assert (shape, [[1, "torch.bfloat16"]]) == (parameters[function]["shape"], parameters[function]["by_stage"])
    assert str(installed / "perfsuite" / "__init__.py") == parameters[function]["place"]
    assert {"shape": shape, "dtype": "torch.bfloat16"} == parameters[workload]
    (stored,) = (tmp_path / "baselines").rglob("*.json")
    entries = json.loads(stored.read_text())["benchmarks"]
    assert parameters == {entry["fullname"]: entry["params"] for entry in entries}


def test_its_commands_find_their_data(installed, tmp_path):
    script = installed / "bin" / "perfsuite"
    for command, answer in (("platforms", "s4000"), ("audit", "004/")):
        found = run(installed, tmp_path, script, command)
        assert answer in found.stdout, found.stderr
        assert "" == found.stderr
