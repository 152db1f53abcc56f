"""The cases of the full size as they are collected: each fits on its cards by estimate, or is skipped with the figures.

Nothing is measured: :mod:`test_correctness.helpers.collected_workloads` takes down what each test hands to perf.
"""

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from perfsuite.base.mesh import MeshShape
from perfsuite.base.units import GIB
from perfsuite.metrics import read_run
from perfsuite.platforms import detect_machine, load_catalog
from perfsuite.plugin.suite import Suite
from perfsuite.projection.job import TrainingJob
from perfsuite.projection.memory import USABLE, memory_of
from perfsuite.published.lookup import lookup
from perfsuite.published.recipes import find
from perfsuite.workloads.training.largest_batch import LargestBatch
from perfsuite.workloads.training.train_step import TrainStep, estimate
from test_correctness.helpers.processes import run_python
from test_perf import test_options

pytestmark = pytest.mark.extended

ROOT = Path(__file__).parent.parent
PLATFORMS = ("s4000", "a100", "h100", "rtx4090", "v100", "rtx6000ada")
TRAINING = {"TrainStep": TrainStep, "LargestBatch": LargestBatch}
OPTIONS = {
    *("test_overlap", "test_compression", "test_bucket_size", "test_library_setting", "test_sharding", "test_offload"),
    *("test_deepspeed", "test_accumulation", "test_opensora_encoders", "test_largest_batch_spread"),
}
"""Tests of one option or one strategy each, on two ranks and on a whole host."""
BEYOND = {"004-strong-gpt3-175b-fsdp-8x8", "004-strong-gpt3-175b-fsdp-16x8", "pp4-dp2-gpipe-m16"}
"""Rows of report 004 that do not fit as perfsuite trains them: its FSDP keeps whole gradients until the last
micro-batch, 650 GiB of 175B; GPipe holds sixteen micro-batches of the four samples that its recipe chose."""


def pytest_of_suite(folder, *arguments):
    """What a run of the suite printed; its journal is in ``folder``."""
    command = ("-m", "pytest", "test_perf", "-q", "-rs", "-p", "no:cacheprovider")
    journal = f"--perf-journal={folder / 'journal.jsonl'}"
    done = run_python(*command, journal, *arguments, cwd=ROOT, PYTEST_ADDOPTS="")
    assert done.returncode == 0, done.stdout[-2000:]
    return done.stdout


def take_down(folder, *arguments):
    """What every case of these platforms hands to perf, and why those are skipped that do not fit."""
    path = folder / "cases.jsonl"
    plugin = ("-p", "test_correctness.helpers.collected_workloads", f"--collected={path}")
    pytest_of_suite(folder, *plugin, "--perf-project", *arguments)
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """Of all platforms that the tests look at."""
    return take_down(tmp_path_factory.mktemp("collected"), "-k", " or ".join(PLATFORMS))


@pytest.fixture(scope="module")
def models():
    """Platforms by name."""
    return load_catalog(()).models


def step_of(case):
    """The training step of a case; None for a kernel, a collective or a layer."""
    made = TRAINING.get(case["workload"])
    return made(**case["parameters"]) if made else None


def projected_bytes(step, world_size, device):
    """Memory as ``--perf-project`` prints it; with the state that an option moves to the host left out."""
    shape = MeshShape.parse(step.mesh) if step.mesh else MeshShape.of(dp=world_size)
    training = step.work(shape).training
    if training is None:
        memory = estimate(step, world_size, device)
        assert memory is not None, "every strategy of the suite has an estimate"
        return memory.total
    job = TrainingJob.of(training, device)
    return memory_of(job.architecture, job.layout, job.implementation).total


@pytest.mark.parametrize("platform", PLATFORMS)
def test_no_training_case_is_begun_that_does_not_fit_by_estimate(cases, models, platform):
    device, begun, beyond = models[platform], 0, []
    for case in cases:
        step = step_of(case) if case["platform"] == platform and not case["why_not"] else None
        if step is not None:
            begun += 1
            if projected_bytes(step, case["world_size"], device) > USABLE * device.memory.value * GIB:
                beyond.append(case["case"])
    assert [] == beyond
    assert begun >= {"s4000": 200, "a100": 240, "h100": 240}.get(platform, 90)


def test_every_reason_says_what_is_needed_and_what_there_is(cases, models):
    reasons = {case["why_not"] for case in cases if case["why_not"]}
    assert reasons
    for case in cases:
        if case["why_not"]:
            assert f"{models[case['platform']].memory.value:.4g} GiB" in case["why_not"]
            assert case["parameters"]["model"] in case["why_not"]


def test_options_and_strategies_run_on_two_ranks_and_on_a_whole_host(cases):
    found = defaultdict(set)
    for case in cases:
        found[case["platform"], case["test"]].add(case["world_size"])
    for platform in ("s4000", "v100"):
        assert {name: {2, 8} for name in OPTIONS} == {name: found[platform, name] for name in OPTIONS}
        assert found[platform, "test_zero_redundancy"] == {2, 4, 8}
        assert found[platform, "test_llama2_deepspeed"] == {8}


@pytest.mark.parametrize(("platform", "narrow"), [("s4000", "bf16"), ("a100", "bf16"), ("v100", "fp16")])
def test_training_at_full_size_is_in_the_16_bits_that_the_device_has(cases, platform, narrow):
    training = [case for case in cases if case["platform"] == platform and case["workload"] in TRAINING]
    dtypes = defaultdict(set)
    for case in training:
        dtypes[case["parameters"]["dtype"]].add(case["test"])
    assert {narrow} == {dtype for dtype, tests in dtypes.items() if tests & OPTIONS}
    assert dtypes["fp32"] == {"test_time_to_target", "test_llama2"}  # the small model, and the sweep of dtypes


@pytest.mark.parametrize("platform", ["s4000", "rtx4090", "a100", "h100", "rtx6000ada"])
def test_the_largest_batch_of_latte_xl_is_looked_for_as_the_report_trains(cases, platform):
    recipe = find("001-latte-xl-b2-w16-1x1").parameters
    (case,) = [one for one in cases if one["case"].endswith(f"test_largest_batch[{platform}-latte-xl-none]")]
    assert not case["why_not"]
    assert (recipe["dtype"], recipe["strategy"]) == (case["parameters"]["dtype"], case["parameters"]["strategy"])


def test_rows_that_a_report_measured_on_a_device_are_not_refused_there(cases, models):
    """Except those of ``BEYOND``, and those whose weights, gradients and optimizer state alone exceed the card."""
    refused = {}
    for case in cases:
        platform, parameters, ranks = case["platform"], case["parameters"], case["world_size"]
        if "by estimate" in case["why_not"] and lookup(platform, "train_step", parameters, ranks):
            memory = estimate(TrainStep(**parameters), ranks, models[platform])
            state = memory.parameters + memory.gradients + memory.optimizer
            refused[case["case"].partition("-")[2].rstrip("]")] = state / memory.capacity
    assert BEYOND == {name for name, share in refused.items() if share <= 1}, refused


def test_settings_of_the_network_are_skipped_on_one_host():
    told = {word: test_options.why_not_on(1, word, 8) for word in test_options.SETTINGS}
    assert {"no-infiniband", "gpu-direct", "outer-interfaces"} == {word for word, why_not in told.items() if why_not}
    assert told["gpu-direct"].startswith("setting gpu-direct acts between hosts only, and the 8 ranks of this case are")
    assert not any(test_options.why_not_on(2, word, 16) for word in test_options.SETTINGS)


def test_hosts_are_those_of_the_ranks_of_a_case():
    hosts = ["a", "a", "b", "b"]
    cluster = SimpleNamespace(place=lambda rank: SimpleNamespace(host=hosts[rank]))
    assert [1, 2] == [Suite.hosts_of(SimpleNamespace(cluster=cluster), count) for count in (2, 4)]
    assert 1 == Suite.hosts_of(SimpleNamespace(cluster=None), 8)


def test_a_run_that_projects_keeps_the_projection_beside_the_reason(tmp_path):
    printed = pytest_of_suite(
        tmp_path, "-k", "s4000 and ddp_strong and ws4 or s4000 and m16 and gpipe", "--perf-project"
    )
    assert "takes 84 GiB by estimate" in printed
    found = {case.partition("::")[2]: one for case, one in read_run(tmp_path / "journal.jsonl").projections.items()}
    refused = found["test_schedules[s4000-pp4-dp2-gpipe-m16]"]
    assert "takes 84 GiB by estimate" in refused.not_measured
    assert refused.step_time_s > 0
    assert any("does not fit" in flag for flag in refused.flags)
    assert "MTT S4000 not found" in found["test_ddp_strong[s4000-ws4-gpt2-xl]"].not_measured


def mote(folder, row):
    """Option of a file with a device of a thousandth of a GiB."""
    memory = '[platform.mote.memory]\nvalue = 0.001\nunit = "GiB"\nsource = "none"\n'
    (folder / "mote.toml").write_text(f'[platform.mote]\ntitle = "Mote"\n{row}\n{memory}')
    return "-o", f"perf_platforms={folder / 'mote.toml'}"


def test_a_case_that_does_not_fit_here_is_skipped(tmp_path):
    name = detect_machine(load_catalog(()), "cpu").devices[0].reported_name
    own = mote(tmp_path, f'family = "cpu"\nmatch = [{json.dumps(name)}]')
    printed = pytest_of_suite(tmp_path, "-k", "mote and test_overlap", *own)
    assert "2 skipped" in printed
    assert "and Mote has 0.001 GiB" in printed


def test_every_training_test_asks_whether_its_step_fits(tmp_path):
    taken = take_down(tmp_path, "-k", "mote", *mote(tmp_path, 'family = "cuda"\nnames = ["Mote"]'))
    training = [case for case in taken if case["workload"] in TRAINING]
    assert len(training) > 100
    assert set() == {case["test"] for case in training if not case["why_not"]}
