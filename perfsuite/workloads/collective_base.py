"""Base of the collectives: sizes, buffers, inputs with a closed form, and the check of every element.

A collective defines its name, which fixes size and bandwidth factor (perfsuite docs metrics), the sizes of input and
output, its root if it has one, and ``operation``, the timed call.  Buffers and expected values follow from these; some
collectives override ``extents`` and ``expected`` instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar, Literal

from perfsuite.base.collectives import receives_first
from perfsuite.base.errors import InvalidParameter, WrongResult
from perfsuite.base.mesh import MeshShape
from perfsuite.record.result import Work
from perfsuite.record.workload import ITEM_BYTES, Rank, Step, Workload, Yardstick, require_dtype
from perfsuite.workloads.checks import Pattern, difference, fill, poison, require_multiple

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

ALL = -1  # In a Segment: the sum over all ranks instead of one rank's values
Size = Literal["all", "part"]
Root = Literal["", "sends", "receives"]
ROOT = 0  # Rank from which rooted collectives start or at which they end


Segment = tuple[int, int, int]
"""A run of output elements: rank of its inputs or ALL, place of the first element in that input, and length."""


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Buffers and group of one rank in an operation."""

    rank: int  # Index in the group
    ranks: int  # Size of the group
    group: dist.ProcessGroup
    ranks_in_world: tuple[int, ...]
    """Rank in the world by index in the group; torch's point-to-point and rooted calls need it."""
    source: torch.Tensor
    target: torch.Tensor  # The same as ``source`` if the operation works in place
    span: Callable[[str], AbstractContextManager[object]] = nullcontext
    """Marks a part of the operation, as :meth:`perfsuite.record.workload.Rank.span`."""


@dataclass(frozen=True, kw_only=True)
class Collective(Workload):
    """Base of the collectives with a message."""

    message_bytes: int  # Size S as nccl-tests counts it.
    dtype: str = "fp32"  # Short name of the elements' dtype.

    name: ClassVar[str]  # Name in perfsuite.base.collectives; fixes factor and bound of the bandwidth.
    divided: ClassVar[bool] = False
    """Whether S is the sum of the ranks' parts, so that the number of ranks must divide it."""
    summed: ClassVar[bool] = False  # Whether the ranks' values are summed.
    takes: ClassVar[Size] = "all"  # Input of a rank: S, or its part of S.
    gives: ClassVar[Size] = "all"  # Output of a rank: S, or its part of S.
    root: ClassVar[Root] = ""
    """Whether only the root has an input, or only the root has an output; empty: all ranks have both."""
    in_place: ClassVar[bool] = False  # Whether the operation works in place.
    yardstick: ClassVar[Yardstick] = "message"

    def __post_init__(self) -> None:
        require_dtype(self.dtype)
        if self.dtype == "tf32":
            raise InvalidParameter("dtype='tf32' applies to products only; choose 'fp32' for the same bytes")
        require_multiple(self, "message_bytes", ITEM_BYTES[self.dtype], f"{self.dtype} elements")

    @property
    def metrics(self) -> tuple[str, ...]:
        """Time and bandwidths."""
        return ("latency_us", "algbw_gb_per_s", "busbw_gb_per_s")

    def require_ranks(self, ranks: int) -> None:
        """Raise InvalidParameter unless the message can be spread over this many ranks."""
        if ranks < 2:
            raise InvalidParameter(f"world_size={ranks} is too small for {self.name}; choose at least 2")
        if self.divided:
            unit, meaning = ITEM_BYTES[self.dtype] * ranks, f"{ranks} ranks x {self.dtype} elements"
            require_multiple(self, "message_bytes", unit, meaning)

    def work(self, shape: MeshShape) -> Work:
        """Return S bytes under the collective's name."""
        self.require_ranks(shape.world_size)
        return Work(collective=self.name, message_bytes=float(self.message_bytes), dtype=self.dtype)

    def extents(self, count: int, ranks: int, rank: int) -> tuple[int, int | None]:
        """Return the elements of input and output of one rank if S is ``count``; None for an output in place."""
        if self.in_place:
            return count, None
        source, target = (count if size == "all" else count // ranks for size in (self.takes, self.gives))
        has_source, has_target = (rank == ROOT or self.root != way for way in ("sends", "receives"))
        return source * has_source, target * has_target

    def operation(self, dist: ModuleType, end: Endpoint) -> Callable[[], object]:
        """Return the timed call; it does no setup.  By default it is the collective of this name."""
        from perfsuite.strategies.traffic import make_call  # on the rank only: it needs the models

        return make_call(dist, self.name, end.source, end.target, end.group, root=end.ranks_in_world[ROOT])

    def expected(self, count: int, ranks: int, rank: int) -> Sequence[Segment]:
        """Return the source of each element of the output, in order; empty if the output has no meaning."""
        if self.root == "receives" and rank != ROOT:
            return []
        length = count // ranks if self.divided else count
        start = rank * length if self.divided and self.takes == "all" else 0
        sources = [ALL] if self.summed else [ROOT] if self.root == "sends" else range(ranks)
        return [(source, start, length) for source in sources]

    def build(self, rank: Rank) -> CollectiveStep:
        """Return buffers on the device and the call over the group of all ranks."""
        self.require_ranks(rank.world_size)
        return CollectiveStep(self, rank)

    def check(self, rank: Rank, step: Step) -> None:
        """Raise WrongResult unless every element of the output equals its closed form, in the right dtype."""
        assert isinstance(step, CollectiveStep)
        output, dtype = step.end.target, rank.dtype(self.dtype)
        if output.dtype != dtype:
            raise WrongResult(f"dtype of {self} on rank {rank.rank}", expected=str(dtype), got=str(output.dtype))
        start = 0
        for segment in self.expected(step.count, rank.world_size, rank.rank):
            end = start + segment[-1]
            if found := difference(output[start:end], step.values(segment)):
                index, expected, got, count = found
                raise WrongResult(
                    f"{self} on rank {rank.rank} of {rank.world_size}, element {start + index} "
                    f"({count} wrong in elements {start} to {end - 1})",
                    expected=expected,
                    got=got,
                )
            start = end


def passing(
    dist: ModuleType, end: Endpoint, *, receive_from: int | None = None, send_to: int | None = None
) -> Callable[[], object]:
    """Return a batch that receives the target from a rank of the group, sends the source to one, or does both."""
    operations = []
    if send_to is not None:
        operations.append(dist.P2POp(dist.isend, end.source, end.ranks_in_world[send_to], end.group))
    if receive_from is not None:
        receive = dist.P2POp(dist.irecv, end.target, end.ranks_in_world[receive_from], end.group)
        first = send_to is None or receives_first(end.source.device.type, end.rank, send_to)
        operations.insert(0 if first else 1, receive)

    def pass_on() -> None:
        for request in dist.batch_isend_irecv(operations):
            request.wait()

    return pass_on


class CollectiveStep(Step):
    """One rank's buffers and call."""

    def __init__(self, workload: Collective, rank: Rank) -> None:
        import torch
        import torch.distributed as dist

        self.count = workload.message_bytes // ITEM_BYTES[workload.dtype]
        self.pattern = Pattern(world_size=rank.world_size, summed=workload.summed)
        sent, received = workload.extents(self.count, rank.world_size, rank.rank)
        dtype, group = rank.dtype(workload.dtype), rank.group()
        source = torch.empty(sent, dtype=dtype, device=rank.device)
        target = source if received is None else torch.empty(received, dtype=dtype, device=rank.device)
        self.end = Endpoint(
            rank=rank.rank,
            ranks=rank.world_size,
            group=group,
            ranks_in_world=tuple(dist.get_process_group_ranks(group)),
            source=source,
            target=target,
            span=rank.span,
        )
        self._operation = workload.operation(dist, self.end)
        self.refill()

    def values(self, segment: Segment) -> list[int]:
        """Return one period of the segment's expected values."""
        rank, start, _ = segment
        return self.pattern.totals(start=start) if rank == ALL else self.pattern.values(rank=rank, start=start)

    def run(self) -> None:
        """Run one collective."""
        self._operation()

    def refill(self) -> None:
        """Fill the input with this rank's pattern, and a separate output with a value that no pattern has."""
        if self.end.target is not self.end.source:
            poison(self.end.target)
        fill(self.end.source, self.pattern.values(rank=self.end.rank))

    def close(self) -> None:
        """Free the buffers."""
        del self._operation, self.end
