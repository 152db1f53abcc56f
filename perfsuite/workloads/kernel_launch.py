"""What starting a kernel costs: the smallest kernel there is, one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from perfsuite.errors import WrongResult
from perfsuite.mesh import MeshShape
from perfsuite.records import Work
from perfsuite.workload import Rank, Step, Workload, Yardstick

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class KernelLaunch(Workload):
    """x += 1 on one number, as Python starts it through torch.

    Back to back on one stream a device takes as long as the slower of host and kernel: ``latency_us`` is the device's
    time per kernel, ``launch_us`` the host's for starting it.  Where both are equal the host is what is slow.
    """

    metrics: ClassVar[tuple[str, ...]] = ("latency_us", "launch_us")
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

    def run(self) -> None:
        """One kernel."""
        self.x.add_(1)

    def refill(self) -> None:
        """Back to 0."""
        self.x.zero_()
