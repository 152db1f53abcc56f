"""The training step with real ranks: parity, spans, damage, and what the builds beside the timed one find."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.errors import InvalidParameter, RanksFailed, WrongResult
from perfsuite.mesh import MeshShape
from perfsuite.metrics import derive
from perfsuite.metrics.flop_conventions import COLOSSALAI, EXACT, EXECUTED, MEGATRON, PALM, SIX_N
from perfsuite.models import find as find_model
from perfsuite.models.dataset import generate
from perfsuite.platforms import families
from perfsuite.records import Peak, Peaks
from perfsuite.runtime.driver import Driver, Job
from perfsuite.runtime.transports.local import LocalTransport
from perfsuite.workload import Budget, FunctionWorkload
from perfsuite.workloads.training.builds import exposed_share
from perfsuite.workloads.training.memory import storage_bytes
from perfsuite.workloads.training.parity import Outcome
from perfsuite.workloads.training.train_step import TrainStep
from test_correctness.helpers import training_faults

ROOT = Path(__file__).parent.parent
QUICK = Budget(min_rounds=3, max_time_s=0.05, warmup_time_s=0.02, timeout_s=90.0)
ONCE = Budget(smoke=True, timeout_s=90.0)
DEEPSPEED = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    transport = LocalTransport(
        start_method="fork",
        preload=("torch", "torch.distributed.fsdp", "torch._dynamo", "perfsuite.runtime.ranks.worker"),
        log_directory=tmp_path_factory.mktemp("logs"),
    )
    driver = Driver(transport=transport, family=families()["cpu"], rootpath=ROOT, device_count=1)
    yield driver
    driver.close()


def run(driver, workload, world_size, *, budget=QUICK, purpose="time"):
    shape = MeshShape.parse(workload.layout()) if workload.layout() else None
    job = Job(workload=workload, world_size=world_size, shape=shape, budget=budget, purpose=purpose)
    return driver.run(job)


def records(measurement):
    return {record.name: record.value for record in measurement.records}


# -- real ranks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world_size", "case"),
    [
        (1, {"model": "gpt2-tiny", "accumulation": 2}),
        (2, {"model": "gpt2-tiny", "strategy": "ddp", "accumulation": 2}),
        (2, {"model": "latte-tiny", "strategy": "zero_redundancy"}),
        (2, {"model": "llama2-tiny", "strategy": "fsdp", "checkpointing": "full"}),
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


@DEEPSPEED
def test_deepspeed_runs_between_other_cases(driver):
    ddp = TrainStep(model="gpt2-tiny", strategy="ddp")
    run(driver, ddp, 2, budget=ONCE)
    measurement = run(driver, TrainStep(model="gpt2-tiny", strategy="zero3", accumulation=2), 2, budget=ONCE)
    assert measurement.process == "fresh"
    assert records(measurement)["parity_error"] <= 1e-5
    assert run(driver, ddp, 2, budget=ONCE).process == "reused"


def test_copies_of_what_is_spread(driver):
    hybrid = TrainStep(model="gpt2-tiny", strategy="fsdp", mesh="dp_replicate2-dp_shard2")
    assert records(run(driver, hybrid, 4, budget=ONCE))["parity_error"] <= 1e-5


def test_generated_files_are_read_by_loaders_that_end_with_the_case(driver, tmp_path, monkeypatch):
    workload = TrainStep(model="latte-tiny", data="generated", dataset_samples=16, num_workers=1)
    measurement = run(driver, workload, 1)
    assert records(measurement)["steps_per_epoch"] == 16
    own = generate(find_model("latte-tiny"), tmp_path / "own", 8)
    assert records(run(driver, dataclasses.replace(workload, data=str(own.directory)), 1))["steps_per_epoch"] == 8


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_frozen_encoders_are_spread_and_left_alone(driver, strategy):
    workload = TrainStep(model="opensora-tiny", overrides={"encoders": "tiny"}, strategy=strategy)
    found = records(run(driver, workload, 2, budget=ONCE))
    assert found["parity_error"] <= 1e-5
    memory = records(run(driver, workload, 2, budget=ONCE, purpose="memory"))
    model = workload.find_model()
    spread = 2 if strategy == "fsdp" else 1
    assert memory["weights_bytes"] == pytest.approx(4 * (model.parameters + model.frozen_parameters) / spread, rel=0.02)
    assert memory["gradients_bytes"] == pytest.approx(4 * model.parameters / spread, rel=0.02)
    flops = workload.work(MeshShape.of(dp=2)).flops
    assert flops["frozen encoders"] == 2 * model.frozen_flops
    assert flops[EXACT] == 2 * 3 * model.forward_flops


def test_a_nan_loss_fails_the_case_and_the_next_one_runs(driver):
    with pytest.raises(WrongResult, match=r"loss of gpt2-tiny under ddp in fp32.*expected 'a finite number', got nan"):
        run(driver, TrainStep(model="gpt2-tiny", strategy="ddp", learning_rate=1e30), 2)
    assert run(driver, TrainStep(model="gpt2-tiny", strategy="ddp"), 2, budget=ONCE).smoke


def test_replicas_that_drift_apart_are_found(driver):
    with pytest.raises(WrongResult, match="sum of all parameters under ddp, largest and smallest of any rank"):
        driver.run(Job(workload=FunctionWorkload(function=training_faults.drifting), world_size=2, budget=QUICK))


def test_a_strategy_that_forgets_to_average_is_found(driver):
    workload = FunctionWorkload(function=training_faults.deaf_parity)
    with pytest.raises(WrongResult, match=r"under ddp on mesh dp2, accumulation 1 against one process, relative error"):
        driver.run(Job(workload=workload, world_size=2, budget=QUICK))


def test_a_slow_forward_shows_in_its_span_and_rank(driver):
    workload = FunctionWorkload(function=training_faults.slow_forward, arguments={"late": 1, "delay_s": 0.05})
    spans = {span.name: span for span in driver.run(Job(workload=workload, world_size=2, budget=QUICK)).spans}
    assert spans["forward"].slowest_rank == 1
    assert spans["forward"].slowest_s >= 0.05
    assert spans["optimizer"].slowest_s < 0.05


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


def memory_of_runs(driver, workload, runs=3):
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


def test_checkpointing_frees_activations(driver):
    kept = [
        records(
            run(
                driver,
                TrainStep(model="gpt2-tiny", overrides={"layers": 6}, micro_batch_size=4, checkpointing=kind),
                1,
                budget=ONCE,
                purpose="memory",
            )
        )["activations_bytes"]
        for kind in ("full", "selective", "none")
    ]
    assert kept[0] < kept[1] < kept[2]


def test_operations_are_counted_as_they_run(driver):
    workload = TrainStep(model="gpt2-tiny", accumulation=2)
    counted = records(run(driver, workload, 1, budget=ONCE, purpose="flops"))["counted_flops"]
    model = find_model("gpt2-tiny")
    # The backward of attention is five products where the work model counts four: 2 S^2 D more in each block.
    fifth = 2.0 * model.layers * model.tokens_per_sample**2 * model.width
    assert counted == workload.work(MeshShape.of()).flops[EXACT] + 2 * fifth


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero_redundancy"])
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
        driver.run(Job(workload=workload, world_size=1, budget=QUICK))
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    until = time.monotonic() + 10
    while time.monotonic() < until and any(os.path.exists(f"/proc/{pid}") for pid in pids):
        time.sleep(0.05)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


# -- the case itself ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "world_size", "message"),
    [
        (
            {"global_batch_size": 10},
            4,
            "global_batch_size=10 does not divide by accumulation 1 x 4 replicas = 4; choose 8 or 12",
        ),
        ({"global_batch_size": 2}, 4, "global_batch_size=2 does not divide by .* = 4; choose 4"),
        (
            {"global_batch_size": 24, "micro_batch_size": 3, "accumulation": 2},
            8,
            "global_batch_size=24 is not micro_batch_size 3 x accumulation 2 x 8 replicas = 48",
        ),
        ({"strategy": "single"}, 2, "strategy single runs on 1 rank, the case has 2"),
        ({"data": "/nowhere"}, 2, "data='/nowhere' is no folder"),
        ({"strategy": "zero1", "options": {"config": "/none.json"}}, 2, "config='/none.json' cannot be read"),
    ],
)
def test_a_case_that_cannot_be_spread_is_refused(fields, world_size, message):
    workload = TrainStep(**{"model": "gpt2-tiny", "strategy": "ddp", **fields})
    with pytest.raises(InvalidParameter, match=message):
        workload.work(MeshShape.of(dp=world_size))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": "int8"}, "dtype='int8' trains nothing; choose from fp32, tf32, bf16, fp16"),
        ({"checkpointing": "some"}, "checkpointing='some' is unknown; choose none, full, selective"),
        ({"accumulation": 0}, "accumulation=0 is not a count"),
        ({"micro_batch_size": True}, "micro_batch_size=True is not a count"),
        ({"num_workers": 2}, "num_workers=2 with data='synthetic' have nothing to read"),
        ({"num_workers": -1}, "num_workers=-1 is no number of processes"),
        ({"builds": ("time",)}, "builds: 'time' is unknown; choose from memory, exposed, flops, loss"),
        ({"builds": ("exposed",), "strategy": "zero2"}, "communication of strategy zero2 cannot be made to do nothing"),
        (
            {"builds": ("exposed",), "strategy": "fsdp", "mesh": "dp_replicate2-dp_shard2"},
            "communication of mesh dp_replicate2-dp_shard2 cannot be made to do nothing",
        ),
        ({"builds": ("flops",), "compiled": True}, "torch counts no operations of compiled blocks"),
        ({"environment": {"A=B": "1"}}, "environment: A=B='1' is no variable; give its name and a text"),
        ({"environment": {"A": 1}}, "environment: A=1 is no variable"),
        ({"mesh": "dp"}, "mesh 'dp': 'dp' is not an axis followed by its size"),
        ({"model": "gpt9"}, "model 'gpt9' is unknown"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(fields, message):
    with pytest.raises(InvalidParameter, match=message):
        TrainStep(**{"model": "gpt2-tiny", **fields})


def test_variables_and_imports_of_a_case_are_known_before_its_ranks_start():
    plain = TrainStep(model="gpt2-tiny", strategy="ddp")
    assert plain.process is None
    assert plain.preload == ("torch._dynamo",)
    told = dataclasses.replace(plain, environment={"GLOO_SOCKET_IFNAME": "lo"})
    assert told.process.env == {"GLOO_SOCKET_IFNAME": "lo"}
    zero = TrainStep(model="gpt2-tiny", strategy="zero1", environment={"A": "1"})
    assert (zero.process.env, zero.preload[-1]) == ({"A": "1"}, "deepspeed")


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 8))
def test_gbs_is_lbs_times_gas_times_dp(micro, accumulation, ranks):
    given_total = TrainStep(
        model="gpt2-tiny", strategy="ddp", accumulation=accumulation, global_batch_size=micro * accumulation * ranks
    )
    given_part = TrainStep(model="gpt2-tiny", strategy="ddp", accumulation=accumulation, micro_batch_size=micro)
    shape = MeshShape.of(dp=ranks)
    assert given_total.plan(shape) == given_part.plan(shape)
    assert given_part.work(shape).samples == micro * accumulation * ranks


def test_a_ds_config_s_batch_is_honoured(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text('{"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": "auto"}')
    workload = TrainStep(model="gpt2-tiny", strategy="zero2", options={"config": str(path)}, accumulation=2)
    assert workload.work(MeshShape.of(dp=4)).samples == 3 * 2 * 4


def test_a_ds_config_s_global_batch_is_spread_over_the_ranks(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text('{"train_batch_size": 24, "train_micro_batch_size_per_gpu": "auto"}')
    workload = TrainStep(model="gpt2-tiny", strategy="zero2", options={"config": str(path)}, accumulation=2)
    assert workload.plan(MeshShape.of(dp=4)).micro_batch_size == 3
    with pytest.raises(
        InvalidParameter,
        match="train_batch_size=24 does not divide by accumulation 2 x 5 replicas = 10; choose 20 or 30",
    ):
        workload.plan(MeshShape.of(dp=5))
    with pytest.raises(
        InvalidParameter, match=r"train_batch_size=24 is not micro_batch_size 2 x accumulation 2 x 4 replicas = 16"
    ):
        dataclasses.replace(workload, micro_batch_size=2).plan(MeshShape.of(dp=4))


def test_llama2_7b_has_the_batch_of_its_report(driver):
    workload = TrainStep(model="llama2-7b", strategy="fsdp", micro_batch_size=3, accumulation=1, global_batch_size=24)
    plan = workload.plan(MeshShape.of(dp=8))
    assert (plan.micro_batch_size, plan.accumulation, plan.model.tokens_per_sample) == (3, 1, 4096)
    tiny = TrainStep(model="llama2-tiny", strategy="fsdp", micro_batch_size=3, accumulation=2, global_batch_size=12)
    found = records(run(driver, tiny, 2, budget=ONCE))
    assert (found["local_batch"], found["accumulation"], found["global_batch"]) == (3, 2, 12)
    assert found["sequence_length"] == find_model("llama2-tiny").tokens_per_sample


def test_conventions_of_the_same_step_differ_as_published():
    workload = TrainStep(model="llama2-7b", strategy="zero2", micro_batch_size=3)
    work = workload.work(MeshShape.of(dp=8))
    per_token = {name: count / work.tokens / 1e9 for name, count in work.flops.items()}
    assert work.samples == 24
    assert work.tokens == 24 * 4096
    assert {name: round(value, 1) for name, value in per_token.items()} == {
        EXACT: 46.1,
        EXECUTED: 46.1,
        SIX_N: 40.4,
        PALM: 46.9,
        MEGATRON: 45.7,
        COLOSSALAI: 40.4,
    }
    again = dataclasses.replace(workload, checkpointing="full").work(MeshShape.of(dp=8))
    assert again.flops[EXACT] == work.flops[EXACT]
    assert round(again.flops[EXECUTED] / again.tokens / 1e9, 1) == 61.2
    assert round(again.flops[MEGATRON] / again.tokens / 1e9, 1) == 60.9
    assert round(again.flops[COLOSSALAI] / again.tokens / 1e9, 1) == 53.9


def test_metrics_follow_from_work_and_time(driver):
    workload = TrainStep(model="gpt2-tiny", strategy="ddp", micro_batch_size=2, builds=("memory",))
    measurement = run(driver, workload, 2, budget=ONCE)
    extra = run(driver, workload, 2, budget=ONCE, purpose="memory")
    both = dataclasses.replace(measurement, records=(*measurement.records, *extra.records))
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
    assert without["hfu_percent"].note == "no fp32 peak in the platform's row"


# -- parts -------------------------------------------------------------------------------------------------------


def outcome(loss=1.0, gradient=(3.0, 4.0), next_loss=0.5, name="w"):
    return Outcome(loss=loss, gradients={name: torch.tensor(gradient)}, next_loss=next_loss)


@pytest.mark.parametrize(
    ("got", "message"),
    [
        (outcome(gradient=(3.0, 4.5)), "gradient of w under ddp against one process, .* got 0.1"),
        (outcome(loss=1.1), "loss under ddp .* got 0.1"),
        (outcome(next_loss=0.6), "loss after a step under ddp"),
        (outcome(gradient=(float("nan"), 4.0)), "gradient of w under ddp .* got nan"),
        (outcome(name="v"), r"parameters with a gradient under ddp: expected \['w'\], got \['v'\]"),
    ],
)
def test_a_difference_is_named(got, message):
    assert outcome().compare(outcome(), "ddp", 1e-5) == 0
    with pytest.raises(WrongResult, match=message):
        got.compare(outcome(), "ddp", 1e-5)


@given(st.floats(0.0, 0.9), st.integers(2, 12))
def test_the_exposed_share_is_found(share, count):
    pairs = [(1.0 + index, (1.0 + index) * (1 - share)) for index in range(count)]
    assert exposed_share(pairs) == pytest.approx((share, share, share), abs=1e-9)


def test_a_storage_counts_once():
    seen: set[int] = set()
    buffer = torch.zeros(16)
    assert storage_bytes([buffer[:4], buffer[8:], torch.zeros(3)], seen) == 64 + 12
    assert storage_bytes([buffer], seen) == 0
