"""What a workload sees of its rank: device, place in the mesh, groups, spans and records."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from perfsuite.platforms.base import DeviceCode
from perfsuite.record.codec import to_json
from perfsuite.record.step import Component, Traffic
from perfsuite.record.workload import DTYPES, Purpose, require_dtype
from perfsuite.runtime.ranks.meshes import Meshes
from perfsuite.runtime.ranks.record_keeper import RecordKeeper
from perfsuite.runtime.ranks.spans import SpanRecorder
from perfsuite.runtime.ranks.timeline import StepKeeper


@dataclass(frozen=True, kw_only=True)
class Membership:
    """A worker's place in the process group of the current generation."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    code: DeviceCode
    backend: str


class WorkerRank:
    """The :class:`perfsuite.record.workload.Rank` of one build on one worker."""

    def __init__(
        self, member: Membership, meshes: Meshes, purpose: Purpose, spans: SpanRecorder, records: RecordKeeper
    ) -> None:
        self.device = member.device
        self.rank = member.rank
        self.local_rank = member.local_rank
        self.world_size = member.world_size
        self.purpose: Purpose = purpose
        self.shape = meshes.shape
        self._meshes = meshes
        self._code = member.code
        self.spans = spans
        self._recording = False
        self._records = records
        self.traffic: dict[str, Any] | None = None
        """What :meth:`keep_traffic` was given, as it goes to the driver."""
        # Neither a vendor's default nor the case before decides; dtype() turns it on for tf32.
        self._code.set_tf32(False)

    @property
    def made_groups(self) -> bool:
        """Whether there are groups besides the world: the process group is then re-formed for another case."""
        return len(distributed_c10d._world.pg_map) > 1

    @property
    def mesh(self) -> DeviceMesh:
        """torch's DeviceMesh of the case's shape."""
        return self._meshes.mesh

    def submesh(self, *axes: str) -> DeviceMesh:
        """See :meth:`Meshes.submesh`."""
        return self._meshes.submesh(*axes)

    def group(self, *axes: str) -> dist.ProcessGroup:
        """See :meth:`Meshes.group`."""
        return self._meshes.group(*axes)

    def dtype(self, name: str) -> torch.dtype:
        """torch's dtype of a short name; sets the TF32 switch: on for tf32, off for every other.

        Also where the name is no fp32: what is left in fp32 under bf16 must not depend on the case before.
        """
        require_dtype(name)
        self._code.set_tf32(name == "tf32")
        dtype = getattr(torch, DTYPES[name])
        assert isinstance(dtype, torch.dtype)
        return dtype

    def generator(self, seed: int) -> torch.Generator:
        """A seeded generator on the device."""
        generator = torch.Generator(device=self.device)
        generator.manual_seed(seed)
        return generator

    def span(self, name: str, **attributes: int | str) -> AbstractContextManager[None]:
        """Mark a part of the step."""
        return self.spans.span(name, **attributes) if self._recording else _nothing()

    def record(self, name: str, value: Any, **meaning: Any) -> None:
        """Keep a value of ``name``; a tensor is read only by :meth:`read_records`."""
        users = not sys._getframe(1).f_globals.get("__name__", "").startswith("perfsuite.")
        self._records.keep(name, value, meaning, timed=self.spans.is_sampling, users=users)

    def keep_traffic(self, traffic: Sequence[Traffic], components: Sequence[Component], *, place: str = "") -> None:
        """Keep what a step sends and the times of its parts."""
        self.traffic = {"place": place, "traffic": to_json(traffic), "components": to_json(components)}

    def keep_timeline(self, schedule: str, *, axis: str = "pp") -> None:
        """The spans of compute, ``send``, ``receive`` and ``wait`` are those of a pipeline along ``axis``."""
        place = self.shape.coordinates(self.rank)
        others = {name: index for name, index in place.items() if name != axis and self.shape.size(name) > 1}
        beside = self.shape.world_size // self.shape.size(axis)
        which = ", ".join(f"{name} {index}" for name, index in others.items())
        self.spans.keeper = StepKeeper(
            schedule=schedule,
            ranks=self.shape.size(axis),
            rank=place.get(axis, 0),
            pipeline=self.shape.rank_of({**place, axis: 0}),
            world_rank=self.rank,
            place=f"of {beside} pipelines that of {which}" if others else "",
        )

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Spans count only inside: warm-up and checks leave none."""
        self._recording = True
        try:
            yield
        finally:
            self._recording = False

    def read_records(self) -> dict[str, Any]:
        """See :meth:`RecordKeeper.read`."""
        return self._records.read()


@contextmanager
def _nothing() -> Iterator[None]:
    yield
