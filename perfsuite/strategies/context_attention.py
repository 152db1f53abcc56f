"""Ring attention (Liu et al. 2023): keys and values are sent around the ranks, queries stay.

At step i rank r has the keys of rank r - i and receives those of r - i - 1 while it computes.  Results are merged by
the logarithms of their sums.  In the backward the fp32 gradients of keys follow one step behind the keys, and are on
the rank of their keys after cp steps.

Shapes: B batch, H heads, K heads of keys (K divides H), S tokens of this rank, E features of a head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from perfsuite.base.errors import UnsupportedCase, first_line
from perfsuite.models.base import AttentionMethod
from perfsuite.models.language_module import LanguageModule
from perfsuite.models.layers import BACKENDS, AttentionCore, chosen_backend, repeat_heads
from perfsuite.platforms.accelerator import Attended, AttentionBlock, AttentionKernel, attention_kernels
from perfsuite.record.workload import Rank
from perfsuite.strategies.context import ContextMethod, places
from perfsuite.strategies.deepspeed.zero import require_deepspeed

Window = tuple[slice, slice, bool]
"""The queries of a rank, the present keys that they see, and whether a query sees only keys up to its own place."""


_ALL = slice(None)


def window_at(step: int, rank: int, tokens: int, *, zigzag: bool) -> Window | None:
    """Return the window of ``rank`` at ``step`` with ``tokens`` per rank; None if all keys are later than its queries.
    Zig-zag: of keys from an earlier rank the first half is earlier than all queries and the second half later than all.
    Keys from a later rank are all earlier than the queries' second half and later than their first.
    """
    if step == 0:
        return _ALL, _ALL, True
    earlier = step <= rank
    if not zigzag:
        return (_ALL, _ALL, False) if earlier else None
    half = tokens // 2
    return (_ALL, slice(0, half), False) if earlier else (slice(half, None), _ALL, False)


class RingCore(nn.Module):
    """Causal attention over the tokens of all ranks of a group, in place of a block's core."""

    def __init__(
        self, group: dist.ProcessGroup, *, zigzag: bool, method: AttentionMethod, kernels: Mapping[str, AttentionKernel]
    ) -> None:
        super().__init__()
        self.group, self.zigzag, self.method, self.kernels = group, zigzag, method, kernels

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return this rank's (B, H, S, E) for its (B, H, S, E) queries and (B, K, S, E) keys and values."""
        own = AttentionBlock(query=query, key=key, value=value, causal=True)
        ring = _Around(self.group, choose_kernel(self.method, self.kernels, own), self.zigzag)
        # The linear layers before have chosen the dtype; kernels use it.
        with torch.autocast(query.device.type, enabled=False):
            return _Ring.apply(query, key, value, ring)


class _Shift:
    """Sends a tensor to the next rank and receives the previous rank's."""

    def __init__(self, sent: torch.Tensor, group: dist.ProcessGroup) -> None:
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        to, source = (dist.get_global_rank(group, (rank + way) % ranks) for way in (1, -1))
        self._sent = sent  # kept until it is sent
        self._received = torch.empty_like(sent)
        send = dist.P2POp(dist.isend, sent, to, group)
        receive = dist.P2POp(dist.irecv, self._received, source, group)
        self._works = dist.batch_isend_irecv([send, receive])

    def wait_along_cp(self) -> torch.Tensor:
        """Return the received tensor."""
        for work in self._works:
            work.wait()
        return self._received


class _KeyGradients:
    """Gradients of the present keys: they arrive a step behind the keys, are added to and sent on."""

    def __init__(self, keys: torch.Tensor, group: dist.ProcessGroup) -> None:
        self.here = torch.zeros_like(keys, dtype=torch.float32)
        self._group = group
        self._coming: _Shift | None = None

    def arrive(self) -> None:
        """Receive the gradients of this step's keys; after the last step, those of this rank's keys."""
        if self._coming:
            self.here, self._coming = self._coming.wait_along_cp(), None

    def leave(self) -> None:
        """Send the gradients to the next rank, after the keys."""
        if dist.get_world_size(self._group) > 1:
            self._coming = _Shift(self.here, self._group)


class _Around:
    """One round of the ring: the next keys are sent before a step computes."""

    def __init__(self, group: dist.ProcessGroup, kernel: AttentionKernel, zigzag: bool) -> None:
        self.group, self.kernel, self.zigzag = group, kernel, zigzag

    def steps(self, keys: torch.Tensor) -> Iterator[tuple[Window | None, torch.Tensor]]:
        """Yield the window of every step, and its (2, B, K, S, E) keys and values."""
        rank, ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        for step in range(ranks):
            coming = _Shift(keys, self.group) if step < ranks - 1 else None
            yield window_at(step, rank, keys.shape[3], zigzag=self.zigzag), keys
            if coming:
                keys = coming.wait_along_cp()


def _block(part: Window, query: torch.Tensor, keys: torch.Tensor) -> AttentionBlock:
    queries, seen, causal = part
    key, value = keys[:, :, :, seen]
    return AttentionBlock(query=query[:, :, queries], key=key, value=value, causal=causal)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ring: _Around) -> torch.Tensor:
        whole: Attended | None = None
        for part, keys in ring.steps(torch.stack((key, value))):
            if part:
                result = block_forward(ring.kernel, _block(part, query, keys))
                whole = _merge(whole, part[0], result) if whole else result
        assert whole is not None  # every query sees its own key
        out = whole.out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, whole.log_sum)
        ctx.ring, ctx.rest = ring, whole.rest
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        query, key, value, out, log_sum = ctx.saved_tensors
        ring, pair = ctx.ring, torch.stack((key, value))
        (gradient,) = gradients
        if gradient.stride(-1) != 1:  # the gradient of a sum has other strides; kernels need adjacent features
            gradient = gradient.contiguous()
        d_query, d_keys = torch.zeros_like(query, dtype=torch.float32), _KeyGradients(pair, ring.group)
        for part, keys in ring.steps(pair):
            result = None
            if part:
                at = part[0]
                whole = Attended(out=out[:, :, at], log_sum=log_sum[:, :, at].contiguous(), rest=ctx.rest)
                result = block_backward(ring.kernel, gradient[:, :, at], _block(part, query, keys), whole)
                d_query[:, :, at] += result[0]
            d_keys.arrive()
            if part and result:
                for here, more in zip(d_keys.here, result[1:], strict=True):
                    here[:, :, part[1]] += more
            d_keys.leave()
        d_keys.arrive()
        d_key, d_value = d_keys.here
        return d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype), None


def _merge(whole: Attended, queries: slice, more: Attended) -> Attended:
    """Merge attention to two sets of keys by their sums of exponentials, into new fp32 tensors."""
    out, log_sum = whole.out.to(torch.float32, copy=True), whole.log_sum.clone()
    before, gap = out[:, :, queries], more.log_sum - log_sum[:, :, queries]
    before += (more.out.float() - before) * gap.sigmoid()[..., None]
    log_sum[:, :, queries] += F.softplus(gap)
    return Attended(out=out, log_sum=log_sum, rest=whole.rest)


class Products(AttentionKernel):
    """Plain products: fp32 scores of all pairs, also of masked ones."""

    def takes(self, block: AttentionBlock) -> bool:
        """Return True for any block."""
        return True

    def forward(self, block: AttentionBlock) -> Attended:
        """Return the output in the query's dtype."""
        scores = _scores(block)
        log_sum = scores.logsumexp(-1)
        out = torch.exp(scores - log_sum[..., None]) @ block.value.float()
        return Attended(out=out.to(block.query.dtype), log_sum=log_sum)

    def backward(
        self, gradient: torch.Tensor, block: AttentionBlock, whole: Attended
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the gradients of query, key and value in fp32."""
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
    """Return the first of the device's ``kernels`` that the method allows and that supports blocks like this one.
    ``block`` has as many keys as queries.  Without a kernel it raises UnsupportedCase for flash, and returns plain
    products for auto.
    """
    # Repeated keys have the shape of the queries, so the queries replace them here without a copy.
    repeated = dataclasses.replace(block, key=block.query, value=block.query)
    for name, kernel in kernels.items():
        if method in ("auto", name) and kernel.takes(block if kernel.grouped else repeated):
            return kernel
    if method == "flash":
        raise UnsupportedCase(
            f"attention='flash': {block.query.device.type} has no kernel that supports {block.query.dtype} heads of "
            f"{block.query.shape[-1]} features and returns their sums; choose auto or math"
        )
    return Products()


def block_forward(kernel: AttentionKernel, block: AttentionBlock) -> Attended:
    """Return :meth:`AttentionKernel.forward` of a block whose keys may have fewer heads."""
    return kernel.forward(_as_taken(kernel, block))


def block_backward(
    kernel: AttentionKernel, gradient: torch.Tensor, block: AttentionBlock, whole: Attended
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return :meth:`AttentionKernel.backward` of such a block; gradients of a key are summed over its query heads."""
    d_query, *d_keys = kernel.backward(gradient, _as_taken(kernel, block), whole)
    heads = block.key.shape[1]
    d_key, d_value = (
        x if x.shape[1] == heads else x.view(x.shape[0], heads, -1, *x.shape[2:]).sum(2, dtype=torch.float32)
        for x in d_keys
    )
    return d_query, d_key, d_value


def _as_taken(kernel: AttentionKernel, block: AttentionBlock) -> AttentionBlock:
    if kernel.grouped:
        return block
    heads = block.query.shape[1]
    return dataclasses.replace(block, key=repeat_heads(block.key, heads), value=repeat_heads(block.value, heads))


class UlyssesCore(nn.Module):
    """Ulysses (Jacobs et al. 2023): ranks exchange tokens for heads; each attends over all tokens with its heads."""

    def __init__(self, group: dist.ProcessGroup, *, method: AttentionMethod) -> None:
        super().__init__()
        self.group = group
        self.core = AttentionCore(method)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return this rank's (B, H, S, E) for its (B, H, S, E) queries and (B, K, S, E) keys and values."""
        ranks = dist.get_world_size(self.group)
        # All three messages start before the first wait.
        sent = [_exchange(torch.stack(x.chunk(ranks, dim=1)), self.group) for x in (query, key, value)]
        out = self.core(*(torch.cat(_wait_along_cp(x).unbind(0), dim=2) for x in sent))
        back = _exchange(torch.stack(out.chunk(ranks, dim=2)), self.group)
        return torch.cat(_wait_along_cp(back).unbind(0), dim=1)


def _exchange(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Exchange (P, ...): part p goes to rank p; the p-th part of the result came from there."""
    if dist.get_world_size(group) == 1:
        return x
    return functional.all_to_all_single_autograd(x, None, None, group)


def _wait_along_cp(x: torch.Tensor) -> torch.Tensor:
    """Wait here and not in torch at the first use, so that reports name this place."""
    return functional.wait_tensor(x)


class _Attention(nn.Module):
    """torch's attention, to be spread."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class TorchCore(nn.Module):
    """torch's own experimental context parallelism: a ring with its default balance, zig-zag places."""

    def __init__(self, mesh: DeviceMesh, *, method: AttentionMethod) -> None:
        super().__init__()
        self.method = method
        self.spread = _Attention()
        _spread(self.spread, mesh)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return (B, H, S, E) of this rank's tokens; raises UnsupportedCase if torch cannot spread the kernel."""
        key, value = repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])
        with nullcontext() if self.method == "auto" else sdpa_kernel(BACKENDS[self.method]):
            # Plain products would run too, but with a wrong order of tokens.
            if chosen_backend(query, key, value, causal=True) in (SDPBackend.MATH.value, SDPBackend.ERROR.value):
                raise _unsupported(query, f"attention={self.method!r} has no fused kernel here")
            try:
                return self.spread(query, key, value)
            except NotImplementedError as error:
                raise _unsupported(query, first_line(error)) from error


def _unsupported(query: torch.Tensor, why: str) -> UnsupportedCase:
    return UnsupportedCase(
        f"context='torch': torch {torch.__version__} cannot spread attention on {query.device.type} ({why}); "
        "choose zigzag or ring"
    )


def _spread(core: nn.Module, mesh: DeviceMesh) -> None:
    """Spread one module as torch's ``context_parallel`` does, without a context around forward and backward."""
    attention: Any = None
    with suppress(ImportError):
        from torch.distributed.tensor.experimental import _attention as attention
    if not hasattr(attention, "_ContextParallel"):
        raise UnsupportedCase(
            f"context='torch': torch {torch.__version__} cannot spread a single module; choose zigzag or ring"
        )
    attention._enable_context_parallel_dispatcher()
    style = attention._ContextParallel(seq_dim=2, attention_type=attention._ContextParallel.AttentionType.SDPA)
    style._apply(core, mesh)


def apply(module: LanguageModule, rank: Rank, method: ContextMethod, attention: AttentionMethod) -> None:
    """Set the module's positions and attention cores; raises UnsupportedCase if ``method`` is not available."""
    module.places = indices(rank, method, module.config.tokens_per_sample)
    for block in module.blocks.children():
        part = block.attention
        assert isinstance(part, nn.Module)
        part.core = new_core(rank, method, attention)


def indices(rank: Rank, method: ContextMethod, length: int) -> torch.Tensor:
    """Return the positions of this rank's tokens in a sequence of ``length``, on its device."""
    held = places(method, length, rank.shape.size("cp"), rank.shape.coordinates(rank.rank)["cp"])
    return torch.cat([torch.arange(part.start, part.stop, device=rank.device) for part in held])


def new_core(rank: Rank, method: ContextMethod, attention: AttentionMethod) -> nn.Module:
    """Return a core of this method."""
    if method == "torch":
        return TorchCore(rank.submesh("cp"), method=attention)
    group = rank.group("cp")
    if method == "ulysses":
        return UlyssesCore(group, method=attention)
    if method == "deepspeed":
        require_deepspeed(rank, "context='deepspeed'")
        from perfsuite.strategies.deepspeed.peers import DeepSpeedCore

        return DeepSpeedCore(rank, method=attention)
    kernels = attention_kernels(rank.device.type)
    return RingCore(group, zigzag=method == "zigzag", method=attention, kernels=kernels)
