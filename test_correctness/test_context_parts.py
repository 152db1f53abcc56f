"""Context parallelism without other processes: places, sizes that are refused, blocks, work per rank."""

import itertools
from contextlib import contextmanager
from typing import get_args

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode

from perfsuite.base.errors import InvalidParameter, UnsupportedCase
from perfsuite.platforms.accelerator import Attended, AttentionBlock, attention_kernels
from perfsuite.strategies.context import ContextMethod, places, require_context
from perfsuite.strategies.context_attention import (
    Products,
    RingCore,
    block_backward,
    block_forward,
    choose_kernel,
    window_at,
)

METHODS = get_args(ContextMethod)


# ------------------------------------------------------------------------------------------------------------ places


def tokens(method, length, cp, rank):
    return [token for each in places(method, length, cp, rank) for token in each]


@given(method=st.sampled_from(METHODS), cp=st.integers(1, 9), size=st.integers(1, 6))
def test_every_token_has_one_place_and_every_rank_as_many(method, cp, size):
    length = 2 * cp * size
    held = [tokens(method, length, cp, rank) for rank in range(cp)]
    assert {2 * size} == {len(each) for each in held}
    assert list(range(length)) == sorted(itertools.chain(*held))
    assert all(each == sorted(each) for each in held)


@given(cp=st.integers(1, 9), size=st.integers(1, 6))
def test_zigzag_places_see_equally_many_keys(cp, size):
    seen = {sum(token + 1 for token in tokens("zigzag", 2 * cp * size, cp, rank)) for rank in range(cp)}
    assert len(seen) == 1


@given(zigzag=st.booleans(), cp=st.integers(1, 6), size=st.integers(1, 3))
def test_blocks_are_all_pairs_of_a_query_and_an_earlier_key(zigzag, cp, size):
    method, length = "zigzag" if zigzag else "ring", 2 * cp * size
    for rank in range(cp):
        pairs = []
        for step in range(cp):
            part = window_at(step, rank, 2 * size, zigzag=zigzag)
            if part:
                among, seen, causal = part
                queries = tokens(method, length, cp, rank)[among]
                keys = tokens(method, length, cp, (rank - step) % cp)[seen]
                pairs += [(q, k) for i, q in enumerate(queries) for j, k in enumerate(keys) if j <= i or not causal]
        own = tokens(method, length, cp, rank)
        assert sorted(pairs) == [(query, key) for query in own for key in range(query + 1)]


LEGAL = {"length": 64, "heads": 8, "key_heads": 4, "cp": 4}


@pytest.mark.parametrize("method", METHODS)
def test_what_divides_is_not_refused(method):
    require_context(method, **LEGAL)
    require_context(method, **{**LEGAL, "cp": 2}, tp=2)


@pytest.mark.parametrize(
    ("method", "change", "message"),
    [
        ("zigzag", {"length": 68}, r"sequence_length=68 is not a multiple of 8: context='zigzag' .* choose 64 or 72"),
        ("torch", {"length": 4}, r"sequence_length=4 is not a multiple of 8: .*two chunks of equal size; choose 8$"),
        ("ring", {"length": 66}, r"sequence_length=66 is not a multiple of 4: .*cp=4 ranks one chunk.*choose 64 or 68"),
        ("ulysses", {"tp": 2}, r"cp=4 does not divide the 2 key heads of a tp rank \(4 over tp=2\).*choose cp 1, 2"),
        ("ulysses", {"cp": 8}, r"cp=8 does not divide the 4 key heads, which context='ulysses' spreads.* 1, 2, 4, or"),
        ("ulysses", {"heads": 6, "key_heads": 6}, r"cp=4 does not divide the 6 heads, .*choose cp 1, 2, 3, or context"),
        ("spiral", {}, r"context='spiral' is unknown; choose 'zigzag', 'ring', 'ulysses', 'torch', 'deepspeed'"),
    ],
)
def test_what_does_not_divide_is_refused_with_what_does(method, change, message):
    with pytest.raises(InvalidParameter, match=message):
        require_context(method, **{**LEGAL, **change})


def test_places_of_a_length_that_no_check_has_seen_are_refused():
    with pytest.raises(InvalidParameter, match="10 tokens do not divide into 4"):
        places("zigzag", 10, 2, 0)


# ------------------------------------------------------------------------------------------------------------ blocks


def block(key_heads=2, *, causal=False, keys=6, dtype=torch.float32):
    generator = torch.Generator().manual_seed(key_heads)

    def tensor(heads, length):
        return torch.randn(2, heads, length, 8, generator=generator).to(dtype)

    return AttentionBlock(query=tensor(4, 6), key=tensor(key_heads, keys), value=tensor(key_heads, keys), causal=causal)


@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize(("keys", "causal"), [(6, True), (6, False), (3, False), (10, False)])
def test_a_device_kernel_computes_what_plain_products_compute(key_heads, keys, causal):
    case = block(key_heads, keys=keys, causal=causal)
    (flash,) = attention_kernels("cpu").values()
    wanted, found = block_forward(Products(), case), block_forward(flash, case)
    torch.testing.assert_close(found.out, wanted.out)
    torch.testing.assert_close(found.log_sum, wanted.log_sum)
    # A block among others: its queries' sums are larger than its own.
    whole = Attended(out=wanted.out.flip(2).contiguous(), log_sum=wanted.log_sum + 1, rest=found.rest)
    for plain, other in zip(
        *(block_backward(k, case.query.flip(2), case, whole) for k in (Products(), flash)), strict=True
    ):
        torch.testing.assert_close(other, plain, atol=1e-5, rtol=1e-5)


def test_the_kernel_is_the_method_s():
    cpu = attention_kernels("cpu")
    assert cpu["flash"] is choose_kernel("flash", cpu, block()) is choose_kernel("auto", cpu, block())
    assert isinstance(choose_kernel("math", cpu, block()), Products)
    assert isinstance(choose_kernel("auto", {}, block()), Products)
    with pytest.raises(UnsupportedCase, match=r"attention='flash': cpu has no kernel that supports torch.float32"):
        choose_kernel("flash", {}, block())


def test_kernels_are_those_of_the_device_s_family():
    assert ["flash", "cudnn"] == list(attention_kernels("cuda"))
    assert ["flash"] == list(attention_kernels("musa"))
    assert {} == attention_kernels("meta")


CUDA = attention_kernels("cuda")


def test_a_fused_kernel_takes_what_torch_gives_it_in_whole_steps_of_features():
    case = block(4)  # on a CPU torch knows a flash kernel and none of cuDNN
    assert [True, False] == [kernel.takes(case) for kernel in CUDA.values()]
    odd = AttentionBlock(query=case.query[..., :7], key=case.key[..., :7], value=case.value[..., :7], causal=True)
    assert [False, False] == [kernel.takes(odd) for kernel in CUDA.values()]


@pytest.mark.parametrize("kernel", CUDA.values(), ids=list(CUDA))
def test_the_operators_of_absent_devices_are_called_as_torch_declares_them(kernel):
    there = AttentionBlock(
        **{name: getattr(block(4), name).to("meta") for name in ("query", "key", "value")}, causal=True
    )
    found = kernel.forward(there)
    assert (there.query.shape, there.query.shape[:-1]) == (found.out.shape, found.log_sum.shape)
    gradients = kernel.backward(torch.empty_like(found.out), there, found)
    assert [there.query.shape, there.key.shape, there.value.shape] == [each.shape for each in gradients]


# -------------------------------------------------------------------------------------------------------------- work


@contextmanager
def lone_rank(rank, ranks):
    """A rank whose messages go nowhere."""
    dist.init_process_group(backend="fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def operations(cp, *, zigzag):
    """Those of every rank, forward and backward, with the kernel that computes masked halves too."""
    counts = []
    for rank in range(cp):
        with lone_rank(rank, cp) as group, FlopCounterMode(display=False) as counter:
            case = block(4)
            inputs = [x.detach().requires_grad_() for x in (case.query, case.key, case.value)]
            RingCore(group, zigzag=zigzag, method="math", kernels={})(*inputs).sum().backward()
        counts.append(float(counter.get_total_flops()))
    return counts


@pytest.mark.parametrize("cp", [1, 2, 3, 4])
def test_zigzag_ranks_do_equal_work_and_the_last_contiguous_one_nearly_twice_the_mean(cp):
    counts = operations(cp, zigzag=True)
    assert 0 < min(counts) == max(counts)
    counts = operations(cp, zigzag=False)
    assert 2 * cp / (cp + 1) == pytest.approx(max(counts) / (sum(counts) / cp), rel=1e-12)
    assert counts == sorted(counts)
