"""The device's own time of a small kernel: many of them in a captured graph, which the host starts as one."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_KERNELS = 100
"""In the graph: its own start is a hundredth of what is told of a kernel."""
_REPLAYS = 20


def captured_kernel_s(device: torch.device, run: Callable[[], object]) -> float | None:
    """Median seconds of one ``run`` among many in a graph, between two events of the device.

    None where there are no graphs: on a CPU, and on a device whose torch has none or cannot capture this kernel.
    """
    import torch

    module: Any = torch.get_device_module(device)
    make = getattr(module, f"{device.type.upper()}Graph", None)  # as vendors name it after their device
    if make is None or not hasattr(module, "graph"):
        return None
    run()  # what a first run sets up cannot be captured
    module.synchronize()
    graph = make()
    try:
        with module.graph(graph):
            for _ in range(_KERNELS):
                run()
        graph.replay()
    except (RuntimeError, NotImplementedError):
        return None
    times_s: list[float] = []
    for _ in range(_REPLAYS):
        start, end = (module.Event(enable_timing=True) for _ in range(2))
        module.synchronize()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times_s.append(start.elapsed_time(end) * 1e-3 / _KERNELS)
    return statistics.median(times_s)
