"""Kernels of fixed size, run between the samples: their time tells how fast the machine is at that moment, no more.

The gate divides by their time (a stored run's noise falls by up to three times, docs/gate.md), so they never run the
code under test and are the same in every version.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from perfsuite.units import MIB
from perfsuite.workload import Yardstick

_MATRIX = 192
_COPY_BYTES = 4 * MIB


def make_yardstick(kind: Yardstick, device: torch.device) -> Callable[[], None]:
    """A kernel of roughly a millisecond on one CPU core: matrix products, or copies of a buffer beyond the L2 cache."""
    if kind == "compute":
        a = torch.ones(_MATRIX, _MATRIX, device=device) / _MATRIX
        out = torch.empty_like(a)

        def compute() -> None:
            for _ in range(4):
                torch.mm(a, a, out=out)

        return compute
    source = torch.ones(_COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)

    def memory() -> None:
        target.copy_(source)

    return memory
