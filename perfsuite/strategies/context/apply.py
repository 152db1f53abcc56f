"""Puts attention over the tokens of all ranks along ``cp`` into a model's blocks."""

from __future__ import annotations

from torch import nn

from perfsuite.models.attention import AttentionMethod
from perfsuite.platforms.attention import attention_kernels
from perfsuite.strategies.context.peers import TorchCore
from perfsuite.strategies.context.places import ContextMethod
from perfsuite.strategies.context.ring import RingCore
from perfsuite.strategies.context.ulysses import UlyssesCore
from perfsuite.workload import Rank


def apply(module: nn.Module, rank: Rank, method: ContextMethod, attention: AttentionMethod) -> None:
    """Replace ``core`` of every block's ``attention``; the module is then given the tokens of the rank's places.

    ``module.blocks`` is an nn.ModuleDict of blocks.  Raises UnsupportedCase where ``method`` is not to be had here.
    """
    blocks = module.blocks
    assert isinstance(blocks, nn.ModuleDict)
    for block in blocks.values():
        part = block.attention
        assert isinstance(part, nn.Module)
        part.core = new_core(rank, method, attention)


def new_core(rank: Rank, method: ContextMethod, attention: AttentionMethod) -> nn.Module:
    """One such core."""
    group = rank.group("cp")
    if method == "ulysses":
        return UlyssesCore(group, method=attention)
    if method == "torch":
        return TorchCore(rank.mesh["cp"], method=attention)
    kernels = attention_kernels(rank.device.type)
    return RingCore(group, zigzag=method == "zigzag", method=attention, kernels=kernels)
