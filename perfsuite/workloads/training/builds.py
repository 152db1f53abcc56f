"""Untimed builds of a training step, each for one purpose.

memory (:mod:`.memory`): bytes by kind; exposed (:mod:`.exposed`): the share of the step that communication costs;
traffic (:mod:`.traffic`): messages and their times; flops: operations counted by torch; loss: a fixed number of seeded
steps.  One iteration runs all of it and records the results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from perfsuite.base.errors import WrongResult
from perfsuite.record.workload import Rank, Step
from perfsuite.workloads.training.exposed import ExposedStep
from perfsuite.workloads.training.memory import MemoryStep, Observed
from perfsuite.workloads.training.traffic import TrafficStep

if TYPE_CHECKING:
    from perfsuite.workloads.training.train_step import TrainStep


class FlopsStep(Observed):
    """Operations of one step of all ranks, counted by torch during the step.  Attention's backward counts five
    products, as in kernels that store no scores; the work model counts four.
    """

    def run(self) -> None:
        """Build, run a step, run another one under the counter, and record the count."""
        import torch
        import torch.distributed as dist
        from torch.utils.flop_counter import FlopCounterMode

        counter = FlopCounterMode(display=False, custom_mapping=_uncounted())
        with self.training() as step:
            step.run()  # DTensor first runs an operator on tensors without values
            with counter, _of_this_rank():
                step.run()
        total = torch.tensor([float(counter.get_total_flops())], dtype=torch.float64, device=self.rank.device)
        dist.all_reduce(total, group=self.rank.group())
        self.rank.record("counted_flops", float(total), reduce="equal")


def _of_this_rank() -> Any:
    """Return a mode that hides DTensor's global operators from the counter below, and leaves this rank's operators."""
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode

    class OfThisRank(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            # DTensor handles operators that no mode accepts, and calls back with operators of local tensors.
            return NotImplemented if any(issubclass(kind, DTensor) for kind in types) else func(*args, **(kwargs or {}))

    mode: Any = OfThisRank
    return mode()


def _uncounted() -> dict[Any, Any]:
    """Return counts of operators that torch's counter lacks: the CPU's attention kernels and grouped products."""
    import torch
    from torch.utils import flop_counter

    counts: Any = flop_counter

    def forward(query: Any, key: Any, value: Any, *rest: Any, **named: Any) -> int:
        return int(counts.sdpa_flop_count(query, key, value))

    def backward(gradient: Any, query: Any, key: Any, value: Any, *rest: Any, **named: Any) -> int:
        return int(counts.sdpa_backward_flop_count(gradient, query, key, value))

    def grouped(left: Any, right: Any, *rest: Any, **named: Any) -> int:
        return 2 * int(left[0] * left[1] * right[-1])  # one product per group, of rows or of sums over them

    kernel = "_scaled_dot_product_flash_attention_for_cpu"
    counts_of = {kernel: forward, f"{kernel}_backward": backward, "_grouped_mm": grouped}
    return {getattr(torch.ops.aten, name): count for name, count in counts_of.items() if hasattr(torch.ops.aten, name)}


class LossStep(Observed):
    """A fixed number of steps from seeded values, on the data from their beginning."""

    def run(self) -> None:
        """Build, train, and record the first and final loss, and the step that reached the target."""
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
    {"memory": MemoryStep, "exposed": ExposedStep, "flops": FlopsStep, "loss": LossStep, "traffic": TrafficStep}
)
"""Steps of the builds, by purpose."""
