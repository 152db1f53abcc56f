"""Ring attention (Liu et al. 2023): keys and values travel around the ranks, queries stay.

At step i rank r has the keys of rank r - i; those of r - i - 1 are on their way to it while it computes.  Blocks add
up by the logarithms of their sums.  In the backward the gradients of keys travel one step behind the keys themselves,
in fp32, and after cp steps are where their keys are from.

Shapes: B batch, H heads, K heads of keys (K divides H), S tokens of this rank, E features of a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from perfsuite.models.attention import AttentionMethod
from perfsuite.platforms.attention import Attended, AttentionBlock, AttentionKernel
from perfsuite.strategies.context.kernels import block_backward, block_forward, choose_kernel


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
        self,
        group: dist.ProcessGroup,
        *,
        zigzag: bool,
        method: AttentionMethod,
        kernels: Mapping[str, AttentionKernel],
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
