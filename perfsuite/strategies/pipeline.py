"""Pipelines by torch.distributed.pipelining: torch's stages and runtime, with perfsuite's orders of actions.

torch's schedule classes are not used: 1F1B refuses fewer micro-batches than ranks, naive is missing, and their orders
cannot be simulated.  One runtime runs all schedules, so that they differ in their order only.

A watch wraps methods of stage instances, and can restore them.  torch's function that posts messages is replaced during
a step (:meth:`StageWatch.posting`), because a stage does not see the waits for its messages.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from perfsuite.base.collectives import receives_first
from perfsuite.base.errors import PerfsuiteError, UnsupportedCase
from perfsuite.record.workload import Rank
from perfsuite.schedules import Kind, Order, Schedule

_KINDS: Mapping[Kind, str] = {
    "forward": "FORWARD",
    "backward": "FULL_BACKWARD",
    "backward_input": "BACKWARD_INPUT",
    "backward_weight": "BACKWARD_WEIGHT",
}
"""perfsuite's kinds of actions -> torch's names."""
_KINDS_2_5: Mapping[Kind, str] = {
    "forward": "FORWARD",
    "backward": "BACKWARD",
    "backward_input": "BACKWARD",
    "backward_weight": "WEIGHT",
}
"""Names in torch 2.5, where one setting for all actions says whether backwards are whole."""


Edges = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Tensors without values for the shapes of a micro-batch: input of the first stage, output of a stage for the next one,
and output of the last stage."""


class Pipeline:
    """Runs one rank's stages under a schedule."""

    def __init__(
        self,
        rank: Rank,
        schedule: Schedule,
        modules: Mapping[int, torch.nn.Module],
        edges: Edges,
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> None:
        """``modules`` are this rank's stages; ``loss`` returns a micro-batch's mean loss of output and target."""
        self.schedule = schedule
        self.group = rank.group("pp") if "pp" in rank.shape.names else rank.group()
        self.watch = StageWatch(rank)
        api = _pipelining(schedule)
        last = schedule.num_stages - 1
        first_input, between, last_output = edges
        self.stages: list[Any] = [
            api.PipelineStage(
                module,
                stage,
                schedule.num_stages,
                rank.device,
                input_args=first_input if stage == 0 else between,
                output_args=last_output if stage == last else between,
                group=self.group,
            )
            for stage, module in sorted(modules.items())
        ]
        share = self.watch.loss(lambda output, target: loss(output, target) / schedule.num_micro_batches)
        self.runtime = _make_runtime(api, self.stages, schedule, share)
        self._torchs = api.schedules
        self.watch.attach(self.stages)
        step = inspect.signature(self.runtime.step).parameters
        # Outputs are not needed and would stay in memory until the step's end.
        self._options = {"return_outputs": False} if "return_outputs" in step else {}
        rank.keep_timeline(schedule.name)

    @property
    def first(self) -> bool:
        """Whether this rank has the first stage, which takes the inputs."""
        return bool(self.stages[0].is_first)

    @property
    def last(self) -> bool:
        """Whether this rank has the last stage, which returns the loss."""
        return bool(self.stages[-1].is_last)

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | None:
        """Add gradients of all micro-batches; return the mean loss on the rank of the last stage, else None."""
        losses: list[torch.Tensor] = []
        inputs_given = (inputs,) if self.first else ()
        targets_given = {"target": targets, "losses": losses} if self.last else {}
        try:
            with _replaced(
                self._torchs, _batch_p2p=self.watch.posting(self._torchs._batch_p2p), _format_pipeline_order=_no_dump
            ):
                self.runtime.step(*inputs_given, **targets_given, **self._options)
        except Exception as error:
            cause = error
            while isinstance(cause, RuntimeError) and isinstance(cause.__cause__, Exception):
                cause = cause.__cause__  # torch wraps errors of stages in RuntimeErrors that print all arguments
            # Out of memory has to stay recognisable, in any device's words; perfsuite's errors already say the remedy.
            words = ("out of memory", "allocate memory")
            if isinstance(cause, (PerfsuiteError, MemoryError)) or any(text in str(cause).lower() for text in words):
                raise cause from None
            raise RuntimeError(
                f"schedule {self.schedule.name}: {self.watch.doing} failed: {type(cause).__name__}: {cause!s:.300}"
            ) from cause
        return torch.stack([loss.detach() for loss in losses]).sum() if self.last else None

    def exchange(self, gradient: torch.Tensor, *, between: tuple[int, int]) -> None:
        """Sum ``gradient`` over the two ranks of the pipeline that hold a copy of one parameter; both call it."""
        own = dist.get_rank(self.group)
        peer = dist.get_global_rank(self.group, between[own == between[0]])
        received = torch.empty_like(gradient)
        send = dist.P2POp(dist.isend, gradient, peer, self.group)
        receive = dist.P2POp(dist.irecv, received, peer, self.group)
        operations = [receive, send] if receives_first(gradient.device.type, dist.get_rank(), peer) else [send, receive]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        gradient.add_(received)

    def close(self) -> None:
        """Free stages and runtime, which refer to each other."""
        self.watch.detach()
        self.stages.clear()
        del self.runtime


def torch_order(order: Order, names: Any) -> list[Any]:
    """Return one rank's order for torch's runtime; joined actions become overlapped ones; ``names``: torch's module."""
    actions: list[Any] = []
    waiting: list[Any] = []
    for action in order:
        kinds = _KINDS if hasattr(names._ComputationType, "FULL_BACKWARD") else _KINDS_2_5
        kind = getattr(names._ComputationType, kinds[action.kind])
        waiting.append(names._Action(action.stage, kind, action.micro_batch))
        if action.joined:
            continue
        if len(waiting) > 1:
            actions.append(names._Action(-1, names._ComputationType.OVERLAP_F_B, None, tuple(waiting)))
        else:
            actions.extend(waiting)
        waiting = []
    return actions


def _pipelining(schedule: Schedule) -> Any:
    """Return torch's package; raises UnsupportedCase if it lacks something that ``schedule`` needs."""
    from torch.distributed import pipelining

    api: Any = pipelining
    names: Any = api.schedules
    stage = api.PipelineStage
    types = names._ComputationType
    kinds = {action.kind for order in schedule.orders for action in order}
    needs = [
        ("a runtime for custom orders", "2.5", hasattr(names, "_PipelineScheduleRuntime")),
        ("split backwards", "2.5", hasattr(stage, "backward_weight_one_chunk")),
    ]
    if any(action.joined for order in schedule.orders for action in order):
        needs.append(("overlapped actions", "2.9", hasattr(types, "OVERLAP_F_B")))
    if any(one == other for one, other in pairwise(schedule.rank_of_stage)):
        needs.append(("neighbouring stages on one rank", "2.6", hasattr(stage, "set_local_fwd_input")))
    if {"backward", "backward_input"} <= kinds:
        needs.append(("whole and split backwards together", "2.6", hasattr(types, "FULL_BACKWARD")))
    for feature, version, there in needs:
        if not there:
            raise UnsupportedCase(
                f"schedule {schedule.name} needs {feature} of torch.distributed.pipelining, which torch "
                f"{torch.__version__} lacks; it is in torch {version} and newer"
            )
    return api


def _make_runtime(api: Any, stages: list[Any], schedule: Schedule, loss: Callable[[Any, Any], Any]) -> Any:
    """Return torch's runtime with the schedule's orders; torch adds the communication."""
    names = api.schedules
    parameters = inspect.signature(names.PipelineScheduleMulti.__init__).parameters
    # The loss is already divided by the micro-batches; torch before 2.6 has no such setting.
    unscaled = {"scale_grads": False} if "scale_grads" in parameters else {}
    oldest = not hasattr(names._ComputationType, "FULL_BACKWARD")
    # torch 2.5 refuses a single stage, although its runtime supports it: it gets the stage twice and runs it once.
    accepted = stages * 2 if oldest and len(stages) == 1 else stages
    runtime = names._PipelineScheduleRuntime(accepted, schedule.num_micro_batches, loss_fn=loss, **unscaled)
    runtime._stages = stages
    places = dict(enumerate(schedule.rank_of_stage))
    for holder in (runtime, *stages):
        holder.stage_index_to_group_rank = places
    if oldest:
        runtime.use_full_backward = all(action.kind != "backward_weight" for action in schedule.orders[0])
    orders = {rank: torch_order(order, names) for rank, order in enumerate(schedule.orders)}
    runtime.pipeline_order = orders
    load = getattr(runtime, "_prepare_schedule_with_comms", None) or runtime._load_actions  # its name before 2.8
    load({rank: list(order) for rank, order in orders.items()})
    return runtime


@contextmanager
def _replaced(module: Any, **functions: Callable[..., Any]) -> Iterator[None]:
    """Replace functions of ``module`` by ``functions`` of the same names within the context."""
    before = {name: getattr(module, name) for name in functions}
    for name, function in functions.items():
        setattr(module, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(module, name, function)


def _no_dump(*_: Any, **named: Any) -> str:
    """Return nothing in place of the schedule that torch prints on every rank when an action fails."""
    return ""


_COMPUTE = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")
_SENDS = ("get_fwd_send_ops", "get_bwd_send_ops")
_RECEIVES = ("get_fwd_recv_ops", "get_bwd_recv_ops")
_SPANS = ("forward", "backward", "backward_weight")  # Names of the spans of ``_COMPUTE``


class StageWatch:
    """Records the spans of one rank's stages."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._last = ("start", -1, -1)
        self._forward = (-1, -1)  # Stage and micro-batch of the last forward, which the loss belongs to
        self._receiving: tuple[int, int] | None = None
        """Stage and micro-batch of the input whose receives are posted next."""
        self._stages: list[Any] = []

    def attach(self, stages: list[Any]) -> None:
        """Wrap the methods of ``stages``."""
        self._stages = list(stages)
        for stage in stages:
            for name, kind in zip(_COMPUTE, _SPANS, strict=True):
                setattr(stage, name, self._compute(getattr(stage, name), stage.stage_index, kind))
            for name in _SENDS:
                setattr(stage, name, self._send(getattr(stage, name), stage.stage_index))
            for name in _RECEIVES:
                setattr(stage, name, self._receive(getattr(stage, name), stage.stage_index))

    def detach(self) -> None:
        """Restore the methods of the stages."""
        for stage in self._stages:
            for name in (*_COMPUTE, *_SENDS, *_RECEIVES):
                delattr(stage, name)
        self._stages = []

    def posting(self, post: Callable[..., Any]) -> Callable[..., Any]:
        """Return torch's function ``post`` with spans of receives when they are posted and during their waits.  The
        stage's method that created the operations just before names their input.
        """

        def watched(*arguments: Any, **named: Any) -> Any:
            key, self._receiving = self._receiving, None
            works = post(*arguments, **named)
            if key is None or not works:
                return works
            with self.part("receive", *key):
                pass
            # torch 2.8 and newer returns a list, older ones one object for all messages of an input.
            several = isinstance(works, list)
            awaited = _Awaited(self, key, works if several else [works])
            return [awaited] if several else awaited

        return watched

    def loss(self, function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """Return ``function`` as a part of the forward before it."""

        def watched(output: Any, target: Any) -> Any:
            if not self._stages:
                return function(output, target)
            stage, micro_batch = self._forward
            with self.part("forward", stage, micro_batch):
                return function(output, target)

        return watched

    @property
    def doing(self) -> str:
        """The running or last action, for errors: ``forward of micro-batch 3 in stage 2``."""
        kind, stage, micro_batch = self._last
        return f"{kind} of micro-batch {micro_batch} in stage {stage}"

    def part(self, kind: str, stage: int, micro_batch: int) -> AbstractContextManager[None]:
        """Return a span of the timeline."""
        self._last = (kind, stage, micro_batch)
        return self._rank.span(kind, stage=stage, micro_batch=micro_batch)

    def _compute(self, run: Callable[..., Any], stage: int, kind: str) -> Callable[..., Any]:
        def watched(chunk: int, *arguments: Any, **named: Any) -> Any:
            if kind == "forward":
                self._forward = (stage, chunk)
            split = kind == "backward" and not named.get("full_backward", True)
            with self.part("backward_input" if split else kind, stage, chunk):
                return run(chunk, *arguments, **named)

        return watched

    def _send(self, operations: Callable[[int], list[Any]], stage: int) -> Callable[[int], list[Any]]:
        """Record a send when torch asks for its operations: torch posts them at once."""

        def watched(chunk: int) -> list[Any]:
            posted = operations(chunk)
            if posted:
                with self.part("send", stage, chunk):
                    pass
            return posted

        return watched

    def _receive(self, operations: Callable[[int], list[Any]], stage: int) -> Callable[[int], list[Any]]:
        def watched(chunk: int) -> list[Any]:
            self._receiving = (stage, chunk)
            return operations(chunk)

        return watched


class _Awaited:
    """Wraps the messages of one input, with a span of the wait."""

    def __init__(self, watch: StageWatch, key: tuple[int, int], works: list[Any]) -> None:
        self._watch, self._key, self._works = watch, key, works

    def wait(self) -> None:
        """Wait for all messages."""
        with self._watch.part("wait", *self._key):
            for work in self._works:
                work.wait()


class _Sleep(torch.autograd.Function):
    """Returns its input; sleeps for ``forward_s`` in the forward and for ``backward_s`` in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.backward_s = backward_s
        if forward_s:  # a sleep of 0 s can give up the core
            time.sleep(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        time.sleep(ctx.backward_s)
        return gradients[0], None, None


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
        x = _Sleep.apply(x, self.action_s, self.action_s)
        return F.linear(x, _Sleep.apply(self.weight, 0.0, self.action_s))
