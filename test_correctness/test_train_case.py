"""The training step without ranks: what a case may be, what its batch is, what follows from its work."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.base.errors import InvalidParameter, WrongResult
from perfsuite.base.mesh import MeshShape
from perfsuite.metrics.flop_conventions import COLOSSALAI, EXACT, EXECUTED, MEGATRON, PALM, SIX_N
from perfsuite.workloads.training.exposed import exposed_share
from perfsuite.workloads.training.memory import CpuLedger, running_sums, storage_bytes, within_collectives
from perfsuite.workloads.training.parity import compare
from perfsuite.workloads.training.train_step import TrainStep


@pytest.mark.parametrize(
    ("fields", "world_size", "message"),
    [
        ({"global_batch_size": 10}, 4, "global_batch_size=10 does not divide by .* 1 x 4 replicas = 4; choose 8 or 12"),
        ({"global_batch_size": 2}, 4, "global_batch_size=2 does not divide by .* = 4; choose 4"),
        ({"global_batch_size": 9, "micro_batch_size": 3, "accumulation": 2}, 8, "size 3 x accumulation 2 x 8 .* = 48"),
        ({"strategy": "single"}, 2, "strategy single runs on 1 rank, the case has 2"),
        ({"data": "/nowhere"}, 2, "data='/nowhere' is not a folder"),
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
        ({"dtype": "int8"}, "dtype='int8' is unknown; choose from fp32, tf32, bf16, fp16"),
        ({"checkpointing": "some"}, "checkpointing='some' is unknown; choose from none, full, selective"),
        ({"accumulation": 0}, "accumulation=0 is not valid"),
        ({"micro_batch_size": True}, "micro_batch_size=True is not valid"),
        ({"num_workers": 2}, "num_workers=2 needs files, and data='synthetic' has none"),
        ({"num_workers": -1}, "num_workers=-1 is not a count"),
        ({"builds": ("time",)}, "builds: 'time' is unknown; choose from memory, exposed, flops, loss, traffic"),
        ({"builds": ("flops",), "compiled": True}, "torch cannot count operations of compiled blocks"),
        ({"environment": {"A=B": "1"}}, "environment: A=B='1' is not a variable; give its name and a text"),
        ({"environment": {"A": 1}}, "environment: A=1 is not a variable"),
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
    assert plain.preload[0] == "torch._dynamo"
    assert "perfsuite.workloads.training.parity" in plain.preload
    told = dataclasses.replace(plain, environment={"GLOO_SOCKET_IFNAME": "lo"})
    assert told.process.env == {"GLOO_SOCKET_IFNAME": "lo"}
    zero = TrainStep(model="gpt2-tiny", strategy="zero1", environment={"A": "1"})
    assert zero.process.env == {"A": "1"}
    assert zero.preload == (*plain.preload, "deepspeed", "torch._inductor.compile_fx")


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 8))
def test_gbs_is_lbs_times_gas_times_dp(micro, accumulation, ranks):
    given_total = TrainStep(
        model="gpt2-tiny", strategy="ddp", accumulation=accumulation, global_batch_size=micro * accumulation * ranks
    )
    given_part = TrainStep(model="gpt2-tiny", strategy="ddp", accumulation=accumulation, micro_batch_size=micro)
    shape = MeshShape.of(dp=ranks)
    assert given_total.plan(shape) == given_part.plan(shape)
    assert given_part.work(shape).samples == micro * accumulation * ranks


def test_a_ds_config_s_batch_is_honoured_and_its_global_batch_is_spread_over_the_ranks(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text('{"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": "auto"}')
    workload = TrainStep(model="gpt2-tiny", strategy="zero2", options={"config": str(path)}, accumulation=2)
    assert workload.work(MeshShape.of(dp=4)).samples == 3 * 2 * 4
    path.write_text('{"train_batch_size": 24, "train_micro_batch_size_per_gpu": "auto"}')
    assert workload.plan(MeshShape.of(dp=4)).micro_batch_size == 3
    with pytest.raises(InvalidParameter, match=r"train_batch_size=24 does not divide by .* = 10; choose 20 or 30"):
        workload.plan(MeshShape.of(dp=5))
    with pytest.raises(InvalidParameter, match=r"train_batch_size=24 is not micro_batch_size 2 x .* 2 x 4 .* = 16"):
        dataclasses.replace(workload, micro_batch_size=2).plan(MeshShape.of(dp=4))


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


# -- parts -------------------------------------------------------------------------------------------------------


def outcome(loss=1.0, gradient=(3.0, 4.0), next_loss=0.5, name="w"):
    return loss, {name: torch.tensor(gradient)}, next_loss


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
    assert compare(outcome(), outcome(), "ddp", 1e-5) == 0
    with pytest.raises(WrongResult, match=message):
        compare(got, outcome(), "ddp", 1e-5)


@given(st.floats(0.0, 0.9), st.integers(2, 12))
def test_the_exposed_share_is_found(share, count):
    pairs = [(1.0 + index, (1.0 + index) * (1 - share)) for index in range(count)]
    assert exposed_share(pairs) == pytest.approx((share, share, share), abs=1e-9)


def test_a_storage_counts_once():
    seen = set()
    buffer = torch.zeros(16)
    assert storage_bytes([buffer[:4], buffer[8:], torch.zeros(3)], seen) == 64 + 12
    assert storage_bytes([buffer], seen) == 0


# -- a CPU's ledger ------------------------------------------------------------------------------------------------


def test_the_ledger_has_every_byte_and_the_peak_between_its_marks():
    before = torch.ones(1 << 12)
    ledger = CpuLedger()
    with ledger.observing():
        kept = torch.ones(1000)
        torch.ones(1 << 20)  # before the start: no peak of the step's
        ledger.mark("start")
        del before  # it was there before the books were opened
        passing = [torch.ones(500), torch.ones(250)]
        ledger.mark("after forward")
        passing.clear()
        ledger.mark("final")
        torch.ones(1 << 20)
    assert {"start": 4000, "after forward": 7000, "final": 4000, "peak": 7000} == ledger.totals()
    assert kept.numel() == 1000


def history(sizes, seen_bytes):
    """One collective from 10 to 20 that allocates for itself; what is seen to end, and when, is a matter of chance."""
    events = [(1, 1, 100)]
    for index, (size, seen) in enumerate(zip(sizes, seen_bytes, strict=True)):
        events.append((11 + index, 2 + index, size))
        if seen is not None:
            events.append((seen, 2 + index, -size))
    events.append((30, 2, 7))  # the address of what may not have been seen to end
    return sorted(events, key=lambda each: each[0])


@given(
    st.lists(
        st.tuples(st.integers(1, 50), st.one_of(st.none(), st.integers(15, 18), st.integers(22, 28))),
        min_size=1,
        max_size=4,
    )
)
def test_when_a_collective_s_own_buffers_are_seen_to_end_changes_nothing(buffers):
    sizes = [size for size, _ in buffers]
    events = history(sizes, [seen for _, seen in buffers])
    totals = running_sums(within_collectives(events, [(10, 20)]), {"start": 5, "after forward": 25, "final": 40})
    assert {"start": 100, "after forward": 100, "final": 107, "peak": 100 + max(sum(sizes), 7)} == totals
