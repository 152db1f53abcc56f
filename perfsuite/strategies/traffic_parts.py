"""Times of the parts of a step, from marks at the edges of ``attention`` and ``mlp`` of every block.

A mark is an autograd function that returns its input: its forward runs when the part begins or ends, its backward when
the part's backward ends or begins.  Parts nest: a checkpointed block runs its forward again inside the backward of its
``mlp``.  Time counts for the innermost part.  Imported on ranks only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from perfsuite.models.layers import Block
from perfsuite.platforms.base import Clock
from perfsuite.record.workload import Rank
from perfsuite.strategies.traffic import ATTENTION, MLP, OTHER, PARTS, PIPELINE

_WAIT = "wait"  # Span in which a rank of a pipeline waits for its neighbours


class Parts:
    """The open parts, and the time of each change."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._open: list[tuple[str, bool]] = []  # Name, and whether it is the part's backward; outermost first
        self._changes: list[tuple[object, str]] = []  # Time, and the part that runs from then on

    @property
    def part(self) -> str:
        """Name of the innermost open part."""
        return self._open[-1][0] if self._open else OTHER

    def enter(self, name: str, *, backward: bool) -> None:
        """Begin a part."""
        self._open.append((name, backward))
        self._changes.append((self._clock.stamp(), self.part))

    def leave(self, name: str, *, backward: bool) -> None:
        """End a part and all parts in it; a checkpoint stops its second forward when the backward has its tensors."""
        while self._open and self._open.pop() != (name, backward):
            pass
        self._changes.append((self._clock.stamp(), self.part))

    def seconds(self, run: Callable[[], None]) -> Mapping[str, float]:
        """Return the seconds of each part during ``run``."""
        self._open.clear()
        self._changes = [(self._clock.stamp(), OTHER)]
        run()
        end = self._clock.stamp()
        self._clock.wait(end)
        ends = [stamp for stamp, _ in self._changes[1:]] + [end]
        total: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        for (start, part), until in zip(self._changes, ends, strict=True):
            total[part] += self._clock.elapsed_s(start, until)
        self._changes = []
        return total

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Return a context that is a part without a backward."""
        self.enter(name, backward=False)
        try:
            yield
        finally:
            self.leave(name, backward=False)


class MarkedRank:
    """A rank whose waits for neighbouring stages are a part; all else is delegated to the real rank."""

    def __init__(self, rank: Rank, parts: Parts) -> None:
        self._rank = rank
        self._parts = parts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rank, name)

    def span(self, name: str, **attributes: int | str) -> AbstractContextManager[None]:
        """Return a part for a wait, and the real rank's span otherwise."""
        return self._parts.inside(PIPELINE) if name == _WAIT else self._rank.span(name, **attributes)


class _Mark(torch.autograd.Function):
    """Returns its input and marks a part's edge in ``parts``, in both directions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, parts: Parts, name: str, begins: bool) -> torch.Tensor:
        ctx.mark = parts, name, begins
        x = _arrived(x)
        (parts.enter if begins else parts.leave)(name, backward=False)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        parts, name, begins = ctx.mark
        gradient = _arrived(gradient)
        (parts.leave if begins else parts.enter)(name, backward=True)
        return gradient, None, None, None


def _through(x: torch.Tensor, parts: Parts, name: str, begins: bool) -> torch.Tensor:
    marked: torch.Tensor = _Mark.apply(x, parts, name, begins)  # type: ignore[no-untyped-call]
    return marked


def _arrived(x: torch.Tensor) -> torch.Tensor:
    """Wait for a collective that produces ``x``: the part that sends also waits."""
    return x.wait() if isinstance(x, AsyncCollectiveTensor) else x


def mark(module: nn.Module, parts: Parts) -> None:
    """Mark ``attention`` and ``mlp`` of every block in ``module``; blocks without them stay unchanged."""
    for block in module.modules():
        if isinstance(block, Block):
            for name in (ATTENTION, MLP):
                part = getattr(block, name, None)
                if isinstance(part, nn.Module):
                    _mark_edges(part, name, parts)


def _mark_edges(part: nn.Module, name: str, parts: Parts) -> None:
    def begins(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (_through(inputs[0], parts, name, True), *inputs[1:])

    def ends(module: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        return _through(output, parts, name, False)

    # Outside the hooks of tensor parallelism, whose messages belong to the part.
    part.register_forward_pre_hook(begins, prepend=True)
    part.register_forward_hook(ends)
