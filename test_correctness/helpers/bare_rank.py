"""A rank without a worker: just enough of perfsuite.record.workload.Rank to build and check a workload in a test."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from perfsuite.base.mesh import MeshShape
from perfsuite.record.step import Component, Traffic
from perfsuite.record.workload import DTYPES, Purpose


class BareRank:
    def __init__(self, *, rank: int = 0, world_size: int = 1, group: dist.ProcessGroup | None = None) -> None:
        self.device = torch.device("cpu")
        self.rank = self.local_rank = rank
        self.world_size = world_size
        self.purpose: Purpose = "time"
        self.shape = MeshShape.of(dp=world_size)
        self.records: dict[str, Any] = {}
        self._group = group

    @property
    def mesh(self) -> DeviceMesh:
        return init_device_mesh("cpu", self.shape.sizes, mesh_dim_names=self.shape.names)

    def group(self, *axes: str) -> dist.ProcessGroup:
        assert self._group is not None, "this rank was made without a process group"
        return self._group

    def dtype(self, name: str) -> torch.dtype:
        return getattr(torch, DTYPES[name])

    def generator(self, seed: int) -> torch.Generator:
        return torch.Generator(device=self.device).manual_seed(seed)

    def span(self, name: str, **attributes: int | str) -> AbstractContextManager[None]:
        return nullcontext()

    def keep_timeline(self, schedule: str, *, axis: str = "pp") -> None:
        return

    def keep_traffic(self, traffic: Sequence[Traffic], components: Sequence[Component], *, place: str = "") -> None:
        self.traffic = tuple(traffic)

    def record(self, name: str, value: Any, *, unit: str = "", reduce: str = "max") -> None:
        self.records[name] = value
