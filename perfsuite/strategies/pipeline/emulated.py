"""A pipeline stage that sleeps for a fixed time instead of computing, to check bubbles on a machine with few cores.

Forward, input gradient and weight gradient each sleep once, when autograd runs them: in a whole backward one after the
other, in a split one each in its half.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class _Sleep(torch.autograd.Function):
    """Returns its input; sleeps in the forward and in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        """Return ``x`` after ``forward_s`` seconds."""
        ctx.backward_s = backward_s
        _sleep(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Return the gradient after ``backward_s`` seconds."""
        _sleep(ctx.backward_s)
        return gradients[0], None, None


def _sleep(seconds: float) -> None:
    if seconds > 0:
        time.sleep(seconds)


class SleepingStage(nn.Module):
    """A small linear layer; (B, D) to (B, D)."""

    def __init__(self, features: int, action_s: float, *, seed: int) -> None:
        super().__init__()
        self.action_s = action_s
        weight = torch.empty(features, features)
        weight.normal_(std=features**-0.5, generator=torch.Generator().manual_seed(seed))
        self.weight = nn.Parameter(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return one product; its forward and both gradients sleep for the same time."""
        if not x.requires_grad:  # the first stage needs an input gradient to sleep in
            x = x.detach().requires_grad_()
        x = self.sleep(x, forward_s=self.action_s)
        return F.linear(x, self.sleep(self.weight, forward_s=0.0))

    def sleep(self, x: torch.Tensor, *, forward_s: float) -> torch.Tensor:
        """Return ``x`` after ``forward_s`` seconds; the backward sleeps as long as an action."""
        slept: torch.Tensor = _Sleep.apply(x, forward_s, self.action_s)  # type: ignore[no-untyped-call]
        return slept
