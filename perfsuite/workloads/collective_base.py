"""What all collectives share: sizes, buffers, inputs with a closed form, and the check of every element.

A collective fills five slots: its name (which fixes size and bandwidth factor, see docs metrics), whether its size
is divided over the ranks and whether values are summed, ``extents`` (its buffers, where it does not send as much as it
receives), ``operation`` (the call that is timed) and ``expected`` (where every element of the output comes from).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar, Protocol

from perfsuite.base.collectives import receives_first
from perfsuite.base.errors import InvalidParameter, WrongResult
from perfsuite.base.mesh import MeshShape
from perfsuite.record.result import Work
from perfsuite.record.workload import ITEM_BYTES, Rank, Step, Workload, Yardstick, require_dtype
from perfsuite.workloads.pattern import Pattern, difference, fill, poison

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

ALL = -1
"""In a Segment: the sum over all ranks instead of one rank's values."""
ROOT = 0
"""Rank that rooted collectives start from or end at."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A run of output elements: whose input they are, and from which place on."""

    rank: int
    """Rank whose inputs they are, or ALL for the sum over all ranks."""
    start: int
    """Endpoint of the first in that input."""
    length: int


@dataclass(frozen=True, kw_only=True)
class Extents:
    """Elements in the buffers of one rank."""

    source: int
    """Input."""
    target: int | None = None
    """Output; None where the operation works in place."""


class Member(Protocol):
    """What an operation needs of a rank: its place in the group whose members take part, and the group."""

    rank: int
    world_size: int
    device: torch.device

    def group(self) -> dist.ProcessGroup:
        """torch's."""

    def dtype(self, name: str) -> torch.dtype:
        """torch's."""

    def span(self, name: str) -> AbstractContextManager[object]:
        """Marks a part of the operation."""


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """One rank's end of an operation: its buffers and its group."""

    rank: int
    """Index in the group."""
    ranks: int
    """Size of the group."""
    group: dist.ProcessGroup
    ranks_in_world: tuple[int, ...]
    """Rank in the world by index in the group: torch's point-to-point and rooted calls want the former."""
    source: torch.Tensor
    target: torch.Tensor
    """Is ``source`` where the operation works in place."""
    span: Callable[[str], AbstractContextManager[object]] = nullcontext
    """Marks a part of the operation, as :meth:`perfsuite.record.workload.Rank.span`."""

    def chunks(self, buffer: torch.Tensor) -> list[torch.Tensor] | None:
        """One equal view per rank on the root; None elsewhere, as torch's gather and scatter want it."""
        return list(buffer.chunk(self.ranks)) if self.rank == ROOT else None


@dataclass(frozen=True, kw_only=True)
class Collective(Workload):
    """Base of the collectives that move a message."""

    message_bytes: int
    """Size S as nccl-tests counts it."""
    dtype: str = "fp32"
    """Short name of the elements' dtype."""

    name: ClassVar[str]
    """In perfsuite.base.collectives: fixes factor and bound of the bandwidth."""
    divided: ClassVar[bool] = False
    """Whether S is the ranks' parts together, so that it divides by the number of ranks."""
    summed: ClassVar[bool] = False
    """Whether the ranks' values are added up."""
    in_place: ClassVar[bool] = False
    """Whether the input is the output too."""
    yardstick: ClassVar[Yardstick] = "message"

    def __post_init__(self) -> None:
        require_dtype(self.dtype)
        if self.dtype == "tf32":
            raise InvalidParameter("dtype='tf32' is a way to multiply, not to store; choose 'fp32' for the same bytes")
        if not isinstance(self.message_bytes, int):
            raise InvalidParameter(f"message_bytes={self.message_bytes!r} is not a whole number of bytes; give an int")
        self._require_multiple(ITEM_BYTES[self.dtype], f"{self.dtype} elements")

    @property
    def metrics(self) -> tuple[str, ...]:
        """Its time and its bandwidths."""
        return ("latency_us", "algbw_gb_per_s", "busbw_gb_per_s")

    def _require_multiple(self, unit: int, what: str) -> None:
        if self.message_bytes < unit or self.message_bytes % unit:
            below = self.message_bytes // unit * unit
            legal = f"{below} or {below + unit}" if below > 0 else f"{unit}"
            raise InvalidParameter(
                f"message_bytes={self.message_bytes} is not a positive multiple of {unit} ({what}); choose {legal}"
            )

    def require_ranks(self, ranks: int) -> None:
        """Raise InvalidParameter unless the message can be spread over so many ranks."""
        if ranks < 2:
            raise InvalidParameter(f"world_size={ranks} leaves {self.name} nobody to talk to; choose at least 2")
        if self.divided:
            self._require_multiple(ITEM_BYTES[self.dtype] * ranks, f"{ranks} ranks x {self.dtype} elements")

    def work(self, shape: MeshShape) -> Work:
        """S bytes under the collective's name."""
        self.require_ranks(shape.world_size)
        return Work(collective=self.name, message_bytes=float(self.message_bytes), dtype=self.dtype)

    def extents(self, count: int, ranks: int, rank: int) -> Extents:
        """Buffers of one rank when S is ``count`` elements: as much out as in unless a collective says otherwise."""
        return Extents(source=count, target=None if self.in_place else count)

    @abstractmethod
    def operation(self, dist: ModuleType, end: Endpoint) -> Callable[[], object]:
        """The call that is timed; everything that can be looked up or cut beforehand is."""

    @abstractmethod
    def expected(self, count: int, ranks: int, rank: int) -> Sequence[Segment]:
        """Where each element of the output comes from, in order; empty where the output means nothing."""

    def build(self, rank: Member) -> CollectiveStep:
        """Buffers on the device and the call over all ranks' group."""
        self.require_ranks(rank.world_size)
        return CollectiveStep(self, rank)

    def check(self, rank: Rank, step: Step) -> None:
        """As :meth:`check_elements`."""
        self.check_elements(rank, step)

    def check_elements(self, rank: Member, step: Step) -> None:
        """Raise WrongResult unless every element of the output equals its closed form, in the right dtype."""
        assert isinstance(step, CollectiveStep)
        output, dtype = step.end.target, rank.dtype(self.dtype)
        if output.dtype != dtype:
            raise WrongResult(f"dtype of {self} on rank {rank.rank}", expected=str(dtype), got=str(output.dtype))
        start = 0
        for segment in self.expected(step.count, rank.world_size, rank.rank):
            wrong = difference(output[start : start + segment.length], step.values(segment))
            if wrong:
                raise WrongResult(
                    f"{self} on rank {rank.rank} of {rank.world_size}, element {start + wrong.index} "
                    f"({wrong.wrong} wrong in elements {start} to {start + segment.length - 1})",
                    expected=wrong.expected,
                    got=wrong.got,
                )
            start += segment.length


def passing(
    dist: ModuleType, end: Endpoint, *, receive_from: int | None = None, send_to: int | None = None
) -> Callable[[], object]:
    """One batch that fills the target from a rank of the group, sends the source to one, or does both at once."""
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
    """One rank's buffers and its call."""

    def __init__(self, workload: Collective, rank: Member) -> None:
        import torch
        import torch.distributed as dist

        self.count = workload.message_bytes // ITEM_BYTES[workload.dtype]
        self.pattern = Pattern(world_size=rank.world_size, summed=workload.summed)
        extents = workload.extents(self.count, rank.world_size, rank.rank)
        dtype, group = rank.dtype(workload.dtype), rank.group()
        source = torch.empty(extents.source, dtype=dtype, device=rank.device)
        target = source
        if extents.target is not None:
            target = torch.empty(extents.target, dtype=dtype, device=rank.device)
        self.end = Endpoint(
            rank=rank.rank,
            ranks=rank.world_size,
            group=group,
            ranks_in_world=tuple(dist.get_process_group_ranks(group)),
            source=source,
            target=target,
            span=rank.span,
        )
        self._operation: Callable[[], object] | None = workload.operation(dist, self.end)
        self.refill()

    def values(self, segment: Segment) -> list[int]:
        """One period of what the segment must hold."""
        if segment.rank == ALL:
            return self.pattern.totals(start=segment.start)
        return self.pattern.values(rank=segment.rank, start=segment.start)

    def run(self) -> None:
        """One collective."""
        assert self._operation is not None, "the step is closed"
        self._operation()

    def refill(self) -> None:
        """Inputs to the pattern of this rank, a separate output to what no pattern holds."""
        if self.end.target is not self.end.source:
            poison(self.end.target)
        fill(self.end.source, self.pattern.values(rank=self.end.rank))

    def close(self) -> None:
        """Free the buffers."""
        self._operation = None
        del self.end
