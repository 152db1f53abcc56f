"""Sends rows of tokens to the ranks of their experts, and back.  Imported on ranks only.

Shapes: R rows of D features on this rank, E experts, W ranks along ep, T along tp.

Over ep a row goes to the rank of its expert: an all-to-all with parts as uneven as the routing.  Over tp every rank
needs all rows of its tp group and computes with its slice of the features: an uneven all-gather, implemented as an
all-to-all of the rows repeated T times.  The partial sums return the same way and are added.  Routing with a capacity
makes all parts equal, so that no counts are exchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from perfsuite.models.moe_module import Experts

Parts = tuple[list[int], list[int], list[int], torch.Tensor]
"""Rows sent to and received from each rank along ep, rows from each rank along tp after ep, and (T W, E / W) rows of
each of this rank's experts by source, in the order of arrival."""


class Dispatcher:
    """Moves the rows of one layer."""

    def __init__(
        self,
        ep: dist.ProcessGroup | None,
        tp: dist.ProcessGroup | None,
        *,
        even: bool,
        watch: Callable[[bool], None] | None = None,
    ) -> None:
        """``even``: every rank sends every expert the same number of rows.  ``watch`` is called when messages begin
        (True) and end (False), in forward and backward.
        """
        self._ep, self._tp, self._even, self._watch = ep, tp, even, watch
        self._ep_ranks = 1 if ep is None else ep.size()
        self._tp_ranks = 1 if tp is None else tp.size()
        self.sources = self._ep_ranks * self._tp_ranks  # Number of ranks whose rows an expert computes

    def __call__(self, rows: torch.Tensor, counts: torch.Tensor, experts: Experts) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (R, D) rows after their experts, and the (E / W,) rows computed here; ``counts``: (E,) rows each."""
        sent, received, gathered, by_source = self._parts(rows, counts)
        if self._ep is not None:
            rows = self.move(rows, received, sent, self._ep)
        here = rows.shape[0]
        if self._tp is not None:
            rows = self.move(rows.repeat(self._tp_ranks, 1), gathered, [here] * self._tp_ranks, self._tp)
        order, load = _by_expert(by_source, rows.shape[0])
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        rows = experts(rows[order], load)[back]
        if self._tp is not None:
            rows = self.move(rows, [here] * self._tp_ranks, gathered, self._tp)
            rows = rows.view(self._tp_ranks, here, rows.shape[-1]).sum(dim=0)
        if self._ep is not None:
            rows = self.move(rows, sent, received, self._ep)
        return rows, load

    def move(self, rows: torch.Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> torch.Tensor:
        """Return the rows of one all-to-all; its backward is the reverse one."""
        rows = self._edge(rows, True).contiguous()
        moved = functional.all_to_all_single_autograd(rows, received, sent, group)
        return self._edge(functional.wait_tensor(moved), False)

    def _edge(self, rows: torch.Tensor, begins: bool) -> torch.Tensor:
        return rows if self._watch is None else _Edge.apply(rows, self._watch, begins)

    def _parts(self, rows: torch.Tensor, counts: torch.Tensor) -> Parts:
        ranks, tp_ranks = self._ep_ranks, self._tp_ranks
        if self._even:
            part = rows.shape[0] // ranks
            by_source = counts.view(ranks, -1).repeat(tp_ranks, 1)
            return [part] * ranks, [part] * ranks, [rows.shape[0]] * tp_ranks, by_source
        watch = self._watch or (lambda begins: None)
        watch(True)
        received = counts
        if self._ep is not None:
            received = torch.empty_like(counts)
            dist.all_to_all_single(received, counts, group=self._ep)
        gathered = received
        if self._tp is not None:
            gathered = counts.new_empty(tp_ranks * len(counts))
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            gather(gathered, received, group=self._tp)
        sums = [counted.view(parts, -1).sum(dim=1) for counted, parts in ((counts, ranks), (received, ranks))]
        # One synchronization with the device.
        numbers = torch.cat((*sums, gathered.view(tp_ranks, -1).sum(dim=1))).tolist()
        watch(False)
        by_source = gathered.view(tp_ranks * ranks, -1)
        return numbers[:ranks], numbers[ranks : 2 * ranks], numbers[2 * ranks :], by_source


def _by_expert(counts: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the order that sorts rows by expert, and the rows of each; rows came by source, sorted by expert."""
    sources, experts = counts.shape
    numbers = torch.arange(experts, device=counts.device).repeat(sources)
    expert = torch.repeat_interleave(numbers, counts.flatten(), output_size=rows)
    return expert.argsort(stable=True), counts.sum(dim=0)


class _Edge(torch.autograd.Function):
    """Returns its input and calls ``watch`` at the begin or end of messages."""

    @staticmethod
    def forward(context: Any, rows: torch.Tensor, watch: Callable[[bool], None], begins: bool) -> torch.Tensor:
        context.watch, context.begins = watch, begins
        watch(begins)
        return rows.view_as(rows)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        context.watch(not context.begins)
        return gradients[0], None, None
