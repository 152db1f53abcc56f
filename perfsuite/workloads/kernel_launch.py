"""What starting a kernel costs: the smallest kernel there is, one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from perfsuite.base.errors import WrongResult
from perfsuite.base.mesh import MeshShape
from perfsuite.base.units import seconds_to_us
from perfsuite.platforms.accelerator import captured_kernel_s
from perfsuite.record.result import Work
from perfsuite.record.workload import Rank, Step, Workload, Yardstick

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class KernelLaunch(Workload):
    """x += 1 on one number, as Python starts it through torch.

    Back to back on one stream a device takes as long as the slower of host and kernel: ``latency_us`` is the device's
    time per kernel, ``launch_us`` the host's for starting it.  Where both are equal the host is what is slow: how long
    the kernel itself takes is then seen in a captured graph alone (``kernel_us``), and what is left is the price of
    starting kernels one by one (``launch_cost_us``).
    """

    metrics: ClassVar[tuple[str, ...]] = ("latency_us", "launch_us", "kernel_us", "launch_cost_us")
    yardstick: ClassVar[Yardstick] = "compute"

    def work(self, shape: MeshShape) -> Work:
        """None worth counting."""
        return Work()

    def build(self, rank: Rank) -> LaunchStep:
        """One number on the device."""
        return LaunchStep(rank)

    def check(self, rank: Rank, step: Step) -> None:
        """Raise WrongResult unless the kernel ran once."""
        assert isinstance(step, LaunchStep)
        if (got := step.x.item()) != 1:
            raise WrongResult("x after one kernel", expected=1.0, got=got)


class LaunchStep(Step):
    """The number of one rank."""

    def __init__(self, rank: Rank) -> None:
        import torch

        self.x: torch.Tensor = torch.zeros(1, device=rank.device)
        kernel_s = captured_kernel_s(rank.device, self.run) if rank.purpose == "time" else None
        if kernel_s is not None:
            rank.record("kernel_us", seconds_to_us(kernel_s), unit="us", reduce="max")
        self.refill()

    def run(self) -> None:
        """One kernel."""
        self.x.add_(1)

    def refill(self) -> None:
        """Back to 0."""
        self.x.zero_()
