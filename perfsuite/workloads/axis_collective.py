"""One collective along one axis of a mesh: groups of ranks that may be apart, all sending at once.

Training steps communicate so: along dp with tp inside, neighbours are tp ranks apart and tp groups share the network.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from perfsuite.base.errors import InvalidParameter, did_you_mean
from perfsuite.base.mesh import MeshShape
from perfsuite.record.result import Work
from perfsuite.record.workload import Rank, Step, Yardstick
from perfsuite.workloads.checks import MeshWorkload
from perfsuite.workloads.collective import AllGather, AllReduce, AllToAll, ReduceScatter
from perfsuite.workloads.collective_base import Collective, CollectiveStep

if TYPE_CHECKING:
    import torch.distributed as dist

_KINDS = {kind.name: kind for kind in (AllReduce, AllGather, ReduceScatter, AllToAll)}


@dataclass(frozen=True, kw_only=True)
class AxisCollective(MeshWorkload):
    """A collective of every group along ``axis``, all groups at once; the slowest one gives the time."""

    collective: str  # all_reduce, all_gather, reduce_scatter or all_to_all.
    mesh: str  # Shape of the mesh, such as dp2-tp4.
    axis: str  # Axis of the mesh, with several ranks.
    message_bytes: int  # Size S within a group, as nccl-tests counts it.
    dtype: str = "fp32"

    yardstick: ClassVar[Yardstick] = "message"

    def __post_init__(self) -> None:
        if self.collective not in _KINDS:
            raise InvalidParameter(
                f"collective={self.collective!r} is unknown; {did_you_mean(self.collective, _KINDS)}"
            )
        shape = MeshShape.parse(self.mesh)
        if shape.size(self.axis) < 2:
            several = ", ".join(name for name, size in shape.axes if size > 1) or "none: give a mesh of several ranks"
            raise InvalidParameter(f"mesh {shape} has fewer than 2 ranks along axis {self.axis!r}; choose {several}")
        self.inner.require_ranks(shape.size(self.axis))

    @property
    def inner(self) -> Collective:
        """The collective of one group."""
        return _KINDS[self.collective](message_bytes=self.message_bytes, dtype=self.dtype)

    def work(self, shape: MeshShape) -> Work:
        """Return no bandwidth: groups share links, and that is measured."""
        return Work(dtype=self.dtype)

    def build(self, rank: Rank) -> Step:
        """Return this rank's buffers and the call over its group."""
        member: Any = _Along(rank, self.axis)
        return CollectiveStep(self.inner, member)

    def check(self, rank: Rank, step: Step) -> None:
        """Check as the collective does, among the ranks of the group."""
        member: Any = _Along(rank, self.axis)
        self.inner.check(member, step)


class _Along:
    """A rank as a member of its group along an axis; all else is delegated to the real rank."""

    def __init__(self, rank: Rank, axis: str) -> None:
        self._rank, self._axis = rank, axis
        self.world_size = rank.shape.size(axis)
        self.rank = rank.shape.coordinates(rank.rank)[axis]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rank, name)

    def group(self) -> dist.ProcessGroup:
        return self._rank.group(self._axis)
