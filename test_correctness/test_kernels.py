"""Kernels beside the dense product: their checks pass on right results and fail on wrong ones; rules; operations."""

import dataclasses
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from perfsuite.base.errors import InvalidParameter, UnsupportedCase, WrongResult
from perfsuite.base.mesh import MeshShape
from perfsuite.metrics import derive
from perfsuite.platforms.accelerator import captured_kernel_s
from perfsuite.record.result import Peaks, Record, Work
from perfsuite.workloads import checks, matmul_mixed
from perfsuite.workloads.attention import Attention
from perfsuite.workloads.grouped_matmul import GroupedMatmul
from perfsuite.workloads.kernel_launch import KernelLaunch
from perfsuite.workloads.matmul import Matmul
from perfsuite.workloads.matmul_mixed import ScaledMatmul, WideMatmul
from perfsuite.workloads.memory_capacity import MemoryCapacity
from test_correctness.helpers.bare_rank import BareRank
from test_correctness.test_metrics import measured

ONE = MeshShape.of(dp=1)
SMALL = {"batch_size": 2, "heads": 4, "kv_heads": 2, "sequence_length": 48, "head_width": 32}


def ran(workload):
    rank = BareRank()
    step = workload.build(rank)
    step.refill()
    step.run()
    return rank, step


def check(workload, spoil=lambda step: None):
    rank, step = ran(workload)
    spoil(step)
    try:
        workload.check(rank, step)
    finally:
        step.close()


# -- products ---------------------------------------------------------------------------------------------------------


def has_fp8():
    a, one = torch.ones(32, 32).to(torch.float8_e4m3fn), torch.ones(1, 1)
    try:
        matmul_mixed.scaled_product(a, a.t(), one, one)
    except (RuntimeError, NotImplementedError):
        return False
    return True


@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_an_fp8_product_is_checked(scaling):
    if not has_fp8():
        pytest.skip("this torch has no fp8 product on a CPU")
    case = ScaledMatmul(m=48, k=64, n=32, scaling=scaling)
    check(case)
    with pytest.raises(WrongResult, match=r"C\[\d+, 7\] of ScaledMatmul"):
        check(case, lambda step: step.out[:, 7].zero_())
    with pytest.raises(WrongResult, match=r"elements beyond rounding"):
        check(case, lambda step: step.out.mul_(1.2))


def test_a_scale_for_every_row_keeps_what_one_for_all_loses():
    _, step = ran(ScaledMatmul(m=48, k=64, n=32, scaling="row")) if has_fp8() else pytest.skip("no fp8 product here")
    assert ((48, 1), (1, 32)) == (tuple(step.scale_a.shape), tuple(step.scale_b.shape))
    assert (448.0, 448.0) == (step.a.float().abs().amax(dim=1).min(), step.b.float().abs().amax(dim=0).min())
    assert (1, 64) == step.b.stride()  # column by column


def test_a_wide_product_may_not_be_rounded(monkeypatch):
    monkeypatch.setattr(matmul_mixed, "wide_product", lambda a, b, out: out.copy_(a.float() @ b.float()))
    check(WideMatmul(m=32, k=64, n=32))
    with pytest.raises(WrongResult):
        check(WideMatmul(m=32, k=64, n=32), lambda step: step.out.copy_(step.out.bfloat16()))


def test_int8_multiplies_the_layout_that_cublas_takes():
    _, step = ran(Matmul(m=32, k=64, n=40, dtype="int8"))
    assert ((64, 40), (1, 64)) == (tuple(step.b.shape), step.b.stride())
    assert torch.equal(step.a.long() @ step.b.long(), step.out.long())


def test_a_kernel_that_torch_lacks_is_a_skip_and_running_out_of_memory_is_not():
    def refuse():
        raise NotImplementedError("Could not run it\nmore")

    with pytest.raises(UnsupportedCase, match=r"has no fp9 product on cpu: Could not run it$"):
        checks.require_kernel("fp9 product", torch.device("cpu"), refuse)

    def exhaust():
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        checks.require_kernel("fp9 product", torch.device("cpu"), exhaust)


@pytest.mark.parametrize("way", ["grouped", "loop"])
def test_every_group_of_a_grouped_product_is_checked(way):
    case = GroupedMatmul(groups=4, rows=40, k=32, n=16, way=way, skew=2.0)
    assert [20, 6, 7, 7] == case.shares()
    try:
        check(case)
    except UnsupportedCase as reason:
        pytest.skip(str(reason))
    with pytest.raises(WrongResult, match="C_2"):
        check(case, lambda step: step.out[28].zero_())


def test_shares_of_groups_add_up():
    for rows in (1, 7, 64):
        for groups in (1, 2, 8):
            shares = GroupedMatmul(groups=groups, rows=rows, k=8, n=8, skew=min(4, groups)).shares()
            assert (groups, rows) == (len(shares), sum(shares))
            assert min(shares) >= 0


# -- attention --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("kv_heads", [4, 2], ids=["plain", "grouped"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("backend", ["flash", "math"])
def test_attention_is_right(backend, direction, kv_heads, causal):
    for dtype in ("fp32", "bf16"):
        changes = {"kv_heads": kv_heads, "causal": causal, "dtype": dtype}
        check(Attention(**{**SMALL, **changes}, backend=backend, direction=direction))


def test_a_wrong_attention_is_told():
    attend = torch.nn.functional.scaled_dot_product_attention
    forward = Attention(**{**SMALL, "kv_heads": 4})

    def sees_what_follows(step):
        step.out = attend(step.query, step.key, step.value)

    def scaled_twice(step):
        step.out = attend(step.query, step.key, step.value, is_causal=True, scale=1 / 32)

    for spoil in (sees_what_follows, scaled_twice, lambda step: step.out[1, 3].zero_()):
        with pytest.raises(WrongResult, match=r"output of sample \d, head \d"):
            check(forward, spoil)


@pytest.mark.parametrize(("place", "name"), [(0, "queries"), (1, "keys"), (2, "values")])
def test_a_wrong_gradient_is_told(place, name):
    backward = Attention(**SMALL, direction="backward")
    with pytest.raises(WrongResult, match=f"gradient of {name} of sample 0"):
        check(backward, lambda step: step.gradients[place].mul_(1.25))
    with pytest.raises(WrongResult, match="no gradients were computed"):
        check(backward, lambda step: setattr(step, "gradients", ()))


def test_a_backend_that_the_device_lacks_is_a_skip_that_names_it_and_leaves_the_others():
    with pytest.raises(UnsupportedCase, match=r"no efficient kernel on cpu for bf16, heads of 32, 2 heads of queries"):
        ran(Attention(**SMALL, backend="efficient"))
    assert torch.backends.cuda.math_sdp_enabled()
    _, step = ran(Attention(**SMALL, backend="flash"))
    assert not torch.backends.cuda.math_sdp_enabled()
    step.close()
    assert torch.backends.cuda.math_sdp_enabled()


def test_operations_of_attention_are_those_of_flash_attentions_benchmark():
    """4 B H S^2 E forward, half where causal, 2.5 times backward (Dao-AILab/flash-attention, benchmarks/)."""
    full = Attention(**SMALL, causal=False).work(ONE).flops["FlashAttention"]
    assert 4 * 2 * 4 * 48**2 * 32 == full
    assert full / 2 == Attention(**SMALL).work(ONE).flops["FlashAttention"]
    assert full * 2.5 / 2 == Attention(**SMALL, direction="backward").work(ONE).flops["FlashAttention"]
    assert 2 * full == Attention(**SMALL, causal=False).work(MeshShape.of(dp=2)).flops["FlashAttention"]


# -- launching and memory ---------------------------------------------------------------------------------------------


class Graphs:
    """A device module whose graph of 100 kernels takes 185 us."""

    def __init__(self):
        self.captured = 0

    def CUDAGraph(self):
        return SimpleNamespace(replay=lambda: None)

    @contextmanager
    def graph(self, graph):
        yield

    def synchronize(self):
        pass

    def Event(self, *, enable_timing):
        return SimpleNamespace(record=lambda: None, synchronize=lambda: None, elapsed_time=lambda end: 0.185)


def test_a_kernel_in_a_graph_takes_what_the_device_takes_and_what_cannot_be_captured_has_no_time(monkeypatch):
    module, ran = Graphs(), []
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert 1.85e-6 == pytest.approx(captured_kernel_s(torch.device("cuda"), lambda: ran.append(1)))
    assert 101 == len(ran)  # one before, 100 captured
    assert captured_kernel_s(torch.device("xpu"), ran.clear) is None  # this module has no graph of that name

    def refuse(graph):
        raise RuntimeError("operation not permitted when stream is capturing")

    module.graph = refuse
    assert captured_kernel_s(torch.device("cuda"), lambda: None) is None


def test_the_launch_cost_is_named_or_why_it_is_not():
    measurement = measured(4.25e-6)
    names = ("kernel_us", "launch_cost_us")
    for metric in derive(names, work=Work(), measurement=measurement, peaks=Peaks()):
        assert (None, True) == (metric.value, metric.note.startswith("no kernel was captured: a CPU"))
    record = Record(name="kernel_us", value=1.85, unit="us", reduce="max")
    measurement = dataclasses.replace(measurement, records=(record,))
    kernel, cost = derive(names, work=Work(), measurement=measurement, peaks=Peaks())
    assert (1.85, pytest.approx(2.4)) == (kernel.value, cost.value)


def test_a_launch_runs_once():
    check(KernelLaunch())
    with pytest.raises(WrongResult, match=r"x after one kernel: expected 1.0, got 2.0"):
        check(KernelLaunch(), lambda step: step.run())


def test_memory_is_taken_in_blocks_that_are_not_shared():
    case = MemoryCapacity(block_bytes=4096, limit_bytes=5 * 4096 + 100)
    rank, step = ran(case)
    assert (5 * 4096 / 2**30, 4) == (rank.records["capacity_gib"], len(step.blocks))  # one is given back
    case.check(rank, step)
    step.blocks[3] = step.blocks[2]
    with pytest.raises(WrongResult, match=r"block 3 of 4 of 4KiB: expected 4.0, got 3.0"):
        case.check(rank, step)
    with pytest.raises(UnsupportedCase, match="so it needs a limit"):
        MemoryCapacity(block_bytes=4096).build(rank)


def test_blocks_end_where_memory_does(monkeypatch):
    plain, left = torch.empty, [3]

    def scarce(*shape, **options):
        left[0] -= 1
        if left[0] < 0:
            raise torch.OutOfMemoryError("out of memory")
        return plain(*shape, **options)

    monkeypatch.setattr(torch, "empty", scarce)
    rank = BareRank()
    step = MemoryCapacity(block_bytes=4096, limit_bytes=1 << 20).build(rank)
    assert (3 * 4096 / 2**30, 2) == (rank.records["capacity_gib"], len(step.blocks))


# -- rules ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ScaledMatmul(m=16, k=24, n=32), r"k and n divisible by 16; k=24, n=32 breaks it"),
        (
            lambda: ScaledMatmul(m=16, k=32, n=32, scaling="block"),
            r"scaling='block' is unknown; choose from tensor, row",
        ),
        (lambda: ScaledMatmul(m=0, k=32, n=32), r"m=0 is not valid"),
        (lambda: WideMatmul(m=8, k=8, n=8, dtype="fp32"), r"dtype='fp32' is not narrower than its result"),
        (lambda: Attention(**{**SMALL, "kv_heads": 3}), r"kv_heads=3 does not divide heads=4; choose from \[1, 2, 4\]"),
        (lambda: Attention(**SMALL, backend="triton"), r"backend='triton' is unknown; choose from flash, efficient"),
        (lambda: Attention(**{**SMALL, "head_width": True}), r"head_width=True is not valid"),
        (lambda: GroupedMatmul(groups=2, rows=8, k=8, n=8, skew=3), r"skew=3 is not from 1 to groups=2"),
        (lambda: GroupedMatmul(groups=2, rows=8, k=8, n=8, way="all"), r"way='all' is unknown"),
        (lambda: MemoryCapacity(block_bytes=6), r"block_bytes=6 is not a positive multiple of 4"),
        (lambda: MemoryCapacity(block_bytes=8, limit_bytes=8), r"limit_bytes=8 is less than two blocks of 8"),
    ],
)
def test_a_parameter_that_breaks_a_rule_is_named(make, said):
    with pytest.raises(InvalidParameter, match=said):
        make()
