"""Step functions on real ranks: a layer of experts spread over a mesh against the same layer alone."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from perfsuite.base.errors import WrongResult
from perfsuite.models.moe import Moe
from perfsuite.record.workload import FunctionWorkload, Process

SMALL = Moe(
    name="moe-small", layers=1, width=16, heads=2, kv_heads=2, hidden=24, sequence_length=16, experts=4, top_k=2
)


@dataclass(frozen=True, kw_only=True)
class FreshFunction(FunctionWorkload):
    """In processes of its own: DTensor keeps what it learnt of an earlier case's mesh."""

    process = Process()


class Largest(TorchDispatchMode):
    """Numbers in the largest tensor with values that any operation gives."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            if isinstance(made, torch.Tensor) and not made.is_meta:
                self.numbers = max(self.numbers, made.untyped_storage().nbytes() // made.element_size())
        return result


def largest_of_a_build(rank):
    """Record the numbers in the largest tensor that building a model of experts makes."""
    from perfsuite.workloads.training.train_step import TrainStep

    step = TrainStep(model="moe-tiny", strategy="hybrid", mesh=str(rank.shape))
    largest = Largest()
    with largest:
        trainer = step.find_strategy().build(rank, step.plan(rank.shape))
    rank.record("largest", float(largest.numbers), reduce="max")
    trainer.close()
    return lambda: None


def layer_parity(rank, samples=2, zigzag=False, tolerance=1e-5, **fields):
    """Output, gradients, balance loss and figures of a layer on the rank's mesh against one process; no other strategy.

    Every data rank has ``samples`` samples.  Gradients are added up here as data parallelism would: those of experts
    over dp and cp, all others over dp, ep and cp.
    """
    from perfsuite.models.moe_module import moe_layers
    from perfsuite.strategies import expert

    config = dataclasses.replace(SMALL, **{"balance_weight": 0.5, **fields})
    shape, at = rank.shape, rank.shape.coordinates(rank.rank)
    data = [axis for axis in ("dp", "ep") if axis in shape.names]
    shares, share = 1, 0
    for axis in data:
        shares, share = shares * shape.size(axis), share * shape.size(axis) + at[axis]

    whole_batch = torch.randn(samples * shares, config.sequence_length, config.width)
    upstream = torch.randn_like(whole_batch) / len(whole_batch)
    reference, inputs = layer_of(config), whole_batch.clone().requires_grad_()
    expected = reference(inputs)
    (expected * upstream).sum().backward()

    cp, tp = shape.size("cp"), shape.size("tp")
    chunks = torch.arange(config.sequence_length).chunk(2 * cp if zigzag else cp)
    mine = at.get("cp", 0)
    places = torch.cat((chunks[mine], chunks[2 * cp - 1 - mine])) if zigzag else chunks[mine]
    layer = layer_of(config)
    expert.apply(layer, rank, places)
    local = places.chunk(tp)[at.get("tp", 0)]
    rows = slice(share * samples, (share + 1) * samples)
    x = whole_batch[rows, local].clone().requires_grad_()
    expert_parameters = {id(p) for part in expert.expert_modules(layer) for p in part.parameters()}

    def run():
        layer.zero_grad()
        x.grad = None
        for routed in moe_layers(layer):
            routed.loss_factor = 1 / (shares * cp)
        output = layer(x)
        (output * upstream[rows, local]).sum().backward()
        errors = {"output": _error(output, expected[rows, local]), "input": _error(x.grad, inputs.grad[rows, local])}
        for name, parameter in layer.named_parameters():
            gradient = _whole_gradient(rank, parameter, is_of_expert=id(parameter) in expert_parameters)
            errors[name] = _error(gradient, reference.get_parameter(name).grad)
        _judge(rank, errors, tolerance)
        expert.record(rank, layer)
        for name, value in reference.figures.items():
            rank.record(f"{name}_alone", value, reduce="equal")

    return run


def layer_of(config):
    from perfsuite.models.moe_module import MoeMlp

    torch.manual_seed(5)
    layer = MoeMlp(config.width, config.hidden, config.routing)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return layer


def _whole_gradient(rank, parameter, *, is_of_expert):
    """A parameter's gradient, added up over the ranks that hold the same and put together of those of experts."""
    from perfsuite.strategies.trainer import whole

    gradient = whole(parameter.grad).clone()
    for axis in ("dp", "cp") if is_of_expert else ("dp", "ep", "cp"):
        if rank.shape.size(axis) > 1:
            dist.all_reduce(gradient, group=rank.group(axis))
    if is_of_expert and "ep" in rank.shape.names:
        parts = [torch.empty_like(gradient) for _ in range(rank.shape.size("ep"))]
        dist.all_gather(parts, gradient.contiguous(), group=rank.group("ep"))
        gradient = torch.cat(parts)
    return gradient


def _judge(rank, errors, tolerance):
    worst = max(errors, key=errors.get)
    if not errors[worst] <= tolerance:
        raise WrongResult(f"{worst} on mesh {rank.shape}", expected=f"at most {tolerance}", got=errors[worst])
    rank.record("error", errors[worst])


def _error(got, expected):
    return float((got - expected).norm() / expected.norm())
