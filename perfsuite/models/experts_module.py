"""Experts of one layer in torch.  Shapes: E experts, D width, F features of an expert, R rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from perfsuite.models.layers import fill, local
from perfsuite.models.moe import EXPERT_FEATURES


class Experts(nn.Module):
    """SwiGLU MLPs of one shape, each with its own rows: all experts of a layer, or a rank's part of them."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(experts, width, hidden))
        self.expand = nn.Parameter(torch.empty(experts, width, hidden))
        self.contract = nn.Parameter(torch.empty(experts, hidden, width))
        self.first = 0  # Number of the first expert here in the layer
        self.slice, self.slices = 0, 1
        """The slice of each expert's features that is here, and the number of equal slices."""

    def keep(self, *, part: int, parts: int, slice_: int, slices: int) -> None:
        """Keep the ``part``-th of ``parts`` groups of experts, and the ``slice_``-th of ``slices`` of their features.
        Parameters with values are copied, so that the whole is freed; those on the meta device get values later, so
        that the whole layer never takes memory.
        """
        self.first, self.slice, self.slices = part * (len(self.gate) // parts), slice_, slices
        for name, dim in EXPERT_FEATURES.items():
            expert = getattr(self, name).detach().chunk(parts)[part].chunk(slices, dim=dim)[slice_]
            setattr(self, name, nn.Parameter(expert.clone(memory_format=torch.contiguous_format)))

    def fill(self, values: torch.Tensor, name: str, seed: int) -> None:
        """Write the initial value of the parameter called ``name`` into ``values``, expert by expert.  An expert's
        number in the layer seeds its value: a part of the experts has the same values as in the whole layer.
        """
        dim = EXPERT_FEATURES[name.rpartition(".")[2]] - 1
        for number, expert in enumerate(values, self.first):
            shape = list(expert.shape)
            shape[dim] *= self.slices
            whole = expert if self.slices == 1 else expert.new_empty(shape)
            fill(whole, f"{name}.{number}", seed)
            if self.slices > 1:
                expert.copy_(whole.chunk(self.slices, dim=dim)[self.slice])

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Return (R, D) for (R, D) rows sorted by expert, and (E,) rows of each."""
        gate, expand, contract = (local(weight) for weight in (self.gate, self.expand, self.contract))
        if torch.is_autocast_enabled(rows.device.type):  # autocast does not cast for a grouped product
            narrow = torch.get_autocast_dtype(rows.device.type)
            rows, gate, expand, contract = (x.to(narrow) for x in (rows, gate, expand, contract))
        multiply = _product(rows.device.type, rows.dtype, counts)
        return multiply(F.silu(multiply(rows, gate)) * multiply(rows, expand), contract)


def _product(device: str, dtype: torch.dtype, counts: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Return the product of rows sorted by expert with each expert's matrix: torch's grouped one if possible."""
    grouped = _grouped_product(device, dtype)
    if grouped is not None:
        ends = counts.cumsum(0).to(torch.int32)
        return lambda rows, weights: grouped(rows, weights, offs=ends)
    lengths = counts.tolist()

    def each(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        parts = torch.split(rows, lengths)
        return torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])

    return each


@functools.cache
def _grouped_product(device: str, dtype: torch.dtype) -> Callable[..., torch.Tensor] | None:
    """Return torch's grouped product if it computes this dtype on this device, else None.
    ``torch.nn.functional.grouped_mm`` is in torch 2.10 and newer, ``torch._grouped_mm`` in 2.8 and newer.
    """
    found: Any = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    if found is None:
        return None
    try:
        with _disable_current_modes():  # hides this product from checkpointing and counters
            rows, weights = (torch.ones(*shape, dtype=dtype, device=device) for shape in ((16, 16), (1, 16, 16)))
            found(rows, weights, offs=torch.tensor([16], dtype=torch.int32, device=device))
    except (NotImplementedError, RuntimeError):
        return None
    product: Callable[..., torch.Tensor] = found
    return product
