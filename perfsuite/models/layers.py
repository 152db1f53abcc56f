"""Torch building blocks of the models: checkpointed blocks, and initial values that do not depend on the strategy.

Shapes: B batch, S tokens, H heads, E features of a head, D = H x E features of a token.
"""

from __future__ import annotations

import functools
import zlib
from abc import abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from perfsuite.base.errors import UnsupportedCase
from perfsuite.models.base import AttentionMethod, Checkpointing


class Block(nn.Module):
    """A repeated layer: the unit of checkpointing, compilation and sharding."""

    def __init__(self, checkpointing: Checkpointing) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.reentrant = False
        """Use torch's older checkpointing, for strategies that reshape parameters between the two forwards."""

    @abstractmethod
    def compute(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Compute the layer."""

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Compute the layer; with checkpointing, activations are computed again in the backward."""
        if self.checkpointing == "none" or not torch.is_grad_enabled():
            return self.compute(*inputs)
        # Without dropout there is no random state to restore.
        chosen: dict[str, Any] = {"use_reentrant": self.reentrant, "preserve_rng_state": False}
        if self.checkpointing == "selective":
            chosen["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _keep_products)
        return checkpoint(self.compute, *inputs, **chosen)


_PRODUCTS = ("mm", "addmm", "bmm", "_grouped_mm")


def _keep_products(context: Any, operation: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
    """Keep the outputs of products and attention; other operations only cost memory bandwidth to compute again."""
    name = operation.__name__.partition(".")[0]
    kept = name in _PRODUCTS or name.startswith("_scaled_dot_product")
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class TrainingModule(nn.Module):
    """A model with its loss: ``forward(**batch)`` returns the mean loss of a batch."""

    blocks: nn.ModuleList | nn.ModuleDict  # Repeated layers in order; ``children()`` iterates over them


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor that may be spread over a mesh."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def attend(core: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, heads: int) -> torch.Tensor:
    """Return ``core``'s attention of (B, S, D) tensors with adjacent heads, as (B, S, D)."""
    q, k, v = (x.view(*x.shape[:-1], heads, -1).transpose(1, 2) for x in (query, key, value))
    mixed: torch.Tensor = core(q, k, v)
    return mixed.transpose(1, 2).flatten(2)


def materialize(module: nn.Module, device: torch.device, *, seed: int, prefix: str = "") -> None:
    """Move every parameter of ``module`` from the meta device to ``device`` and set its initial value.  The value
    depends only on the seed and on the parameter's full name (``prefix`` + its name in ``module``). So a strategy may
    fill a model block by block, no rank needs memory for the whole model, and all strategies start from the same
    values. A module with a method ``fill`` sets its own values; it can hold a part of a parameter. Matrices are normal
    with a standard deviation of 0.02; gains are 1 and biases 0. Gates published as zero at the start (adaLN-Zero) are
    not zero here: all gradients behind a closed gate are zero, and a check of zeros finds no error.
    """
    for name, parameter in list(module.named_parameters()):
        if not parameter.is_meta:
            continue
        path, _, leaf = name.rpartition(".")
        full = torch.empty_like(parameter, device=device)
        fill_parameter(module, name, full, seed, prefix=prefix)
        setattr(module.get_submodule(path), leaf, nn.Parameter(full, requires_grad=parameter.requires_grad))


@torch.no_grad()
def fill_parameter(module: nn.Module, name: str, values: torch.Tensor, seed: int, *, prefix: str = "") -> None:
    """Write the initial value of the module's parameter ``name`` into ``values``."""
    owner = module.get_submodule(name.rpartition(".")[0])
    getattr(owner, "fill", fill)(values, prefix + name, seed)


def fill(values: torch.Tensor, name: str, seed: int) -> None:
    """Write the initial value of the parameter called ``name`` into ``values``."""
    if values.dim() > 1:
        # A CPU generator uses only the low 32 bits of a seed.
        mixed = zlib.crc32(f"{seed} {name}".encode())
        generator = torch.Generator(device=values.device).manual_seed(mixed)
        values.normal_(std=0.02, generator=generator)
    else:
        values.fill_(1.0 if name.endswith("weight") else 0.0)


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean loss over all tokens of (B, S, V) logits against (B, S) targets, in fp32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


# -- attention: softmax(QK)V without the projections; K heads of keys and values, K divides H ----------------------

BACKENDS = {"math": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION}
"""torch's kernels by method; with ``auto`` torch chooses one."""


class AttentionCore(nn.Module):
    """Attention over all tokens; context parallelism replaces this module."""

    def __init__(self, method: AttentionMethod = "auto", *, causal: bool = True) -> None:
        super().__init__()
        self.method = method
        self.causal = causal

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return (B, H, S, E) for queries and (B, K, S', E) keys and values; UnsupportedCase without a kernel."""
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
    """Return (B, K, S, E) as (B, heads, S, E): some backends of torch's attention do not support enable_gqa=True."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)
