"""What is wrong with a training case is one clear failure, and the cases round it are measured; real ranks, one run."""

import json
from pathlib import Path
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

def test_world_size(perf):
    perf(step(strategy="fsdp", mesh="dp_replicate2-dp_shard2"), on=2)

def test_alone(perf):
    perf(step(strategy="single"), on=2)

def test_dtype(perf):
    perf(step(dtype="tf32"), on=2)

def test_overlapped(perf):
    overlapped = {"strategy": "hybrid", "mesh": "tp2", "compiled": True, "options": {"async_tensor": True}}
    perf(step(model="llama2-tiny", **overlapped), on=2)

def test_config(perf):
    perf(step(strategy="zero1", options={"config": "ds_config.json"}, micro_batch_size=2), on=2)

def test_no_data(perf):
    perf(step(data="nowhere"), on=2)

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
    "test_world_size": "mesh dp_replicate2-dp_shard2 has 4 ranks, the case 2; make them equal",
    "test_alone": "strategy single runs on 1 rank, the case has 2; choose ddp, fsdp or zero1 for more",
    "test_config": "ds_config.json: train_micro_batch_size_per_gpu=3 is not the case's 2; change one of them",
    "test_no_data": "data='nowhere' is not a folder; give one that has dataset.json, or 'synthetic'",
    "test_cut_data": "tokens.bin has 100 bytes, but 4 rows of 34 bytes are 136; copy it again",
    "test_nan": "loss of gpt2-micro under ddp in fp32, mean over replicas: expected 'a finite number', got nan",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(what pytest printed, failure messages by case, cases with an outcome beside measured) of one run of TESTS."""
    folder = tmp_path_factory.mktemp("theirs")
    (folder / "test_bad.py").write_text(TESTS)
    (folder / "pytest.ini").write_text(
        "[pytest]\naddopts = --benchmark-max-time=0.05 -p perfsuite.plugin\nperf_show = tables\n"
    )
    (folder / "ds_config.json").write_text(json.dumps({"train_micro_batch_size_per_gpu": 3}))
    cut = generate(find("gpt2-micro"), folder / "cut", 4)
    file = cut.directory / cut.tables[0].file
    file.write_bytes(file.read_bytes()[:100])
    done = run_python("-m", "pytest", "-rs", "--junitxml=junit.xml", cwd=folder, PYTHONPATH=str(ROOT))
    return done.stdout, Path(folder / "junit.xml")


def test_each_failure_names_values_and_rule(run):
    cases = ElementTree.parse(run[1]).iter("testcase")
    failures = {case.attrib["name"].partition("[")[0]: case.find("failure") for case in cases}
    told = {name: failure.attrib["message"] for name, failure in failures.items() if failure is not None}
    assert set(told) == set(EXPECTED)
    for name, message in EXPECTED.items():
        assert message in told[name]


def test_a_dtype_that_the_device_lacks_is_skipped_by_name(run):
    assert "no CPU has instructions for tf32" in run[0]


def test_an_option_that_needs_an_accelerator_is_skipped_by_name(run):
    assert "async_tensor needs an accelerator; leave it out on a cpu" in run[0]


def test_the_other_cases_go_on(run):
    printed = " ".join(run[0].split())
    assert "7 failed, 3 passed, 2 skipped" in printed
    assert "2 measured, 1 out of memory" in printed
    assert "GiB: a local batch of 1 is over the budget of a rank" in printed
