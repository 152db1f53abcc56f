"""The experts of one layer in torch.  Shapes: E experts, D width, F features of an expert, R rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from perfsuite.models.layers import fill
from perfsuite.models.moe import EXPERT_FEATURES


class Experts(nn.Module):
    """SwiGLU MLPs of one shape, each for rows of its own; all of a layer's, or a rank's part of them."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(experts, width, hidden))
        self.expand = nn.Parameter(torch.empty(experts, width, hidden))
        self.contract = nn.Parameter(torch.empty(experts, hidden, width))
        self.first = 0
        """Number in the layer of the first expert here."""
        self.slice, self.slices = 0, 1
        """Of each expert's features this one of so many equal slices is here."""

    def keep(self, *, part: int, parts: int, slice_: int, slices: int) -> None:
        """Keep the ``part``-th of ``parts`` groups of experts, and of their features the ``slice_``-th of ``slices``.

        Parameters with values are copied, so that nothing keeps the whole alive; those of the meta device get theirs
        later, and the whole layer is never made.
        """
        self.first, self.slice, self.slices = part * (len(self.gate) // parts), slice_, slices
        for name, dim in EXPERT_FEATURES.items():
            mine = getattr(self, name).detach().chunk(parts)[part].chunk(slices, dim=dim)[slice_]
            setattr(self, name, nn.Parameter(mine.clone(memory_format=torch.contiguous_format)))

    def fill(self, values: torch.Tensor, name: str, seed: int) -> None:
        """Write the initial value of the parameter called ``name`` into ``values``, one expert after the other.

        Each expert's is drawn by its number in the layer: a part of the experts has what the whole layer has there.
        """
        dim = EXPERT_FEATURES[name.rpartition(".")[2]] - 1
        for number, mine in enumerate(values, self.first):
            shape = list(mine.shape)
            shape[dim] *= self.slices
            whole = mine if self.slices == 1 else mine.new_empty(shape)
            fill(whole, f"{name}.{number}", seed)
            if self.slices > 1:
                mine.copy_(whole.chunk(self.slices, dim=dim)[self.slice])

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """(R, D) rows sorted by expert, (E,) rows of each, to (R, D)."""
        gate, expand, contract = (_local(weight) for weight in (self.gate, self.expand, self.contract))
        if torch.is_autocast_enabled(rows.device.type):  # autocast knows no grouped product
            narrow = torch.get_autocast_dtype(rows.device.type)
            rows, gate, expand, contract = (x.to(narrow) for x in (rows, gate, expand, contract))
        multiply = _product(rows.device.type, rows.dtype, counts)
        return multiply(F.silu(multiply(rows, gate)) * multiply(rows, expand), contract)


def _product(device: str, dtype: torch.dtype, counts: torch.Tensor) -> Callable[..., torch.Tensor]:
    """The product of rows sorted by expert with a matrix of each: torch's grouped one where it has it."""
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
    """torch's grouped product where it computes this dtype on this device, else None: its names and limits change.

    ``torch.nn.functional.grouped_mm`` came with 2.10, before that 2.8 has ``torch._grouped_mm``.
    """
    found: Any = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    if found is None:
        return None
    try:
        with _disable_current_modes():  # whoever keeps or counts a layer's products is not to see this one
            rows, weights = (torch.ones(*shape, dtype=dtype, device=device) for shape in ((16, 16), (1, 16, 16)))
            found(rows, weights, offs=torch.tensor([16], dtype=torch.int32, device=device))
    except (NotImplementedError, RuntimeError):
        return None
    product: Callable[..., torch.Tensor] = found
    return product


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
