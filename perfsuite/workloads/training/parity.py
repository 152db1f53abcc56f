"""Twin of a training step: checks loss, gradients and next loss of a strategy against one process, on a tiny model.

Every rank also trains the whole global batch by itself in plain torch, and compares the gradients that it has.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from perfsuite import models, strategies
from perfsuite.base.errors import WrongResult
from perfsuite.base.mesh import MeshShape
from perfsuite.models.base import AttentionMethod, Checkpointing
from perfsuite.platforms.detection import family_class
from perfsuite.record.result import Work
from perfsuite.record.workload import DTYPES, Process, Rank, Step, Workload
from perfsuite.strategies import Plan, Strategy
from perfsuite.workloads.training.agreement import raise_alike, texts_of_all

if TYPE_CHECKING:
    import torch

    from perfsuite.strategies.trainer import Trainer

_LEARNING_RATE = 1e-3
_FLOOR = 1e-4
"""Gradients below this share of the norm of all are compared with that share: near zero there is only noise."""


@dataclass(frozen=True, kw_only=True)
class TrainParity(Workload):
    """The twin of a training step."""

    model: str
    """Name of the configuration whose twin is trained."""
    strategy: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the configuration to replace before its twin is made."""
    options: Mapping[str, Any] = field(default_factory=dict)
    micro_batch_size: int = 2
    accumulation: int = 1
    dtype: str = "fp32"
    checkpointing: Checkpointing = "none"
    attention: AttentionMethod = "auto"
    compiled: bool = False
    clip: float | None = None
    seed: int = 0

    @property
    def process(self) -> Process | None:
        """Processes that the strategy needs."""
        return self.find_strategy().process

    def find_strategy(self) -> Strategy:
        """Return the strategy with its options."""
        return strategies.find(self.strategy, self.options)

    def plan(self, shape: MeshShape) -> Plan:
        """Return the plan of each rank, or of its part, on a mesh of this shape."""
        strategy, model = self.find_strategy(), models.find_trained(self.model, self.overrides)
        plan = Plan(
            model=strategy.twin(model, shape, self.accumulation),
            dtype=self.dtype,
            micro_batch_size=self.micro_batch_size,
            accumulation=self.accumulation,
            checkpointing=self.checkpointing,
            attention=self.attention,
            compiled=self.compiled,
            learning_rate=_LEARNING_RATE,
            clip=self.clip,
            seed=self.seed,
        )
        strategy.check_plan(plan, shape)
        return plan

    def work(self, shape: MeshShape) -> Work:
        """Return no operations: a check has no throughput."""
        self.find_strategy().require(shape)
        return Work(dtype=self.dtype)

    def build(self, rank: Rank) -> ParityStep:
        """Return a step of the small model."""
        return ParityStep(self, rank)

    def check(self, rank: Rank, step: Step) -> None:
        """Raise WrongResult on all ranks unless loss, gradients and the next loss equal those of one process."""
        assert isinstance(step, ParityStep)
        plan, strategy = self.plan(rank.shape), self.find_strategy()
        expected = one_process(rank, plan, step.batch, narrow=strategy.narrows(plan))
        texts = texts_of_all(rank, json.dumps(sorted(step.outcome.gradients)))
        missing = set(expected.gradients) - {name for text in texts for name in json.loads(text)}
        problem = f"no rank has a gradient of {', '.join(sorted(missing))}" if missing else ""
        gradients = {name: value for name, value in expected.gradients.items() if name in step.outcome.gradients}
        options = "".join(f", {name}={value}" for name, value in self.options.items())
        who = f"{self.strategy}{options} on mesh {rank.shape}, accumulation {self.accumulation}"
        try:
            allowed = tolerance_on(rank.device.type, strategy, plan)
            error = step.outcome.compare(dataclasses.replace(expected, gradients=gradients), who, allowed)
            rank.record("parity_error", error, reduce="max")
        except WrongResult as wrong:
            problem = str(wrong)
        raise_alike(rank, problem)


def tolerance_on(device: str, strategy: Strategy, plan: Plan) -> float:
    """Return the relative error allowed on this type of device, whose kernels of one fp32 step may differ."""
    return max(strategy.tolerance(plan), family_class(device).fp32_tolerance if plan.dtype == "fp32" else 0.0)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a training of two steps."""

    loss: float
    gradients: Mapping[str, torch.Tensor]
    """Gradients of the first step, whole, in fp32, by the names of the unsplit model."""
    next_loss: float  # Loss of the same batch after one step of the optimizer

    def compare(self, expected: Outcome, who: str, tolerance: float) -> float:
        """Return the largest relative error; raises WrongResult if one is above ``tolerance``.  A gradient's error is
        the L2 norm of its difference over the norm of the expected gradient.
        """
        if set(self.gradients) != set(expected.gradients):
            raise WrongResult(
                f"parameters with a gradient under {who}",
                expected=sorted(set(expected.gradients) - set(self.gradients)),
                got=sorted(set(self.gradients) - set(expected.gradients)),
            )
        norms = {name: float(gradient.norm()) for name, gradient in expected.gradients.items()}
        floor = _FLOOR * sum(norm**2 for norm in norms.values()) ** 0.5
        errors = {
            f"gradient of {name}": float((self.gradients[name] - gradient).norm()) / max(norms[name], floor)
            for name, gradient in expected.gradients.items()
        }
        errors["loss"] = abs(self.loss - expected.loss) / abs(expected.loss)
        errors["loss after a step"] = abs(self.next_loss - expected.next_loss) / abs(expected.next_loss)
        # A NaN is the largest error of all.
        worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
        if not errors[worst] <= tolerance:
            raise WrongResult(
                f"{worst} under {who} against one process, relative error",
                expected=f"at most {tolerance:g}",
                got=errors[worst],
            )
        return float(errors[worst])


class ParityStep(Step):
    """Two steps of the optimizer on one global batch."""

    def __init__(self, workload: TrainParity, rank: Rank) -> None:
        from perfsuite.models.loading import synthetic_batch

        plan = workload.plan(rank.shape)
        self.trainer: Trainer = workload.find_strategy().build(rank, plan)
        batch = synthetic_batch(plan.model, list(range(plan.batch_size * rank.shape.replicas)))
        self.batch = {name: values.to(rank.device) for name, values in batch.items()}

    def run(self) -> None:
        """Compute loss and gradients, step, and compute the loss again."""
        loss, gradients = self.trainer.loss_and_gradients(self.batch)
        self.trainer.step()
        next_loss, _ = self.trainer.loss_and_gradients(self.batch)
        self.trainer.step()
        self.outcome = Outcome(loss=loss, gradients=gradients, next_loss=next_loss)

    def close(self) -> None:
        """Free the model."""
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
    return Outcome(loss=loss, gradients=gradients, next_loss=next_loss)
