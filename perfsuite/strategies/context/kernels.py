"""Attention of one block of queries and keys: plain products, which every device has, and the choice among kernels.

Shapes as in :mod:`perfsuite.platforms.attention`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from perfsuite.base.errors import UnsupportedCase
from perfsuite.models.attention import AttentionMethod
from perfsuite.models.attention_module import repeat_heads
from perfsuite.platforms.attention import Attended, AttentionBlock, AttentionKernel


class Products(AttentionKernel):
    """Scores of all pairs in fp32, those behind a causal mask too."""

    def takes(self, block: AttentionBlock) -> bool:
        """Anything."""
        return True

    def forward(self, block: AttentionBlock) -> Attended:
        """Output in the dtype of the query."""
        scores = _scores(block)
        log_sum = scores.logsumexp(-1)
        out = torch.exp(scores - log_sum[..., None]) @ block.value.float()
        return Attended(out=out.to(block.query.dtype), log_sum=log_sum)

    def backward(
        self, gradient: torch.Tensor, block: AttentionBlock, whole: Attended
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """In fp32."""
        gradient, query, key = gradient.float(), block.query.float(), block.key.float()
        shares = torch.exp(_scores(block) - whole.log_sum[..., None])
        inner = (gradient * whole.out.float()).sum(-1, keepdim=True)
        d_scores = shares * (gradient @ block.value.float().transpose(-1, -2) - inner) * query.shape[-1] ** -0.5
        return d_scores @ key, d_scores.transpose(-1, -2) @ query, shares.transpose(-1, -2) @ gradient


def _scores(block: AttentionBlock) -> torch.Tensor:
    products = torch.matmul(block.query.float(), block.key.float().transpose(-1, -2))
    scores: torch.Tensor = products * block.query.shape[-1] ** -0.5
    if not block.causal:
        return scores
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(later, float("-inf"))


def choose_kernel(
    method: AttentionMethod, kernels: Mapping[str, AttentionKernel], block: AttentionBlock
) -> AttentionKernel:
    """Of ``kernels``, those of the device, the first that the method allows and that takes blocks like this one.

    ``block`` has as many keys as queries.  Raises UnsupportedCase for flash where there is none; plain products stand
    in for auto.
    """
    # Repeated keys have the queries' shape: the queries stand for them, and nothing is copied to ask.
    repeated = dataclasses.replace(block, key=block.query, value=block.query)
    for name, kernel in kernels.items():
        if method in ("auto", name) and kernel.takes(block if kernel.grouped else repeated):
            return kernel
    if method == "flash":
        raise UnsupportedCase(
            f"attention='flash': {block.query.device.type} has no kernel that takes blocks of {block.query.dtype} "
            f"heads of {block.query.shape[-1]} features and tells their sums; choose auto or math"
        )
    return Products()


def block_forward(kernel: AttentionKernel, block: AttentionBlock) -> Attended:
    """:meth:`AttentionKernel.forward` of a block whose keys may have fewer heads."""
    return kernel.forward(_as_taken(kernel, block))


def block_backward(
    kernel: AttentionKernel, gradient: torch.Tensor, block: AttentionBlock, whole: Attended
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:meth:`AttentionKernel.backward` of such a block; a key's gradient is the sum over the heads that share it."""
    d_query, *d_keys = kernel.backward(gradient, _as_taken(kernel, block), whole)
    d_key, d_value = (_added(x, block.key.shape[1]) for x in d_keys)
    return d_query, d_key, d_value


def _as_taken(kernel: AttentionKernel, block: AttentionBlock) -> AttentionBlock:
    if kernel.grouped:
        return block
    heads = block.query.shape[1]
    return dataclasses.replace(block, key=repeat_heads(block.key, heads), value=repeat_heads(block.value, heads))


def _added(x: torch.Tensor, heads: int) -> torch.Tensor:
    """(B, H, T, E) as (B, heads, T, E): neighbouring heads added up, in fp32."""
    if x.shape[1] == heads:
        return x
    return x.view(x.shape[0], heads, -1, *x.shape[2:]).sum(2, dtype=torch.float32)
