"""Stages as torch modules: consecutive blocks of a model, the embedding in the first and the head in the last.

A stage's parameters have the names that they have in the whole model, so they start with the same values.  A stage of
several inputs would need several messages: what all blocks need besides (LLaMA's angles) each stage makes for itself.
Shapes: B samples of a micro-batch, S tokens, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from perfsuite.models.gpt_module import GptModule
from perfsuite.models.layers import TrainingModule
from perfsuite.models.llama_module import LlamaModule, rotary_angles
from perfsuite.strategies.base import Plan
from perfsuite.workload import DTYPES

TIED = "tokens.weight"
"""Name of GPT's embedding, which is also its head: the first and the last stage have a copy each."""


class ModelStage(nn.Module):
    """Blocks ``layers`` of a model; ``forward`` takes (B, S) tokens in the first stage and (B, S, D) in the others.

    It gives (B, S, D), in the last stage (B, S, V) logits.
    """

    def __init__(self, module: TrainingModule, plan: Plan, layers: range, *, last: bool) -> None:
        super().__init__()
        self.first = layers.start == 0
        self.last = last
        self._plan = plan
        self.blocks = nn.ModuleDict({str(layer): module.blocks[layer] for layer in layers})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The stage, its matrix products in the plan's dtype."""
        with self._products_in(x.device):
            if self.first:
                x = self.embed(x)
            x = self.through_blocks(x)
            return self.head(x) if self.last else x

    def _products_in(self, device: torch.device) -> AbstractContextManager[Any]:
        if not self._plan.half:
            return nullcontext()
        return torch.autocast(device.type, dtype=getattr(torch, DTYPES[self._plan.dtype]))

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """(B, S) to (B, S, D)."""
        raise AssertionError("a subclass knows its embedding")

    def through_blocks(self, x: torch.Tensor) -> torch.Tensor:
        """(B, S, D) to (B, S, D)."""
        for block in self.blocks.values():
            x = block(x)
        return x

    def head(self, x: torch.Tensor) -> torch.Tensor:
        """(B, S, D) to (B, S, V)."""
        raise AssertionError("a subclass knows its head")


class GptStage(ModelStage):
    """A stage of a GPT."""

    def __init__(self, module: GptModule, plan: Plan, layers: range, *, last: bool) -> None:
        super().__init__(module, plan, layers, last=last)
        if self.first or last:
            self.tokens = module.tokens
        if self.first:
            self.positions = module.positions
        if last:
            self.norm = module.norm

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Words and positions."""
        x: torch.Tensor = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return x

    def head(self, x: torch.Tensor) -> torch.Tensor:
        """The last norm and the tied projection."""
        logits: torch.Tensor = self.tokens(self.norm(x), project=True)
        return logits


class LlamaStage(ModelStage):
    """A stage of a LLaMA."""

    def __init__(self, module: LlamaModule, plan: Plan, layers: range, *, last: bool) -> None:
        super().__init__(module, plan, layers, last=last)
        self.head_features = module.head_features
        self._angles: tuple[torch.Tensor, torch.Tensor] | None = None
        if self.first:
            self.tokens = module.tokens
        if last:
            self.norm, self.output = module.norm, module.output

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Words alone: blocks turn by the positions."""
        x: torch.Tensor = self.tokens(tokens)
        return x

    def through_blocks(self, x: torch.Tensor) -> torch.Tensor:
        """Every block gets the angles of the positions."""
        if self._angles is None:
            self._angles = rotary_angles(x.shape[1], self.head_features, x.device)
        for block in self.blocks.values():
            x = block(x, *self._angles)
        return x

    def head(self, x: torch.Tensor) -> torch.Tensor:
        """The last norm and the output projection."""
        logits: torch.Tensor = self.output(self.norm(x))
        return logits


_STAGES: Mapping[type[TrainingModule], Any] = MappingProxyType({GptModule: GptStage, LlamaModule: LlamaStage})


def make_stage(plan: Plan, layers: range, *, last: bool) -> ModelStage:
    """The stage without values, on the meta device; the model's type is one that ``split_layers`` lets through."""
    with torch.device("meta"):
        module = plan.model.build(plan.checkpointing)
    stage: ModelStage = _STAGES[type(module)](module, plan, layers, last=last)
    return stage
