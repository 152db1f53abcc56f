"""Ring attention (Liu et al. 2023): keys and values travel around the ranks, queries stay.

At step i rank r has the keys of rank r - i; those of r - i - 1 are on their way to it while it computes.  Blocks add
up by the logarithms of their sums.  In the backward the gradients of keys travel one step behind the keys themselves,
in fp32, and after cp steps are where their keys are from.

Shapes: B batch, H heads, K heads of keys (K divides H), S tokens of this rank, E features of a head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from perfsuite.base.errors import UnsupportedCase
from perfsuite.models.attention_module import repeat_heads
from perfsuite.models.base import AttentionMethod
from perfsuite.platforms.attention import Attended, AttentionBlock, AttentionKernel


@dataclass(frozen=True, kw_only=True)
class Window:
    """Which of a rank's queries see which of the keys that are there."""

    queries: slice
    keys: slice
    causal: bool = False


_ALL = slice(None)


def window_at(step: int, rank: int, tokens: int, *, zigzag: bool) -> Window | None:
    """What ``rank`` computes at ``step`` with ``tokens`` per rank; None where all of the keys are later than its own.

    Zig-zag: of keys that began on an earlier rank the first half is earlier than all queries and the second later
    than all; of a later rank's, all are earlier than the queries' second half and later than their first.
    """
    if step == 0:
        return Window(queries=_ALL, keys=_ALL, causal=True)
    earlier = step <= rank
    if not zigzag:
        return Window(queries=_ALL, keys=_ALL) if earlier else None
    half = tokens // 2
    if earlier:
        return Window(queries=_ALL, keys=slice(0, half))
    return Window(queries=slice(half, None), keys=_ALL)


class RingCore(nn.Module):
    """Causal attention over the tokens of all ranks of a group, in the place of a block's core."""

    def __init__(
        self, group: dist.ProcessGroup, *, zigzag: bool, method: AttentionMethod, kernels: Mapping[str, AttentionKernel]
    ) -> None:
        super().__init__()
        self.group, self.zigzag, self.method, self.kernels = group, zigzag, method, kernels

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """This rank's (B, H, S, E) queries, (B, K, S, E) keys and values to its (B, H, S, E)."""
        own = AttentionBlock(query=query, key=key, value=value, causal=True)
        ring = _Around(self.group, choose_kernel(self.method, self.kernels, own), self.zigzag)
        # The linear layers before it have chosen the dtype; the kernels' own products are as wide as they say.
        with torch.autocast(query.device.type, enabled=False):
            out = cast(Any, _Ring).apply(query, key, value, ring)
        assert isinstance(out, torch.Tensor)
        return out


class _Shift:
    """A tensor on its way to the next rank while the previous one's comes."""

    def __init__(self, sent: torch.Tensor, group: dist.ProcessGroup) -> None:
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        to, source = (dist.get_global_rank(group, (rank + way) % ranks) for way in (1, -1))
        self._sent = sent  # alive until it has been sent
        self._received = torch.empty_like(sent)
        send = dist.P2POp(dist.isend, sent, to, group)
        receive = dist.P2POp(dist.irecv, self._received, source, group)
        self._works = dist.batch_isend_irecv([send, receive])

    def wait_along_cp(self) -> torch.Tensor:
        """What has come."""
        for work in self._works:
            work.wait()
        return self._received


class _KeyGradients:
    """The gradients of the keys that are here: they come a step behind the keys, are added to and go on."""

    def __init__(self, keys: torch.Tensor, group: dist.ProcessGroup) -> None:
        self.here = torch.zeros_like(keys, dtype=torch.float32)
        self._group = group
        self._coming: _Shift | None = None

    def arrive(self) -> None:
        """Those of the keys of this step; after the last, of the keys that this rank began with."""
        if self._coming:
            self.here, self._coming = self._coming.wait_along_cp(), None

    def leave(self) -> None:
        """On to the next rank, after the keys."""
        if dist.get_world_size(self._group) > 1:
            self._coming = _Shift(self.here, self._group)


class _Around:
    """One way around the ring: the next keys are sent before the block of a step is computed."""

    def __init__(self, group: dist.ProcessGroup, kernel: AttentionKernel, zigzag: bool) -> None:
        self.group, self.kernel, self.zigzag = group, kernel, zigzag

    def steps(self, keys: torch.Tensor) -> Iterator[tuple[Window | None, torch.Tensor]]:
        """What to compute at every step, and the (2, B, K, S, E) keys and values that are here at it."""
        rank, ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        for step in range(ranks):
            coming = _Shift(keys, self.group) if step < ranks - 1 else None
            yield window_at(step, rank, keys.shape[3], zigzag=self.zigzag), keys
            if coming:
                keys = coming.wait_along_cp()


def _block(part: Window, query: torch.Tensor, keys: torch.Tensor) -> AttentionBlock:
    key, value = keys[:, :, :, part.keys]
    return AttentionBlock(query=query[:, :, part.queries], key=key, value=value, causal=part.causal)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ring: _Around) -> torch.Tensor:
        whole: Attended | None = None
        for part, keys in ring.steps(torch.stack((key, value))):
            if part:
                result = block_forward(ring.kernel, _block(part, query, keys))
                whole = _merge(whole, part.queries, result) if whole else result
        assert whole is not None  # every query sees itself
        out = whole.out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, whole.log_sum)
        ctx.ring, ctx.rest = ring, whole.rest
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        query, key, value, out, log_sum = ctx.saved_tensors
        ring, pair = ctx.ring, torch.stack((key, value))
        (gradient,) = gradients
        if gradient.stride(-1) != 1:  # that of a sum; kernels want features side by side
            gradient = gradient.contiguous()
        d_query, d_keys = torch.zeros_like(query, dtype=torch.float32), _KeyGradients(pair, ring.group)
        for part, keys in ring.steps(pair):
            result = None
            if part:
                at = part.queries
                whole = Attended(out=out[:, :, at], log_sum=log_sum[:, :, at].contiguous(), rest=ctx.rest)
                result = block_backward(ring.kernel, gradient[:, :, at], _block(part, query, keys), whole)
                d_query[:, :, at] += result[0]
            d_keys.arrive()
            if part and result:
                for here, more in zip(d_keys.here, result[1:], strict=True):
                    here[:, :, part.keys] += more
            d_keys.leave()
        d_keys.arrive()
        d_key, d_value = d_keys.here
        return d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype), None


def _merge(whole: Attended, queries: slice, more: Attended) -> Attended:
    """Attention to the keys of both: each output weighs as much as its keys' sum of exponentials.

    In fp32, in tensors of its own: a checkpoint may keep what a kernel returned.
    """
    out, log_sum = whole.out.to(torch.float32, copy=True), whole.log_sum.clone()
    before, gap = out[:, :, queries], more.log_sum - log_sum[:, :, queries]
    before += (more.out.float() - before) * gap.sigmoid()[..., None]
    log_sum[:, :, queries] += F.softplus(gap)
    return Attended(out=out, log_sum=log_sum, rest=whole.rest)


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
