"""Rank side of strategy hybrid: this rank's layers, with each parallelism applied to them, and one step of them.

Imported on ranks only.  Expert, tensor and data parallelism split a layer in this order; each splits the parts that
the previous one left on this rank.  Context parallelism replaces the core of attention.  With an axis pp torch's
pipeline runtime orders the micro-batches, else they run one after the other.  A GPT's embedding is also its head: the
first and the last stage hold a copy each, and their gradients are summed before the optimizer steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import loss_parallel

from perfsuite.models.build import build_layers
from perfsuite.models.language_module import LanguageModule
from perfsuite.models.layers import cross_entropy, local, materialize
from perfsuite.record.workload import DTYPES, Rank
from perfsuite.strategies import expert
from perfsuite.strategies.context_attention import apply as apply_context
from perfsuite.strategies.data_parallel import DataParallel, reduce_in_last
from perfsuite.strategies.hybrid_sizes import HybridSizes
from perfsuite.strategies.pipeline import Edges, Pipeline
from perfsuite.strategies.tensor import TensorParallel, overlap_messages
from perfsuite.strategies.trainer import Batch, Copies, Trainer, compile_blocks, make_optimizer, whole

_GROWTH, _BACKOFF, _INTERVAL = 2.0, 0.5, 2000  # Values of torch's GradScaler


class MeshScaler:
    """One dynamic loss scale for all ranks of a mesh: in fp16 all ranks step, or none.  torch's GradScaler would check
    each rank's own parameters only, and does not support parameters on several meshes.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup, *, init_scale: float) -> None:
        self._group = group
        self._scale = torch.full((), init_scale, dtype=torch.float32, device=device)
        self._steps_since = torch.zeros((), dtype=torch.int32, device=device)
        self._found = torch.zeros((), dtype=torch.float32, device=device)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return ``loss`` times the scale."""
        return loss * self._scale

    def get_scale(self) -> float:
        """Return the scale."""
        return float(self._scale)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, and step unless a gradient of any rank is not finite; a collective."""
        self._found.zero_()
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    gradient = local(parameter.grad)
                    by_dtype.setdefault(gradient.dtype, []).append(gradient)
        for gradients in by_dtype.values():
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, self._found, self._scale.reciprocal())
        dist.all_reduce(self._found, dist.ReduceOp.MAX, group=self._group)
        if not self._found.item():
            optimizer.step()

    def update(self, fixed: float | None = None) -> None:
        """Reduce the scale after an overflow, raise it after many steps without; a ``fixed`` scale stays."""
        if fixed is not None:
            return
        torch._amp_update_scale_(self._scale, self._steps_since, self._found, _GROWTH, _BACKOFF, _INTERVAL)


_FIRST_SCALE = 2.0**10  # First loss scale in fp16; sums of narrow gradients overflow before gradients of activations do


class HybridTrainer(Trainer):
    """The layers of one rank and their optimizer; all ranks call the same methods."""

    def __init__(self, rank: Rank, sizes: HybridSizes) -> None:
        plan, schedule = sizes.plan, sizes.schedule
        rank.dtype(plan.dtype)  # fp32 and tf32 differ by a switch
        self.sizes = sizes
        self.modules = {stage: _build(rank, sizes, layers) for stage, layers in sizes.stages()}
        self.pipeline = Pipeline(rank, schedule, self.modules, _edges(sizes), self._scaled) if schedule else None
        everything = nn.ModuleList(self.modules.values())
        hold = None
        if schedule is None and plan.accumulation > 1 and hasattr(self.modules[0], "set_requires_gradient_sync"):
            hold = reduce_in_last(self.modules[0])
        super().__init__(rank, plan, module=everything, optimizer=make_optimizer(everything, plan), hold=hold)
        if plan.dtype == "fp16":
            self.scaler = MeshScaler(rank.device, rank.group(), init_scale=plan.loss_scale or _FIRST_SCALE)
        experts = expert.expert_modules(everything)
        self._experts = {id(parameter) for part in experts for parameter in part.parameters()}
        self._nothing = torch.empty(plan.batch_size, 2, dtype=torch.int64, device=rank.device)

    # -- one step ------------------------------------------------------------------------------------------------

    @property
    def needs_data(self) -> bool:
        """Whether this rank takes inputs or targets."""
        return self.pipeline is None or self.pipeline.first or self.pipeline.last

    def forward_and_backward(
        self, batches: Iterator[Batch], first_forward: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> torch.Tensor | None:
        """Run all micro-batches, by the schedule if there is one; return the mean loss on ranks that have one."""
        if self.pipeline is None:
            loss = super().forward_and_backward(batches, first_forward)
            self._complete_gradients()
            return None if loss is None else whole(loss)
        loss = self._pipelined(self.pipeline, batches)
        with self.rank.span("tie"):
            self._complete_gradients()
            self._add_up_tied(self.pipeline)
        return loss

    def _pipelined(self, pipeline: Pipeline, batches: Iterator[Batch]) -> torch.Tensor | None:
        tokens = self._nothing
        self.scale_balance_losses()
        with self.rank.span("data"):
            if self.needs_data:
                tokens = torch.cat([batch["tokens"] for batch in islice(batches, self.plan.accumulation)])
        with self._split_loss():
            loss = pipeline.step(*self._inputs_and_targets(tokens))
        if loss is None:
            return None
        return whole(loss) / self.loss_scale() if self.plan.dtype == "fp16" else whole(loss)

    def _inputs_and_targets(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's places of (B, S + 1) tokens, as copies: torch 2.5 and 2.7 compare strides of inputs."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        places = next(iter(self.modules.values())).places
        if places is not None and self.needs_data:
            inputs, targets = inputs[:, places], targets[:, places]
        return inputs.clone(memory_format=torch.contiguous_format), targets.contiguous()

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return the mean loss of this rank's tokens of a micro-batch."""
        inputs, targets = self._inputs_and_targets(batch["tokens"])
        with self._split_loss():
            return cross_entropy(self.modules[0](inputs), targets)

    def backward(self, loss: torch.Tensor) -> None:
        """Add this micro-batch's share of the gradients."""
        with self._split_loss():
            super().backward(loss)

    def _scaled(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.scaler.scale(cross_entropy(logits, targets))

    def _split_loss(self) -> AbstractContextManager[Any]:
        split = self.sizes.loss_parallel and self.sizes.tp > 1
        return loss_parallel() if split else nullcontext()

    def _complete_gradients(self) -> None:
        """Sum the gradients that FSDP2 did not sum, and divide those of experts, which ep has summed, by ep."""
        ep = self.rank.shape.size("ep")
        unsummed = []
        for parameter in self.module.parameters():
            gradient: Any = parameter.grad
            if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:  # type: ignore[attr-defined]
                if all(isinstance(placement, Partial) for placement in gradient.placements) and _is_copy(parameter):
                    unsummed.append(parameter)
                else:
                    parameter.grad = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
            if ep > 1 and parameter.grad is not None and id(parameter) in self._experts:
                local(parameter.grad).div_(ep)
        if unsummed:
            self._sum_over_tp(unsummed)

    def _sum_over_tp(self, parameters: list[nn.Parameter]) -> None:
        """Sum in one message the gradients that every rank of tp holds whole: they are many and small.  Source:
        Megatron-LM, distributed/finalize_model_grads.py, which joins the gradients of its norms as well.
        """
        gradients: list[Any] = [parameter.grad for parameter in parameters]
        parts = [gradient.to_local() for gradient in gradients]
        joined = torch.cat([part.reshape(-1) for part in parts])
        dist.all_reduce(joined, group=self.rank.group("tp"))
        summed = joined.split([part.numel() for part in parts])
        for parameter, gradient, part, total in zip(parameters, gradients, parts, summed, strict=True):
            part.copy_(total.view_as(part))
            parameter.grad = DTensor.from_local(part, gradient.device_mesh, parameter.placements, run_check=False)  # type: ignore[attr-defined]

    def _add_up_tied(self, pipeline: Pipeline) -> None:
        held = [local(parameter.grad) for parameter in self._tied() if parameter.grad is not None]
        schedule = pipeline.schedule
        if not held or schedule.num_stages == 1:
            return
        ends = (schedule.rank_of_stage[0], schedule.rank_of_stage[-1])
        if ends[0] == ends[1]:
            total = held[0] + held[1]
            for gradient in held:
                gradient.copy_(total)
        else:
            pipeline.exchange(held[0], between=ends)

    # -- looking inside ------------------------------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of all this rank's layers; a tied one may come twice."""
        for module in self.modules.values():
            yield from module.named_parameters()

    def gradients(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Yield name and whole fp32 gradient of every parameter of this rank's layers; a collective."""
        experts = {name for name, parameter in self.named_parameters() if id(parameter) in self._experts}
        for name, gradient in super().gradients():
            if gradient is not None and name in experts and self.rank.shape.size("ep") > 1:
                parts = [torch.empty_like(gradient) for _ in range(self.rank.shape.size("ep"))]
                dist.all_gather(parts, gradient.contiguous(), group=self.rank.group("ep"))
                gradient = torch.cat(parts)  # noqa: PLW2901
            yield name, gradient

    def _tied(self) -> list[nn.Parameter]:
        """Return this rank's copies of the parameter that the first and the last stage share."""
        tied = [name for name, split in self.sizes.model.parallelize.items() if split == "tied"]
        names = {f"{name}.weight" for name in tied}
        return [parameter for name, parameter in self.named_parameters() if name in names]

    def copies(self) -> tuple[Copies, ...]:
        """Return the tied embedding of both end stages, and the parameters that every rank of tp holds whole."""
        copies: list[Copies] = []
        if self.pipeline is not None and any(split == "tied" for split in self.sizes.model.parallelize.values()):
            sums = [_sum(parameter) for parameter in self._tied()]
            copies.append(("the tied embedding", sums, self.pipeline.group))
        if self.rank.shape.size("tp") > 1:
            same = [parameter for parameter in self.module.parameters() if _is_copy(parameter)]
            if same:
                total = torch.stack([_sum(parameter) for parameter in same]).sum()
                name = "the parameters that tensor parallelism does not split"
                copies.append((name, [total], self.rank.group("tp")))
        return tuple(copies)

    def close(self) -> None:
        """Free the pipeline, the model and the optimizer."""
        if self.pipeline is not None:
            self.pipeline.close()
        self.modules.clear()
        super().close()


def _sum(parameter: torch.Tensor) -> torch.Tensor:
    return local(parameter).detach().double().sum()


def _is_copy(parameter: nn.Parameter) -> bool:
    """Return whether all ranks of tp hold the same values; in a mesh with tp, tp is the last dimension."""
    spread: Any = parameter
    names = spread.device_mesh.mesh_dim_names if isinstance(spread, DTensor) else ()
    return "tp" not in (names or ()) or isinstance(spread.placements[-1], Replicate)


def _build(rank: Rank, sizes: HybridSizes, layers: range) -> LanguageModule:
    """Return a stage with every parallelism of the mesh, built layer by layer: no rank ever holds a whole stage."""
    plan = sizes.plan
    with torch.device("meta"):
        module = build_layers(plan.model, plan.checkpointing, plan.attention, layers)
    spreader = DataParallel(rank, plan, replicate=sizes.replicate, reshard=sizes.reshard)
    parallel = None
    if sizes.tp > 1:
        mesh = rank.submesh("tp")
        split = {"sequence_parallel": sizes.sequence_parallel, "loss_parallel": sizes.loss_parallel}
        parallel = TensorParallel(mesh=mesh, **split)
        if sizes.async_tensor:
            overlap_messages(mesh)
    if sizes.cp > 1:
        apply_context(module, rank, sizes.context, plan.attention)
    compile_blocks(module, rank, plan)
    for number, block in module.blocks.named_children():
        if plan.model.experts:
            expert.keep_own(block, rank)
        materialize(block, rank.device, seed=plan.seed, prefix=f"blocks.{number}.")
        if plan.model.experts:
            expert.connect(block, rank, module.places)
        if parallel:
            parallel.split_block(module, block)
        spreader.spread(block, tuple(expert.expert_modules(block)))
    materialize(module, rank.device, seed=plan.seed)
    if parallel:
        parallel.split_ends(module)
    spreader.spread_rest(module)
    return module


def _edges(sizes: HybridSizes) -> Edges:
    """Return the tensors between the stages of a language model, and the logits."""
    plan, size = sizes.plan, sizes.plan.micro_batch_size
    length = plan.model.tokens_per_sample // sizes.cp
    between = length // sizes.tp if sizes.sequence_parallel else length
    dtype = getattr(torch, DTYPES[plan.dtype])
    return (
        torch.empty(size, length, dtype=torch.int64, device="meta"),
        torch.empty(size, between, plan.model.width, dtype=dtype, device="meta", requires_grad=True),
        torch.empty(size, length, plan.model.vocabulary, dtype=dtype, device="meta", requires_grad=True),
    )
