"""What pipelines are made of, without ranks: bad input, splits, orders for torch, timelines put together."""

from __future__ import annotations

import doctest
import re
from contextlib import nullcontext
from enum import Enum
from typing import Any

import pytest
import torch
from torch.distributed import pipelining

from perfsuite.baselines.runs import Meaning
from perfsuite.errors import InvalidParameter, UnsupportedCase
from perfsuite.gate.exact import rule_for
from perfsuite.mesh import MeshShape
from perfsuite.metrics import REGISTRY
from perfsuite.metrics.pipeline import bubble_ratio
from perfsuite.models import find as find_model
from perfsuite.platforms.base import Clock
from perfsuite.platforms.clocks import PerfCounterClock
from perfsuite.records import ClockFacts, Sample
from perfsuite.runtime.ranks.spans import SpanRecorder
from perfsuite.runtime.ranks.timeline import KEPT_STEPS, Part, StepKeeper
from perfsuite.runtime.timelines import join
from perfsuite.schedules import SCHEDULES, make_schedule
from perfsuite.strategies.pipeline import pipeline as pipeline_module
from perfsuite.strategies.pipeline import split as pipeline_split
from perfsuite.strategies.pipeline.pipeline import torch_order
from perfsuite.strategies.pipeline.split import split_layers, stage_costs
from perfsuite.strategies.pipeline.watch import Watch
from perfsuite.workloads.training.emulated_pipeline import EmulatedPipeline
from perfsuite.workloads.training.train_step import TrainStep
from test_correctness.helpers.pipelines import staged

# -- bad input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ({"mesh": "pp16"}, "16 stages for num_layers=12: every stage has at least one layer; choose 1 to 12 stages"),
        (
            {"mesh": "pp4", "global_batch_size": 30},
            "global_batch_size=30 does not divide by accumulation 8 x 1 replicas = 8; choose 24 or 32",
        ),
        ({"mesh": "pp2-dp2", "global_batch_size": 7}, "does not divide by accumulation 8 x 2 replicas = 16; choose 16"),
        (
            {"mesh": "pp2", "global_batch_size": 16, "micro_batch_size": 4},
            "global_batch_size=16 is not micro_batch_size 4 x accumulation 8 x 1 replicas = 32; leave one of them out",
        ),
        ({"mesh": "pp2", "micro_batch_size": 0}, "micro_batch_size=0 is not a count; choose a whole number from 1"),
        ({"mesh": "pp2", "num_micro_batches": 0}, "accumulation=0 is not a count; choose a whole number from 1"),
        (
            {"mesh": "pp4", "schedule": "dualpipev", "num_micro_batches": 6},
            "num_micro_batches=6 with 4 ranks for schedule dualpipev, which needs at least 2 x ranks, one per stage; "
            "choose 8",
        ),
        (
            {"mesh": "pp4", "schedule": "interleaved_1f1b", "num_micro_batches": 9},
            "which needs a multiple of its number of rounds max(1, num_micro_batches // ranks); choose 8 or 10",
        ),
        (
            {"mesh": "pp2", "schedule": "zbv", "stages_per_rank": 3},
            "stages_per_rank=3 for schedule zbv, which has 2 stages per rank; choose 2, or another schedule",
        ),
        ({"mesh": "pp2", "schedule": "gpip"}, "schedule='gpip' is unknown; choose naive, gpipe, 1f1b"),
        ({"mesh": "tp2-pp2"}, "mesh pp2-tp2 has axis tp, along which strategy hybrid cannot train; give it pp or dp"),
        ({"mesh": "dp4"}, "mesh dp4 has no axis pp, which strategy hybrid needs; give it one, such as pp4 or pp2-dp2"),
        ({"mesh": "pp2-dp_shard2"}, "mesh pp2-dp_shard2 has one of dp_replicate and dp_shard; strategy hybrid needs"),
        ({"mesh": "pp2", "compiled": True}, "compiled blocks cannot be cut into stages; leave compiled out"),
        (
            {"mesh": "pp2", "schedule": "zbv", "checkpointing": "full"},
            "checkpointing='full' computes blocks again in a backward, which schedule zbv splits; leave it out",
        ),
        ({"mesh": "pp2", "model": "latte-l"}, "model latte-l cannot be split into stages"),
        ({"mesh": "pp2", "dtype": "fp16"}, "dtype='fp16' trains no pipeline; choose from fp32, tf32, bf16"),
        (
            {"mesh": "pp2", "schedule": "zbv", "builds": ("flops",)},
            "builds: torch counts no operations of backwards in two parts, as schedule zbv has them; leave out 'flops'",
        ),
        (
            {"mesh": "pp2", "builds": ("exposed",)},
            "builds: the communication of strategy hybrid cannot be made to do nothing; leave out 'exposed'",
        ),
    ],
)
def test_what_cannot_be_is_named_with_the_legal_choices(case, message):
    with pytest.raises(InvalidParameter, match=re.escape(message)):
        TrainStep(**staged(**{"model": "gpt2", **case}))


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ({"mesh": "pp2-dp2"}, "mesh pp2-dp2 is none of an emulated pipeline; give it pp alone, such as pp4"),
        ({"mesh": "pp2", "action_ms": -1}, "action_ms=-1 is no time to sleep; choose 0 or more milliseconds"),
        ({"mesh": "pp2", "action_ms": float("nan")}, "action_ms=nan is no time to sleep"),
        ({"mesh": "pp2", "features": 0}, "features=0 is no size; choose a whole number from 1"),
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


def test_the_batch_is_that_of_all_pipelines():
    told = TrainStep(model="gpt2", mesh="pp2-dp4", **staged(num_micro_batches=4), micro_batch_size=3)
    found = TrainStep(model="gpt2", mesh="pp2-dp4", **staged(num_micro_batches=4), global_batch_size=48)
    shape = MeshShape.parse("pp2-dp4")
    assert told.work(shape) == found.work(shape)
    assert found.plan(shape).micro_batch_size == 3
    assert found.work(shape).samples == 48
    assert found.work(shape).tokens == 48 * 1024


def test_the_twin_runs_the_same_schedule_on_the_same_mesh():
    fields = staged(schedule="interleaved_1f1b", num_micro_batches=8, stages_per_rank=4)
    case, shape = TrainStep(model="llama2-7b", mesh="pp4-dp2", **fields), MeshShape.parse("pp4-dp2")
    twin = case.twin()
    orders = [each.find_strategy().find_schedule(shape, each.accumulation) for each in (twin, case)]
    assert orders[0] == orders[1]
    assert twin.plan(shape).model.layers == 17


@pytest.mark.parametrize(
    "workload",
    [TrainStep(model="gpt2", mesh="pp2", **staged(), builds=("memory",)), EmulatedPipeline(mesh="pp2")],
)
def test_every_metric_of_a_case_is_in_the_registry(workload):
    assert [name for name in workload.metrics if name not in REGISTRY] == []


def test_the_head_takes_the_place_of_blocks():
    assert doctest.testmod(pipeline_split).failed == 0
    for name, stages in (("gpt2", 3), ("gpt2-xl", 8), ("llama2-7b", 8), ("gpt3-13b", 16)):
        model = find_model(name)
        split = split_layers(model, stages)
        assert [layer for layers in split for layer in layers] == list(range(model.layers))
        assert sum(stage_costs(model, split)) == pytest.approx(model.forward_flops)
        even = [range(index * model.layers // stages, (index + 1) * model.layers // stages) for index in range(stages)]
        assert max(stage_costs(model, split)) <= max(stage_costs(model, tuple(even)))


def test_a_gate_judges_one_bubble_alone():
    meaning = Meaning(unit="ratio", better="lower")
    names = [name for name in TrainStep(model="gpt2", mesh="pp2", **staged()).metrics if "bubble" in name]
    assert [name for name in names if rule_for(name, meaning) is not None] == ["bubble_ratio"]


# -- orders for torch --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
def test_torch_takes_every_order(name):
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
        ("1f1b", pipelining.schedules, "_PipelineScheduleRuntime", "2.5"),
        ("zbv", pipelining.PipelineStage.__mro__[1], "set_local_fwd_input", "2.6"),
        ("dualpipev", None, "OVERLAP_F_B", "2.9"),
    ],
)
def test_an_older_torch_is_told_what_it_lacks(monkeypatch, schedule, owner, attribute, version):
    if owner is None:  # members of an enum cannot be taken away
        monkeypatch.setattr(pipelining.schedules, "_ComputationType", object)
    else:
        monkeypatch.delattr(owner, attribute, raising=False)
    plan = make_schedule(schedule, ranks=2, num_micro_batches=4)
    with pytest.raises(UnsupportedCase, match=rf"schedule {schedule} needs .* it is in torch {version} and newer"):
        pipeline_module._pipelining(plan)


def test_torchs_functions_are_replaced_for_a_step_only():
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
    watch = Watch(rank)
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


def test_torch_2_5_says_once_whether_backwards_are_whole():
    class Names:
        _ComputationType = Enum("_ComputationType", ["FORWARD", "BACKWARD", "WEIGHT"])
        _Action = pipelining.schedules._Action

    split = make_schedule("interleaved_zero_bubble", ranks=2, num_micro_batches=2)
    kinds = {action.computation_type.name for action in torch_order(split.orders[0], Names)}
    assert kinds == {"FORWARD", "BACKWARD", "WEIGHT"}
    whole = make_schedule("1f1b", ranks=2, num_micro_batches=2)
    kinds = {action.computation_type.name for action in torch_order(whole.orders[0], Names)}
    assert kinds == {"FORWARD", "BACKWARD"}


# -- timelines ---------------------------------------------------------------------------------------------------


def keeper(**place: int) -> StepKeeper:
    return StepKeeper(**{"schedule": "gpipe", "ranks": 2, "rank": 0, "pipeline": 0, **place})


def step(rank: int, begin: float) -> list[Part]:
    """GPipe's step of one micro-batch on two ranks, F = 1 and B = 2; the last stage's loss is half of its forward."""
    if rank == 0:
        actions = [
            Part("forward", 0, 0, 0, 1),
            Part("send", 0, 0, 1, 1.1),
            Part("wait", 0, 0, 1, 4),
            Part("backward", 0, 0, 4, 6),
        ]
    else:
        actions = [
            Part("forward", 1, 0, 1, 1.5),
            Part("forward", 1, 0, 1.5, 2),
            Part("backward", 1, 0, 2, 4),
            Part("optimizer", -1, -1, 6, 9),
        ]
    return [part._replace(start_s=part.start_s + begin, end_s=part.end_s + begin) for part in actions]


def kept(rank: int, *begins: float, offset_s: float = 0.0, **place: int) -> dict[str, Any]:
    own = keeper(rank=rank, **place)
    for begin in begins:
        own.take(step(rank, begin))
    samples = [Sample(time_s=1.0 + index) for index in range(len(begins))]
    return {"steps": own.report(samples, offset_s=offset_s)}


def test_the_ranks_parts_become_one_timeline():
    timeline, records = join([kept(0, 100.0, 200.0, 300.0), kept(1, 100.0, 200.0, 300.0)])
    assert timeline.schedule == "gpipe"
    found = [(e.kind, e.rank, e.stage, e.micro_batch, round(e.start_s, 9), round(e.end_s, 9)) for e in timeline.events]
    assert found == [
        ("forward", 0, 0, 0, 0, 1),
        ("send", 0, 0, 0, 1, 1),  # only posted
        ("wait", 0, 0, 0, 1, 4),
        ("backward", 0, 0, 0, 4, 6),
        ("forward", 1, 1, 0, 1, 2),  # with the loss
        ("backward", 1, 1, 0, 2, 4),
    ]
    assert bubble_ratio(timeline) == pytest.approx(0.5)
    values = {record.name: record.value for record in records}
    assert values["bubble_ratio_median"] == values["bubble_ratio_low"] == pytest.approx(0.5)
    assert values["bubble_ratio_simulated"] == pytest.approx(0.5)
    assert values["binding_stage_excess"] == pytest.approx(0.0)


def test_the_clocks_of_other_hosts_are_shifted():
    timeline, _ = join([kept(0, 100.0), kept(1, 1100.0, offset_s=-1000.0)])
    assert bubble_ratio(timeline) == pytest.approx(0.5)


def test_of_several_pipelines_the_one_that_took_longest_is_shown():
    slow = {"steps": {**kept(1, 100.0, pipeline=2)["steps"]}}
    slow["steps"]["parts"] = [[name, s, m, start, end + 3] for name, s, m, start, end in slow["steps"]["parts"][2:]]
    timeline, _ = join([kept(0, 100.0), kept(1, 100.0), kept(0, 100.0, pipeline=2), slow])
    assert max(event.end_s for event in timeline.events if event.rank == 1) == pytest.approx(7)


def test_without_all_ranks_there_is_no_timeline():
    assert join([{"steps": None}, {}]) == (None, ())
    assert join([kept(0, 100.0), {"steps": None}]) == (None, ())


def test_a_schedule_that_nobody_knows_is_not_simulated():
    reports = [kept(0, 100.0), kept(1, 100.0)]
    for report in reports:
        report["steps"]["schedule"] = "own"
    timeline, records = join(reports)
    assert timeline.schedule == "own"
    assert {record.name for record in records} == {"bubble_ratio_median", "bubble_ratio_low", "bubble_ratio_high"}


def test_the_step_that_is_sent_is_the_one_nearest_to_the_median():
    own = keeper()
    times = [5.0, 1.0, 3.0, 2.0, 4.0]
    for index in range(len(times)):
        own.take(step(0, 10.0 * index))
    report = own.report([Sample(time_s=time) for time in times], offset_s=0.0)
    assert report["parts"][0][3] == 20.0
    assert len(report["busy"]) == 5


def test_only_the_latest_steps_are_kept_whole():
    own = keeper()
    count = KEPT_STEPS + 10
    for index in range(count):
        own.take(step(0, float(index)))
    assert len(own.kept) == KEPT_STEPS
    # The median sample is long gone: the nearest of those that are left is sent.
    samples = [Sample(time_s=1.0 if index < 5 else 9.0) for index in range(count)]
    samples[20] = Sample(time_s=8.0)
    report = own.report(samples, offset_s=0.0)
    assert len(report["busy"]) == count
    assert report["parts"][0][3] >= 10.0


def test_steps_without_actions_have_no_timeline():
    own = keeper()
    own.take([Part("optimizer", -1, -1, 0, 1)])
    assert own.report([Sample(time_s=1.0)], offset_s=0.0) is None


class DeviceClock(Clock):
    """A device whose clock stands at another time than the host's and is read as stamps in seconds."""

    def __init__(self) -> None:
        self.now = 5000.0

    def stamp(self) -> object:
        self.now += 1.0
        return self.now

    def wait(self, stamp: object) -> None:
        return

    def elapsed_s(self, start: Any, end: Any) -> float:
        return end - start

    def facts(self) -> ClockFacts:
        return ClockFacts(name="device", resolution_s=1e-9, cost_s=0.0)


def test_a_devices_stamps_are_told_on_the_hosts_clock():
    device = DeviceClock()
    assert device.host_s(5003.0, 5010.0, 70.0) == 63.0
    host = PerfCounterClock()
    stamp = host.stamp()
    assert host.host_s(stamp, host.stamp(), -1.0) == pytest.approx(stamp * 1e-9)


def test_a_sample_of_several_iterations_keeps_the_last():
    recorder = SpanRecorder(clock=DeviceClock(), keeper=keeper())
    start = recorder.clock.stamp()
    for micro_batch in (0, 1, 0, 1):
        with recorder.span("forward", stage=0, micro_batch=micro_batch):
            pass
    recorder.close_sample(start, recorder.clock.stamp(), 2)
    (parts,) = recorder.keeper.kept
    assert [part.micro_batch for part in parts] == [0, 1]
    assert [part.end_s - part.start_s for part in parts] == [1.0, 1.0]
    assert parts[1].start_s - parts[0].end_s == 1.0
