"""What is wrong with a training case is one clear failure, and the cases round it are measured; real ranks, one run."""

from xml.etree import ElementTree

import pytest

from perfsuite.models import find
from perfsuite.models.dataset import generate
from test_correctness.helpers.processes import run_python
from test_correctness.helpers.scripted_driver import ROOT

pytestmark = pytest.mark.extended
TESTS = """
import pytest
from perfsuite.workloads.training.largest_batch import LargestBatch
from perfsuite.workloads.training.train_step import TrainStep

def step(**fields):
    return TrainStep(**{"model": "gpt2-micro", "strategy": "ddp", **fields})

def test_first(perf):
    perf(step(), on=2)

def test_batch(perf):
    perf(step(global_batch_size=7), on=2)

def test_dtype(perf):
    perf(step(dtype="tf32"), on=2)

def test_overlapped(perf):
    overlapped = {"strategy": "hybrid", "mesh": "tp2", "compiled": True, "options": {"async_tensor": True}}
    perf(step(model="llama2-tiny", **overlapped), on=2)

def test_cut_data(perf):
    perf(step(data="cut"), on=2)

def test_nan(perf):
    perf(step(learning_rate=1e30), on=2)

def test_too_large(perf):
    perf(LargestBatch(model="gpt2-micro", memory_budget_bytes=1000))

def test_last(perf):
    perf(step(), on=2)
"""
EXPECTED = {
    "test_batch": "global_batch_size=7 does not divide by accumulation 1 x 2 replicas = 2; choose 6 or 8",
    "test_cut_data": "tokens.bin has 100 bytes, but 4 rows of 34 bytes are 136; copy it again",
    "test_nan": "loss of gpt2-micro under ddp in fp32, mean over replicas: expected 'a finite number', got nan",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """What pytest printed in one run of TESTS, and its JUnit report."""
    folder = tmp_path_factory.mktemp("theirs")
    (folder / "test_bad.py").write_text(TESTS)
    (folder / "pytest.ini").write_text(
        "[pytest]\naddopts = --benchmark-max-time=0.05 -p perfsuite.plugin\nperf_show = tables\n"
    )
    cut = generate(find("gpt2-micro"), folder / "cut", 4)
    file = cut.directory / cut.tables[0].file
    file.write_bytes(file.read_bytes()[:100])
    done = run_python("-m", "pytest", "-rs", "--junitxml=junit.xml", cwd=folder, PYTHONPATH=str(ROOT))
    return done.stdout, folder / "junit.xml"


def test_each_failure_names_values_and_rule(run):
    cases = ElementTree.parse(run[1]).iter("testcase")
    failures = {case.attrib["name"].partition("[")[0]: case.find("failure") for case in cases}
    told = {name: failure.attrib["message"] for name, failure in failures.items() if failure is not None}
    assert set(told) == set(EXPECTED)
    for name, message in EXPECTED.items():
        assert message in told[name]


def test_what_the_device_lacks_is_skipped_by_name(run):
    assert "no CPU has instructions for tf32" in run[0]
    assert "async_tensor needs an accelerator; leave it out on a cpu" in run[0]


def test_the_other_cases_go_on(run):
    printed = " ".join(run[0].split())
    assert "3 failed, 3 passed, 2 skipped" in printed
    assert "2 measured, 1 out of memory" in printed
    assert "GiB: a local batch of 1 is over the budget of a rank" in printed
