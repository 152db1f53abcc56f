"""The core of attention in torch: softmax(QK)V without the projections, so without parameters.

Shapes: B batch, H heads, K heads of keys and values (K divides H), S tokens, E features of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from perfsuite.base.errors import UnsupportedCase
from perfsuite.models.base import AttentionMethod

BACKENDS = {"math": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION}
"""torch's kernels by method; with ``auto`` torch chooses one."""


class Core(nn.Module):
    """Attention over all tokens; context parallelism replaces this module."""

    def __init__(self, method: AttentionMethod = "auto", *, causal: bool = True) -> None:
        super().__init__()
        self.method = method
        self.causal = causal

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return (B, H, S, E) for (B, H, S, E) queries and (B, K, S', E) keys and values.  Raises UnsupportedCase if
        the device has no kernel of the method for these tensors.
        """
        key, value = repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])
        if self.method == "auto":
            return F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        with sdpa_kernel(BACKENDS[self.method]):
            # Without such a kernel torch silently computes with math.
            if not torch.compiler.is_compiling() and (
                chosen_backend(query, key, value, causal=self.causal) != BACKENDS[self.method].value
            ):
                raise UnsupportedCase(
                    f"attention={self.method!r}: torch {torch.__version__} has no such kernel on {query.device.type} "
                    f"for {query.dtype} heads of {query.shape[-1]} features; choose auto or math"
                )
            return F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)


def chosen_backend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool) -> int:
    """Return the kernel that torch chooses for these tensors, as a value of SDPBackend."""
    try:
        return int(torch._fused_sdp_choice(query, key, value, is_causal=causal))
    except RuntimeError:  # torch has kernels for the device, but none for these tensors
        return int(SDPBackend.ERROR.value)


def repeat_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Return (B, K, S, E) as (B, heads, S, E): neighbouring query heads share one key head.  Heads are repeated because
    several backends of torch's attention do not support enable_gqa=True.
    """
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)
