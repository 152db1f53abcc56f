"""What a training step is looked at for beside its time, each in a build of its own that is never timed.

memory (:mod:`.memory`): exact bytes by kind; exposed: the share of the step that communication costs; flops:
operations as torch counts them; loss: a fixed number of seeded steps.  One iteration does all of it and records what it
found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from perfsuite.errors import WrongResult
from perfsuite.platforms.base import Clock
from perfsuite.platforms.clocks import EventClock, PerfCounterClock
from perfsuite.statistics.student import ratio_interval
from perfsuite.workload import Rank, Step
from perfsuite.workloads.training.memory import MemoryStep, Observed
from perfsuite.workloads.training.on_rank import TrainingStep
from perfsuite.workloads.training.overlap import record_kernels, uncovered_share

if TYPE_CHECKING:
    import torch.distributed as dist

    from perfsuite.workloads.training.train_step import TrainStep

_PAIRS = 12
"""Steps with communication, and as many without, between which the difference is taken."""
_WARM_STEPS = 2


# -- exposed communication ---------------------------------------------------------------------------------------


class ExposedStep(Observed):
    """1 - T_silent / T: the same training step in the same ranks, its collectives real and doing nothing, in turn.

    With overlap the cost of communication is not the time spent in it; it is the time that goes when it goes.  The
    interval is Student's for the mean of the logarithms of the paired ratios; on a busy machine it reaches below zero.
    One rank has nobody to communicate with: there it is 0, and nothing is built.
    """

    def run(self) -> None:
        """Build both, step them in turn, record the share and its 95 % interval."""
        if self.rank.world_size == 1:
            self._record(0.0, 0.0, 0.0)
            if self.rank.device.type != "cpu":
                self.rank.record("exposed_kernel_share", 0.0, reduce="mean")
        else:
            self._measure()

    def _record(self, share: float, low: float, high: float) -> None:
        for name, value in (("exposed_share", share), ("exposed_share_low", low), ("exposed_share_high", high)):
            self.rank.record(name, value, reduce="equal")

    def _measure(self) -> None:
        import torch
        import torch.distributed as dist

        with _silent(self.rank) as silent, self.training() as real, self.training(silent) as quiet:
            for _ in range(_WARM_STEPS):
                real.run()
                quiet.run()
            pairs = [self._pair(real, quiet, real_first=index % 2 == 0) for index in range(_PAIRS)]
            if self.rank.device.type != "cpu":
                self._look_at_kernels(real)
        worst = torch.tensor(pairs, dtype=torch.float64, device=self.rank.device)
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=self.rank.group())
        self._record(*exposed_share([(float(a), float(b)) for a, b in worst.tolist()]))

    def _look_at_kernels(self, real: TrainingStep) -> None:
        import torch.distributed as dist

        clock = self._clock()
        kernels = record_kernels(real.run, lambda: clock.wait(clock.stamp()))
        share = uncovered_share(kernels, dist.get_backend(self.rank.group()))
        if share is not None:
            self.rank.record("exposed_kernel_share", share, reduce="mean")

    def _pair(self, real: TrainingStep, quiet: TrainingStep, *, real_first: bool) -> tuple[float, float]:
        if real_first:
            first, second = self._seconds(real.run), self._seconds(quiet.run)
            return first, second
        second, first = self._seconds(quiet.run), self._seconds(real.run)
        return first, second

    def _seconds(self, run: Callable[[], None]) -> float:
        import torch.distributed as dist

        dist.barrier(group=self.rank.group())
        clock = self._clock()
        clock.wait(clock.stamp())
        start = clock.stamp()
        run()
        end = clock.stamp()
        clock.wait(end)
        return clock.elapsed_s(start, end)

    def _clock(self) -> Clock:
        import torch

        device = self.rank.device
        if device.type == "cpu":
            return PerfCounterClock()
        return EventClock(torch.get_device_module(device), device.type)


def exposed_share(pairs: list[tuple[float, float]]) -> tuple[float, float, float]:
    """Share of the first time that the second lacks, with its 95 % interval, from at least two pairs.

    >>> [round(value, 6) for value in exposed_share([(2.0, 1.5), (4.0, 3.0), (1.0, 0.75)])]
    [0.25, 0.25, 0.25]
    """
    mean, low, high = ratio_interval([without / with_it for with_it, without in pairs])
    return 1 - mean, 1 - high, 1 - low


class _SilentRank:
    """A rank whose collectives return at once and move nothing; everything else is the real rank's."""

    def __init__(self, rank: Rank, group: dist.ProcessGroup) -> None:
        self._rank = rank
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rank, name)

    def group(self, *axes: str) -> dist.ProcessGroup:
        return self._group

    @property
    def mesh(self) -> Any:
        from torch.distributed.device_mesh import DeviceMesh

        names = self._rank.shape.names or ("dp",)
        return DeviceMesh.from_group(self._group, self._rank.device.type, mesh_dim_names=names)

    def record(self, name: str, value: Any, **meaning: Any) -> None:
        """Nothing: its losses mean nothing."""


@contextmanager
def _silent(rank: Rank) -> Iterator[Any]:
    import torch
    import torch.distributed as dist
    import torch.testing._internal.distributed.fake_pg  # importing it registers the backend "fake"

    # Named by device: torch knows the fake backend for its own devices only.
    group = dist.new_group(backend=f"{rank.device.type}:fake")
    assert isinstance(group, dist.ProcessGroup)
    # What is gathered from nobody is whatever memory held: denormal numbers would make a CPU's products slow.
    torch.set_flush_denormal(True)
    try:
        yield _SilentRank(rank, group)
    finally:
        torch.set_flush_denormal(False)
        dist.destroy_process_group(group)


# -- operations --------------------------------------------------------------------------------------------------


class FlopsStep(Observed):
    """Operations of one step of all ranks, counted by torch while they run.

    Attention's backward counts five products, as kernels that keep no scores do them; the work model counts four.
    """

    def run(self) -> None:
        """Build, one step under the counter, and the record."""
        import torch
        import torch.distributed as dist
        from torch.utils.flop_counter import FlopCounterMode

        counter = FlopCounterMode(display=False, custom_mapping=_cpu_attention())
        with self.training() as step, counter:
            step.run()
        total = torch.tensor([float(counter.get_total_flops())], dtype=torch.float64, device=self.rank.device)
        dist.all_reduce(total, group=self.rank.group())
        self.rank.record("counted_flops", float(total), reduce="equal")


def _cpu_attention() -> dict[Any, Any]:
    """torch's counter knows every attention kernel but the CPU's."""
    import torch
    from torch.utils import flop_counter

    counts: Any = flop_counter

    def forward(query: Any, key: Any, value: Any, *rest: Any, **named: Any) -> int:
        return int(counts.sdpa_flop_count(query, key, value))

    def backward(gradient: Any, query: Any, key: Any, value: Any, *rest: Any, **named: Any) -> int:
        return int(counts.sdpa_backward_flop_count(gradient, query, key, value))

    kernel = "_scaled_dot_product_flash_attention_for_cpu"
    return {getattr(torch.ops.aten, kernel): forward, getattr(torch.ops.aten, f"{kernel}_backward"): backward}


# -- loss --------------------------------------------------------------------------------------------------------


class LossStep(Observed):
    """A fixed number of steps from seeded values on the data from their beginning."""

    def run(self) -> None:
        """Build, train, and the records: first and final loss, and the step that reached the target."""
        steps, target = self.workload.loss_steps, self.workload.target_loss
        with self.training() as step:
            losses = []
            for _ in range(steps):
                step.run()
                losses.append(step.mean_loss())
        broken = next((index for index, loss in enumerate(losses) if not math.isfinite(loss)), None)
        if broken is not None:
            raise WrongResult(
                f"loss of step {broken + 1} of {steps} of {self.workload.model} in {self.workload.dtype}",
                expected="a finite number",
                got=losses[broken],
            )
        self.rank.record("first_loss", losses[0], reduce="equal")
        self.rank.record("final_loss", losses[-1], reduce="equal")
        reached = [index for index, loss in enumerate(losses, 1) if target is not None and loss <= target]
        if reached:
            self.rank.record("steps_to_target", float(reached[0]), unit="steps", reduce="equal")


STEPS: Mapping[str, Callable[[TrainStep, Rank], Step]] = MappingProxyType(
    {"memory": MemoryStep, "exposed": ExposedStep, "flops": FlopsStep, "loss": LossStep}
)
"""What looks at a training step, by purpose of the build."""
