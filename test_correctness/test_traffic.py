"""Traffic without ranks: closed forms, marks of the parts on a clock of the test's own, joining, metrics."""

import dataclasses
import math

import pytest
import torch
from torch import nn

from perfsuite.base.errors import CaseError, InvalidParameter
from perfsuite.base.mesh import MeshShape
from perfsuite.metrics import derive
from perfsuite.models import find as find_model
from perfsuite.models.build import build
from perfsuite.models.layers import materialize
from perfsuite.record.codec import from_json, to_json
from perfsuite.record.result import Measurement, Peaks, Record, Work
from perfsuite.record.step import Component, Traffic
from perfsuite.runtime.assembly import join_components, join_traffic
from perfsuite.strategies import Plan, find
from perfsuite.strategies.traffic import find_shapes
from perfsuite.strategies.traffic_count import Posted
from perfsuite.workloads.training.builds import Parts, components_of, difference, mark, traffic_of
from perfsuite.workloads.training.case import BUILDS
from perfsuite.workloads.training.train_step import TrainStep
from test_correctness.helpers.scripted_driver import measured_on
from test_correctness.test_runtime_parts import Ticks

# -- closed forms ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["gpt2-tiny", "llama2-tiny", "moe-tiny", "gpt-1536x16"])
def test_shapes_are_those_of_the_modules(model):
    config = find_model(model)
    shapes = find_shapes(config)
    with torch.device("meta"):
        module = build(config)
    held = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    blocks = {f"blocks.{layer}.{name}": shape for layer in range(config.layers) for name, shape in shapes.layer.items()}
    told = {**shapes.first, **blocks, **shapes.last}
    assert held == told
    assert config.parameters == sum(math.prod(shape) for shape in told.values())


def calls(strategy, mesh, rank=0, *, options=None, model="llama2-tiny", **plan):
    shape = MeshShape.parse(mesh)
    plan = Plan(model=find_model(model), **{"dtype": "fp32", "micro_batch_size": 2, **plan})
    form = find(strategy, options or {}).traffic(plan, shape, rank)
    return {(call.axis, call.collective, call.part): (call.calls, call.message_bytes) for call in form}


def test_sixteen_bits_halve_messages_and_micro_batches_multiply_them():
    one = calls("hybrid", "cp2")["cp", "send", "attention"]
    keys = 2 * 2 * 32 * 64  # keys and values of 2 samples, half of 64 tokens, 2 heads of 32 features
    assert (2 * (2 + 2), 2 * (2 * keys * 4 + 2 * keys * 4)) == one
    halved = calls("hybrid", "cp2", dtype="bf16", accumulation=3)["cp", "send", "attention"]
    assert (3 * one[0], 3 * 2 * (2 * keys * 2 + 2 * keys * 4)) == halved


def test_experts_get_their_rows_and_give_them_back():
    # Two layers; 2 samples of 64 tokens go to 2 of 8 experts each, 128 features wide; what a rank sends on the average.
    rows, counts = 2 * 64 * 2 * 128 * 4, 8 * 8
    assert (2 * (4 + 1), 2 * (4 * rows + counts)) == calls("hybrid", "ep2", model="moe-tiny")["ep", "all_to_all", "mlp"]
    split = calls("hybrid", "ep2-tp2", model="moe-tiny")
    assert (2 * (4 + 1), 2 * (4 * rows // 2 + counts)) == split["ep", "all_to_all", "mlp"]
    assert (2 * 4, 2 * 4 * rows) == split["tp", "all_to_all", "mlp"]
    assert (2, 2 * 2 * counts) == split["tp", "all_gather", "mlp"]
    assert ("tp", "reduce_scatter", "mlp") not in split
    again = calls("hybrid", "ep2", model="moe-tiny", checkpointing="full")
    assert (2 * (6 + 2), 2 * (6 * rows + 2 * counts)) == again["ep", "all_to_all", "mlp"]


def test_strategies_without_a_closed_form_say_so():
    plan = Plan(model=find_model("latte-tiny"), dtype="fp32", micro_batch_size=1)
    for strategy in ("ddp", "fsdp", "zero_redundancy", "zero2", "single"):
        assert find(strategy).traffic(plan, MeshShape.of(dp=2), 0) is None
    torchs = Plan(model=find_model("llama2-tiny"), dtype="fp32", micro_batch_size=1)
    assert find("hybrid", {"context": "torch"}).traffic(torchs, MeshShape.of(cp=2), 0) is None


def test_what_differs_is_told_with_both_counts():
    form = {"tp / all_gather / mlp": [4, 400, True], "ep / all_to_all / mlp": [4, 100, False]}
    posted = {"tp / all_gather / mlp": [4, 400, True], "ep / all_to_all / mlp": [4, 90, False]}
    other = {"form": form, "posted": {**posted, "ep / all_to_all / mlp": [4, 110, False]}}
    assert difference({"form": form, "posted": posted}, [{"form": form, "posted": posted}, other]) == ""
    less = {"form": form, "posted": {**posted, "tp / all_gather / mlp": [3, 400, True]}}
    told = "one step posts, against the strategy's closed form, tp / all_gather / mlp 3 calls of 400 bytes and not 4"
    assert told in difference(less, [less, other])
    assert "ep / all_to_all / mlp 4 calls of 180 bytes of all ranks and not 4 of 200" in difference(less, [less, less])


# -- parts -------------------------------------------------------------------------------------------------------


class Takes(torch.autograd.Function):
    """Identity that takes ``forward_s`` and ``backward_s`` on a clock."""

    @staticmethod
    def forward(ctx, x, clock, forward_s, backward_s):
        ctx.clock, ctx.backward_s = clock, backward_s
        clock.now += forward_s
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.clock.now += ctx.backward_s
        return gradient, None, None, None


def step_of(model, clock, *, checkpointing="none", **slow):
    """A step in which each named part of every layer takes its (forward, backward) seconds, and nothing else any."""
    module = build(find_model(model), checkpointing)
    materialize(module, torch.device("cpu"), seed=0)
    for block in module.blocks.children():
        for name, (forward_s, backward_s) in slow.items():
            getattr(block, name).register_forward_hook(
                lambda part, inputs, output, a=forward_s, b=backward_s: Takes.apply(output, clock, a, b)
            )
    tokens = torch.zeros(1, find_model(model).tokens_per_sample + 1, dtype=torch.int64)

    def step():
        module(tokens).backward()

    return module, step


@pytest.mark.parametrize("model", ["gpt2-tiny", "llama2-tiny", "moe-tiny"])
def test_time_of_a_part_in_either_direction_is_its_own(model):
    clock = Ticks()
    module, step = step_of(model, clock, attention=(1.0, 20.0), mlp=(300.0, 4000.0), norm1=(0.5, 0.25))
    parts = Parts(clock)
    mark(module, parts)
    assert {"attention": 42.0, "mlp": 8600.0, "other": 1.5, "data": 0.0, "pipeline": 0.0} == parts.seconds(step)
    assert "other" == parts.part


def test_a_forward_that_runs_again_is_the_time_of_its_parts():
    clock = Ticks()
    module, step = step_of("llama2-tiny", clock, checkpointing="full", attention=(1.0, 20.0), mlp=(300.0, 4000.0))
    parts = Parts(clock)
    mark(module, parts)
    found = parts.seconds(step)
    # Of the second forward of an mlp nobody needs what comes last: it may be stopped before that.
    assert 2 * (2 * 1.0 + 20.0) == found["attention"]
    assert found["mlp"] in (2 * 4300.0, 2 * 4600.0)
    assert {"other": 0.0, "data": 0.0, "pipeline": 0.0} == {name: found[name] for name in ("other", "data", "pipeline")}
    assert "other" == parts.part


def test_waiting_for_neighbours_is_no_computation():
    clock = Ticks()
    parts = Parts(clock)

    def step():
        clock.now += 1.0
        with parts.inside("pipeline"):
            clock.now += 5.0

    found = parts.seconds(step)
    assert (1.0, 5.0) == (found["other"], found["pipeline"])
    sent = posted(axis="pp", collective="send", part="pipeline")
    components = {each.name: each for each in components_of([sent], {sent: 2.0}, found)}
    assert Component(name="pipeline", compute_s=0.0, communication_s=2.0) == components["pipeline"]
    assert Component(name="other", compute_s=1.0, communication_s=0.0) == components["other"]


def posted(**given):
    usual = {"axis": "tp", "collective": "all_reduce", "part": "mlp", "place": given.get("part", "mlp"), "group": "0"}
    return Posted(**{**usual, "ranks": 2, "dtype": torch.float32, "elements": 8, **given})


def test_a_part_computes_without_what_it_waits_for():
    ours, gathered = posted(), posted(axis="dp", collective="all_gather", part="data", place="other")
    spent = {"attention": 0.0, "mlp": 1.0, "data": 0.0, "pipeline": 0.0, "other": 0.5}
    seconds = {ours: 0.25, gathered: 0.75}
    found = {each.name: each for each in components_of([ours, ours, gathered], seconds, spent)}
    assert {"mlp": (0.5, 0.5), "data": (0.0, 0.75), "other": (0.0, 0.0)} == {
        name: (each.compute_s, each.communication_s) for name, each in found.items()
    }
    both, other = traffic_of([ours, gathered, ours], seconds, frozenset())
    assert (2, 64, 0.5, "data") == (both.calls, both.message_bytes, both.time_s, other.part)


# -- records and metrics ----------------------------------------------------------------------------------------


def entry(**given):
    usual = {"axis": "tp", "collective": "all_gather", "part": "mlp", "message_bytes": 4_000_000, "time_s": 0.004}
    return Traffic(**{**usual, "calls": 4, "ranks": 4, **given})


def report(*entries, place="", components=()):
    return {"traffic": {"place": place, "traffic": to_json(entries), "components": to_json(components)}}


def test_ranks_are_joined_by_the_most_of_each():
    parts = (
        Component(name="mlp", compute_s=1.0, communication_s=0.1),
        Component(name="mlp", compute_s=0.5, communication_s=0.2),
    )
    reports = [report(entry(), components=parts[:1]), report(entry(calls=6, time_s=0.001), components=parts[1:])]
    assert (entry(calls=6),) == join_traffic(reports)
    assert (Component(name="mlp", compute_s=1.0, communication_s=0.2),) == join_components(reports)
    assert ((), ()) == (join_traffic([{"traffic": None}]), join_components([{"traffic": None}]))


def test_ranks_of_one_place_send_the_same():
    same = [report(entry(uneven=True), place="a"), report(entry(uneven=True, message_bytes=5_000_000), place="a")]
    assert (entry(uneven=True, message_bytes=5_000_000),) == join_traffic(same)
    other = [report(entry(), place="a"), report(entry(calls=5), place="b"), report(entry(calls=5), place="a")]
    with pytest.raises(CaseError, match=r"all_gather along tp for mlp: rank 0: 4 of 4000000 bytes, rank 2: 5 of"):
        join_traffic(other)


def test_records_of_traffic_travel_and_older_ones_load():
    plain = measured_on(2)
    assert ((), ()) == (plain.traffic, plain.components)
    whole = from_json(Measurement, to_json(with_traffic(entry(uneven=True))))
    assert (entry(uneven=True),) == whole.traffic
    assert "traffic" not in to_json(plain)


def with_traffic(*entries, communication_s=0.02, compute_s=0.06):
    records = tuple(
        Record(name=name, value=value, unit="s", reduce="max")
        for name, value in (("communication_s", communication_s), ("compute_s", compute_s))
    )
    components = (Component(name="mlp", compute_s=compute_s, communication_s=communication_s),)
    return dataclasses.replace(measured_on(2), records=records, traffic=entries, components=components)


def metrics(case):
    return {each.name: each for each in derive(BUILDS["traffic"], work=Work(), measurement=case, peaks=Peaks())}


def test_metrics_of_traffic():
    sent = entry(axis="pp", collective="send", part="pipeline", message_bytes=6_000_000, time_s=0.002, ranks=2)
    received = entry(axis="pp", collective="receive", part="pipeline", message_bytes=6_000_000, time_s=0.0, ranks=2)
    gathered = entry(axis="dp-cp", part="data", message_bytes=8_000_000, time_s=0.003)
    found = metrics(with_traffic(entry(), sent, received, gathered))
    assert (0.02, 0.06, 25.0) == tuple(
        found[name].value for name in ("communication_time_s", "compute_time_s", "communication_percent")
    )
    assert found["communication_percent"].note == "replayed, nothing overlapped"
    assert 18_000_000 == found["communication_bytes"].value
    assert {"tp": 0.75, "pp": 3.0, "dp": 2.0} == {
        axis: pytest.approx(found[f"{axis}_busbw_gb_per_s"].value) for axis in ("tp", "pp", "dp")
    }
    for axis in ("cp", "ep"):
        assert (None, f"not available: the step sends nothing along {axis}") == (
            found[f"{axis}_busbw_gb_per_s"].value,
            found[f"{axis}_busbw_gb_per_s"].note,
        )


def test_metrics_without_the_build():
    for metric in metrics(measured_on(2)).values():
        assert (None, "not available: no traffic build was run") == (metric.value, metric.note)


def test_compiled_blocks_have_no_parts():
    with pytest.raises(InvalidParameter, match="parts of compiled blocks cannot be marked; leave out 'traffic'"):
        TrainStep(model="gpt2-tiny", builds=("traffic",), compiled=True)


def test_a_step_without_parts_is_all_other():
    module = nn.Linear(2, 2)
    parts = Parts(Ticks())
    mark(module, parts)
    module(torch.ones(1, 2)).sum().backward()
    assert not module._forward_hooks
