"""Base of the rank side of strategies: a model, an optimizer, one step of them, and access to gradients and state.

Imported on ranks only.  A micro-batch is a dict of tensors with the samples in the first dimension.  A global batch
holds the micro-batches of all replicas, by the numbers of :func:`perfsuite.models.loading.numbers_of`, so that every
strategy sees every sample once on any mesh.  A replica trains whole samples: it is one rank, or all stages of a
pipeline; the rank's place in the mesh decides which one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from perfsuite.base.errors import UnsupportedCase
from perfsuite.models.base import Plan
from perfsuite.models.build import build
from perfsuite.models.layers import TrainingModule, local, materialize
from perfsuite.models.loading import numbers_of
from perfsuite.record.workload import DTYPES, Rank

Batch = Mapping[str, torch.Tensor]


Copies = tuple[str, Sequence[torch.Tensor], dist.ProcessGroup]
"""Name of parameters that several ranks hold, this rank's fp64 sum of each of its copies, and the group of ranks."""


class Trainer:
    """One rank's part of a training step."""

    def __init__(
        self,
        rank: Rank,
        plan: Plan,
        *,
        module: nn.Module,
        unit: nn.Module | None = None,
        optimizer: torch.optim.Optimizer,
        hold: Callable[[bool], AbstractContextManager[None]] | None = None,
        casts: bool = True,
        sends_fp16: bool = False,
        replicates: bool = True,
    ) -> None:
        """``unit`` is the module to call: the wrapper around ``module``, or ``module`` itself without one.  ``hold`` is
        :meth:`micro_batch` of a strategy that communicates. ``casts`` is False if the strategy casts parameters, so
        that autocast is not needed. ``sends_fp16``: gradients are sent in fp16. ``replicates``: every rank holds all
        parameters, so ranks can be compared.
        """
        self.rank = rank
        self._hold = hold
        self._casts = casts
        self._replicates = replicates
        self.plan = plan
        self.module = module
        self.unit: Any = module if unit is None else unit
        self.optimizer: Any = optimizer
        self.group = rank.group()
        # Small gradients vanish in fp16 without the dynamic loss scale; it is off in other dtypes. Gradients sent in
        # fp16 need a lower start: the sum of a parameter's gradient overflows before an activation's.
        self.scaler: Any = torch.amp.GradScaler(
            rank.device.type,
            init_scale=plan.loss_scale or (2.0**10 if sends_fp16 else 2.0**16),
            enabled=sends_fp16 or plan.dtype == "fp16",
        )
        self.prepare: Callable[[Batch], Batch] = lambda batch: batch
        """Transforms a micro-batch between data and forward."""

    # -- one step ------------------------------------------------------------------------------------------------

    @property
    def needs_data(self) -> bool:
        """Whether :meth:`forward_and_backward` takes micro-batches on this rank."""
        return True

    def forward_and_backward(
        self, batches: Iterator[Batch], first_forward: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> torch.Tensor | None:
        """Run all micro-batches of a step; return the replica's mean loss, or None on a rank without a loss.
        ``first_forward`` is entered around the first forward, on ranks that run forwards one after the other.
        """
        rank, count, losses = self.rank, self.plan.accumulation, []
        self.scale_balance_losses()
        for micro in range(count):
            with rank.span("data", micro_batch=micro):
                batch = next(batches)
            batch = self.prepare(batch)
            with self.micro_batch(last=micro == count - 1):
                with nullcontext() if micro else first_forward(), rank.span("forward", micro_batch=micro):
                    loss = self.forward(batch)
                with rank.span("backward", micro_batch=micro):
                    self.backward(loss)
            losses.append(loss.detach())
        return losses[0] if count == 1 else torch.stack(losses).mean()

    def scale_balance_losses(self) -> None:
        """Scale the balance losses of experts like a micro-batch's own loss before its backward."""
        if self.plan.model.experts:
            from perfsuite.models.moe_module import set_loss_factor

            set_loss_factor(self.module, self.loss_scale() / self.plan.accumulation)

    def loss_scale(self) -> float | torch.Tensor:
        """Return the loss scale in fp16, without waiting for the device; 1 in other dtypes."""
        return self.scaler.scale(torch.ones((), device=self.rank.device))

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """Return the context of one micro-batch; only the last one of a step communicates gradients."""
        return nullcontext() if self._hold is None else self._hold(last)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return the mean loss of a micro-batch; by autocast matrix products use the plan's dtype."""
        narrow, dtype = self.plan.half and self._casts, getattr(torch, DTYPES[self.plan.dtype])
        with torch.autocast(self.rank.device.type, dtype=dtype) if narrow else nullcontext():
            return self.unit(**batch)

    def backward(self, loss: torch.Tensor) -> None:
        """Add this micro-batch's share of the gradients."""
        self.scaler.scale(loss / self.plan.accumulation).backward()

    def step(self) -> None:
        """Clip the gradients if the plan says so, step the optimizer and clear the gradients."""
        if self.plan.clip is not None:
            self.scaler.unscale_(self.optimizer)
            trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
            nn.utils.clip_grad_norm_(trained, self.plan.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update(self.plan.loss_scale)
        self.optimizer.zero_grad()

    # -- looking inside ------------------------------------------------------------------------------------------

    def loss_and_gradients(self, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
        """Return the mean loss of a global batch, and whole fp32 gradients under the names of the unsplit model; a
        collective.  Only parameters with a part on this rank have gradients.  They stay in place until :meth:`step`,
        which must follow.
        """
        own = ({name: values[numbers] for name, values in batch.items()} for numbers in self.numbers())
        loss = self.mean_loss(self.forward_and_backward(own))
        return loss, {name: value for name, value in self.gradients() if value is not None}

    def numbers(self) -> Iterator[list[int]]:
        """Yield the numbers of the samples of this replica's micro-batches, without end."""
        shape = self.rank.shape
        return numbers_of(shape.replica(self.rank.rank), shape.replicas, self.plan.micro_batch_size)

    def mean_loss(self, loss: torch.Tensor | None) -> float:
        """Return the mean of ``loss`` over the ranks with one, whose shares are equal, on every rank; a collective."""
        own = (0.0, 0.0) if loss is None else (float(loss), 1.0)
        total = torch.tensor(own, dtype=torch.float64, device=self.rank.device)
        dist.all_reduce(total, group=self.group)
        return float(total[0] / total[1])

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return this rank's parameters, or its parts of them, under the names of the unsplit model."""
        return self.module.named_parameters()

    def gradients(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Yield name and whole fp32 gradient of every trained parameter; a collective."""
        scale = self.scaler.get_scale()
        for name, parameter in self.named_parameters():
            if parameter.requires_grad:
                gradient = parameter.grad
                # Offloaded parts are gathered from the device: its backend cannot use host tensors.
                yield name, None if gradient is None else whole(gradient.to(self.rank.device)).float() / scale

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        """Return the tensors kept between steps: this rank's parts of ``weights``, ``gradients`` and ``optimizer``."""
        parameters = list(self.module.parameters())
        # ZeroRedundancyOptimizer wraps the optimizer with the state.
        states = getattr(self.optimizer, "optim", self.optimizer).state.values()
        return {
            "weights": [*self.weights(), *map(local, self.module.buffers())],
            "gradients": [local(parameter.grad) for parameter in parameters if parameter.grad is not None],
            "optimizer": [local(tensor) for state in states for tensor in state.values() if torch.is_tensor(tensor)],
        }

    def weights(self) -> list[torch.Tensor]:
        """Return this rank's parts of all parameters, as kept between steps."""
        return [local(parameter) for parameter in self.module.parameters()]

    def copies(self) -> tuple[Copies, ...]:
        """Return the parameters that several ranks hold; empty if no parameter is held twice."""
        if not self._replicates:
            return ()
        sums = torch.stack([local(parameter).detach().double().sum() for parameter in self.module.parameters()])
        return (("all parameters", (sums.sum(),), self.group),)

    def close(self) -> None:
        """Free the model and the optimizer."""
        del self.unit, self.module, self.optimizer
        self._hold = None


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor that may be spread over a mesh; a collective if it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def new_module(rank: Rank, plan: Plan) -> TrainingModule:
    """Return the plan's model on the meta device, compiled if asked; raises UnsupportedCase if that cannot be."""
    rank.dtype(plan.dtype)  # sets the switch between fp32 and tf32
    with torch.device("meta"):
        module = build(plan.model, plan.checkpointing, plan.attention)
    compile_blocks(module, rank, plan)
    return module


def compile_blocks(module: TrainingModule, rank: Rank, plan: Plan) -> None:
    """Compile every block if the plan says so; raises UnsupportedCase if torch.compile cannot."""
    if plan.compiled:
        _require_compiler(rank.device)
        for block in module.blocks.children():
            block.compile()


def new_whole_module(rank: Rank, plan: Plan) -> TrainingModule:
    """Return the plan's whole model with its values on this rank's device."""
    module = new_module(rank, plan)
    materialize(module, rank.device, seed=plan.seed)
    return module


def make_optimizer(module: nn.Module, plan: Plan) -> torch.optim.Optimizer:
    """Return AdamW over the trained parameters; only parameters of one mesh are stepped together."""
    groups: dict[str, list[nn.Parameter]] = {}
    for parameter in module.parameters():
        if parameter.requires_grad:
            groups.setdefault(str(getattr(parameter, "device_mesh", "")), []).append(parameter)
    return torch.optim.AdamW([{"params": group} for group in groups.values()], lr=plan.learning_rate)


def _require_compiler(device: torch.device) -> None:
    # inductor compiles CPU kernels by CXX or g++; triton the launchers of a device's kernels by CC, gcc or clang.
    language, variable, names = ("C++", "CXX", ("g++",)) if device.type == "cpu" else ("C", "CC", ("gcc", "clang"))
    named = os.environ.get(variable)
    if not any(map(shutil.which, (named,) if named else names)):
        missing = f"{variable}={named}" if named else f"{variable} is not set, and {' or '.join(names)}"
        raise UnsupportedCase(
            f"torch.compile for {device.type} needs a {language} compiler: {missing} is not found; install one"
        )
    from torch._inductor.codegen.common import get_scheduling_for_device, init_backend_registration

    init_backend_registration()
    if get_scheduling_for_device(device.type) is None:
        raise UnsupportedCase(
            f"torch.compile has no code generator for {device.type}; install the vendor's, or leave compiled out"
        )
