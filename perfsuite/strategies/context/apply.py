"""Replaces attention in a model's blocks by attention over the tokens of all ranks along ``cp``."""

from __future__ import annotations

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
from perfsuite.models.layers import BACKENDS, Core, chosen_backend, repeat_heads
from perfsuite.platforms.attention import attention_kernels
from perfsuite.record.workload import Rank
from perfsuite.strategies.context.places import ContextMethod, places
from perfsuite.strategies.context.ring import RingCore
from perfsuite.strategies.deepspeed.zero import require_deepspeed


class UlyssesCore(nn.Module):
    """Ulysses (Jacobs et al. 2023): ranks exchange tokens for heads; each attends over all tokens with its heads."""

    def __init__(self, group: dist.ProcessGroup, *, method: AttentionMethod) -> None:
        super().__init__()
        self.group = group
        self.core = Core(method)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return this rank's (B, H, S, E) for its (B, H, S, E) queries and (B, K, S, E) keys and values."""
        # All three messages start before the first wait.
        sent = [_exchange(torch.stack(x.chunk(self._ranks, dim=1)), self.group) for x in (query, key, value)]
        out = self.core(*(torch.cat(_wait_along_cp(x).unbind(0), dim=2) for x in sent))
        back = _exchange(torch.stack(out.chunk(self._ranks, dim=2)), self.group)
        return torch.cat(_wait_along_cp(back).unbind(0), dim=1)

    @property
    def _ranks(self) -> int:
        return dist.get_world_size(self.group)


def _exchange(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Exchange (P, ...): part p goes to rank p; the p-th part of the result came from there."""
    if dist.get_world_size(group) == 1:
        return x
    exchanged: torch.Tensor = functional.all_to_all_single_autograd(x, None, None, group)
    return exchanged


def _wait_along_cp(x: torch.Tensor) -> torch.Tensor:
    """Wait here and not in torch at the first use, so that reports name this place."""
    arrived: torch.Tensor = functional.wait_tensor(x)  # type: ignore[no-untyped-call]  # torch does not type it
    return arrived


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
                out = self.spread(query, key, value)
            except NotImplementedError as error:
                raise _unsupported(query, first_line(error)) from error
        assert isinstance(out, torch.Tensor)
        return out


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
