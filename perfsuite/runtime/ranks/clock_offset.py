"""How far a rank's clock is from rank 0's, by messages there and back.

The ranks of one host read one clock.  Across hosts rank 0 asks every other rank for its time: the answer was read
between the question and its arrival, so the midpoint is wrong by at most half the round trip, of which the shortest is
taken.  A collective; all ranks call it alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

_EXCHANGES = 16


def offset_to_rank0_s(device: torch.device, *, now_s: Callable[[], float] = time.perf_counter) -> float:
    """Seconds to add to this rank's clock to read rank 0's; 0 on rank 0."""
    rank, offset_s = dist.get_rank(), 0.0
    for other in range(1, dist.get_world_size()):
        if rank == 0:
            _answer_with_offset(other, device, now_s)
        elif rank == other:
            offset_s = _ask(device, now_s)
    return offset_s


def _answer_with_offset(other: int, device: torch.device, now_s: Callable[[], float]) -> None:
    """Rank 0's part: ask for the other's time, and tell it the offset of the fastest exchange."""
    box = torch.zeros(1, dtype=torch.float64, device=device)
    exchanges = []
    for _ in range(_EXCHANGES):
        asked_s = now_s()
        dist.send(box, other)
        dist.recv(box, other)
        theirs_s = float(box.item())  # reading it waits for the device
        came_s = now_s()
        exchanges.append((came_s - asked_s, (asked_s + came_s) / 2 - theirs_s))
    box.fill_(min(exchanges)[1])
    dist.send(box, other)


def _ask(device: torch.device, now_s: Callable[[], float]) -> float:
    """The other rank's part: answer with its time, and take the offset."""
    box = torch.zeros(1, dtype=torch.float64, device=device)
    for _ in range(_EXCHANGES):
        dist.recv(box, 0)
        box.item()
        box.fill_(now_s())
        dist.send(box, 0)
    dist.recv(box, 0)
    return float(box.item())
