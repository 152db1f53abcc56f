"""The training step with real ranks: parity, spans, damage, and what the builds beside the timed one find."""

import dataclasses
import importlib.util

import pytest

from perfsuite.base.errors import RanksFailed, WrongResult
from perfsuite.base.mesh import MeshShape
from perfsuite.metrics import derive
from perfsuite.metrics.flop_conventions import EXACT
from perfsuite.models import find as find_model
from perfsuite.models.dataset import generate
from perfsuite.models.program import ENCODERS
from perfsuite.record.result import Peak, Peaks
from perfsuite.record.workload import Budget, FunctionWorkload
from perfsuite.workloads.training.train_step import TrainStep
from test_correctness.helpers import local_driver, training_faults
from test_correctness.helpers.local_driver import COMPILER, FSDP, ONCE, WORKER, driver_fixture, records
from test_correctness.helpers.processes import gone
from test_correctness.helpers.twin_sizes import as_its_twin

QUICK = Budget(min_rounds=3, max_time_s=0.05, warmup_time_s=0.02, timeout_s=300.0)
DEEPSPEED = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")

driver = driver_fixture("torch", FSDP, COMPILER, WORKER)


def run(driver, workload, world_size, *, budget=QUICK, **how):
    return local_driver.run(driver, workload, workload.layout() or world_size, budget=budget, **how)


# -- real ranks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world_size", "case"),
    [
        (1, {"model": "gpt2-tiny", "accumulation": 2}),
        (2, {"model": "gpt2-tiny", "strategy": "ddp", "accumulation": 2}),
        (2, {"strategy": "zero_redundancy", **as_its_twin("latte-tiny")}),
        (2, {"strategy": "fsdp", "checkpointing": "full", **as_its_twin("llama2-tiny")}),
    ],
    ids=["single", "ddp", "zero_redundancy", "fsdp"],
)
def test_a_step_is_checked_and_its_parts_are_told_apart(driver, world_size, case):
    measurement = run(driver, TrainStep(**case), world_size)
    assert records(measurement)["parity_error"] <= 1e-5
    assert 0 < records(measurement)["loss"] < 10
    spans = {span.name: span for span in measurement.spans}
    assert set(spans) == {"data", "forward", "backward", "optimizer", "remainder"}
    count = case.get("accumulation", 1)
    assert [spans[name].count for name in ("data", "forward", "backward", "optimizer")] == [count] * 3 + [1]
    assert not measurement.aligned
    assert sum(span.time_s for span in measurement.spans) == pytest.approx(measurement.median_s, rel=1e-12)


@pytest.mark.extended
@DEEPSPEED
def test_deepspeed_runs_between_other_cases(driver):
    ddp = TrainStep(model="gpt2-tiny", strategy="ddp")
    run(driver, ddp, 2, budget=ONCE)
    measurement = run(driver, TrainStep(model="gpt2-tiny", strategy="zero3", accumulation=2), 2, budget=ONCE)
    assert measurement.process == "fresh"
    assert records(measurement)["parity_error"] <= 1e-5
    assert run(driver, ddp, 2, budget=ONCE).process == "reused"


@pytest.mark.extended
def test_copies_of_what_is_spread(driver):
    hybrid = TrainStep(strategy="fsdp", mesh="dp_replicate2-dp_shard2", **as_its_twin("gpt2-tiny"))
    assert records(run(driver, hybrid, 4, budget=ONCE))["parity_error"] <= 1e-5


@pytest.mark.extended
def test_generated_files_are_read_by_loaders_that_end_with_the_case(driver, tmp_path, monkeypatch):
    workload = TrainStep(model="latte-tiny", data="generated", dataset_samples=16, num_workers=1)
    measurement = run(driver, workload, 1)
    assert records(measurement)["steps_per_epoch"] == 16
    own = generate(find_model("latte-tiny"), tmp_path / "own", 8)
    assert records(run(driver, dataclasses.replace(workload, data=str(own.directory)), 1))["steps_per_epoch"] == 8


# -- what a training program does beside its model ---------------------------------------------------------------------

ENCODED = {"model": "opensora-tiny", "program": {"encoders": "tiny-text-picture", "ema": "fp32", "clip": 0.5}}


@pytest.mark.extended
@pytest.mark.parametrize(
    ("strategy", "spread"),
    [("ddp", 1), ("fsdp", 2), pytest.param("zero2", 1, marks=DEEPSPEED), pytest.param("zero3", 2, marks=DEEPSPEED)],
)
def test_encoders_are_whole_and_the_average_is_spread_as_the_weights_are(driver, strategy, spread):
    workload = TrainStep(strategy=strategy, dtype="bf16", data="generated", dataset_samples=4, **ENCODED)
    memory = records(run(driver, workload, 2, budget=ONCE, purpose="memory"))
    model, encoders = workload.find_model(), ENCODERS["tiny-text-picture"]
    assert memory["encoders_bytes"] == 2 * encoders.parameters
    assert memory["ema_bytes"] == pytest.approx(4 * model.parameters / spread, rel=0.02)
    narrow = strategy.startswith("zero")
    assert memory["weights_bytes"] == pytest.approx((2 if narrow else 4) * model.parameters / spread, rel=0.02)
    flops = workload.work(MeshShape.of(dp=2)).flops
    assert flops["frozen encoders"] == 2 * encoders.forward_flops(model)
    assert flops[EXACT] == 2 * 3 * model.forward_flops


@pytest.mark.extended
def test_encoders_run_in_a_mesh_of_copies_of_what_is_spread(driver):
    workload = TrainStep(strategy="fsdp", mesh="dp_replicate2-dp_shard2", **ENCODED)
    found = run(driver, workload, 4)
    assert {span.name for span in found.spans} == {
        "data", "encoders", "forward", "backward", "optimizer", "ema", "remainder",
    }  # fmt: skip
    assert records(found)["parity_error"] <= 1e-5


def test_each_part_of_a_program_is_a_part_of_the_step(driver):
    program = {"ema": "bf16", "ema_on_host": True, "logs": True, "saves": True}
    found = run(driver, TrainStep(model="gpt2-tiny", strategy="ddp", program=program), 2)
    spans = {span.name: span for span in found.spans}
    assert set(spans) == {"data", "forward", "backward", "optimizer", "ema", "logging", "saving", "remainder"}
    assert spans["saving"].slowest_s > spans["logging"].slowest_s / 100
    assert sum(span.time_s for span in found.spans) == pytest.approx(found.median_s, rel=1e-12)


@pytest.mark.extended
@pytest.mark.parametrize("case", training_faults.CLIPPED, ids=lambda case: "-".join(map(str, case.values())))
def test_gradients_are_clipped_to_their_norm_over_all_ranks(driver, case):
    """The norm of what the optimizer is given, all ranks' parts together; without clipping it is larger."""
    if case["strategy"].startswith("zero"):
        pytest.importorskip("deepspeed")
    workload = FunctionWorkload(function=training_faults.norm_after_clipping, arguments=case)
    found = records(run(driver, workload, 2, budget=ONCE))
    assert found["norm_before"] > 2 * training_faults.CLIP
    assert found["norm_after"] == pytest.approx(training_faults.CLIP, rel=1e-2)


def test_the_average_follows_the_weights_as_its_formula_says(driver):
    workload = FunctionWorkload(function=training_faults.average_after_steps)
    assert records(run(driver, workload, 1, budget=ONCE))["largest_error"] <= 1e-6


@pytest.mark.extended
@pytest.mark.parametrize("num_workers", [0, 2])
def test_video_files_are_decoded_and_encoded(driver, num_workers):
    workload = TrainStep(strategy="ddp", data="video", dataset_samples=4, num_workers=num_workers, **ENCODED)
    found = records(run(driver, workload, 2))
    assert found["steps_per_epoch"] == 2
    assert found["raw_frames"] == (0 if importlib.util.find_spec("av") else 1)
    assert 0 < found["loss"] < 10


def test_a_nan_loss_fails_the_case_and_the_next_one_runs(driver):
    with pytest.raises(WrongResult, match=r"loss of gpt2-tiny under ddp in fp32.*expected 'a finite number', got nan"):
        run(driver, TrainStep(model="gpt2-tiny", strategy="ddp", learning_rate=1e30), 2)
    assert run(driver, TrainStep(model="gpt2-tiny", strategy="ddp"), 2, budget=ONCE).smoke


def test_replicas_that_drift_apart_are_found(driver):
    with pytest.raises(WrongResult, match="sum of all parameters under ddp, largest and smallest of any rank"):
        run(driver, FunctionWorkload(function=training_faults.drifting), 2)


@pytest.mark.extended
def test_a_slow_forward_shows_in_its_span_and_rank(driver):
    workload = FunctionWorkload(function=training_faults.slow_forward, arguments={"late": 1, "delay_s": 0.3})
    spans = {span.name: span for span in run(driver, workload, 2).spans}
    assert spans["forward"].slowest_rank == 1
    assert spans["forward"].slowest_s >= 0.3
    # Both are as long as the machine is busy, but for the delay.
    assert spans["optimizer"].slowest_s < spans["forward"].slowest_s


def test_memory_is_the_bytes_of_what_was_allocated(driver):
    model = find_model("gpt2-tiny")
    found = records(run(driver, TrainStep(model="gpt2-tiny"), 1, budget=ONCE, purpose="memory"))
    weights = 4 * model.parameters
    assert found["weights_bytes"] == found["gradients_bytes"] == weights
    # Two fp32 moments of every parameter, and a step counter for each of the 28 tensors.
    assert found["optimizer_bytes"] == 2 * weights + 4 * 28
    # What is left are the batches, 4 x 65 tokens of 8 bytes, and the loss.
    assert found["untracked_bytes"] == 4 * 65 * 8 + 4
    assert found["final_device_bytes"] == 3 * weights + 4 * 28 + found["untracked_bytes"]
    # At the end of the forward all activations are there, at the end of the backward all gradients.
    assert found["peak_bytes"] >= found["final_device_bytes"] + max(found["activations_bytes"], weights)
    assert found["final_host_bytes"] > found["peak_bytes"]


def memory_of_runs(driver, workload, runs=2):
    """Bytes by kind on two ranks, which are the same in every run; the resident set is the kernel's."""
    found = [records(run(driver, workload, 2, budget=ONCE, purpose="memory")) for _ in range(runs)]
    for each in found:
        del each["final_host_bytes"]
    assert [found[0]] * runs == found
    assert found[0]["parts_beyond_peak_bytes"] <= 0
    return found[0]


def test_buckets_that_gloo_holds_longer_than_the_rank_are_not_counted_twice(driver):
    weights = 4 * find_model("gpt2-tiny").parameters
    found = memory_of_runs(driver, TrainStep(model="gpt2-tiny", strategy="ddp"))
    # The reducer's bucket, the batches and the loss.
    assert found["untracked_bytes"] == weights + 4 * 65 * 8 + 4
    assert found["parts_at_once_bytes"] == 2 * weights + found["optimizer_bytes"]


@pytest.mark.extended
def test_what_is_spread_takes_half_of_the_memory(driver):
    whole = 4 * find_model("llama2-tiny").parameters
    found = memory_of_runs(driver, TrainStep(model="llama2-tiny", strategy="fsdp"))
    assert found["weights_bytes"] == found["gradients_bytes"] == whole / 2
    assert found["optimizer_bytes"] == pytest.approx(whole, rel=0.001)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", ["zero_redundancy", *(pytest.param(f"zero{n}", marks=DEEPSPEED) for n in range(4))]
)
def test_memory_is_the_same_in_every_run(driver, strategy):
    memory_of_runs(driver, TrainStep(model="gpt2-tiny", strategy=strategy), runs=5)


@pytest.mark.extended
def test_checkpointing_frees_activations(driver):
    plain = TrainStep(model="gpt2-tiny", overrides={"layers": 6}, micro_batch_size=4)
    kept = []
    for kind in ("full", "selective", "none"):
        step = dataclasses.replace(plain, checkpointing=kind)
        kept.append(records(run(driver, step, 1, budget=ONCE, purpose="memory"))["activations_bytes"])
    assert kept[0] < kept[1] < kept[2]


def test_operations_are_counted_as_they_run(driver):
    workload = TrainStep(model="gpt2-tiny", accumulation=2)
    counted = records(run(driver, workload, 1, budget=ONCE, purpose="flops"))["counted_flops"]
    model = find_model("gpt2-tiny")
    # The backward of attention is five products where the work model counts four: 2 S^2 D more in each block.
    fifth = 2.0 * model.layers * model.tokens_per_sample**2 * model.width
    assert counted == workload.work(MeshShape.of()).flops[EXACT] + 2 * fifth


@pytest.mark.parametrize(
    ("strategy", "mesh"), [("zero2", ""), ("fsdp", "dp_replicate2-dp_shard2"), ("hybrid", "pp2-dp2")]
)
def test_what_cannot_be_silent_exposes_nothing_on_a_cpu(driver, strategy, mesh):
    workload = TrainStep(model="gpt2-tiny", strategy=strategy, mesh=mesh, builds=("exposed",))
    found = records(run(driver, workload, 4 if mesh else 2, budget=ONCE, purpose="exposed"))
    assert {"exposed_without_silent": 1.0} == found


def test_a_first_step_under_selective_checkpointing_is_watched_too(driver):
    case = TrainStep(model="gpt2-tiny", checkpointing="selective", accumulation=2)
    assert run(driver, case, 1, budget=ONCE).smoke


@pytest.mark.parametrize(("blind", "share"), [(None, 0.25), (1, None)])
def test_kernels_tell_exposed_communication_where_every_rank_sees_them(driver, blind, share):
    workload = FunctionWorkload(function=training_faults.told_by_kernels, arguments={"blind": blind})
    found = records(run(driver, workload, 2, budget=ONCE))
    assert (found["told"], found.get("exposed_kernel_share")) == (share is not None, share)


@pytest.mark.parametrize(
    "strategy", ["ddp", *(pytest.param(each, marks=pytest.mark.slow) for each in ("fsdp", "zero_redundancy"))]
)
def test_exposed_communication_comes_with_its_interval(driver, strategy):
    workload = TrainStep(model="gpt2-tiny", strategy=strategy)
    found = records(run(driver, workload, 2, budget=ONCE, purpose="exposed"))
    assert found["exposed_share_low"] <= found["exposed_share"] <= found["exposed_share_high"] < 1
    assert run(driver, workload, 2, budget=ONCE).smoke  # the group is as good as before


def test_one_rank_exposes_no_communication(driver):
    workload = TrainStep(model="gpt2-tiny", builds=("exposed",))
    measurement = run(driver, workload, 1, budget=ONCE, purpose="exposed")
    names = ("exposed_share", "exposed_share_low", "exposed_share_high")
    assert dict.fromkeys(names, 0.0) == records(measurement)  # and no step was built: no loss, no batch


def test_a_seeded_build_gives_the_same_losses_every_time(driver):
    workload = TrainStep(model="gpt2-tiny", strategy="ddp", loss_steps=6, learning_rate=1e-3, target_loss=6.0)
    found = [records(run(driver, workload, 2, budget=ONCE, purpose="loss")) for _ in range(2)]
    assert found[0] == found[1]
    assert found[0]["final_loss"] < found[0]["first_loss"]
    assert 1 < found[0]["steps_to_target"] <= 6
    with pytest.raises(WrongResult, match="loss of step 2 of 20 of gpt2-tiny in fp32"):
        run(driver, TrainStep(model="gpt2-tiny", learning_rate=1e30), 1, budget=ONCE, purpose="loss")


def test_loaders_of_a_killed_rank_are_gone_at_once(driver, tmp_path):
    workload = FunctionWorkload(function=training_faults.dying_reader, arguments={"folder": str(tmp_path)})
    with pytest.raises(RanksFailed, match="died: killed by SIGKILL"):
        run(driver, workload, 1)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    assert gone(pids)


def test_metrics_follow_from_work_and_time(driver):
    workload = TrainStep(model="gpt2-tiny", strategy="ddp", micro_batch_size=2, builds=("memory",))
    measurement = run(driver, workload, 2, budget=ONCE)
    extra = run(driver, workload, 2, budget=ONCE, purpose="memory")
    both = dataclasses.replace(measurement, smoke=False, records=(*measurement.records, *extra.records))
    peaks = Peaks(tflops={"fp32": Peak(value=2.0, unit="TFLOPS", source="a data sheet")})
    work = workload.work(MeshShape.of(dp=2))
    metrics = {m.name: m for m in derive(workload.metrics, work=work, measurement=both, peaks=peaks)}
    seconds = measurement.median_s
    assert metrics["step_time_s"].value == seconds
    assert metrics["samples_per_s"].value == pytest.approx(4 / seconds)
    # Both ranks share one CPU: per device is per CPU.
    assert metrics["tokens_per_s_per_device"].value == pytest.approx(4 * 64 / seconds)
    assert metrics["mfu_percent"].value == pytest.approx(100 * work.flops[EXACT] / seconds / 2e12)
    assert metrics["mfu_percent"].note == "of 2 TFLOPS: a data sheet"
    assert metrics["weights_gib"].value == 4 * find_model("gpt2-tiny").parameters / 2**30
    without = {m.name: m for m in derive(workload.metrics, work=work, measurement=measurement, peaks=Peaks())}
    assert without["weights_gib"].value is None
    assert without["weights_gib"].note == "no memory build was run"
    assert without["hfu_percent"].note == "the case was run once and not measured"
