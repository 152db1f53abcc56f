"""Untimed builds of a training step, each for one purpose; imported on ranks only.

memory (:mod:`.memory`): bytes by kind; exposed (:mod:`.exposed`): the share of the step that communication costs;
traffic: messages and their times; flops: operations counted by torch; loss: a fixed number of seeded steps.  One
iteration runs all of it and records the results.

For traffic one step after warm ones is counted (:mod:`perfsuite.strategies.traffic_count`) and compared with the
strategy's closed form.  A few more have a time per part, and the counted messages are posted again without computation.
A part's time comes from marks at the edges of ``attention`` and ``mlp`` of every block.  A mark is an autograd function
that returns its input: its forward runs when the part begins or ends, its backward when the part's backward ends or
begins.  Parts nest: a checkpointed block runs its forward again inside the backward of its ``mlp``.  Time counts for
the innermost part.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from perfsuite.base.errors import WrongResult
from perfsuite.models.layers import Block
from perfsuite.platforms.base import Clock
from perfsuite.record.step import Component, Traffic
from perfsuite.record.workload import Rank, Step
from perfsuite.strategies.traffic import ATTENTION, MLP, OTHER, PARTS, PIPELINE, Call
from perfsuite.strategies.traffic_count import Counting, Key, Posted, TrafficReplay
from perfsuite.workloads.checks import raise_alike, texts_of_all
from perfsuite.workloads.training.case import TrainCase
from perfsuite.workloads.training.exposed import ExposedStep
from perfsuite.workloads.training.memory import MemoryStep, Observed

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
        return (_Mark.apply(inputs[0], parts, name, True), *inputs[1:])

    def ends(module: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        return _Mark.apply(output, parts, name, False)

    # Outside the hooks of tensor parallelism, whose messages belong to the part.
    part.register_forward_pre_hook(begins, prepend=True)
    part.register_forward_hook(ends)


_WARM_STEPS = 2  # The first creates the optimizer's state, after which DDP rebuilds its buckets
_STAMPED_STEPS = 5
_LISTED_PROBLEMS = 6


class TrafficStep(Observed):
    """Calls and bytes by axis, collective and part; times of the parts and of their messages."""

    def run(self) -> None:
        """Build, count, compare, time, replay, and record."""
        clock = self.clock
        parts = Parts(clock)
        marked: Any = MarkedRank(self.rank, parts)
        with self.training(marked) as step:
            mark(step.trainer.module, parts)
            for _ in range(_WARM_STEPS):
                step.run()
            with Counting(self.rank.shape, self.rank.rank, lambda: parts.part) as counting:
                step.run()
            posted = counting.posted
            shape = self.rank.shape
            form = self.workload.find_strategy().traffic(self.workload.plan(shape), shape, self.rank.rank)
            uneven = self._compare(posted, form)
            stamped = [parts.seconds(step.run) for _ in range(_STAMPED_STEPS)]
        seconds = TrafficReplay(self.rank.device, clock, uneven).seconds(posted)
        spent = {name: statistics.median(times[name] for times in stamped) for name in PARTS}
        traffic = traffic_of(posted, seconds, uneven)
        components = components_of(posted, seconds, spent)
        place = "" if form is None else json.dumps(_tally_form(form), sort_keys=True)
        self.rank.keep_traffic(traffic, components, place=place)
        for name in ("compute_s", "communication_s"):
            self.rank.record(name, sum(getattr(component, name) for component in components), unit="s", reduce="max")

    def _compare(self, posted: Sequence[Posted], form: Sequence[Call] | None) -> frozenset[Key]:
        """Return the keys with unequal splits on some rank; a collective.  Raises WrongResult unless all forms fit."""
        own = {"posted": _tally(posted), "form": None if form is None else _tally_form(form)}
        everyone = [json.loads(text) for text in texts_of_all(self.rank, json.dumps(own))]
        raise_alike(self.rank, difference(everyone[self.rank.rank], everyone) if form is not None else "")
        return frozenset(
            tuple(key.split(" / ")) for one in everyone for key, (_, _, even) in one["posted"].items() if not even
        )


def _name(key: Key) -> str:
    return " / ".join(key)


def _tally(posted: Sequence[Posted]) -> dict[str, list[Any]]:
    """Return calls, bytes and whether all splits are even, by axis, collective and part."""
    tally: dict[str, list[Any]] = {}
    for post in posted:
        entry = tally.setdefault(_name(post.key), [0, 0, True])
        entry[:] = entry[0] + 1, entry[1] + post.message_bytes, entry[2] and post.even
    return tally


def _tally_form(form: Sequence[Call]) -> dict[str, list[Any]]:
    return {
        _name((call.axis, call.collective, call.part)): [call.calls, call.message_bytes, not call.uneven]
        for call in form
    }


def difference(own: Mapping[str, Any], everyone: Sequence[Mapping[str, Any]]) -> str:
    """Return the differences between a rank's counts and its closed form; uneven bytes are summed over all ranks."""
    form, posted = own["form"], own["posted"]
    problems = []
    for key in sorted({*form, *posted}):
        calls, size, even = form.get(key, (0, 0, True))
        counted, sent, _ = posted.get(key, (0, 0, True))
        if not even:
            size, sent = (sum(one[kind].get(key, (0, 0))[1] for one in everyone) for kind in ("form", "posted"))
        if (calls, size) != (counted, sent):
            where = " of all ranks" if not even else ""
            problems.append(f"{key} {counted} calls of {sent} bytes{where} and not {calls} of {size}")
    listed = "; ".join(problems[:_LISTED_PROBLEMS])
    return f"one step posts, against the strategy's closed form, {listed}" if problems else ""


def traffic_of(posted: Sequence[Posted], seconds: Mapping[Posted, float], uneven: frozenset[Key]) -> list[Traffic]:
    """Return one entry for each axis, collective and part."""
    entries: dict[Key, list[Posted]] = {}
    for post in posted:
        entries.setdefault(post.key, []).append(post)
    return [
        Traffic(
            axis=key[0],
            collective=key[1],
            part=key[2],
            calls=len(calls),
            message_bytes=sum(post.message_bytes for post in calls),
            time_s=sum(seconds[post] for post in calls),
            ranks=calls[0].ranks,
            uneven=key in uneven,
        )
        for key, calls in entries.items()
    ]


def components_of(
    posted: Sequence[Posted], seconds: Mapping[Posted, float], spent: Mapping[str, float]
) -> list[Component]:
    """Return the parts of the step: a part's computation is its time less that of the collectives that it waits for.
    Messages hidden behind computation are subtracted too, so the rest is less than the computation, at least 0.  A
    pipeline's own part has no computation: its time without messages is waiting.
    """
    sent, awaited = dict.fromkeys(PARTS, 0.0), dict.fromkeys(PARTS, 0.0)
    for post in posted:
        sent[post.part] += seconds[post]
        awaited[post.place] += seconds[post]
    return [
        Component(
            name=name,
            compute_s=0.0 if name == PIPELINE else max(0.0, spent[name] - awaited[name]),
            communication_s=sent[name],
        )
        for name in PARTS
        if spent[name] or sent[name]
    ]


class _FlopsStep(Observed):
    """Operations of one step of all ranks, counted by torch during the step.  Attention's backward counts five
    products, as in kernels that store no scores; the work model counts four.
    """

    def run(self) -> None:
        """Build, run a step, run another one under the counter, and record the count."""
        counter = FlopCounterMode(display=False, custom_mapping=_uncounted())
        with self.training() as step:
            step.run()  # DTensor first runs an operator on tensors without values
            with counter, _OfThisRank():
                step.run()
        total = torch.tensor([float(counter.get_total_flops())], dtype=torch.float64, device=self.rank.device)
        dist.all_reduce(total, group=self.rank.group())
        self.rank.record("counted_flops", float(total), reduce="equal")


class _OfThisRank(TorchDispatchMode):
    """Hides DTensor's global operators from the counter below, and leaves this rank's operators."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # DTensor handles operators that no mode accepts, and calls back with operators of local tensors.
        return NotImplemented if any(issubclass(kind, DTensor) for kind in types) else func(*args, **(kwargs or {}))


def _uncounted() -> dict[Any, Any]:
    """Return counts of operators that torch's counter lacks: the CPU's attention kernels and grouped products."""
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


class _LossStep(Observed):
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


STEPS: Mapping[str, Callable[[TrainCase, Rank], Step]] = {
    "memory": MemoryStep,
    "exposed": ExposedStep,
    "flops": _FlopsStep,
    "loss": _LossStep,
    "traffic": TrafficStep,
}
"""Steps of the builds, by purpose."""
