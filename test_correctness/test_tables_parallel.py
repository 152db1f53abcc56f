"""The tables of report 004 about model parallelism out of fixed results."""

import dataclasses

import pytest

from perfsuite.base.mesh import MeshShape
from perfsuite.published.lookup import lookup
from perfsuite.record.codec import to_json
from perfsuite.record.step import Component, SpanTotal, Traffic
from perfsuite.workloads.moe_layer import MoeLayer
from perfsuite.workloads.tensor_linear import SPLITS, TensorLinear
from perfsuite.workloads.training.train_step import TrainStep
from test_correctness.helpers.measurements import result_of
from test_correctness.helpers.report_runs import gpt, measurement, rows, run, style

GIB = 2**30
TINY = {"layers": 8, "width": 64, "heads": 8, "words": 128, "context": 32}


def is_measured(row):
    return not row["nodes x ranks"].startswith("published")


def measured(told, *names):
    """Cells of the rows that were measured."""
    return [tuple(row[name] for name in names) for row in told if is_measured(row)]


def published(told, *names):
    return [tuple(row[name] for name in names) for row in told if not is_measured(row)]


def hybrid(name, mesh, time_s=1.0, **changes):
    """A training case on this mesh, called ``test[platform-words]``."""
    platform = changes.setdefault("platform", "a100")
    test, _, words = name.partition(" ")
    case = f"{test}[{platform}-{words or mesh}]"
    ranks = MeshShape.parse(mesh).world_size
    return gpt(case, ranks, time_s, **{"strategy": "hybrid", "mesh": mesh, **changes})


def test_tensor_parallel_has_out_of_memory_on_one_card_measured_and_published():
    model = {"model": "gpt3-175b", "overrides": {"words_multiple": 128}, "builds": ("memory",)}
    cases = [
        hybrid("test_tensor_parallel", f"tp{tp}", 1 / tp, records=(("peak_bytes", 80 / tp * GIB),), **model)
        for tp in (2, 4, 8)
    ]
    alone = hybrid("test_tensor_parallel", "tp1", oom="OOM at 79.1 GiB of 79.2 GiB", **model)
    told = rows(style("methods", run(*cases, alone)), "Tensor parallel")
    assert ["1", "1", "2", "2", "4", "4", "8", "8"] == [row["tp"] for row in told]
    names = ("not measured because", "samples/s (all devices)")
    assert ("OOM at 79.1 GiB of 79.2 GiB", "") == measured(told, *names)[0]
    assert ("out of memory, as published; not measured here", "OOM [X]") == published(told, *names)[0]
    assert ["40", "42 [X]", "20", "22 [X]", "10", "12 [X]"] == [row["peak GiB per device"] for row in told[2:]]


def layer(split, ranks, sides=8192, platform="a100"):
    """A split layer whose products take 3 ms and whose messages 1 ms."""
    workload = TensorLinear(
        split=split,
        mesh=f"tp{ranks}" if ranks > 1 else "1",
        features_in=sides,
        features_out=sides,
        rows=sides,
        dtype="bf16",
    )
    times = {"compute": 3e-3, **({"communication": 1e-3} if ranks > 1 else {})}
    size = sum(size for _, size in workload.messages())
    records = (("communication_bytes", float(size)), ("tp_bus_bytes", 1.5 * size))
    case = f"test_perf/t.py::test_column_and_row[{platform}-{sides}x{sides}-{split}]"
    return of_parts(workload, ranks, times, records=records, case=case, platform=platform)


def of_parts(workload, ranks, times, *, records, case, platform="a100"):
    """A case whose iteration has spans of these seconds."""
    told = dataclasses.replace(
        measurement(ranks, sum(times.values()), records=records),
        spans=tuple(SpanTotal(name=name, time_s=time_s, count=1, slowest_rank=0) for name, time_s in times.items()),
    )
    kind = type(workload)
    return result_of(
        told,
        case,
        workload=f"{kind.__module__}:{kind.__name__}",
        parameters=to_json(workload.parameters()),
        platform=platform,
        work=workload.work(MeshShape.parse(workload.mesh)),
        metrics=workload.metrics,
        fingerprint=f"{platform}-test",
    )


def test_column_and_row_stand_in_the_reports_order_with_parts_that_sum_to_the_total():
    cases = [layer(split, 1 if split == "none" else 4) for split in sorted(SPLITS)]
    text = style("methods", run(*cases))
    told = rows(text, "Column and row parallel layer")
    assert list(SPLITS) == [split for (split,) in measured(told, "split")]
    times = measured(told, "compute ms", "communication ms", "total ms")
    assert [("3", "0", "3")] + [("3", "1", "4")] * 4 == times
    alone, *split = measured(told, "bytes", "busbw GB/s")
    assert ("0", "") == alone
    assert {"134217728", "268435456"} == {size for size, _ in split}
    assert ["201.3", "402.7"] == [rate for _, rate in split[:2]]
    theirs = published(told, "split", "communication ms", "busbw GB/s")
    assert [("none", "0 [X]", "0 [X]"), ("column", "0.1 [X]", "8 [X]"), ("row", "2.1 [X]", "45 [X]")] == theirs
    assert "- published, lines 329, 330, 331 of 004_078bcf89b93f8696.txt: the same run" in text
    small = style("methods", run(layer("row", 4, sides=512, platform="cpu"), platform="cpu"))
    assert "platform a100 or h100, not cpu; features_in 8192, not 512; features_out 8192, not 512" in small


@pytest.mark.parametrize(("split", "total"), [("none", "12.3 ms"), ("column", "3.3 ms"), ("row", "5.3 ms")])
def test_lookup_finds_the_rows_of_one_layer(split, total):
    case = layer(split, 1 if split == "none" else 4)
    found = lookup("a100", case.workload, case.parameters, case.world_size, metric="step_time_s")
    assert [total] == [figure.text for figure in found]
    assert lookup("a100", case.workload, {**case.parameters, "features_in": 512}, case.world_size) == []


def test_lookup_finds_the_rows_of_routing_by_batch():
    case = {"mesh": "ep8", "batch_size": 64, "top_k": 2, "experts": 64}
    assert ["60.8 ms"] == [figure.text for figure in lookup("a100", "moe_layer", case, 8, metric="step_time_s")]
    assert lookup("a100", "moe_layer", {**case, "top_k": 1}, 8) == []


LONG = {"heads": 20, "words_multiple": 128}


def long(length, way, time_s, **changes):
    options = {"sequence_parallel": way == "sequence"}
    overrides = {**LONG, "context": length, "sequence_length": length}
    return hybrid(
        f"test_long_sequences {length}-{way}",
        "tp4",
        time_s,
        **{"overrides": overrides, "options": options, "micro_batch_size": 16, "builds": ("memory",), **changes},
    )


def test_a_length_is_compared_with_the_same_length_without():
    cases = [
        long(2048, "tensor", 2.0, records=(("peak_bytes", 40 * GIB),)),
        long(2048, "sequence", 1.6, records=(("peak_bytes", 30 * GIB),)),
        long(16384, "tensor", 1.0, oom="OOM at 79.1 GiB of 79.2 GiB"),
        long(16384, "sequence", 16.0, records=(("peak_bytes", 60 * GIB),)),
        long(65536, "tensor", 1.0, oom="OOM at 79.1 GiB of 79.2 GiB"),
    ]
    text = style("methods", run(*cases))
    told = rows(text, "Long sequences")
    names = ("sequence length", "peak GiB without sequence parallelism", "peak GiB per device")
    names += ("samples/s (all devices)", "tokens/s (all devices)", "times without, same length")
    assert [
        ("2048", "40", "30", "10", "20480", "1.25"),
        ("16384", "", "60", "1", "16384", ""),
        ("65536", "", "", "", "", ""),
    ] == measured(told, *names)
    why = "peak GiB without sequence parallelism; times without, same length: OOM at 79.1 GiB of 79.2 GiB"
    assert f"- empty in 1 row: {why}" in text
    assert ("2048", "45 [X]", "1 [X]") in published(told, *names[:2], names[-1])
    assert ("16384", "OOM [X]", "79 [X]") in published(told, *names[:3])


def test_one_way_at_one_length_is_no_table_of_lengths():
    assert "### Long sequences" not in style("methods", run(long(2048, "sequence", 1.0)))
    both = run(long(2048, "sequence", 1.0), long(2048, "tensor", 1.0))
    assert "### Long sequences" in style("methods", both)


def test_ways_of_attention_have_the_reports_rows_below():
    def attention(method, mesh, **changes):
        overrides = {**LONG, "context": 16384, "sequence_length": 16384}
        return hybrid(f"test_attention 16384-{method}", mesh, overrides=overrides, **changes)

    cases = [
        attention("standard", "dp4", attention="math", oom="OOM at 79.1 GiB of 79.2 GiB"),
        attention("flash", "dp4", attention="flash"),
        attention("zigzag", "cp4", attention="flash", options={"context": "zigzag"}, micro_batch_size=4),
        attention("ring", "cp4", attention="flash", options={"context": "ring"}, micro_batch_size=4),
    ]
    told = rows(style("methods", run(*cases)), "Ring attention")
    assert {"standard", "flash", "zigzag", "ring"} == {row["attention"] for row in told if is_measured(row)}
    names = ("attention", "peak GiB per device", "samples/s (all devices)", "communication overhead %")
    assert {
        ("standard", "OOM [R]", "", ""),
        ("flash", "72 [R]", "89 [R]", "0 [R]"),
        ("ring", "21 [R]", "76 [R]", "18.3 [R]"),
    } == set(published(told, *names))
    assert "### Ring attention" not in style("methods", run(cases[1]))
    assert "### Ring attention" in style("methods", run(cases[2]))


def test_meshes_are_named_by_their_axes_and_stand_beside_the_reports():
    model = {"model": "gpt3-175b", "overrides": {"words_multiple": 128}}
    cases = [
        hybrid("test_meshes", mesh, accumulation=64 // MeshShape.parse(mesh).replicas, **model)
        for mesh in ("pp64", "pp8-tp8", "pp8-dp2-tp4")
    ]
    alone = hybrid("test_meshes", "dp64", oom="OOM at 79.1 GiB of 79.2 GiB", **model)
    told = rows(style("methods", run(alone, *cases)), "Meshes")
    mine = measured(told, "axes", "dp", "pp", "tp")
    assert {"DP-only", "PP-only", "2D (PP+TP)", "3D (DP+PP+TP)"} == {axes for axes, *_ in mine}
    assert ("3D (DP+PP+TP)", "2", "8", "4") in mine
    assert {
        ("DP-only", "64", "1", "1", "OOM [X]"),
        ("PP-only", "1", "64", "1", "234 [X]"),
        ("TP-only", "1", "1", "64", "412 [X]"),
        ("2D(PP+TP)", "1", "8", "8", "678 [X]"),
        ("3D优化", "2", "8", "4", "823 [X]"),
    } == set(published(told, "axes", "dp", "pp", "tp", "samples/s (all devices)"))


def test_one_axis_alone_is_no_table_of_meshes():
    case = hybrid("test_meshes", "tp8", model="gpt2-tiny", overrides=TINY)
    assert "### Meshes" not in style("methods", run(case))


COMPONENTS = (
    Component(name="attention", compute_s=0.1, communication_s=0.05),
    Component(name="other", compute_s=0.1, communication_s=0.0),
    Component(name="mlp", compute_s=0.4, communication_s=0.1),
    Component(name="data", compute_s=0.0, communication_s=0.2),
    Component(name="pipeline", compute_s=0.0, communication_s=0.05),
)


def test_components_add_up_and_the_whole_step_is_told_below():
    parts = {"components": COMPONENTS}
    case = hybrid("test_components", "pp2-dp2-tp2", model="gpt2-tiny", overrides=TINY, accumulation=2, measured=parts)
    text = style("methods", run(case))
    told = rows(text, "Components of a step")
    assert [
        ("MLP or experts", "400", "100", "50"),
        ("attention", "100", "50", "15"),
        ("gradients and parameters over data axes", "0", "200", "20"),
        ("between stages", "0", "50", "5"),
        ("other", "100", "0", "10"),
        ("total", "600", "400", "100"),
    ] == measured(told, "component", "compute ms", "communication ms", "share %")
    shares = [share for (share,) in published(told, "share %")]
    assert ["45.2 [X]", "25.4 [X]", "13.1 [X]", "7 [X]", "9.3 [X]", "100 [X]"] == shares
    assert "- whole step of gpt2-tiny on pp2-dp2-tp2: 4 samples/s, MFU " in text
    assert "- published, lines 453, 454: 2567 samples/s, MFU 48.3 % [X]" in text


def test_traffic_stands_beside_its_closed_form():
    step = TrainStep(model="gpt2-tiny", overrides=TINY, strategy="hybrid", mesh="pp2-tp2", accumulation=2)
    shape = MeshShape.parse(step.mesh)
    calls = step.find_strategy().traffic(step.plan(shape), shape, 0)
    names = ("axis", "collective", "part", "calls", "message_bytes")
    told = [{name: getattr(call, name) for name in names} for call in calls]
    counted = tuple(Traffic(**fields, time_s=1e-3, ranks=2) for fields in told)
    parameters = {"model": "gpt2-tiny", "overrides": TINY, "accumulation": 2}
    case = hybrid("test_meshes", "pp2-tp2", **parameters, measured={"traffic": counted})
    told = rows(style("methods", run(case)), "Traffic")
    assert ["pp"] * 2 + ["tp"] * (len(counted) - 2) == [row["axis"] for row in told]
    last = [
        max(
            call.message_bytes
            for rank in range(4)
            for call in step.find_strategy().traffic(step.plan(shape), shape, rank)
            if (call.axis, call.collective, call.part) == (row["axis"], row["collective"], row["part"])
        )
        for row in told
    ]
    assert last == [int(row["bytes by closed form"]) for row in told]
    gathers = next(row for row in told if (row["collective"], row["part"]) == ("all_gather", "attention"))
    # Two micro-batches, four blocks, two gathers of X = 1 x 32 x 64 x 4 bytes; half of it crosses a link of two ranks.
    size = 2 * 4 * 2 * 32 * 64 * 4
    assert (str(2 * 4 * 2), str(size)) == (gathers["calls"], gathers["bytes"])
    assert float(gathers["busbw GB/s"]) == pytest.approx(size / 2 / 1e-3 / 1e9, rel=1e-3)


def test_what_one_rank_received_is_no_bandwidth_of_its_own():
    received = Traffic(axis="pp", collective="receive", part="pipeline", calls=2, message_bytes=64, time_s=0.0, ranks=2)
    case = hybrid("test_meshes", "pp2", model="gpt2-tiny", measured={"traffic": (received,)}, accumulation=2)
    (row,) = rows(style("methods", run(case)), "Traffic")
    assert ("64", "") == (row["bytes"], row["busbw GB/s"])


ROUTED = (("expert_imbalance", 1.5), ("dropped_share", 0.02))


def test_experts_stand_beside_the_dense_model_of_equal_active_parameters():
    cases = [
        hybrid("test_experts_and_dense", mesh, time_s, model=model, builds=("memory",), records=records)
        for model, mesh, time_s, records in (
            ("mixtral-8x7b-dense", "dp32", 1.5, ()),
            ("mixtral-8x7b", "dp4-ep8", 1.0, ROUTED),
            ("mixtral-64", "dp8-ep8", 1.0, ROUTED),
        )
    ]
    text = style("methods", run(*cases))
    told = rows(text, "Experts and dense")
    names = ("experts", "nodes x ranks", "parameters 1e9", "active 1e9", "dropped %")
    assert [
        ("0", "1 x 32 a100", "12.88", "12.88", "", ""),
        ("8", "1 x 32 a100", "46.7", "12.88", "2", "1.5"),
        ("64", "1 x 64 a100", "91.81", "12.89", "2", "1.5"),
    ] == measured(told, *names, "most over mean rows of an expert")
    assert [("312 [X]",), ("487 [X]",), ("892 [X]",)] == published(told, "samples/s (all devices)")
    assert (
        "- mixtral-8x7b over mixtral-8x7b-dense on 32 a100: 1.5 times the samples/s; the published report "
        "claims 1.56 times [X: from a table that contradicts itself]"
    ) in text
    assert "mixtral-64 over" not in text  # it ran on other ranks than the dense model


def routing(batch_size, **changes):
    """A layer of experts whose all-to-alls take 1 ms of 4."""
    sizes = {"sequence_length": 16, "width": 64, "hidden": 128, "experts": 64}
    workload = MoeLayer(mesh="ep8", batch_size=batch_size, **sizes, **changes)
    case = f"test_perf/t.py::test_routing[a100-{batch_size}-{'-'.join(changes)}]"
    return of_parts(workload, 8, {"compute": 3e-3, "communication": 1e-3}, records=ROUTED, case=case)


def test_routing_is_told_by_batch_beside_the_report():
    cases = [*(routing(batch) for batch in (256, 32, 64, 128)), routing(32, top_k=1)]
    told = rows(style("methods", run(*cases)), "Routing")
    batches = [("32", "1"), ("32", "2"), ("64", "2"), ("128", "2"), ("256", "2")]
    assert batches == measured(told, "batch", "top-k")
    names = ("all-to-all ms", "compute ms", "total ms", "all-to-all %")
    assert {("1", "3", "4", "25")} == set(measured(told, *names))
    theirs = published(told, "batch", *names[:3])
    assert theirs[0] == ("32", "8.2 [R]", "45.3 [R]", "53.5 [R]")
    assert told.index(next(row for row in told if not is_measured(row))) == 2  # below top 2, which the report has
    assert [batch for batch, *_ in theirs] == ["32", "64", "128", "256"]


def test_a_published_row_whose_case_was_not_run_says_so():
    told = rows(style("methods", run(routing(32, skew=4.0))), "Routing")
    assert [(row["batch"], row["not measured because"]) for row in told] == [
        ("32", ""),
        *((batch, "not measured here") for batch in ("32", "64", "128", "256")),
    ]
    text = style("methods", run(routing(32, skew=4.0)))
    assert "-k NAME runs those not measured here: 32x2048x4096x14336-top2 (line 404)" in text


def test_components_of_experts_have_the_reports_rows_below():
    case = hybrid("test_components", "ep4", model="moe-tiny", measured={"components": COMPONENTS})
    told = rows(style("methods", run(case)), "Components of a step")
    theirs = [tuple(row.values())[2:] for row in told if not is_measured(row)]
    assert [("142 [X]", "38 [X]", "45.2 [X]"), ("268 [X]", "130 [X]", "100 [X]")] == [
        each[2:-1] for each in (theirs[0], theirs[-1])
    ]
    assert {"not measured here"} == {each[-1] for each in theirs}
    assert [row["component"] for row in told[::2]] == [row["component"] for row in told[1::2]]
