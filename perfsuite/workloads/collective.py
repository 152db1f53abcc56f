"""Collectives: what one message over all ranks costs, one small class each.

The call that is timed is synchronous, works on buffers made before and is the one whose output is checked.
"""

from __future__ import annotations

import socket
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

from perfsuite.base.collectives import partner
from perfsuite.base.errors import InvalidParameter, WrongResult
from perfsuite.base.mesh import MeshShape
from perfsuite.record.result import Work
from perfsuite.record.workload import ITEM_BYTES, CallableStep, Rank, Step, Workload, Yardstick
from perfsuite.workloads.collective_base import ALL, ROOT, Collective, Endpoint, Extents, Segment, passing

_LATE_S = 0.005
"""How late the last rank comes to the barrier that is checked."""


@dataclass(frozen=True, kw_only=True)
class AllReduce(Collective):
    """Sum one buffer over all ranks, in place.

    Repeated without refilling, the values grow up to infinity; no device adds those at another speed.
    """

    message_bytes: int
    """Buffer on each rank."""

    name: ClassVar[str] = "all_reduce"
    in_place: ClassVar[bool] = True
    summed: ClassVar[bool] = True

    def operation(self, dist: ModuleType, end: Endpoint) -> Callable[[], object]:
        """The call is torch's all_reduce."""
        return lambda: dist.all_reduce(end.source, group=end.group)

    def expected(self, count: int, ranks: int, rank: int) -> Sequence[Segment]:
        """The sum of all."""
        return [Segment(rank=ALL, start=0, length=count)]


@dataclass(frozen=True, kw_only=True)
class AllGather(Collective):
    """Every rank receives the parts of all ranks."""

    message_bytes: int
    """All parts together: the output of each rank."""

    name: ClassVar[str] = "all_gather"
    divided: ClassVar[bool] = True

    def extents(self, count: int, ranks: int, rank: int) -> Extents:
        """A part in, all out."""
        return Extents(source=count // ranks, target=count)

    def operation(self, dist: ModuleType, end: Endpoint) -> Callable[[], object]:
        """The call is all_gather_single, which older torch calls all_gather_into_tensor."""
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return lambda: gather(end.target, end.source, group=end.group)

    def expected(self, count: int, ranks: int, rank: int) -> Sequence[Segment]:
        """The parts in rank order."""
        return [Segment(rank=peer, start=0, length=count // ranks) for peer in range(ranks)]


@dataclass(frozen=True, kw_only=True)
class ReduceScatter(Collective):
    """Sum one buffer over all ranks and leave each rank its part."""

    message_bytes: int
    """Input of each rank: all parts together."""

    name: ClassVar[str] = "reduce_scatter"
    divided: ClassVar[bool] = True
    summed: ClassVar[bool] = True

    def extents(self, count: int, ranks: int, rank: int) -> Extents:
        """All in, a part out."""
        return Extents(source=count, target=count // ranks)

    def operation(self, dist: ModuleType, end: Endpoint) -> Callable[[], object]:
        """The call is reduce_scatter_single, which older torch calls reduce_scatter_tensor."""
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return lambda: scatter(end.target, end.source, group=end.group)

    def expected(self, count: int, ranks: int, rank: int) -> Sequence[Segment]:
        """The rank's part of the sum."""
        return [Segment(rank=ALL, start=rank * (count // ranks), length=count // ranks)]


@dataclass(frozen=True, kw_only=True)
class AllToAll(Collective):
    """Every rank sends an equal part to every rank."""

    message_bytes: int
    """What each rank sends in all, its own part included."""

    name: ClassVar[str] = "all_to_all"
    divided: ClassVar[bool] = True

    def operation(self, dist: ModuleType, end: Endpoint) -> Callable[[], object]:
        """The call is torch's all_to_all_single with equal splits."""
        return lambda: dist.all_to_all_single(end.target, end.source, group=end.group)

    def expected(self, count: int, ranks: int, rank: int) -> Sequence[Segment]:
        """From each rank the part meant for this one."""
        part = count // ranks
        return [Segment(rank=peer, start=rank * part, length=part) for peer in range(ranks)]


@dataclass(frozen=True, kw_only=True)
class AllToAllUneven(Collective):
    """Every rank sends the last rank most: of a part of S / n, rank d gets the share (d + 1) / n.

    So do tokens in a mixture of experts with one popular expert.  The last rank receives S and is what all wait for.
    """

    message_bytes: int
    """max(sent, received) over the ranks: what the last rank receives, its own part included."""

    name: ClassVar[str] = "all_to_all_uneven"
    divided: ClassVar[bool] = True

    @staticmethod
    def splits(count: int, ranks: int) -> tuple[int, ...]:
        """Elements that each rank sends to rank 0, 1, ...

        >>> AllToAllUneven.splits(16, 4)
        (1, 2, 3, 4)
        """
        return tuple(count // ranks * (receiver + 1) // ranks for receiver in range(ranks))

    def extents(self, count: int, ranks: int, rank: int) -> Extents:
        """The same splits out on every rank; in, n times the rank's own."""
        splits = self.splits(count, ranks)
        return Extents(source=sum(splits), target=splits[rank] * ranks)

    def operation(self, dist: ModuleType, end: Endpoint) -> Callable[[], object]:
        """The call is torch's all_to_all_single with splits."""
        sent = list(self.splits(self.message_bytes // ITEM_BYTES[self.dtype], end.ranks))
        received = [sent[end.rank]] * end.ranks
        return lambda: dist.all_to_all_single(end.target, end.source, received, sent, group=end.group)

    def expected(self, count: int, ranks: int, rank: int) -> Sequence[Segment]:
        """From each rank the split meant for this one."""
        splits = self.splits(count, ranks)
        start = sum(splits[:rank])
        return [Segment(rank=peer, start=start, length=splits[rank]) for peer in range(ranks)]


@dataclass(frozen=True, kw_only=True)
class Broadcast(Collective):
    """Rank 0's buffer to all, in place."""

    message_bytes: int
    """Buffer on each rank."""

    name: ClassVar[str] = "broadcast"
    in_place: ClassVar[bool] = True

    def operation(self, dist: ModuleType, end: Endpoint) -> Callable[[], object]:
        """The call is torch's broadcast."""
        root = end.ranks_in_world[ROOT]
        return lambda: dist.broadcast(end.source, root, group=end.group)

    def expected(self, count: int, ranks: int, rank: int) -> Sequence[Segment]:
        """The root's buffer."""
        return [Segment(rank=ROOT, start=0, length=count)]


@dataclass(frozen=True, kw_only=True)
class Reduce(Collective):
    """Sum one buffer over all ranks onto rank 0, in place."""

    message_bytes: int
    """Buffer on each rank."""

    name: ClassVar[str] = "reduce"
    in_place: ClassVar[bool] = True
    summed: ClassVar[bool] = True

    def operation(self, dist: ModuleType, end: Endpoint) -> Callable[[], object]:
        """The call is torch's reduce."""
        root = end.ranks_in_world[ROOT]
        return lambda: dist.reduce(end.source, root, group=end.group)

    def expected(self, count: int, ranks: int, rank: int) -> Sequence[Segment]:
        """The sum on the root; what other ranks hold afterwards is not defined."""
        return [Segment(rank=ALL, start=0, length=count)] if rank == ROOT else []


@dataclass(frozen=True, kw_only=True)
class Gather(Collective):
    """Rank 0 receives the parts of all ranks."""

    message_bytes: int
    """All parts together: the output of rank 0."""

    name: ClassVar[str] = "gather"
    divided: ClassVar[bool] = True

    def extents(self, count: int, ranks: int, rank: int) -> Extents:
        """A part in; all out on the root."""
        return Extents(source=count // ranks, target=count if rank == ROOT else 0)

    def operation(self, dist: ModuleType, end: Endpoint) -> Callable[[], object]:
        """The call is torch's gather into views of one buffer."""
        root, parts = end.ranks_in_world[ROOT], end.chunks(end.target)
        return lambda: dist.gather(end.source, parts, root, group=end.group)

    def expected(self, count: int, ranks: int, rank: int) -> Sequence[Segment]:
        """The parts in rank order on the root."""
        parts = [Segment(rank=peer, start=0, length=count // ranks) for peer in range(ranks)]
        return parts if rank == ROOT else []


@dataclass(frozen=True, kw_only=True)
class Scatter(Collective):
    """Rank 0 sends every rank its part."""

    message_bytes: int
    """All parts together: the input of rank 0."""

    name: ClassVar[str] = "scatter"
    divided: ClassVar[bool] = True

    def extents(self, count: int, ranks: int, rank: int) -> Extents:
        """All in on the root; a part out."""
        return Extents(source=count if rank == ROOT else 0, target=count // ranks)

    def operation(self, dist: ModuleType, end: Endpoint) -> Callable[[], object]:
        """The call is torch's scatter from views of one buffer."""
        root, parts = end.ranks_in_world[ROOT], end.chunks(end.source)
        return lambda: dist.scatter(end.target, parts, root, group=end.group)

    def expected(self, count: int, ranks: int, rank: int) -> Sequence[Segment]:
        """The rank's part of the root's buffer."""
        return [Segment(rank=ROOT, start=rank * (count // ranks), length=count // ranks)]


@dataclass(frozen=True, kw_only=True)
class PairedCollective(Collective):
    """Base of those in which a rank has one partner, at distance half the world: on another host if there are any."""

    def require_ranks(self, ranks: int) -> None:
        """Pairs need an even number of ranks."""
        super().require_ranks(ranks)
        if ranks % 2:
            raise InvalidParameter(f"world_size={ranks} leaves a rank without a partner; choose an even number")


@dataclass(frozen=True, kw_only=True)
class SendRecv(PairedCollective):
    """Ranks r and r + n/2 swap buffers: each sends and receives at the same time."""

    message_bytes: int
    """Buffer that each rank sends."""

    name: ClassVar[str] = "send_recv"

    def operation(self, dist: ModuleType, end: Endpoint) -> Callable[[], object]:
        """One batch of a receive and a send."""
        other = partner(end.rank, end.ranks)
        return passing(dist, end, receive_from=other, send_to=other)

    def expected(self, count: int, ranks: int, rank: int) -> Sequence[Segment]:
        """The partner's buffer."""
        return [Segment(rank=partner(rank, ranks), start=0, length=count)]


@dataclass(frozen=True, kw_only=True)
class RingShift(Collective):
    """Each rank sends its buffer to the next one and receives that of the one before."""

    message_bytes: int
    """Buffer that each rank sends."""

    name: ClassVar[str] = "ring_shift"

    def operation(self, dist: ModuleType, end: Endpoint) -> Callable[[], object]:
        """One batch of a receive and a send."""
        before, after = (end.rank - 1) % end.ranks, (end.rank + 1) % end.ranks
        return passing(dist, end, receive_from=before, send_to=after)

    def expected(self, count: int, ranks: int, rank: int) -> Sequence[Segment]:
        """The buffer of the rank before."""
        return [Segment(rank=(rank - 1) % ranks, start=0, length=count)]


@dataclass(frozen=True, kw_only=True)
class OneDirection(PairedCollective):
    """Rank r of the lower half sends its buffer to rank r + n/2; nothing comes back."""

    message_bytes: int
    """Buffer that each rank of the lower half sends."""

    name: ClassVar[str] = "one_direction"

    def extents(self, count: int, ranks: int, rank: int) -> Extents:
        """Out in the lower half, in in the upper."""
        sends = rank < ranks // 2
        return Extents(source=count if sends else 0, target=0 if sends else count)

    def operation(self, dist: ModuleType, end: Endpoint) -> Callable[[], object]:
        """A send or a receive."""
        other = partner(end.rank, end.ranks)
        if end.rank < end.ranks // 2:
            return passing(dist, end, send_to=other)
        return passing(dist, end, receive_from=other)

    def expected(self, count: int, ranks: int, rank: int) -> Sequence[Segment]:
        """The partner's buffer in the upper half."""
        return [] if rank < ranks // 2 else [Segment(rank=partner(rank, ranks), start=0, length=count)]


@dataclass(frozen=True, kw_only=True)
class Barrier(Workload):
    """All ranks wait for each other; no message that a bandwidth could be taken of."""

    metrics: ClassVar[tuple[str, ...]] = ("latency_us",)
    yardstick: ClassVar[Yardstick] = "message"

    def work(self, shape: MeshShape) -> Work:
        """Nothing but the name."""
        if shape.world_size < 2:
            raise InvalidParameter(
                f"world_size={shape.world_size} leaves a barrier nobody to wait for; choose 2 or more"
            )
        return Work(collective="barrier")

    def build(self, rank: Rank) -> Step:
        """The call is torch's barrier, over all ranks' group."""
        import torch
        import torch.distributed as dist

        group = rank.group()
        # A group learns which device is this rank's from a first message; a barrier alone would let it guess.
        dist.all_reduce(torch.zeros(1, device=rank.device), group=group)
        return CallableStep(lambda: dist.barrier(group=group))

    def check(self, rank: Rank, step: Step) -> None:
        """Raise WrongResult if a rank of this host leaves before another has come; the last one comes late."""
        import torch
        import torch.distributed as dist

        if rank.rank == rank.world_size - 1:
            time.sleep(_LATE_S)
        came = time.monotonic_ns()  # one clock for all processes of a host
        step.run()
        torch.get_device_module(rank.device).synchronize()
        left = time.monotonic_ns()
        mine = torch.tensor([zlib.crc32(socket.gethostname().encode()), came, left], device=rank.device)
        everyone = [torch.empty_like(mine) for _ in range(rank.world_size)]
        dist.all_gather(everyone, mine, group=rank.group())
        for other, (host, came_ns, _) in enumerate(row.tolist() for row in everyone):
            if host == int(mine[0]) and left < came_ns:
                early_us = (came_ns - left) / 1e3
                raise WrongResult(f"barrier let rank {rank.rank} go {early_us:.0f} us before rank {other} had come")
