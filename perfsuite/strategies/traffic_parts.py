"""Which part of a step runs, and for how long: marks at the edges of ``attention`` and ``mlp`` of every block.

A mark is an autograd function that changes nothing: its forward runs when the part begins or ends, its backward when
the part's backward ends or begins.  Parts nest (a checkpointed block runs its forward again inside the backward of its
``mlp``); the innermost one has the time.  Imported on ranks only.
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

_WAIT = "wait"
"""Span in which a rank of a pipeline waits for its neighbours."""


class Parts:
    """The parts that are open now, and when each change came."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._open: list[tuple[str, bool]] = []
        """Name, and whether it is the part's backward, outermost first."""
        self._changes: list[tuple[object, str]] = []
        """When, and the part that runs from then on."""

    @property
    def part(self) -> str:
        """The innermost part that is open."""
        return self._open[-1][0] if self._open else OTHER

    def enter(self, name: str, *, backward: bool) -> None:
        """A part begins."""
        self._open.append((name, backward))
        self._changes.append((self._clock.stamp(), self.part))

    def leave(self, name: str, *, backward: bool) -> None:
        """A part ends, and with it what was begun inside of it and given up.

        A checkpoint stops its second forward once it has computed what the backward needs.
        """
        while self._open and self._open.pop() != (name, backward):
            pass
        self._changes.append((self._clock.stamp(), self.part))

    def seconds(self, run: Callable[[], None]) -> Mapping[str, float]:
        """Seconds of each part while ``run`` runs."""
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
        """A part that has no backward."""
        self.enter(name, backward=False)
        try:
            yield
        finally:
            self.leave(name, backward=False)


class MarkedRank:
    """A rank whose waits for neighbouring stages are a part; everything else is the real rank's."""

    def __init__(self, rank: Rank, parts: Parts) -> None:
        self._rank = rank
        self._parts = parts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rank, name)

    def span(self, name: str, **attributes: int | str) -> AbstractContextManager[None]:
        """A wait is a part; no other span is."""
        return self._parts.inside(PIPELINE) if name == _WAIT else self._rank.span(name, **attributes)


class _Mark(torch.autograd.Function):
    """Passes its input through and tells ``parts`` of it, in both directions."""

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
    """``x``, waited for where a collective still brings it: what a part sends, the part waits for."""
    return x.wait() if isinstance(x, AsyncCollectiveTensor) else x


def mark(module: nn.Module, parts: Parts) -> None:
    """Mark ``attention`` and ``mlp`` of every block in ``module``; blocks without such parts stay as they are."""
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

    # Outside of the hooks that others put there: what those send belongs to the part.
    part.register_forward_pre_hook(begins, prepend=True)
    part.register_forward_hook(ends)
