"""The core of attention in torch: what lies between the projections, without parameters.

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
"""torch's kernels by method; auto leaves it to torch."""


class Core(nn.Module):
    """Attention over all tokens; context parallelism puts another module in its place."""

    def __init__(self, method: AttentionMethod = "auto", *, causal: bool = True) -> None:
        super().__init__()
        self.method = method
        self.causal = causal

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """(B, H, S, E) queries and (B, K, S', E) keys and values to (B, H, S, E).

        Raises UnsupportedCase where the device has no kernel of the method for these tensors.
        """
        key, value = repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])
        if self.method == "auto":
            return F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        with sdpa_kernel(BACKENDS[self.method]):
            if not torch.compiler.is_compiling():
                self._require_kernel(query, key, value)
            return F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)

    def _require_kernel(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """A device that torch knows no kernels of computes with math whatever was chosen, and does not say so."""
        if chosen_backend(query, key, value, causal=self.causal) != BACKENDS[self.method].value:
            raise UnsupportedCase(
                f"attention={self.method!r}: torch {torch.__version__} has no such kernel on {query.device.type} for "
                f"{query.dtype} heads of {query.shape[-1]} features; choose auto or math"
            )


def chosen_backend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool) -> int:
    """Which kernel torch computes these tensors with, among those that it may: a value of SDPBackend."""
    try:
        return int(torch._fused_sdp_choice(query, key, value, is_causal=causal))
    except RuntimeError:  # torch has kernels for the device, none of them for these tensors
        return int(SDPBackend.ERROR.value)


def repeat_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """(B, K, S, E) as (B, heads, S, E): neighbouring heads of the query share one of the keys.

    Repeated instead of enable_gqa=True: several backends of torch's attention know only equal numbers of heads.
    """
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)
