"""The mesh of a case and the groups along its axes, made once for all builds in one process group."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from perfsuite.base.errors import InvalidParameter
from perfsuite.base.mesh import DATA_AXES, DATA_PARALLEL, MeshShape

_ALONE = "dp"
"""An axis of one rank, for what torch spreads over data-parallel ranks where there are none."""


class Meshes:
    """What a mesh shape is on one rank, as far as it was asked for.

    It lives as long as the process group: DTensor keeps what it knows of a mesh, its groups too, for every equal one.
    """

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
        """The mesh that all others are slices of: without data parallelism in the shape it has an axis of one rank."""
        if self._made is None:
            alone = () if set(DATA_PARALLEL) & set(self.shape.names) else (_ALONE,)
            sizes, names = (*(1 for _ in alone), *self.shape.sizes), (*alone, *self.shape.names)
            if len(names) == 1:  # init_device_mesh makes a group of its own for gloo where there is CUDA
                world = dist.group.WORLD
                assert world is not None
                self._made = DeviceMesh.from_group(world, self._device_type, mesh_dim_names=names)
            else:
                self._made = init_device_mesh(self._device_type, sizes, mesh_dim_names=names)
        return self._made

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
            members = sorted({self.shape.group(rank, *axes) for rank in range(self.shape.world_size)})
            lists = [list(ranks) for ranks in members]
            # torch does not type it
            self._subgroups[key], _ = dist.new_subgroups_by_enumeration(lists)  # type: ignore[no-untyped-call]
        return self._subgroups[key]
