"""Workloads on one process: parameters, work models, and checks that pass on right and fail on wrong results."""

import sys
import types
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perfsuite.base.errors import InvalidParameter, UnsupportedCase, WrongResult
from perfsuite.base.mesh import MeshShape
from perfsuite.record.workload import ITEM_BYTES
from perfsuite.workloads import collective, matmul
from perfsuite.workloads.checks import Pattern, difference, fill, poison
from perfsuite.workloads.matmul import Matmul
from perfsuite.workloads.memory_bandwidth import HostDeviceCopy, MemoryCopy, MemoryTriad, StreamingStep
from test_correctness.helpers.bare_rank import BareRank

ROOT = Path(__file__).parent.parent
COLLECTIVES = [
    *(collective.AllReduce, collective.AllGather, collective.ReduceScatter, collective.AllToAll),
    *(collective.AllToAllUneven, collective.Broadcast, collective.Reduce, collective.Gather, collective.Scatter),
    *(collective.SendRecv, collective.RingShift, collective.OneDirection),
]
DIVIDED = [each for each in COLLECTIVES if each.divided]
EIGHT = MeshShape.of(dp=8)


def run_once(workload):
    """What a worker does: build, refill, run, check."""
    rank = BareRank()
    step = workload.build(rank)
    for _ in range(2):
        step.refill()
        step.run()
        workload.check(rank, step)
    step.close()


def torch_multiplies_int8():
    """Whether it does here; torch 2.5.0 saturates sums of signed products on a CPU without VNNI."""
    a = torch.full((32, 32), 127, dtype=torch.int8)
    return bool((torch._int_mm(a, a) == 32 * 127 * 127).all())


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "tf32", "bf16", "fp16", "int8"])
@pytest.mark.parametrize(("m", "k", "n"), [(32, 64, 32), (17, 256, 40), (64, 8, 128)])
def test_matmul_passes_its_check(m, k, n, dtype):
    if dtype == "int8" and not torch_multiplies_int8():
        with pytest.raises(WrongResult, match="elements beyond rounding"):
            run_once(Matmul(m=m, k=k, n=n, dtype=dtype))
        return
    run_once(Matmul(m=m, k=k, n=n, dtype=dtype))


def wrong_matmul(step, kind):
    """C as a broken kernel would leave it."""
    a, b, out = step.a.double(), step.b.double(), step.out.clone()
    if kind == "a product is left out":
        return (a[:, :-1] @ b[:-1]).to(out.dtype)
    if kind == "B transposed":
        return (a @ b.T).to(out.dtype)
    if kind == "a tile is stale":
        out[-8:, -8:] = 0
        return out
    if kind == "rows swapped":
        return out.flip(0)
    assert kind == "one element is not written"
    out[5, 7] = float("nan") if out.is_floating_point() else -(2**31)
    return out


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "tf32", "bf16", "fp16", "int8"])
@pytest.mark.parametrize(
    "kind", ["a product is left out", "B transposed", "a tile is stale", "rows swapped", "one element is not written"]
)
def test_matmul_check_notices(kind, dtype):
    workload, rank = Matmul(m=96, k=128, n=128, dtype=dtype), BareRank()
    step = workload.build(rank)
    step.run()
    step.out = wrong_matmul(step, kind)
    with pytest.raises(WrongResult, match=r"of Matmul\(m=96, k=128, n=128"):
        workload.check(rank, step)


@pytest.mark.parametrize(
    ("claimed", "computed"), [("fp64", torch.float32), ("fp32", torch.bfloat16), ("tf32", torch.bfloat16)]
)
def test_matmul_check_notices_a_lower_precision(claimed, computed):
    workload, rank = Matmul(m=64, k=512, n=256, dtype=claimed), BareRank()
    step = workload.build(rank)
    step.out = (step.a.to(computed).double() @ step.b.to(computed).double()).to(step.out.dtype)
    with pytest.raises(WrongResult, match="beyond rounding"):
        workload.check(rank, step)


def test_matmul_check_notices_tf32_where_fp32_was_asked_for():
    def cut(matrix):  # keep 10 bits of each factor
        return (matrix.view(torch.int32) & ~0x1FFF).view(torch.float32).double()

    rank = BareRank()
    for dtype, right in (("tf32", True), ("fp32", False)):
        workload = Matmul(m=64, k=512, n=256, dtype=dtype)
        step = workload.build(rank)
        step.out = (cut(step.a) @ cut(step.b)).float()
        if right:
            workload.check(rank, step)
        else:
            with pytest.raises(WrongResult):
                workload.check(rank, step)


@given(m=st.integers(1, 20000), k=st.integers(1, 20000), n=st.integers(1, 20000), ranks=st.integers(1, 64))
def test_matmul_counts_a_multiplication_and_an_addition_per_product(m, k, n, ranks):
    work = Matmul(m=m, k=k, n=n).work(MeshShape.of(dp=ranks))
    assert {"exact": float(2 * m * k * n * ranks)} == work.flops
    assert work.dtype == "fp32"


def test_integer_product_that_torch_lacks_is_named(monkeypatch):
    def refuse(*_):
        raise NotImplementedError("Could not run 'aten::_int_mm'\nwith arguments")

    monkeypatch.setattr(torch, "_int_mm", refuse)
    with pytest.raises(UnsupportedCase, match=r"torch\._int_mm\) on cpu: Could not run 'aten::_int_mm'$"):
        Matmul(m=32, k=32, n=32, dtype="int8").build(BareRank())
    monkeypatch.delattr(torch, "_int_mm")
    with pytest.raises(UnsupportedCase, match="has no integer matrix product"):
        matmul.require_int8(torch.device("cpu"))


@pytest.mark.parametrize(
    "workload", [MemoryCopy(buffer_bytes=4000), MemoryTriad(buffer_bytes=4), MemoryTriad(buffer_bytes=4 << 20)]
)
def test_bandwidth_passes_its_check(workload):
    run_once(workload)


def test_bandwidth_work_is_counted_as_stream_counts_it():
    copy, triad = (kind(buffer_bytes=1 << 20).work(EIGHT) for kind in (MemoryCopy, MemoryTriad))
    assert (2 << 20, 2 << 20, "device") == (copy.bytes_moved, copy.footprint_bytes, copy.memory_path)
    assert (3 << 20, 3 << 20, "device") == (triad.bytes_moved, triad.footprint_bytes, triad.memory_path)
    link = HostDeviceCopy(buffer_bytes=1 << 20, direction="device_to_host").work(EIGHT)
    assert (1 << 20, "device_to_host") == (link.bytes_moved, link.memory_path)


@pytest.mark.parametrize("kind", ["element", "last element", "not run", "wrong source"])
@pytest.mark.parametrize("workload", [MemoryCopy(buffer_bytes=1000), MemoryTriad(buffer_bytes=1000)])
def test_bandwidth_check_notices(workload, kind):
    rank = BareRank()
    step = workload.build(rank)
    step.refill()
    if kind != "not run":
        step.run()
    if kind == "element":
        step.target[17] += 1
    elif kind == "last element":
        step.target[-1] = float("nan")
    elif kind == "wrong source":
        step.target.copy_(step.target.flip(0))
    with pytest.raises(WrongResult, match=f"{type(workload).__name__} of 1000B, element"):
        workload.check(rank, step)


def test_host_device_copy_needs_a_device_of_its_own():
    with pytest.raises(UnsupportedCase, match="cpu has no separate device memory"):
        HostDeviceCopy(buffer_bytes=1024).build(BareRank())


@pytest.mark.parametrize("direction", ["host_to_device", "device_to_host"])
def test_host_device_copy_is_checked(direction):
    workload, rank = HostDeviceCopy(buffer_bytes=1024, direction=direction, pinned=False), BareRank()
    step = workload.between(torch.device("cpu"))
    assert isinstance(step, StreamingStep)
    with pytest.raises(WrongResult):
        workload.check(rank, step)
    step.run()
    workload.check(rank, step)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Matmul(m=0, k=1, n=1), "m=0 is not valid; choose a whole number from 1"),
        (lambda: Matmul(m=1, k=1.5, n=1), "k=1.5 is not valid"),
        (lambda: Matmul(m=1, k=1, n=1, dtype="int64"), "choose from fp64, fp32, tf32, bf16, fp16, int8"),
        (lambda: Matmul(m=16, k=8, n=8, dtype="int8"), "int8 needs m > 16 and k, n divisible by 8"),
        (lambda: MemoryCopy(buffer_bytes=0), "choose 4"),
        (lambda: MemoryTriad(buffer_bytes=1001), "buffer_bytes=1001 .* choose 1000 or 1004"),
        (lambda: MemoryTriad(buffer_bytes="1MiB"), "not a whole number of bytes"),
        (lambda: HostDeviceCopy(buffer_bytes=4, direction="up"), "choose from host_to_device, device_to_host"),
        (lambda: collective.AllReduce(message_bytes=1001), "multiple of 4 .fp32 elements.; choose 1000 or 1004"),
        (lambda: collective.AllReduce(message_bytes=-8), "message_bytes=-8 .* choose 4"),
        (lambda: collective.AllReduce(message_bytes=2.0), "not a whole number of bytes"),
        (
            lambda: collective.AllReduce(message_bytes=8, dtype="float32"),
            "dtype='float32' is unknown; choose from fp64",
        ),
        (lambda: collective.AllReduce(message_bytes=8, dtype="tf32"), "choose 'fp32' for the same bytes"),
        (lambda: collective.AllGather(message_bytes=1028).work(EIGHT), "multiple of 32 .* choose 1024 or 1056"),
        (lambda: collective.SendRecv(message_bytes=8).work(MeshShape.of(dp=3)), "world_size=3 .* an even number"),
        (lambda: collective.OneDirection(message_bytes=8).work(MeshShape.of(dp=3)), "world_size=3 .* an even number"),
        (lambda: collective.Reduce(message_bytes=8).work(MeshShape.of()), "world_size=1 .* choose at least 2"),
        (lambda: collective.Barrier().work(MeshShape.of(dp=1)), "too small for a barrier"),
    ],
)
def test_impossible_parameters_say_what_to_choose(make, message):
    assert callable(make)
    with pytest.raises(InvalidParameter, match=message) as raised:
        make()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("kind", COLLECTIVES)
@given(part=st.integers(1, 10**6), ranks=st.integers(1, 16), dtype=st.sampled_from(sorted(set(ITEM_BYTES) - {"tf32"})))
@settings(max_examples=25, deadline=None)
def test_collective_extents_and_expectations_fit(kind, part, ranks, dtype):
    ranks *= 2
    count = part * ranks
    workload = kind(message_bytes=count * ITEM_BYTES[dtype], dtype=dtype)
    work = workload.work(MeshShape.of(dp=ranks))
    assert workload.metrics[0] == "latency_us"
    assert (workload.name, count * ITEM_BYTES[dtype], dtype) == (work.collective, work.message_bytes, work.dtype)
    most = 0
    for rank in range(ranks):
        source, target = workload.extents(count, ranks, rank)
        output = source if target is None else target
        segments = workload.expected(count, ranks, rank)
        assert sum(length for _, _, length in segments) in (0, output)
        sources = [workload.extents(count, ranks, max(0, of))[0] for of, _, _ in segments]
        ends = [start + length for _, start, length in segments]
        assert all(end <= source for end, source in zip(ends, sources, strict=True))
        most = max(most, source, output)
    assert most == count, "S is what the busiest rank sends or receives"


@given(ranks=st.integers(1, 300), start=st.integers(0, 1000), data=st.data())
@settings(max_examples=50, deadline=None)
def test_sums_of_patterns_stay_exact_in_every_dtype(ranks, start, data):
    pattern = Pattern(world_size=ranks, summed=True)
    index = data.draw(st.integers(0, 10**9))
    values = [pattern.value(rank, start + index) for rank in range(ranks)]
    assert min(values) >= 0
    assert sum(values) <= 127
    assert values == [pattern.value(rank, start + index + pattern.period) for rank in range(ranks)]
    contributors = {rank for rank in range(ranks) for place in range(pattern.period) if pattern.value(rank, place)}
    assert set(range(ranks)) == contributors, "a rank whose input is all zeros could be missing from the sum"


def test_no_two_ranks_have_the_same_inputs():
    pattern = Pattern(world_size=1000, summed=False)
    assert 1000 == len({tuple(pattern.values(rank=rank)) for rank in range(1000)})
    assert max(max(pattern.values(rank=rank)) for rank in range(1000)) <= 127


@given(
    length=st.integers(0, 3000),
    dtype=st.sampled_from(["float64", "float32", "float16", "bfloat16", "int8", "uint8", "int32", "int64"]),
    values=st.lists(st.integers(0, 127), min_size=1, max_size=200),
    data=st.data(),
)
@settings(max_examples=50, deadline=None)
def test_difference_finds_exactly_what_was_changed(length, dtype, values, data):
    buffer = torch.empty(length, dtype=getattr(torch, dtype))
    fill(buffer, values)
    assert [values[index % len(values)] for index in range(length)] == buffer.tolist()
    assert difference(buffer, values) is None
    changed = data.draw(st.sets(st.integers(0, length - 1), max_size=5)) if length else set()
    for index in changed:
        poison(buffer[index : index + 1])
    found = difference(buffer, values)
    if changed:
        assert found is not None
        assert (min(changed), len(changed)) == (found[0], found[3])
        assert values[min(changed) % len(values)] == found[1]
    else:
        assert found is None


def test_difference_counts_beyond_one_chunk():
    buffer = torch.empty((1 << 24) + 500, dtype=torch.int8)
    fill(buffer, [1, 2, 3])
    buffer[[7, (1 << 24) + 100]] = 9
    found = difference(buffer, [1, 2, 3])
    assert found is not None
    assert (7, 2.0, 9.0, 2) == found


def test_the_example_of_a_workload_is_checked():
    module = types.ModuleType("softmax")
    sys.modules["softmax"] = module  # dataclasses look their module up
    try:
        exec((ROOT / "examples" / "workload" / "softmax.py").read_text(), module.__dict__)
        workload = module.__dict__["Softmax"](rows=16, columns=32)
        run_once(workload)
        assert 2 * 4 * 16 * 32 == workload.work(EIGHT).bytes_moved
        rank = BareRank()
        step = workload.build(rank)
        step.run()
        step.out[3, 4] += 1e-3
        with pytest.raises(WrongResult, match="largest error of a probability"):
            workload.check(rank, step)
        with pytest.raises(InvalidParameter):
            module.__dict__["Softmax"](rows=0, columns=1)
    finally:
        del sys.modules["softmax"]
