"""Kernels of fixed size, run between the samples: their time tells how fast the machine is at that moment, no more.

The gate divides by their time (a stored run's noise falls by up to three times, docs/gate.md), so they never run the
code under test and are the same in every version.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from perfsuite.platforms.base import DeviceCode
from perfsuite.workload import Yardstick


def make_yardstick(kind: Yardstick, device: torch.device, code: DeviceCode) -> Callable[[], None]:
    """A kernel of roughly a millisecond: matrix products, or a copy, in the sizes that the device's code says."""
    if kind == "compute":
        side = code.yardstick_side
        a = torch.ones(side, side, device=device) / side
        out = torch.empty_like(a)

        def compute() -> None:
            for _ in range(4):
                torch.mm(a, a, out=out)

        return compute
    source = torch.ones(code.yardstick_bytes // 4, device=device)
    target = torch.empty_like(source)

    def memory() -> None:
        target.copy_(source)

    return memory
