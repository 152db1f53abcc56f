"""Torch building blocks that the models share: blocks that may be checkpointed, and values that no strategy changes.

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
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from perfsuite.models.base import Checkpointing


class Block(nn.Module):
    """A repeated layer: what is checkpointed, compiled and sharded as one."""

    def __init__(self, checkpointing: Checkpointing) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.reentrant = False
        """torch's older way of checkpointing, for strategies that reshape parameters between the two forwards."""

    @abstractmethod
    def compute(self, *inputs: torch.Tensor) -> torch.Tensor:
        """The layer itself."""

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """The layer, its activations kept or computed again in the backward."""
        if self.checkpointing == "none" or not torch.is_grad_enabled():
            return self.compute(*inputs)
        # There is no dropout, so there is no random state to keep.
        chosen: dict[str, Any] = {"use_reentrant": self.reentrant, "preserve_rng_state": False}
        if self.checkpointing == "selective":
            chosen["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _keep_products)
        output = checkpoint(self.compute, *inputs, **chosen)
        assert isinstance(output, torch.Tensor)
        return output


_PRODUCTS = ("mm", "addmm", "bmm", "_grouped_mm")


def _keep_products(context: Any, operation: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
    """Keep what costs arithmetic; everything else only costs memory bandwidth to compute again."""
    name = operation.__name__.partition(".")[0]
    kept = name in _PRODUCTS or name.startswith("_scaled_dot_product")
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class TrainingModule(nn.Module):
    """A model with its loss: ``forward(**batch)`` returns the mean loss of a batch: a wrapper sees all of it."""

    blocks: nn.ModuleList | nn.ModuleDict
    """The repeated layers by number, first to last; ``children()`` gives them."""


def attend(core: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, heads: int) -> torch.Tensor:
    """What ``core`` makes of (B, S, D) tensors with ``heads`` heads side by side; (B, S, D)."""
    q, k, v = (x.view(*x.shape[:-1], heads, -1).transpose(1, 2) for x in (query, key, value))
    mixed: torch.Tensor = core(q, k, v)
    return mixed.transpose(1, 2).flatten(2)


def materialize(module: nn.Module, device: torch.device, *, seed: int, prefix: str = "") -> None:
    """Give every parameter of ``module`` that is on the meta device storage on ``device`` and its initial value.

    The value depends on the seed and on the parameter's full name (``prefix`` + its name in ``module``) and on nothing
    else: a strategy may fill a model block by block, so that no rank ever holds it whole, and all of them start alike.
    A module that has a method ``fill`` knows by itself which part of a value it holds.
    Matrices are normal with a deviation of 0.02; gains are 1 and biases 0.  Gates that are published as zero at the
    start (adaLN-Zero) are not zero here: behind a closed gate all gradients are zero, and checking them shows nothing.
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
    """The initial value of the module's parameter ``name``, written into ``values`` by whoever knows it."""
    owner = module.get_submodule(name.rpartition(".")[0])
    getattr(owner, "fill", fill)(values, prefix + name, seed)


def fill(values: torch.Tensor, name: str, seed: int) -> None:
    """The initial value of the parameter called ``name``, written into ``values``."""
    if values.dim() > 1:
        # One 32-bit number: a CPU's generator ignores what of a seed is above that.
        mixed = zlib.crc32(f"{seed} {name}".encode())
        generator = torch.Generator(device=values.device).manual_seed(mixed)
        values.normal_(std=0.02, generator=generator)
    else:
        values.fill_(1.0 if name.endswith("weight") else 0.0)


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean over all tokens of (B, S, V) logits against (B, S) targets, in fp32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
