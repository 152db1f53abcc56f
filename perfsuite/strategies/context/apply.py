"""Puts attention over the tokens of all ranks along ``cp`` into a model's blocks."""

from __future__ import annotations

import torch
from torch import nn

from perfsuite.models.attention import AttentionMethod
from perfsuite.models.language_module import LanguageModule
from perfsuite.platforms.attention import attention_kernels
from perfsuite.strategies.context.peers import TorchCore
from perfsuite.strategies.context.places import ContextMethod, places
from perfsuite.strategies.context.ring import RingCore
from perfsuite.strategies.context.ulysses import UlyssesCore
from perfsuite.strategies.deepspeed.zero import require_deepspeed
from perfsuite.workload import Rank


def apply(module: LanguageModule, rank: Rank, method: ContextMethod, attention: AttentionMethod) -> None:
    """Tell the module its tokens' places, and replace ``core`` of every block's ``attention``.

    Raises UnsupportedCase where ``method`` is not to be had here.
    """
    module.places = indices(rank, method, module.config.tokens_per_sample)
    for block in module.blocks.children():
        part = block.attention
        assert isinstance(part, nn.Module)
        part.core = new_core(rank, method, attention)


def indices(rank: Rank, method: ContextMethod, length: int) -> torch.Tensor:
    """Where in a sequence of ``length`` this rank's tokens stand, on its device."""
    held = places(method, length, rank.shape.size("cp"), rank.shape.coordinates(rank.rank)["cp"])
    return torch.cat([torch.arange(part.start, part.stop, device=rank.device) for part in held])


def new_core(rank: Rank, method: ContextMethod, attention: AttentionMethod) -> nn.Module:
    """One such core."""
    if method == "torch":
        return TorchCore(rank.submesh("cp"), method=attention)
    group = rank.group("cp")
    if method == "ulysses":
        return UlyssesCore(group, method=attention)
    if method == "deepspeed":
        require_deepspeed(rank, "context='deepspeed'")
        from perfsuite.strategies.deepspeed.attention import DeepSpeedCore

        return DeepSpeedCore(rank, method=attention)
    kernels = attention_kernels(rank.device.type)
    return RingCore(group, zigzag=method == "zigzag", method=attention, kernels=kernels)
