"""The rank as a workload sees it: device, place in the mesh, groups, spans and records."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from perfsuite.base.errors import InvalidParameter
from perfsuite.base.mesh import DATA_AXES, DATA_PARALLEL, MeshShape
from perfsuite.metrics import REGISTRY
from perfsuite.platforms.base import DeviceCode
from perfsuite.record.codec import to_json
from perfsuite.record.own_metrics import MEANING, OwnMetric, agreed
from perfsuite.record.step import Component, Traffic
from perfsuite.record.workload import DTYPES, Purpose, Workload, require_dtype
from perfsuite.runtime.ranks.spans import SpanRecorder, StepKeeper

_COMBINE: Mapping[str, tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]] = MappingProxyType(
    {"max": (max, torch.maximum), "min": (min, torch.minimum)}
)
"""Functions for two plain numbers and for two tensors, by ``over``; every other ``over`` adds."""


@dataclass(kw_only=True)
class _Kept:
    meaning: Mapping[str, Any]  # Keyword arguments of the record, checked once: they stay the same.
    reduce: str
    metric: OwnMetric | None
    value: Any = None
    count: int = 0
    timed: bool = False  # Whether ``value`` comes from timed iterations only, without the warm-up.

    def take(self, value: Any, timed: bool) -> None:
        """Add a value."""
        over = self.metric.over if self.metric else "last"
        if over == "last" or not self.count or (timed and not self.timed):
            if over != "last" and isinstance(value, torch.Tensor):  # a copy; in bf16 a sum of ones stops at 256
                value = value.to(value.dtype if over in _COMBINE else torch.float64, copy=True)
            self.value, self.count = value, 1
        elif over in _COMBINE:
            plain, tensors = _COMBINE[over]
            both = type(value) is not float and isinstance(self.value, torch.Tensor)
            self.value = (tensors if both else plain)(self.value, value)
        else:
            self.value, self.count = self.value + value, self.count + 1
        self.timed = timed

    @property
    def number(self) -> float:
        """The value; reading a device's tensor synchronises."""
        mean = self.metric is not None and self.metric.over == "mean"
        return float(self.value) / (self.count if mean else 1)


class RecordKeeper:
    """Keeps the records of one build on one rank."""

    def __init__(self, workload: Workload, registered: Collection[OwnMetric]) -> None:
        """``registered``: metrics that a conftest.py or a plugin registers."""
        self._derived = frozenset(workload.metrics)
        self._registered = {metric.name: metric for metric in registered}
        self._kept: dict[str, _Kept] = {}

    def keep(self, name: str, value: Any, meaning: Mapping[str, Any], *, timed: bool, users: bool = True) -> None:
        """Keep a number (else InvalidParameter) with its ``meaning``; ``users``: code outside of perfsuite made it."""
        value = value if type(value) is float else _number(name, value)  # most are floats, and this is timed
        kept = self._kept.get(name)
        if kept is None or kept.meaning != meaning:
            metric = self._metric(name, meaning, users)
            if kept is not None and kept.metric != metric:
                raise InvalidParameter(
                    f"{name} was recorded in two ways, with {kept.meaning} and with {meaning}; use one of them"
                )
            if kept is None or metric is None:
                reduce = metric.reduce if metric else meaning.get("reduce", "max")
                kept = self._kept[name] = _Kept(meaning=meaning, reduce=str(reduce), metric=metric)
            kept.meaning = meaning
        kept.take(value, timed)

    def read(self) -> dict[str, Any]:
        """Return by name: value, unit, reduction over ranks, and the fields of its metric or None."""
        return {
            name: (
                kept.number,
                kept.metric.unit if kept.metric else kept.meaning.get("unit", ""),
                kept.reduce,
                dataclasses.asdict(kept.metric) if kept.metric else None,
            )
            for name, kept in self._kept.items()
        }

    def _metric(self, name: str, meaning: Mapping[str, Any], users: bool) -> OwnMetric | None:
        unknown = sorted(set(meaning) - MEANING)
        if unknown:
            raise InvalidParameter(
                f"{name} was recorded with {', '.join(unknown)}; a record may have {', '.join(sorted(MEANING))}"
            )
        registered = self._registered.get(name)
        if registered is not None:
            return agreed(registered, meaning, "its registration")
        if name in self._derived:
            if "better" in meaning:
                raise InvalidParameter(f"perfsuite derives {name} for this case; record your value under another name")
            return None
        if not users and "better" not in meaning:
            return None
        spec = REGISTRY.get(name)
        if spec is not None:
            fields = {field: value for field, value in meaning.items() if field in ("unit", "better")}
            agreed(OwnMetric(name=name, unit=spec.unit, better=spec.better), fields, "perfsuite")
            meaning = {**meaning, "unit": spec.unit, "better": spec.better}
        return OwnMetric(name=name, **meaning)


def _number(name: object, value: Any) -> Any:
    """Return the value, a tensor detached but not read; raise InvalidParameter if it is not one real number."""
    if isinstance(value, torch.Tensor):
        if value.numel() == 1 and not value.is_complex():
            return value.detach()
        found = f"a {'complex ' if value.is_complex() else ''}tensor of {value.numel()} elements"
    elif isinstance(value, (str, bytes)):
        found = f"the text {value!r:.60}"
    else:
        try:
            return float(value)
        except (TypeError, ValueError):
            found = f"{value!r:.60} of type {type(value).__name__}"
    raise InvalidParameter(f"{name!r:.60} was recorded with {found}; record one number, and its unit as unit=")


_ALONE = "dp"  # Axis of one rank, for torch features that need a data-parallel axis.


class Meshes:
    """The DeviceMesh and groups of a mesh shape, made on demand; DTensor caches them as long as the process group."""

    def __init__(self, shape: MeshShape, device_type: str) -> None:
        self.shape = shape
        self._device_type = device_type
        self._made: DeviceMesh | None = None
        self._flat: dict[tuple[str, ...], DeviceMesh] = {}
        self._subgroups: dict[frozenset[str], dist.ProcessGroup] = {}

    @property
    def mesh(self) -> DeviceMesh:
        """torch's DeviceMesh of the shape."""
        root, names = self._root, self.shape.names or ("dp",)
        return root if root.mesh_dim_names == names else root[names]

    @property
    def _root(self) -> DeviceMesh:
        """The mesh that contains all others; without data parallelism in the shape it has an axis of one rank."""
        if self._made is None:
            alone = () if set(DATA_PARALLEL) & set(self.shape.names) else (_ALONE,)
            sizes, names = (*(1 for _ in alone), *self.shape.sizes), (*alone, *self.shape.names)
            if len(names) == 1:  # init_device_mesh would create another group for gloo if there is CUDA
                world = dist.group.WORLD
                assert world is not None
                self._made = DeviceMesh.from_group(world, self._device_type, mesh_dim_names=names)
            else:
                self._made = init_device_mesh(self._device_type, sizes, mesh_dim_names=names)
        return self._made

    def submesh(self, *axes: str) -> DeviceMesh:
        """Return a one-dimensional mesh along ``axes``; of this rank alone if no axis has several ranks."""
        names = tuple(name for name, size in self.shape.axes if name in axes and size > 1)
        if not names:
            return self._root[next((name for name, size in self.shape.axes if size == 1 and name in DATA_AXES), _ALONE)]
        if len(names) == 1:
            return self._root[names[0]]
        if names not in self._flat:
            self._flat[names] = self._root[names]._flatten("_".join(names))
        return self._flat[names]

    def group(self, *axes: str) -> dist.ProcessGroup:
        """Return the process group along ``axes``; of all ranks without any."""
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
            members = sorted({self.shape.group(rank, *axes) for rank in range(self.shape.world_size)})
            lists = [list(ranks) for ranks in members]
            # torch does not type it
            self._subgroups[key], _ = dist.new_subgroups_by_enumeration(lists)  # type: ignore[no-untyped-call]
        return self._subgroups[key]


@dataclass(frozen=True, kw_only=True)
class Membership:
    """A worker's rank and device in its current process group."""

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
        self.traffic: dict[str, Any] | None = None  # Data of :meth:`keep_traffic` for the driver.
        # Vendors' defaults and the previous case must not matter; dtype() turns it on for tf32.
        self._code.set_tf32(False)

    @property
    def made_groups(self) -> bool:
        """Whether there are groups in addition to the world: another case then needs a new process group."""
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
        """Return torch's dtype of a short name; turn TF32 on for tf32, off for others: fp32 parts may depend on it."""
        require_dtype(name)
        self._code.set_tf32(name == "tf32")
        dtype = getattr(torch, DTYPES[name])
        assert isinstance(dtype, torch.dtype)
        return dtype

    def generator(self, seed: int) -> torch.Generator:
        """Return a seeded generator on the device."""
        generator = torch.Generator(device=self.device)
        generator.manual_seed(seed)
        return generator

    def span(self, name: str, **attributes: int | str) -> AbstractContextManager[None]:
        """Record a named part of the step."""
        return self.spans.span(name, **attributes) if self._recording else _nothing()

    def record(self, name: str, value: Any, **meaning: Any) -> None:
        """Keep a value of ``name``; a tensor is read only by :meth:`read_records`."""
        users = not sys._getframe(1).f_globals.get("__name__", "").startswith("perfsuite.")
        self._records.keep(name, value, meaning, timed=self.spans.is_sampling, users=users)

    def keep_traffic(self, traffic: Sequence[Traffic], components: Sequence[Component], *, place: str = "") -> None:
        """Keep the traffic of a step and the times of its parts."""
        self.traffic = {"place": place, "traffic": to_json(traffic), "components": to_json(components)}

    def keep_timeline(self, schedule: str, *, axis: str = "pp") -> None:
        """Declare that the spans of compute, ``send``, ``receive`` and ``wait`` form a pipeline along ``axis``."""
        place = self.shape.coordinates(self.rank)
        others = {name: index for name, index in place.items() if name != axis and self.shape.size(name) > 1}
        count = self.shape.world_size // self.shape.size(axis)
        which = ", ".join(f"{name} {index}" for name, index in others.items())
        self.spans.keeper = StepKeeper(
            schedule=schedule,
            ranks=self.shape.size(axis),
            rank=place.get(axis, 0),
            pipeline=self.shape.rank_of({**place, axis: 0}),
            world_rank=self.rank,
            place=f"of {count} pipelines that of {which}" if others else "",
        )

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record spans inside only: not in warm-up and checks."""
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
