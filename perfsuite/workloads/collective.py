"""Collectives: the time of one message over all ranks, one class each.

The timed call is synchronous, uses existing buffers, and its output is checked.
"""

from __future__ import annotations

import socket
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

from perfsuite.base.collectives import partner
from perfsuite.base.errors import InvalidParameter, WrongResult
from perfsuite.base.mesh import MeshShape
from perfsuite.record.result import Work
from perfsuite.record.workload import ITEM_BYTES, CallableStep, Rank, Step, Workload, Yardstick
from perfsuite.workloads.checks import texts_of_all
from perfsuite.workloads.collective_base import Collective, Endpoint, Root, Segment, Size, passing

_LATE_S = 0.005  # Delay of the last rank before the checked barrier


class AllReduce(Collective):
    """Sum one buffer over all ranks, in place; S: the buffer of a rank.  Sums may grow to infinity at equal speed."""

    name: ClassVar[str] = "all_reduce"
    in_place: ClassVar[bool] = True
    summed: ClassVar[bool] = True


class AllGather(Collective):
    """Every rank receives the parts of all ranks; S: all parts together."""

    name: ClassVar[str] = "all_gather"
    divided: ClassVar[bool] = True
    takes: ClassVar[Size] = "part"


class ReduceScatter(Collective):
    """Sum one buffer over all ranks and leave each rank its part; S: all parts together."""

    name: ClassVar[str] = "reduce_scatter"
    divided: ClassVar[bool] = True
    summed: ClassVar[bool] = True
    gives: ClassVar[Size] = "part"


class AllToAll(Collective):
    """Every rank sends an equal part to every rank; S: all parts that a rank sends, its own included."""

    name: ClassVar[str] = "all_to_all"
    divided: ClassVar[bool] = True


class AllToAllUneven(Collective):
    """Every rank sends most to the last rank: of a part of S / n, rank d gets the share (d + 1) / n.  Tokens of a
    mixture of experts with one popular expert are sent so.  All ranks wait for the last one, which receives S, its own
    part included.
    """

    name: ClassVar[str] = "all_to_all_uneven"
    divided: ClassVar[bool] = True

    @staticmethod
    def splits(count: int, ranks: int) -> tuple[int, ...]:
        """Return the elements that each rank sends to rank 0, 1, ...

        >>> AllToAllUneven.splits(16, 4)
        (1, 2, 3, 4)
        """
        return tuple(count // ranks * (receiver + 1) // ranks for receiver in range(ranks))

    def extents(self, count: int, ranks: int, rank: int) -> tuple[int, int | None]:
        """Return the sum of the splits as input, and n times the rank's own split as output."""
        splits = self.splits(count, ranks)
        return sum(splits), splits[rank] * ranks

    def operation(self, dist: ModuleType, end: Endpoint) -> Callable[[], object]:
        """Return torch's all_to_all_single with splits."""
        sent = list(self.splits(self.message_bytes // ITEM_BYTES[self.dtype], end.ranks))
        received = [sent[end.rank]] * end.ranks
        return lambda: dist.all_to_all_single(end.target, end.source, received, sent, group=end.group)

    def expected(self, count: int, ranks: int, rank: int) -> Sequence[Segment]:
        """Return the split of each rank for this one."""
        splits = self.splits(count, ranks)
        start = sum(splits[:rank])
        return [(peer, start, splits[rank]) for peer in range(ranks)]


class Broadcast(Collective):
    """Copy rank 0's buffer to all ranks, in place; S: the buffer of a rank."""

    name: ClassVar[str] = "broadcast"
    in_place: ClassVar[bool] = True
    root: ClassVar[Root] = "sends"


class Reduce(Collective):
    """Sum one buffer over all ranks onto rank 0, in place; S: the buffer of a rank."""

    name: ClassVar[str] = "reduce"
    in_place: ClassVar[bool] = True
    summed: ClassVar[bool] = True
    root: ClassVar[Root] = "receives"


class Gather(Collective):
    """Rank 0 receives the parts of all ranks; S: all parts together."""

    name: ClassVar[str] = "gather"
    divided: ClassVar[bool] = True
    takes: ClassVar[Size] = "part"
    root: ClassVar[Root] = "receives"


class Scatter(Collective):
    """Rank 0 sends every rank its part; S: all parts together."""

    name: ClassVar[str] = "scatter"
    divided: ClassVar[bool] = True
    gives: ClassVar[Size] = "part"
    root: ClassVar[Root] = "sends"


class PassingCollective(Collective):
    """Base of collectives in which a rank passes its buffer of S bytes to another one."""

    @abstractmethod
    def peers(self, rank: int, ranks: int) -> tuple[int | None, int | None]:
        """Return the rank to receive from and the rank to send to."""

    def extents(self, count: int, ranks: int, rank: int) -> tuple[int, int | None]:
        """Return an input on a rank that sends, and an output on a rank that receives."""
        source, target = self.peers(rank, ranks)
        return count * (target is not None), count * (source is not None)

    def operation(self, dist: ModuleType, end: Endpoint) -> Callable[[], object]:
        """Return one batch of a receive and a send, or one of them."""
        source, target = self.peers(end.rank, end.ranks)
        return passing(dist, end, receive_from=source, send_to=target)

    def expected(self, count: int, ranks: int, rank: int) -> Sequence[Segment]:
        """Return the buffer of the rank that sends to this one."""
        source, _ = self.peers(rank, ranks)
        return [] if source is None else [(source, 0, count)]


class PairedCollective(PassingCollective):
    """Base of collectives of pairs: the partner is half the world away, so on another host if there are several."""

    def require_ranks(self, ranks: int) -> None:
        """Raise InvalidParameter unless the number of ranks is even."""
        super().require_ranks(ranks)
        if ranks % 2:
            raise InvalidParameter(f"world_size={ranks} leaves a rank without a partner; choose an even number")


class SendRecv(PairedCollective):
    """Ranks r and r + n/2 swap buffers of S bytes: each sends and receives at the same time."""

    name: ClassVar[str] = "send_recv"

    def peers(self, rank: int, ranks: int) -> tuple[int, int]:
        """Return the partner twice."""
        return partner(rank, ranks), partner(rank, ranks)


class RingShift(PassingCollective):
    """Each rank sends its buffer of S bytes to the next one and receives that of the previous one."""

    name: ClassVar[str] = "ring_shift"

    def peers(self, rank: int, ranks: int) -> tuple[int, int]:
        """Return the previous and the next rank."""
        return (rank - 1) % ranks, (rank + 1) % ranks


class OneDirection(PairedCollective):
    """Rank r of the lower half sends its buffer of S bytes to rank r + n/2, without an answer."""

    name: ClassVar[str] = "one_direction"

    def peers(self, rank: int, ranks: int) -> tuple[int | None, int | None]:
        """Return only a target in the lower half, and only a source in the upper half."""
        other = partner(rank, ranks)
        return (None, other) if rank < ranks // 2 else (other, None)


@dataclass(frozen=True, kw_only=True)
class Barrier(Workload):
    """All ranks wait for each other; without a message there is no bandwidth."""

    yardstick: ClassVar[Yardstick] = "message"

    def work(self, shape: MeshShape) -> Work:
        """Return only the name."""
        if shape.world_size < 2:
            raise InvalidParameter(f"world_size={shape.world_size} is too small for a barrier; choose 2 or more")
        return Work(collective="barrier")

    def build(self, rank: Rank) -> Step:
        """Return the call of torch's barrier over the group of all ranks."""
        import torch
        import torch.distributed as dist

        group = rank.group()
        # A group learns its device from a first message; with a barrier alone torch would guess it.
        dist.all_reduce(torch.zeros(1, device=rank.device), group=group)
        return CallableStep(lambda: dist.barrier(group=group))

    def check(self, rank: Rank, step: Step) -> None:
        """Raise WrongResult if a rank of this host leaves the barrier before another arrives; the last one is late."""
        import torch

        if rank.rank == rank.world_size - 1:
            time.sleep(_LATE_S)
        came = time.monotonic_ns()  # all processes of a host share this clock
        step.run()
        torch.get_device_module(rank.device).synchronize()
        left = time.monotonic_ns()
        for other, text in enumerate(texts_of_all(rank, f"{came} {socket.gethostname()}")):
            stamp, _, host = text.partition(" ")
            if host == socket.gethostname() and left < int(stamp):
                early_us = (int(stamp) - left) / 1e3
                raise WrongResult(f"barrier let rank {rank.rank} pass {early_us:.0f} us before rank {other} arrived")
