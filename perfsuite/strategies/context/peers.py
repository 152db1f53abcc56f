"""Other people's context parallelism, to compare with: torch's own, which is experimental."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from perfsuite.errors import UnsupportedCase, first_line
from perfsuite.models.attention import AttentionMethod
from perfsuite.models.attention_module import BACKENDS, chosen_backend, repeat_heads


class _Attention(nn.Module):
    """What is spread: torch's attention and nothing else."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class TorchCore(nn.Module):
    """torch's ring over its own kernels, balanced as it is by default: tokens in zig-zag places."""

    def __init__(self, mesh: DeviceMesh, *, method: AttentionMethod) -> None:
        super().__init__()
        self.method = method
        self.spread = _Attention()
        _spread(self.spread, mesh)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """(B, H, S, E) queries, (B, K, S, E) keys and values of this rank's places to (B, H, S, E).

        Raises UnsupportedCase where torch cannot spread the kernel of this device.
        """
        key, value = repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])
        with nullcontext() if self.method == "auto" else sdpa_kernel(BACKENDS[self.method]):
            # Plain products would run too, over tokens whose order they do not know.
            if chosen_backend(query, key, value, causal=True) in (SDPBackend.MATH.value, SDPBackend.ERROR.value):
                raise _unsupported(query, f"by attention={self.method!r} there is no fused kernel to spread")
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
    """What torch's ``context_parallel`` does, for one module: forward and backward need no context round them."""
    attention: Any = None
    with suppress(ImportError):
        from torch.distributed.tensor.experimental import _attention as attention
    if not hasattr(attention, "_ContextParallel"):
        raise UnsupportedCase(
            f"context='torch': torch {torch.__version__} spreads no single module's attention; choose zigzag or ring"
        )
    attention._enable_context_parallel_dispatcher()
    style = attention._ContextParallel(seq_dim=2, attention_type=attention._ContextParallel.AttentionType.SDPA)
    style._apply(core, mesh)
