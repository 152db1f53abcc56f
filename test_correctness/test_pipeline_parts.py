"""What pipelines are made of, without ranks: bad input, splits, orders for torch."""

import re
from contextlib import nullcontext
from enum import Enum

import pytest
import torch

from perfsuite.base.errors import InvalidParameter, UnsupportedCase
from perfsuite.base.mesh import MeshShape
from perfsuite.baselines.runs import MetricMeaning
from perfsuite.gate.quantity import rule_for
from perfsuite.metrics import REGISTRY
from perfsuite.models import find as find_model
from perfsuite.schedules import SCHEDULES, make_schedule, split_costs
from perfsuite.strategies import pipeline as pipeline_module
from perfsuite.strategies.hybrid_sizes import split_layers
from perfsuite.strategies.pipeline import StageWatch, torch_order
from perfsuite.workloads.training.emulated_pipeline import EmulatedPipeline
from perfsuite.workloads.training.train_step import TrainStep
from test_correctness.helpers.pipelines import staged

# -- bad input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ({"mesh": "pp16"}, "16 stages for num_layers=12: each stage needs at least one layer; choose 1 to 12 stages"),
        ({"global_batch_size": 16, "micro_batch_size": 4}, "global_batch_size=16 is not ... set accumulation=4"),
        (
            {"mesh": "pp4", "schedule": "dualpipev", "num_micro_batches": 6},
            "num_micro_batches=6 with 4 ranks for schedule dualpipev, which needs at least 2 x ranks, ... choose 8",
        ),
        ({"compiled": True}, "compiled blocks cannot be cut into stages; leave compiled out"),
        ({"schedule": "zbv", "checkpointing": "full"}, "checkpointing='full' does not work ... zbv; leave it out"),
        ({"model": "latte-l"}, "model latte-l cannot be trained by strategy hybrid: its blocks need other inputs"),
        ({"schedule": "zbv", "builds": ("flops",)}, "torch cannot count operations ... zbv; leave out 'flops'"),
    ],
)
def test_what_cannot_be_is_named_with_the_legal_choices(case, message):
    with pytest.raises(InvalidParameter, match=re.escape(message).replace(r"\.\.\.", ".*")):
        TrainStep(**staged(**{"model": "gpt2", "mesh": "pp2", **case}))


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ({"mesh": "pp2-dp2"}, "mesh pp2-dp2 has other axes than pp; give it only pp, such as pp4"),
        ({"mesh": "pp2", "action_ms": -1}, "action_ms=-1 is not a duration; choose 0 or more milliseconds"),
        ({"mesh": "pp2", "action_ms": float("nan")}, "action_ms=nan is not a duration"),
        ({"mesh": "pp2", "features": 0}, "features=0 is not valid; choose a whole number from 1"),
    ],
)
def test_an_emulated_pipeline_has_rules_too(case, message):
    with pytest.raises(InvalidParameter, match=re.escape(message)):
        EmulatedPipeline(**case)


def test_an_accelerator_does_not_wait_for_a_sleep():
    class Elsewhere:
        device = torch.device("meta")

    with pytest.raises(UnsupportedCase, match="run it with --perf-platform=cpu"):
        EmulatedPipeline(mesh="pp2").build(Elsewhere())


# -- what a case is ----------------------------------------------------------------------------------------------


def test_the_twin_runs_the_same_schedule_on_the_same_mesh():
    fields = staged(schedule="interleaved_1f1b", num_micro_batches=8, stages_per_rank=4)
    case, shape = TrainStep(model="llama2-7b", mesh="pp4-dp2", **fields), MeshShape.parse("pp4-dp2")
    twin = case.twin()
    orders = [each.find_strategy().find_schedule(shape, each.accumulation) for each in (twin, case)]
    assert orders[0] == orders[1]
    assert twin.plan(shape).model.layers == 17


@pytest.mark.parametrize(
    "workload", [TrainStep(model="gpt2", mesh="pp2", **staged(), builds=("memory",)), EmulatedPipeline(mesh="pp2")]
)
def test_every_metric_of_a_case_is_in_the_registry(workload):
    assert [name for name in workload.metrics if name not in REGISTRY] == []


def test_the_head_takes_the_place_of_blocks():
    for name, stages in (("gpt2", 3), ("gpt2-xl", 8), ("llama2-7b", 8), ("gpt3-13b", 16)):
        model = find_model(name)
        split = split_layers(model, stages)
        assert [layer for layers in split for layer in layers] == list(range(model.layers))
        costs, head = [model.block_flops / model.layers] * model.layers, model.forward_flops - model.block_flops
        assert sum(split_costs(costs, split, head=head)) == pytest.approx(model.forward_flops)
        even = [range(index * model.layers // stages, (index + 1) * model.layers // stages) for index in range(stages)]
        assert max(split_costs(costs, split, head=head)) <= max(split_costs(costs, tuple(even), head=head))


def test_a_gate_judges_one_bubble_alone():
    meaning = MetricMeaning(unit="ratio", better="lower")
    names = [name for name in TrainStep(model="gpt2", mesh="pp2", **staged()).metrics if "bubble" in name]
    assert [name for name in names if rule_for(name, meaning, REGISTRY) is not None] == ["bubble_ratio"]


# -- orders for torch --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pipelining():
    """Its import takes seconds, which only who runs these tests waits for."""
    from torch.distributed import pipelining

    return pipelining


@pytest.mark.parametrize("name", SCHEDULES)
def test_torch_takes_every_order(name, pipelining):
    schedule = make_schedule(name, ranks=4, num_micro_batches=8)
    types = pipelining.schedules._ComputationType
    if name == "dualpipev" and not hasattr(types, "OVERLAP_F_B"):
        pytest.skip("this torch has no overlapped actions")
    # torch 2.5 writes an input gradient as it writes a whole backward.
    written_input = "I" if hasattr(types, "BACKWARD_INPUT") else "B"
    written = [[str(action) for action in torch_order(order, pipelining.schedules)] for order in schedule.orders]
    for order, torchs in zip(schedule.orders, written, strict=True):
        flat = [part for action in torchs for part in re.findall(r"\d+[FBIW]\d+", action)]
        assert flat == [str(action).rstrip("+").replace("I", written_input) for action in order]
        assert sum("OVERLAP_F_B" in action for action in torchs) == sum(action.joined for action in order)


@pytest.mark.parametrize(
    ("schedule", "owner", "attribute", "version"),
    [
        ("1f1b", "torch.distributed.pipelining.schedules", "_PipelineScheduleRuntime", "2.5"),
        ("zbv", "_PipelineStageBase", "set_local_fwd_input", "2.6"),
        ("dualpipev", None, "OVERLAP_F_B", "2.9"),
    ],
)
def test_an_older_torch_is_told_what_it_lacks(monkeypatch, schedule, owner, attribute, version):
    from torch.distributed import pipelining

    if owner is None:  # members of an enum cannot be taken away
        monkeypatch.setattr(pipelining.schedules, "_ComputationType", object)
    else:
        base = pipelining.PipelineStage.__mro__[1]
        monkeypatch.delattr(base if owner == base.__name__ else pipelining.schedules, attribute, raising=False)
    plan = make_schedule(schedule, ranks=2, num_micro_batches=4)
    with pytest.raises(UnsupportedCase, match=rf"schedule {schedule} needs .* it is in torch {version} and newer"):
        pipeline_module._pipelining(plan)


def test_torchs_functions_are_replaced_for_a_step_only(pipelining):
    names = pipelining.schedules
    posts, dumps = names._batch_p2p, names._format_pipeline_order

    def within():
        with pipeline_module._replaced(names, _batch_p2p=len, _format_pipeline_order=pipeline_module._no_dump):
            assert names._batch_p2p is len
            assert names._format_pipeline_order({0: []}, error_step_number=0) == ""
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        within()
    assert (names._batch_p2p, names._format_pipeline_order) == (posts, dumps)


class Mute:
    """A rank whose spans are only noted."""

    def __init__(self):
        self.seen = []

    def span(self, name, **attributes):
        self.seen.append((name, attributes["stage"], attributes["micro_batch"]))
        return nullcontext()


class Stage:
    stage_index = 5

    def __getattr__(self, name):
        if name.startswith(("get_", "forward", "backward")):
            return lambda chunk, *_, **__: [name, chunk]
        raise AttributeError(name)


class Message:
    def __init__(self):
        self.waited = 0

    def wait(self):
        self.waited += 1


@pytest.mark.parametrize("several", [True, False], ids=["a list of messages", "one message, as before torch 2.8"])
def test_waiting_is_watched_whatever_torch_posts(several):
    rank, message = Mute(), Message()
    watch = StageWatch(rank)
    stage = Stage()
    watch.attach([stage])
    post = watch.posting(lambda operations: [message] if several else message)
    for name in ("get_fwd_send_ops", "get_bwd_recv_ops"):
        posted = post(getattr(stage, name)(3))
        (posted[0] if several else posted).wait()
    assert message.waited == 2
    assert rank.seen == [("send", 5, 3), ("receive", 5, 3), ("wait", 5, 3)]
    assert watch.doing == "wait of micro-batch 3 in stage 5"
    watch.detach()
    stage.get_fwd_recv_ops(4)
    assert post([]) is not None
    assert len(rank.seen) == 3


def test_torch_2_5_says_once_whether_backwards_are_whole(pipelining):
    class Names:
        _ComputationType = Enum("_ComputationType", ["FORWARD", "BACKWARD", "WEIGHT"])
        _Action = pipelining.schedules._Action

    split = make_schedule("interleaved_zero_bubble", ranks=2, num_micro_batches=2)
    kinds = {action.computation_type.name for action in torch_order(split.orders[0], Names)}
    assert kinds == {"FORWARD", "BACKWARD", "WEIGHT"}
    whole = make_schedule("1f1b", ranks=2, num_micro_batches=2)
    kinds = {action.computation_type.name for action in torch_order(whole.orders[0], Names)}
    assert kinds == {"FORWARD", "BACKWARD"}
