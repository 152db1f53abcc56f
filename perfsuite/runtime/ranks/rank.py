"""What a workload sees of its rank: device, place in the mesh, groups, spans and records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from perfsuite.decoding import to_json
from perfsuite.errors import InvalidParameter
from perfsuite.mesh import DATA_AXES, DATA_PARALLEL, MeshShape
from perfsuite.platforms.base import DeviceCode
from perfsuite.runtime.ranks.spans import SpanRecorder
from perfsuite.runtime.ranks.timeline import StepKeeper
from perfsuite.step_records import Component, Traffic
from perfsuite.workload import DTYPES, Purpose, require_dtype

_ALONE = "dp"
"""An axis of one rank, for what torch spreads over data-parallel ranks where there are none."""


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
    """The :class:`perfsuite.workload.Rank` of one build on one worker."""

    def __init__(self, member: Membership, shape: MeshShape, purpose: Purpose, spans: SpanRecorder) -> None:
        self.device = member.device
        self.rank = member.rank
        self.local_rank = member.local_rank
        self.world_size = member.world_size
        self.purpose: Purpose = purpose
        self.shape = shape
        self._code = member.code
        self._spans = spans
        self._mesh: DeviceMesh | None = None
        self._flat: dict[tuple[str, ...], DeviceMesh] = {}
        self._subgroups: dict[frozenset[str], dist.ProcessGroup] = {}
        self._recording = False
        self._records: dict[str, tuple[Any, str, str]] = {}
        self.traffic: dict[str, Any] | None = None
        """What :meth:`keep_traffic` was given, as it goes to the driver."""
        # Neither a vendor's default nor the case before decides; dtype() turns it on for tf32.
        self._code.set_tf32(False)

    @property
    def made_groups(self) -> bool:
        """Whether there are groups besides the world: the process group is then re-formed for the next case."""
        return len(distributed_c10d._world.pg_map) > 1

    @property
    def mesh(self) -> DeviceMesh:
        """torch's DeviceMesh of the case's shape."""
        root, names = self._root, self.shape.names or ("dp",)
        return root if root.mesh_dim_names == names else root[names]

    @property
    def _root(self) -> DeviceMesh:
        """The mesh that all others are slices of: without data parallelism in the shape it has an axis of one rank."""
        if self._mesh is None:
            alone = () if set(DATA_PARALLEL) & set(self.shape.names) else (_ALONE,)
            sizes, names = (*(1 for _ in alone), *self.shape.sizes), (*alone, *self.shape.names)
            self._mesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=names)
        return self._mesh

    def submesh(self, *axes: str) -> DeviceMesh:
        """The mesh along those of ``axes`` with several ranks, as one dimension; of this rank alone without any."""
        names = tuple(name for name, size in self.shape.axes if name in axes and size > 1)
        if not names:
            return self._root[next((name for name, size in self.shape.axes if size == 1 and name in DATA_AXES), _ALONE)]
        if len(names) == 1:
            return self._root[names[0]]
        if names not in self._flat:
            self._flat[names] = self._root[names]._flatten("_".join(names))
        return self._flat[names]

    def group(self, *axes: str) -> dist.ProcessGroup:
        """The process group along ``axes``; all ranks without any."""
        world = dist.group.WORLD
        assert world is not None
        if not axes or set(axes) == set(self.shape.names):
            return world
        unknown = set(axes) - set(self.shape.names)
        if unknown:
            raise InvalidParameter(
                f"mesh {self.shape} has no axis {', '.join(sorted(unknown))}; it has {', '.join(self.shape.names)}"
            )
        if len(axes) == 1:
            return self.mesh.get_group(axes[0])
        key = frozenset(axes)
        if key not in self._subgroups:
            members = sorted({self.shape.group(rank, *axes) for rank in range(self.world_size)})
            lists = [list(ranks) for ranks in members]
            # torch does not type it
            self._subgroups[key], _ = dist.new_subgroups_by_enumeration(lists)  # type: ignore[no-untyped-call]
        return self._subgroups[key]

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
        return self._spans.span(name, **attributes) if self._recording else _nothing()

    def record(
        self, name: str, value: Any, *, unit: str = "", reduce: Literal["max", "mean", "equal", "only"] = "max"
    ) -> None:
        """Keep the latest value of ``name``; a tensor is read only by :meth:`read_records`."""
        self._records[name] = (value.detach() if isinstance(value, torch.Tensor) else value, unit, reduce)

    def keep_traffic(self, traffic: Sequence[Traffic], components: Sequence[Component], *, place: str = "") -> None:
        """Keep what a step sends and the times of its parts."""
        self.traffic = {"place": place, "traffic": to_json(traffic), "components": to_json(components)}

    def keep_timeline(self, schedule: str, *, axis: str = "pp") -> None:
        """The spans of compute, ``send``, ``receive`` and ``wait`` are those of a pipeline along ``axis``."""
        place = self.shape.coordinates(self.rank)
        others = {name: index for name, index in place.items() if name != axis and self.shape.size(name) > 1}
        beside = self.shape.world_size // self.shape.size(axis)
        which = ", ".join(f"{name} {index}" for name, index in others.items())
        self._spans.keeper = StepKeeper(
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

    def read_records(self) -> dict[str, tuple[float, str, str]]:
        """Name -> (value, unit, reduce); reading a device tensor synchronises."""
        return {name: (float(value), unit, how) for name, (value, unit, how) in self._records.items()}


@contextmanager
def _nothing() -> Iterator[None]:
    yield
