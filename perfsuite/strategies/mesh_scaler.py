"""One dynamic loss scale for all ranks of a mesh: in fp16 all of them step, or none."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

_GROWTH, _BACKOFF, _INTERVAL = 2.0, 0.5, 2000
"""As torch's GradScaler has them."""


class MeshScaler:
    """What torch's GradScaler does, whose ranks would each look at their own parameters alone.

    A stage that overflows keeps all others from stepping; parameters may be spread over several meshes.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup, *, init_scale: float) -> None:
        self._group = group
        self._scale = torch.full((), init_scale, dtype=torch.float32, device=device)
        self._steps_since = torch.zeros((), dtype=torch.int32, device=device)
        self._found = torch.zeros((), dtype=torch.float32, device=device)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """``loss`` times the scale."""
        return loss * self._scale

    def get_scale(self) -> float:
        """The scale."""
        return float(self._scale)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale and step, unless one of any rank is no finite number; a collective."""
        self._found.zero_()
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    gradient: Any = parameter.grad
                    mine = gradient.to_local() if hasattr(gradient, "to_local") else gradient
                    by_dtype.setdefault(mine.dtype, []).append(mine)
        for gradients in by_dtype.values():
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, self._found, self._scale.reciprocal())
        dist.all_reduce(self._found, dist.ReduceOp.MAX, group=self._group)
        if not self._found.item():
            optimizer.step()

    def update(self) -> None:
        """A smaller scale after an overflow, a larger one after many steps without."""
        torch._amp_update_scale_(self._scale, self._steps_since, self._found, _GROWTH, _BACKOFF, _INTERVAL)
