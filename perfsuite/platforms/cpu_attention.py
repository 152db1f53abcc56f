"""Attention by blocks on a CPU: torch's flash kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from perfsuite.platforms.attention import Attended, AttentionBlock, AttentionKernel

if TYPE_CHECKING:
    import torch


class CpuFlash(AttentionKernel):
    """``aten::_scaled_dot_product_flash_attention_for_cpu``."""

    def takes(self, block: AttentionBlock) -> bool:
        """Floating-point numbers of any width."""
        return block.query.is_floating_point()

    def forward(self, block: AttentionBlock) -> Attended:
        """Output in the dtype of the query."""
        import torch

        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, log_sum = kernel(block.query, block.key, block.value, 0.0, block.causal)
        return Attended(out=out, log_sum=log_sum)

    def backward(
        self, gradient: torch.Tensor, block: AttentionBlock, whole: Attended
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """In the dtype of the query."""
        import torch

        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        tensors = gradient, block.query, block.key, block.value, whole.out, whole.log_sum
        d_query, d_key, d_value = kernel(*tensors, 0.0, block.causal)
        return d_query, d_key, d_value


def kernels() -> Mapping[str, AttentionKernel]:
    """The one there is."""
    return {"flash": CpuFlash()}
