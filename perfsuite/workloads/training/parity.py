"""Twin of a training step: checks loss, gradients and next loss of a strategy against one process, on a tiny model.

Every rank also trains the whole global batch by itself in plain torch, and compares the gradients that it has.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from perfsuite import models
from perfsuite.base.errors import WrongResult
from perfsuite.base.mesh import MeshShape
from perfsuite.models.base import Model
from perfsuite.platforms.detection import family_class
from perfsuite.record.result import Work
from perfsuite.record.workload import DTYPES, Rank, Step
from perfsuite.strategies import Plan, Strategy
from perfsuite.workloads.checks import raise_alike, texts_of_all
from perfsuite.workloads.training.case import TrainCase

if TYPE_CHECKING:
    import torch

    from perfsuite.strategies.trainer import Trainer

_FLOOR = 1e-4
"""Gradients below this share of the norm of all are compared with that share: near zero there is only noise."""


@dataclass(frozen=True, kw_only=True)
class TrainParity(TrainCase):
    """The twin of a training step."""

    micro_batch_size: int | None = 2
    learning_rate: float = 1e-3

    def trained_model(self, shape: MeshShape) -> Model:
        """Return the twin of the model of this name."""
        return self.find_strategy().twin(models.find_trained(self.model, self.overrides), shape, self.accumulation)

    def work(self, shape: MeshShape) -> Work:
        """Return no operations: a check has no throughput."""
        self.find_strategy().require(shape)
        return Work(dtype=self.dtype)

    def build(self, rank: Rank) -> _ParityStep:
        """Return a step of the small model."""
        return _ParityStep(self, rank)

    def check(self, rank: Rank, step: Step) -> None:
        """Raise WrongResult on all ranks unless loss, gradients and the next loss equal those of one process."""
        assert isinstance(step, _ParityStep)
        plan, strategy = self.plan(rank.shape), self.find_strategy()
        loss, whole, next_loss = one_process(rank, plan, step.batch, narrow=strategy.narrows(plan))
        own = step.outcome[1]
        texts = texts_of_all(rank, json.dumps(sorted(own)))
        missing = set(whole) - {name for text in texts for name in json.loads(text)}
        problem = f"no rank has a gradient of {', '.join(sorted(missing))}" if missing else ""
        gradients = {name: value for name, value in whole.items() if name in own}
        options = "".join(f", {name}={value}" for name, value in self.options.items())
        who = f"{self.strategy}{options} on mesh {rank.shape}, accumulation {self.accumulation}"
        try:
            allowed = tolerance_on(rank.device.type, strategy, plan)
            error = compare(step.outcome, (loss, gradients, next_loss), who, allowed)
            rank.record("parity_error", error, reduce="max")
        except WrongResult as wrong:
            problem = str(wrong)
        raise_alike(rank, problem)


def tolerance_on(device: str, strategy: Strategy, plan: Plan) -> float:
    """Return the relative error allowed on this type of device, whose kernels of one fp32 step may differ."""
    return max(strategy.tolerance(plan), family_class(device).fp32_tolerance if plan.dtype == "fp32" else 0.0)


Outcome = tuple[float, Mapping[str, "torch.Tensor"], float]
"""Loss and gradients of the first step (whole, in fp32, by the names of the unsplit model), and loss of the same batch
after one step of the optimizer."""


def compare(own: Outcome, expected: Outcome, who: str, tolerance: float) -> float:
    """Return the largest relative error, of gradients by their L2 norm; WrongResult if it is above ``tolerance``."""
    (loss, gradients, next_loss), (expected_loss, expected_gradients, expected_next) = own, expected
    if set(gradients) != set(expected_gradients):
        raise WrongResult(
            f"parameters with a gradient under {who}",
            expected=sorted(set(expected_gradients) - set(gradients)),
            got=sorted(set(gradients) - set(expected_gradients)),
        )
    norms = {name: float(gradient.norm()) for name, gradient in expected_gradients.items()}
    floor = _FLOOR * sum(norm**2 for norm in norms.values()) ** 0.5
    errors = {
        f"gradient of {name}": float((gradients[name] - gradient).norm()) / max(norms[name], floor)
        for name, gradient in expected_gradients.items()
    }
    errors["loss"] = abs(loss - expected_loss) / abs(expected_loss)
    errors["loss after a step"] = abs(next_loss - expected_next) / abs(expected_next)
    # A NaN is the largest error of all.
    worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
    if not errors[worst] <= tolerance:
        text = f"{worst} under {who} against one process, relative error"
        raise WrongResult(text, expected=f"at most {tolerance:g}", got=errors[worst])
    return float(errors[worst])


class _ParityStep(Step):
    """Two steps of the optimizer on one global batch."""

    def __init__(self, workload: TrainParity, rank: Rank) -> None:
        from perfsuite.models.loading import synthetic_batch

        plan = workload.plan(rank.shape)
        self.trainer: Trainer = workload.find_strategy().build(rank, plan)
        batch = synthetic_batch(plan.model, list(range(plan.batch_size * rank.shape.replicas)))
        self.batch = {name: values.to(rank.device) for name, values in batch.items()}

    def run(self) -> None:
        loss, gradients = self.trainer.loss_and_gradients(self.batch)
        self.trainer.step()
        next_loss, _ = self.trainer.loss_and_gradients(self.batch)
        self.trainer.step()
        self.outcome = (loss, gradients, next_loss)

    def close(self) -> None:
        self.trainer.close()
        self.__dict__.pop("outcome", None)


def one_process(rank: Rank, plan: Plan, batch: Mapping[str, torch.Tensor], *, narrow: bool) -> Outcome:
    """Return the outcome of plain torch: no strategy, no checkpointing, no micro-batches, no communication.
    ``narrow``: cast parameters to the plan's dtype, like strategies that keep a wide copy for the optimizer.
    """
    import torch

    from perfsuite.models.moe_module import set_loss_factor
    from perfsuite.strategies.trainer import make_optimizer, new_whole_module

    plain = dataclasses.replace(plan, checkpointing="none", compiled=False)
    wide = new_whole_module(rank, plain)
    optimizer = make_optimizer(wide, plain)
    dtype = getattr(torch, DTYPES[plan.dtype])
    casts = nullcontext() if narrow or not plan.half else torch.autocast(rank.device.type, dtype=dtype)
    # GradScaler's first scale, with which small gradients survive fp16
    scale = 2.0**16 if plan.dtype == "fp16" else 1.0

    def train() -> tuple[float, dict[str, torch.Tensor]]:
        module, inputs = wide, dict(batch)
        if narrow:
            module = new_whole_module(rank, plain)
            module.load_state_dict(wide.state_dict())
            module.to(dtype)
            inputs = {name: x.to(dtype) if x.is_floating_point() else x for name, x in batch.items()}
        if plan.model.experts:
            set_loss_factor(module, scale)
        with casts:
            loss: Any = module(**inputs)
        (loss * scale).backward()
        used = dict(module.named_parameters())
        for name, parameter in wide.named_parameters():
            gradient = used[name].grad
            parameter.grad = None if gradient is None else gradient.float() / scale
        value = float(loss.detach())
        return value, {n: p.grad.clone() for n, p in wide.named_parameters() if p.grad is not None}

    loss, gradients = train()
    if plan.clip is not None:
        torch.nn.utils.clip_grad_norm_([p for p in wide.parameters() if p.grad is not None], plan.clip)
    optimizer.step()
    optimizer.zero_grad()
    next_loss, _ = train()
    return loss, gradients, next_loss
