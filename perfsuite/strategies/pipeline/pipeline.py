"""Pipelines by torch.distributed.pipelining: torch's stages and torch's runtime, fed with our orders of actions.

torch's schedule classes are not used: 1F1B refuses fewer micro-batches than ranks, there is no naive one, and their
orders cannot be simulated beside the run.  One runtime runs them all, so that schedules differ in their order alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from perfsuite.base.collectives import receives_first
from perfsuite.base.errors import PerfsuiteError, UnsupportedCase
from perfsuite.record.workload import Rank
from perfsuite.schedules import Action, Kind, Order, Schedule
from perfsuite.strategies.pipeline.watch import Watch

_KINDS: Mapping[Kind, str] = MappingProxyType(
    {
        "forward": "FORWARD",
        "backward": "FULL_BACKWARD",
        "backward_input": "BACKWARD_INPUT",
        "backward_weight": "BACKWARD_WEIGHT",
    }
)
"""torch's names of our kinds."""
_KINDS_2_5: Mapping[Kind, str] = MappingProxyType(
    {"forward": "FORWARD", "backward": "BACKWARD", "backward_input": "BACKWARD", "backward_weight": "WEIGHT"}
)
"""Those of torch 2.5: whether a backward is whole is said once, of all in the order."""


@dataclass(frozen=True, kw_only=True)
class Edges:
    """Tensors without values that say what passes between stages: the same for every micro-batch."""

    first: torch.Tensor
    """What the first stage takes."""
    between: torch.Tensor
    """What a stage hands to the next."""
    last: torch.Tensor
    """What the last stage gives."""


class Pipeline:
    """One rank's stages under a schedule."""

    def __init__(
        self,
        rank: Rank,
        schedule: Schedule,
        modules: Mapping[int, torch.nn.Module],
        edges: Edges,
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> None:
        """``modules`` are this rank's stages; ``loss`` gives a micro-batch's mean loss of output and target."""
        self.schedule = schedule
        self.group = rank.group("pp") if "pp" in rank.shape.names else rank.group()
        self.watch = Watch(rank)
        api = _pipelining(schedule)
        last = schedule.num_stages - 1
        self.stages: list[Any] = [
            api.PipelineStage(
                module,
                stage,
                schedule.num_stages,
                rank.device,
                input_args=edges.first if stage == 0 else edges.between,
                output_args=edges.last if stage == last else edges.between,
                group=self.group,
            )
            for stage, module in sorted(modules.items())
        ]
        share = self.watch.loss(lambda output, target: loss(output, target) / schedule.num_micro_batches)
        self.runtime = _make_runtime(api, self.stages, schedule, share)
        self._torchs = api.schedules
        self.watch.attach(self.stages)
        step = inspect.signature(self.runtime.step).parameters
        # Outputs are of no use and would be kept until the step's end.
        self._options = {"return_outputs": False} if "return_outputs" in step else {}
        rank.keep_timeline(schedule.name)

    @property
    def first(self) -> bool:
        """Whether this rank has the first stage, which takes the inputs."""
        return bool(self.stages[0].is_first)

    @property
    def last(self) -> bool:
        """Whether this rank has the last stage, which has the loss."""
        return bool(self.stages[-1].is_last)

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | None:
        """Forward and backward of all micro-batches; the mean loss where the last stage is, None elsewhere.

        Gradients are added to what the parameters have.  Raises RuntimeError that names stage and micro-batch.
        """
        losses: list[torch.Tensor] = []
        inputs_given = (inputs,) if self.first else ()
        targets_given = {"target": targets, "losses": losses} if self.last else {}
        try:
            with _replaced(
                self._torchs, _batch_p2p=self.watch.posting(self._torchs._batch_p2p), _format_pipeline_order=_no_dump
            ):
                self.runtime.step(*inputs_given, **targets_given, **self._options)
        except Exception as error:
            cause = root_of(error)
            if _speaks_for_itself(cause):
                raise cause from None
            raise RuntimeError(
                f"schedule {self.schedule.name}: {self.watch.doing} failed: {type(cause).__name__}: {cause!s:.300}"
            ) from cause
        return torch.stack([loss.detach() for loss in losses]).sum() if self.last else None

    def exchange(self, gradient: torch.Tensor, *, between: tuple[int, int]) -> None:
        """Add up ``gradient`` over the two ranks of the pipeline that hold a copy of one parameter; both call it."""
        mine = dist.get_rank(self.group)
        peer = dist.get_global_rank(self.group, between[mine == between[0]])
        theirs = torch.empty_like(gradient)
        send = dist.P2POp(dist.isend, gradient, peer, self.group)
        receive = dist.P2POp(dist.irecv, theirs, peer, self.group)
        operations = [receive, send] if receives_first(gradient.device.type, dist.get_rank(), peer) else [send, receive]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        gradient.add_(theirs)

    def close(self) -> None:
        """Let go of stages and runtime, which refer to each other."""
        self.watch.detach()
        self.stages.clear()
        del self.runtime


def root_of(error: Exception) -> Exception:
    """What a stage raised: torch wraps it in RuntimeErrors that dump its arguments."""
    while isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    return error


def _speaks_for_itself(cause: Exception) -> bool:
    """Out of memory has to stay recognisable, in whichever words a device says it; our own errors say what to do."""
    said = str(cause).lower()
    return isinstance(cause, (PerfsuiteError, MemoryError)) or "out of memory" in said or "allocate memory" in said


def torch_order(order: Order, names: Any) -> list[Any]:
    """One rank's order as torch's runtime takes it; ``names`` is torch's module of schedules.

    A joined action and the next one become one overlapped action.
    """
    actions: list[Any] = []
    waiting: list[Any] = []
    for action in order:
        waiting.append(_torch_action(action, names))
        if action.joined:
            continue
        if len(waiting) > 1:
            actions.append(names._Action(-1, names._ComputationType.OVERLAP_F_B, None, tuple(waiting)))
        else:
            actions.extend(waiting)
        waiting = []
    return actions


def _torch_action(action: Action, names: Any) -> Any:
    types = names._ComputationType
    kinds = _KINDS if hasattr(types, "FULL_BACKWARD") else _KINDS_2_5
    return names._Action(action.stage, getattr(types, kinds[action.kind]), action.micro_batch)


def _pipelining(schedule: Schedule) -> Any:
    """torch's package, once it is known to have what ``schedule`` needs; UnsupportedCase says what is missing."""
    from torch.distributed import pipelining

    api: Any = pipelining
    names: Any = api.schedules
    stage = api.PipelineStage
    types = names._ComputationType
    kinds = {action.kind for order in schedule.orders for action in order}
    needs = [
        ("a runtime for orders of one's own", "2.5", hasattr(names, "_PipelineScheduleRuntime")),
        ("split backwards", "2.5", hasattr(stage, "backward_weight_one_chunk")),
    ]
    if any(action.joined for order in schedule.orders for action in order):
        needs.append(("overlapped actions", "2.9", hasattr(types, "OVERLAP_F_B")))
    if any(one == other for one, other in pairwise(schedule.rank_of_stage)):
        needs.append(("neighbouring stages on one rank", "2.6", hasattr(stage, "set_local_fwd_input")))
    if {"backward", "backward_input"} <= kinds:
        needs.append(("whole beside split backwards", "2.6", hasattr(types, "FULL_BACKWARD")))
    for what, version, there in needs:
        if not there:
            raise UnsupportedCase(
                f"schedule {schedule.name} needs {what} of torch.distributed.pipelining, which torch "
                f"{torch.__version__} lacks; it is in torch {version} and newer"
            )
    return api


def _make_runtime(api: Any, stages: list[Any], schedule: Schedule, loss: Callable[[Any, Any], Any]) -> Any:
    """torch's runtime with the schedule's orders; communication is put in by torch."""
    names = api.schedules
    known = inspect.signature(names.PipelineScheduleMulti.__init__).parameters
    # The loss is divided by the micro-batches already; torch before 2.6 leaves that to the caller anyway.
    unscaled = {"scale_grads": False} if "scale_grads" in known else {}
    oldest = not hasattr(names._ComputationType, "FULL_BACKWARD")
    # torch 2.5 refuses a single stage, which its runtime has no trouble with: it is given twice and runs once.
    given = stages * 2 if oldest and len(stages) == 1 else stages
    runtime = names._PipelineScheduleRuntime(given, schedule.num_micro_batches, loss_fn=loss, **unscaled)
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
    """``functions`` instead of those of the same name in ``module``, for as long as this lasts."""
    before = {name: getattr(module, name) for name in functions}
    for name, function in functions.items():
        setattr(module, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(module, name, function)


def _no_dump(*_: Any, **named: Any) -> str:
    """Instead of the whole schedule, which torch prints on every rank when an action fails: it would hide the error."""
    return ""
