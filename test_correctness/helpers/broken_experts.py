"""Layers of experts whose result is wrong in one known way."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from perfsuite.workloads.moe_layer import MoeLayer


class _Damaged:
    """Another layer's result, changed by ``change``; everything else is the other's."""

    def __init__(self, layer, change):
        self._layer, self._change = layer, change

    def __getattr__(self, name):
        return getattr(self._layer, name)

    def __call__(self, x):
        return self._change(self._layer, x)


@dataclass(frozen=True, kw_only=True)
class Doubled(MoeLayer):
    """One token's output is twice what it is."""

    def build(self, rank):
        step = super().build(rank)
        step.layer = _Damaged(step.layer, self.change)
        return step

    @staticmethod
    def change(layer, x):
        factor = torch.ones_like(x)
        factor[0, 0] = 2.0
        return layer(x) * factor


@dataclass(frozen=True, kw_only=True)
class OtherExpert(MoeLayer):
    """The last rank's experts stand in another order than the router has them."""

    def build(self, rank):
        step = super().build(rank)
        if rank.rank == rank.world_size - 1:
            with torch.no_grad():
                first, second = step.layer.weight("gate", 0), step.layer.weight("gate", 1)
                kept = first.clone()
                first.copy_(second)
                second.copy_(kept)
        return step


@dataclass(frozen=True, kw_only=True)
class LargeOther(OtherExpert):
    """The same in a layer whose twin is right."""

    def twin(self):
        return None


@dataclass(frozen=True, kw_only=True)
class NoGradient(Doubled):
    """Rows lose their way in the backward."""

    @staticmethod
    def change(layer, x):
        return layer(x).detach() + 0 * layer(x)


@dataclass(frozen=True, kw_only=True)
class HalfGradient(Doubled):
    """An expert's weights miss what half of the ranks' rows add."""

    @staticmethod
    def change(layer, x):
        output = layer(x)
        for name in ("gate", "expand", "contract"):
            layer.weight(name, 0)._base.register_hook(lambda gradient: gradient / 2)
        return output
