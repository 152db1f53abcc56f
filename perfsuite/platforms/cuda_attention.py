"""Attention by blocks on NVIDIA devices: torch's flash kernel and cuDNN's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from perfsuite.platforms.attention import Attended, AttentionBlock, AttentionKernel

if TYPE_CHECKING:
    import torch

_FEATURE_STEP = 8
"""Both kernels take heads of a multiple of so many features; torch's attention pads others, this way in does not."""


class _Fused(AttentionKernel):
    backend: ClassVar[str]
    """Its name among torch's SDPBackends."""

    def takes(self, block: AttentionBlock) -> bool:
        """As torch decides where no other kernel is allowed: by dtype, shapes and the device's generation."""
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        backend = getattr(SDPBackend, self.backend)
        with sdpa_kernel(backend):
            try:
                chosen = torch._fused_sdp_choice(block.query, block.key, block.value, is_causal=block.causal)
            except RuntimeError:
                return False
        return block.query.shape[-1] % _FEATURE_STEP == 0 and chosen == int(backend.value)


class CudaFlash(_Fused):
    """``aten::_scaled_dot_product_flash_attention``: fp16 and bf16."""

    backend = "FLASH_ATTENTION"

    def forward(self, block: AttentionBlock) -> Attended:
        """Its rest: the state of the random numbers that no dropout asks for."""
        import torch

        kernel = torch.ops.aten._scaled_dot_product_flash_attention
        outputs = kernel(block.query, block.key, block.value, 0.0, block.causal)
        return Attended(out=outputs[0], log_sum=outputs[1], rest=(outputs[6], outputs[7]))

    def backward(
        self, gradient: torch.Tensor, block: AttentionBlock, whole: Attended
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """In the dtype of the query."""
        import torch

        kernel = torch.ops.aten._scaled_dot_product_flash_attention_backward
        tensors = gradient, block.query, block.key, block.value, whole.out, whole.log_sum
        lengths = None, None, block.query.shape[2], block.key.shape[2]  # one length for all samples
        d_query, d_key, d_value = kernel(*tensors, *lengths, 0.0, block.causal, *whole.rest)
        return d_query, d_key, d_value


class CudaCudnn(_Fused):
    """``aten::_scaled_dot_product_cudnn_attention``, whose logarithms of sums have a fourth dimension of size 1."""

    backend = "CUDNN_ATTENTION"

    def forward(self, block: AttentionBlock) -> Attended:
        """Its rest: the state of the random numbers that no dropout asks for."""
        import torch

        kernel = torch.ops.aten._scaled_dot_product_cudnn_attention
        outputs = kernel(block.query, block.key, block.value, None, True, 0.0, block.causal)
        return Attended(out=outputs[0], log_sum=outputs[1].view(outputs[0].shape[:-1]), rest=(outputs[6], outputs[7]))

    def backward(
        self, gradient: torch.Tensor, block: AttentionBlock, whole: Attended
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """In the dtype of the query."""
        import torch

        kernel = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
        tensors = gradient, block.query, block.key, block.value, whole.out, whole.log_sum.unsqueeze(-1)
        lengths = None, None, None, block.query.shape[2], block.key.shape[2]  # no bias, one length for all samples
        d_query, d_key, d_value = kernel(*tensors, *whole.rest, *lengths, 0.0, block.causal)
        return d_query, d_key, d_value


def kernels() -> Mapping[str, AttentionKernel]:
    """Flash first, as torch prefers it."""
    return {"flash": CudaFlash(), "cudnn": CudaCudnn()}
