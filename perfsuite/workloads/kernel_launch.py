"""Cost of starting a kernel: the smallest kernels, one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from perfsuite.base.errors import WrongResult
from perfsuite.base.mesh import MeshShape
from perfsuite.base.units import seconds_to_us
from perfsuite.platforms.accelerator import captured_kernel_s
from perfsuite.record.result import Work
from perfsuite.record.workload import Rank, Step, Workload

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class KernelLaunch(Workload):
    """x += 1 on one number, started from Python through torch.  On one stream the slower of host and kernel decides the
    time: ``latency_us`` is the device's time per kernel, ``launch_us`` the host's for starting it. If both are equal,
    the host is the bottleneck: then only a captured graph shows the time of the kernel itself (``kernel_us``), and the
    rest is the cost of starting kernels one by one (``launch_cost_us``).
    """

    metrics: ClassVar[tuple[str, ...]] = ("latency_us", "launch_us", "kernel_us", "launch_cost_us")

    def work(self, shape: MeshShape) -> Work:
        """Return no operations."""
        return Work()

    def build(self, rank: Rank) -> _LaunchStep:
        """Return a step with one number on the device."""
        return _LaunchStep(rank)

    def check(self, rank: Rank, step: Step) -> None:
        """Raise WrongResult unless the kernel ran once."""
        assert isinstance(step, _LaunchStep)
        if (got := step.x.item()) != 1:
            raise WrongResult("x after one kernel", expected=1.0, got=got)


class _LaunchStep(Step):
    """The number of one rank."""

    def __init__(self, rank: Rank) -> None:
        import torch

        self.x: torch.Tensor = torch.zeros(1, device=rank.device)
        kernel_s = captured_kernel_s(rank.device, self.run) if rank.purpose == "time" else None
        if kernel_s is not None:
            rank.record("kernel_us", seconds_to_us(kernel_s), unit="us", reduce="max")
        self.refill()

    def run(self) -> None:
        self.x.add_(1)

    def refill(self) -> None:
        self.x.zero_()
