"""What a training step trains travels as plain data in its result, and changes nothing that is compared."""

import dataclasses
import json

import pytest

from perfsuite.base.mesh import MeshShape
from perfsuite.baselines import store
from perfsuite.baselines.document import Fault, check_of, loads
from perfsuite.models import find
from perfsuite.record.codec import from_json, to_json
from perfsuite.record.result import Work
from perfsuite.record.step import Training
from perfsuite.strategies.base import Strategy
from perfsuite.workloads import LargestBatch, TrainStep
from perfsuite.workloads.collective import AllReduce
from test_correctness.helpers.stored_files import case, offer, run_of

GPT = {"model": "gpt-64x4", "overrides": {"layers": 8}}
PIPELINED = {"sharding": "gradients", "sequence_parallel": True, "schedule": "1f1b"}
PIPELINED |= {"narrow": True, "gradient_dtype": "bf16"}
SPREAD = [
    # strategy, options, mesh, ranks, other fields of the case -> what the record says beside its defaults
    ("single", {}, "", 1, {}, {}),
    ("ddp", {}, "", 4, {}, {}),
    ("ddp", {"overlap": False, "compression": "bf16"}, "", 2, {}, {"overlap": False, "gradient_dtype": "bf16"}),
    ("fsdp", {}, "dp_replicate2-dp_shard4", 8, {}, {"sharding": "parameters"}),
    ("fsdp", {"reshard": False}, "", 2, {}, {"sharding": "gradients"}),
    ("fsdp", {"mixed_precision": True}, "", 2, {"dtype": "bf16"}, {"sharding": "parameters", "narrow": True}),
    ("zero_redundancy", {}, "", 2, {}, {"sharding": "optimizer"}),
    ("zero0", {}, "", 2, {}, {"overlap": False}),
    ("zero1", {}, "", 2, {}, {"sharding": "optimizer", "overlap": False}),
    ("zero2", {}, "", 2, {}, {"sharding": "gradients", "overlap": False}),
    ("zero3", {}, "", 2, {"dtype": "bf16"}, {"sharding": "parameters", "narrow": True, "gradient_dtype": "bf16"}),
    ("hybrid", {}, "tp2", 2, {}, {"sequence_parallel": True}),
    ("hybrid", {"sequence_parallel": False}, "dp2-tp2", 4, {}, {"sharding": "parameters"}),
    ("hybrid", {"data": "replicate"}, "dp2", 2, {}, {}),
    ("hybrid", {}, "pp2-dp2-tp2", 8, {"accumulation": 4, "dtype": "bf16"}, PIPELINED),
    ("hybrid", {"schedule": "zbv"}, "pp2", 2, {"accumulation": 4}, {"schedule": "zbv", "stages_per_rank": 2}),
]


@pytest.mark.parametrize("row", SPREAD)
def test_record_of_every_strategy(row):
    strategy, options, mesh, ranks, fields, said = row
    step = TrainStep(**GPT, strategy=strategy, options=options, mesh=mesh, micro_batch_size=2, **fields)
    shape = MeshShape.parse(mesh) if mesh else MeshShape.of(dp=ranks)
    record = step.work(shape).training
    plain = {"layout": str(shape), "strategy": strategy, "micro_batch_size": 2, "dtype": fields.get("dtype", "fp32")}
    plain["num_micro_batches"] = fields.get("accumulation", 1)
    # Stages 1 to 3 of ZeRO keep a bucket, here as large as the model.
    numbers = find(GPT["model"], GPT["overrides"]).parameters if strategy in ("zero1", "zero2", "zero3") else 0
    bucket = {"bucket_bytes": numbers * (2.0 if said.get("narrow") else 4.0)}
    assert Training(**GPT, **plain, **said, **bucket) == record
    assert find("gpt-64x4", {"layers": 8}) == find(record.model, record.overrides)
    assert record == from_json(Training, to_json(record))


@pytest.mark.parametrize(("strategy", "options"), [("fsdp", {"offload": True}), ("zero2", {"offload_optimizer": True})])
def test_no_record_of_what_it_has_no_words_for(strategy, options):
    step = TrainStep(model="gpt2-tiny", strategy=strategy, options=options)
    assert step.work(MeshShape.of(dp=2)).training is None


def test_no_record_of_a_strategy_of_somebody_else():
    class Theirs(Strategy):
        name = "theirs"

        def build(self, rank, plan):
            raise AssertionError("never built")

    assert Theirs().training(TrainStep(model="gpt2-tiny").plan(MeshShape.of()), MeshShape.of()) is None


def test_record_of_the_batch_that_was_searched():
    step = dataclasses.replace(LargestBatch(model="gpt2-tiny", checkpointing="full"), micro_batch_size=7)
    record = step.work(MeshShape.of(dp=1)).training
    assert (7, "full") == (record.micro_batch_size, record.checkpointing)


def test_work_of_before_loads():
    old = {"flops": {"exact": 1.0}, "dtype": "fp32", "samples": 2.0}
    work = from_json(Work, old)
    assert work.training is None
    assert old == to_json(work)
    assert "training" not in to_json(AllReduce(message_bytes=1024).work(MeshShape.of(dp=2)))


TRAINED = Training(model="gpt-64x4", overrides={"layers": 8}, layout="dp2", strategy="ddp")


def store_trained(folder):
    return offer(folder, run_of("s0", days_old=2), case=case(training=TRAINED)).path


def test_baseline_keeps_it_and_compares_without_it(tmp_path):
    path = store_trained(tmp_path)
    (entry,) = store.read(path).entries.values()
    assert TRAINED == entry.case.training
    assert (case(), case().key) == (entry.case, entry.case.key)
    assert () == entry.case.differences(case())
    offer(tmp_path, run_of("s1"))  # of an older perfsuite: the same case, a second run
    assert [2] == [len(entry.runs) for entry in store.read(path).entries.values()]


def test_damaged_record_in_a_baseline_is_named(tmp_path):
    plain = json.loads(store_trained(tmp_path).read_text())
    (entry,) = plain["benchmarks"]
    entry["extra_info"]["training"]["colour"] = "red"
    entry["check"] = check_of(entry)
    with pytest.raises(Fault, match=r"CaseIdentity\.training has unknown fields colour"):
        loads(json.dumps(plain).encode())
