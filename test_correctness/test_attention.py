"""Attention by every method is the same function, and what a device lacks is a skip that says so."""

import pytest
import torch

from perfsuite.base.errors import InvalidParameter, UnsupportedCase
from perfsuite.models.base import require_attention
from perfsuite.models.layers import AttentionCore


def heads(number, length=9):
    return torch.randn(2, number, length, 8, generator=torch.Generator().manual_seed(number))


def plainly(query, key, value):
    """Head by head: neighbouring heads of the query share one of the keys."""
    shared = query.shape[1] // key.shape[1]
    later = torch.ones(query.shape[2], query.shape[2]).triu(1).bool()
    out = torch.empty_like(query)
    for head in range(query.shape[1]):
        scores = query[:, head] @ key[:, head // shared].transpose(-1, -2) / query.shape[-1] ** 0.5
        out[:, head] = scores.masked_fill(later, float("-inf")).softmax(-1) @ value[:, head // shared]
    return out


@pytest.mark.parametrize("method", ["auto", "math", "flash"])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_every_method_computes_causal_attention(method, key_heads):
    query, key, value = heads(4), heads(key_heads), heads(key_heads).flip(2)
    torch.testing.assert_close(
        plainly(query, key, value), AttentionCore(method)(query, key, value), rtol=1e-5, atol=1e-6
    )


def test_a_method_is_the_kernel_of_its_name():
    profiled = {}
    for method in ("math", "flash"):
        with torch.profiler.profile() as profile:
            AttentionCore(method)(heads(2), heads(2), heads(2))
        profiled[method] = {event.key for event in profile.key_averages()}
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in profiled["flash"] - profiled["math"]
    assert "aten::_scaled_dot_product_attention_math" in profiled["math"] - profiled["flash"]


def test_what_a_device_lacks_is_unsupported():
    there = heads(2).to("meta")  # torch knows no kernels of it and would compute with math, saying nothing
    with pytest.raises(UnsupportedCase, match=r"attention='flash': torch .* on meta .*float32 heads of 8.*choose auto"):
        AttentionCore("flash")(there, there, there)
    assert AttentionCore("math")(there, there, there).shape == there.shape


def test_a_method_that_there_is_not_is_refused():
    with pytest.raises(InvalidParameter, match="attention='fast' is unknown; choose auto, math, flash"):
        require_attention("fast")
