"""Attention by blocks on Moore Threads devices: muDNN's flash kernel, as torch_musa offers it.

The two operators are held against the sources of every supported version by a test.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from perfsuite.platforms.attention import Attended, AttentionBlock, AttentionKernel

if TYPE_CHECKING:
    import torch


class MusaFlash(AttentionKernel):
    """``aten::_scaled_dot_product_attention_flash_musa``; it knows no other scale than 1 / sqrt(E)."""

    grouped = True

    def takes(self, block: AttentionBlock) -> bool:
        """Whether this torch has the operator; what muDNN cannot compute, it refuses itself."""
        import torch

        return hasattr(torch.ops.aten, "_scaled_dot_product_attention_flash_musa")

    def forward(self, block: AttentionBlock) -> Attended:
        """Its rest: the mask of the dropout that is not asked for."""
        import torch

        kernel = torch.ops.aten._scaled_dot_product_attention_flash_musa
        tensors = (tensor.contiguous() for tensor in (block.query, block.key, block.value))
        out, log_sum, dropout_mask = kernel(*tensors, None, 0.0, block.causal)
        return Attended(out=out, log_sum=log_sum, rest=(dropout_mask,))

    def backward(
        self, gradient: torch.Tensor, block: AttentionBlock, whole: Attended
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """In the dtype of the query; some versions return a gradient of the mask too."""
        import torch

        kernel = torch.ops.aten._scaled_dot_product_attention_flash_musa_backward
        tensors = gradient, block.query, block.key, block.value, whole.out, whole.log_sum
        d_query, d_key, d_value, *_ = kernel(*(tensor.contiguous() for tensor in tensors), *whole.rest, block.causal)
        return d_query, d_key, d_value


def kernels() -> Mapping[str, AttentionKernel]:
    """The one there is."""
    return {"flash": MusaFlash()}
