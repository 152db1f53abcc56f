"""Other people's context parallelism, to compare with: torch's own, which is experimental."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from perfsuite.errors import UnsupportedCase, first_line
from perfsuite.models.attention import AttentionMethod
from perfsuite.models.attention_module import Core, repeat_heads


class TorchCore(nn.Module):
    """torch's ring over its own kernels, balanced as it is by default: tokens in zig-zag places."""

    def __init__(self, mesh: DeviceMesh, *, method: AttentionMethod) -> None:
        super().__init__()
        self.core = Core(method)
        _spread(self.core, mesh)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """(B, H, S, E) queries, (B, K, S, E) keys and values of this rank's places to (B, H, S, E).

        Raises UnsupportedCase where torch cannot spread the kernel of this device.
        """
        key, value = repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])
        try:
            out = self.core(query, key, value)
        except NotImplementedError as error:
            raise UnsupportedCase(
                f"context='torch': torch {torch.__version__} cannot spread attention on {query.device.type} "
                f"({first_line(error)}); choose zigzag or ring"
            ) from error
        assert isinstance(out, torch.Tensor)
        return out


def _spread(core: nn.Module, mesh: DeviceMesh) -> None:
    """What torch's ``context_parallel`` does, for one module: forward and backward need no context round them."""
    attention: Any = None
    with contextlib.suppress(ImportError):
        from torch.distributed.tensor.experimental import _attention as attention
    if not hasattr(attention, "_ContextParallel"):
        raise UnsupportedCase(
            f"context='torch': torch {torch.__version__} spreads no single module's attention; choose zigzag or ring"
        )
    attention._enable_context_parallel_dispatcher()
    style = attention._ContextParallel(seq_dim=2, attention_type=attention._ContextParallel.AttentionType.SDPA)
    style._apply(core, mesh)
