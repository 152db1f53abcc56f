"""Workloads of the suite, each imported at its first use, so that collecting cases imports none."""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = {
    "axis_collective": ("AxisCollective",),
    "collective": (
        *("AllGather", "AllReduce", "AllToAll", "AllToAllUneven", "Barrier", "Broadcast", "Gather"),
        *("OneDirection", "Reduce", "ReduceScatter", "RingShift", "Scatter", "SendRecv"),
    ),
    "contention": ("MatmulBesideAllReduce",),
    "matmul": ("Matmul", "Soak"),
    "memory_bandwidth": ("HostDeviceCopy", "MemoryCopy", "MemoryTriad"),
    "moe_layer": ("MoeLayer",),
    "pairs": ("Pairs",),
    "tensor_linear": ("TensorLinear",),
    "training.emulated_pipeline": ("EmulatedPipeline",),
    "training.largest_batch": ("LargestBatch",),
    "training.train_step": ("TrainStep",),
}
"""Module -> its workloads."""


def __getattr__(name: str) -> Any:
    """Return a workload class by its name."""
    for module, names in _NAMES.items():
        if name in names:
            return getattr(importlib.import_module(f"perfsuite.workloads.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *(name for names in _NAMES.values() for name in names)})
