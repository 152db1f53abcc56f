"""Ulysses (Jacobs et al. 2023): ranks exchange tokens for heads, and each attends over all tokens with its heads.

Shapes: B batch, H heads, K heads of keys, S tokens of this rank, E features of a head, P ranks; P divides H and K.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

from perfsuite.models.attention import AttentionMethod
from perfsuite.models.attention_module import Core


class UlyssesCore(nn.Module):
    """Causal attention over the tokens of all ranks of a group, in the place of a block's core."""

    def __init__(self, group: dist.ProcessGroup, *, method: AttentionMethod) -> None:
        super().__init__()
        self.group = group
        self.core = Core(method)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """This rank's (B, H, S, E) queries, (B, K, S, E) keys and values to its (B, H, S, E)."""
        # All three are on their way before the first is waited for.
        sent = [_exchange(torch.stack(x.chunk(self._ranks, dim=1)), self.group) for x in (query, key, value)]
        out = self.core(*(torch.cat(_wait_along_cp(x).unbind(0), dim=2) for x in sent))
        back = _exchange(torch.stack(out.chunk(self._ranks, dim=2)), self.group)
        return torch.cat(_wait_along_cp(back).unbind(0), dim=1)

    @property
    def _ranks(self) -> int:
        return dist.get_world_size(self.group)


def _exchange(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """(P, ...): part p goes to rank p; the p-th of the result came from there."""
    if dist.get_world_size(group) == 1:
        return x
    exchanged: torch.Tensor = functional.all_to_all_single_autograd(x, None, None, group)
    return exchanged


def _wait_along_cp(x: torch.Tensor) -> torch.Tensor:
    """Here, and not somewhere in torch at the first use: where ranks wait for a lost one is what a report names."""
    arrived: torch.Tensor = functional.wait_tensor(x)  # type: ignore[no-untyped-call]  # torch does not type it
    return arrived
