"""Shapes of device meshes: named axes, their sizes, and the place of each rank.

A mesh *shape* needs no torch; ``rank.mesh`` is torch's DeviceMesh of it.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from dataclasses import dataclass

from perfsuite.base.errors import InvalidParameter

AXES = ("pp", "dp", "dp_replicate", "dp_shard", "ep", "cp", "tp")
"""Axes that a mesh may have, outermost first: neighbours along ``tp`` are neighbouring ranks."""
DATA_PARALLEL = ("dp", "dp_replicate", "dp_shard")  # Axes of data parallelism.
DATA_AXES = (*DATA_PARALLEL, "ep")  # Axes along which ranks see different samples; ``ep`` divides the batch too.


@dataclass(frozen=True, kw_only=True)
class MeshShape:
    """Sizes of named axes, outermost first; ranks are numbered with the last axis fastest (row-major).

    >>> shape = MeshShape.parse("dp2-pp2-tp2")
    >>> str(shape), shape.world_size
    ('pp2-dp2-tp2', 8)
    >>> shape.coordinates(5)
    {'pp': 1, 'dp': 0, 'tp': 1}
    >>> shape.rank_of({"pp": 1, "dp": 0, "tp": 1})
    5
    """

    axes: tuple[tuple[str, int], ...]  # (axis, size) pairs in the order of AXES.

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        for name, size in self.axes:
            if name not in AXES:
                raise InvalidParameter(f"mesh axis {name!r} is unknown; choose from {', '.join(AXES)}")
            if size < 1:
                raise InvalidParameter(f"mesh axis {name} has size {size}; a size is at least 1")
        if len(set(names)) != len(names):
            raise InvalidParameter(f"mesh axes {', '.join(names)} name one axis twice; give each axis one size")
        if "dp" in names and {"dp_replicate", "dp_shard"} & set(names):
            raise InvalidParameter("a mesh has either dp, or dp_replicate and dp_shard; use one of them")
        object.__setattr__(self, "axes", tuple(sorted(self.axes, key=lambda axis: AXES.index(axis[0]))))

    @classmethod
    def of(cls, **sizes: int) -> MeshShape:
        """Return a shape by keyword: ``MeshShape.of(dp=2, tp=4)``; without an axis it has one rank."""
        return cls(axes=tuple(sizes.items()))

    @classmethod
    def parse(cls, text: str) -> MeshShape:
        """Return the shape of ``"dp2-pp2-tp2"``, or of ``"1"`` for one rank; raise InvalidParameter for other text."""
        axes = []
        for part in [] if text == "1" else text.split("-"):
            match = re.fullmatch(r"([a-z_]+)(\d+)", part)
            if not match:
                raise InvalidParameter(
                    f"mesh {text!r}: {part!r} is not an axis followed by its size; write for example 'dp2-tp4'"
                )
            axes.append((match[1], int(match[2])))
        return cls(axes=tuple(axes))

    @classmethod
    def on(cls, ranks: int, layout: str) -> MeshShape:
        """Return the shape of ``layout``, or all ranks on dp if it is empty.

        >>> str(MeshShape.on(8, "")), str(MeshShape.on(8, "dp4-tp2"))
        ('dp8', 'dp4-tp2')
        """
        return cls.parse(layout) if layout else cls.of(dp=ranks)

    def __str__(self) -> str:
        return "-".join(f"{name}{size}" for name, size in self.axes) or "1"

    @property
    def names(self) -> tuple[str, ...]:
        """Axis names, outermost first."""
        return tuple(name for name, _ in self.axes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Axis sizes in the order of :attr:`names`."""
        return tuple(size for _, size in self.axes)

    @property
    def world_size(self) -> int:
        """Number of ranks: the product of the sizes."""
        return math.prod(self.sizes)

    def size(self, axis: str) -> int:
        """Return the ranks along ``axis``; 1 if the shape does not have it."""
        return self._size_of.get(axis, 1)

    @functools.cached_property
    def _size_of(self) -> dict[str, int]:
        """Sizes by axis; ranking layouts reads them millions of times."""
        return dict(self.axes)

    @property
    def data_axes(self) -> tuple[str, ...]:
        """Axes along which ranks see different samples."""
        return tuple(name for name in self.names if name in DATA_AXES)

    @property
    def replicas(self) -> int:
        """Number of parts of a global batch: the product of the sizes of the data axes.

        >>> MeshShape.parse("dp_replicate2-dp_shard4-pp2").replicas
        8
        """
        return math.prod(self.size(axis) for axis in DATA_AXES)

    def replica(self, rank: int) -> int:
        """Return the number of the replica of ``rank``, from 0.

        >>> [MeshShape.parse("pp2-dp2").replica(rank) for rank in range(4)]
        [0, 1, 0, 1]
        """
        place, index = self.coordinates(rank), 0
        for axis in self.data_axes:
            index = index * self.size(axis) + place[axis]
        return index

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the index of ``rank`` along each axis."""
        if not 0 <= rank < self.world_size:
            raise InvalidParameter(f"rank {rank} is not in mesh {self}; it has ranks 0 to {self.world_size - 1}")
        place = {}
        for name, size in reversed(self.axes):
            rank, place[name] = divmod(rank, size)
        return {name: place[name] for name in self.names}

    def place(self, rank: int) -> str:
        """Return the place of ``rank`` as text, such as `` (pp 1, tp 0)``; empty for dp alone.

        >>> MeshShape.parse("pp2-tp2").place(2), MeshShape.parse("dp4").place(2)
        (' (pp 1, tp 0)', '')
        """
        several = {axis: index for axis, index in self.coordinates(rank).items() if self.size(axis) > 1}
        if set(several) <= {"dp"}:
            return ""
        return f" ({', '.join(f'{axis} {index}' for axis, index in several.items())})"

    def rank_of(self, coordinates: dict[str, int]) -> int:
        """Return the rank at these coordinates; missing axes count as 0."""
        rank = 0
        for name, size in self.axes:
            index = coordinates.get(name, 0)
            if not 0 <= index < size:
                raise InvalidParameter(f"{name}={index} is not in mesh {self}; choose 0 to {size - 1}")
            rank = rank * size + index
        return rank

    def group(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Return the ranks that share every coordinate of ``rank`` except those of ``axes``, in rank order."""
        fixed = self.coordinates(rank)
        choices = [range(size) if name in axes else (fixed[name],) for name, size in self.axes]
        return tuple(self.rank_of(dict(zip(self.names, at, strict=True))) for at in itertools.product(*choices))
