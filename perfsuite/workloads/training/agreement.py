"""Agreement of ranks on a result, so that none waits for a rank that has given up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perfsuite.base.errors import WrongResult
from perfsuite.record.workload import Rank

if TYPE_CHECKING:
    import torch


def texts_of_all(rank: Rank, text: str) -> list[str]:
    """Return the ``text`` of every rank, as bytes without pickle, in rank order; a collective."""
    import torch
    import torch.distributed as dist

    def exchange(own: torch.Tensor) -> list[list[int]]:
        everyone = [torch.empty_like(own) for _ in range(rank.world_size)]
        dist.all_gather(everyone, own, group=rank.group())
        return [row.tolist() for row in everyone]

    data = text.encode(errors="replace")
    lengths = [length for (length,) in exchange(torch.tensor([len(data)], device=rank.device))]
    padded = list(data.ljust(max(lengths), b"\0"))
    parts = exchange(torch.tensor(padded, dtype=torch.uint8, device=rank.device)) if padded else [[]] * rank.world_size
    return [bytes(part[:length]).decode() for part, length in zip(parts, lengths, strict=True)]


def raise_alike(rank: Rank, problem: str) -> None:
    """Raise WrongResult on every rank if any of them found a ``problem``, so that none waits for one that left."""
    for who, text in enumerate(texts_of_all(rank, problem)):
        if text:
            raise WrongResult(f"{text} (found by rank {who})")
