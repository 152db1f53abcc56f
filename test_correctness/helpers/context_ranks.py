"""What tests of context parallelism run on ranks: attention of spread tokens against attention of all of them."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist

from perfsuite.record.result import Work
from perfsuite.record.workload import CallableStep, Rank, Workload

BATCH, FEATURES = 2, 16


@dataclass(frozen=True, kw_only=True)
class SpreadAttention(Workload):
    """Records ``out``, ``d_query``, ``d_key``, ``d_value``: relative errors in the norm, the largest of the ranks."""

    method: str
    cp: int
    attention: str = "auto"
    heads: int = 8
    key_heads: int = 8
    length: int = 96
    dtype: str = "fp32"

    def layout(self):
        return f"cp{self.cp}"

    def work(self, shape):
        return Work()

    def build(self, rank):
        return CallableStep(lambda: measure(self, rank))


def measure(case: SpreadAttention, rank: Any) -> None:
    from perfsuite.models.layers import AttentionCore
    from perfsuite.strategies.context_attention import indices, new_core

    def tensor(heads: int, seed: int) -> torch.Tensor:
        shape = BATCH, case.length, heads, FEATURES
        values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).transpose(1, 2)
        return values.to(rank.device, rank.dtype(case.dtype))

    inputs = [tensor(heads, seed) for seed, heads in enumerate((case.heads, case.key_heads, case.key_heads))]
    upstream = tensor(case.heads, 3)
    whole = [each.float().requires_grad_() for each in inputs]
    out = AttentionCore("math")(*whole)
    out.backward(upstream.float())
    at = indices(rank, case.method, case.length)
    own = [each[:, :, at].detach().requires_grad_() for each in inputs]
    found = new_core(rank, case.method, case.attention)(*own)
    found.backward(upstream[:, :, at])
    pairs = [("out", found, out), *((f"d_{n}", a.grad, b.grad) for n, a, b in zip(NAMES, own, whole, strict=True))]
    for name, got, everywhere in pairs:
        assert got.dtype == own[0].dtype
        wanted = everywhere[:, :, at]
        rank.record(name, (got.float() - wanted).norm() / wanted.norm())


NAMES = ("query", "key", "value")


@dataclass(frozen=True, kw_only=True)
class LonelyAttention(Workload):
    """Rank 0 alone attends in silence: whatever a real group carried would wait for the others for ever."""

    method: str

    def work(self, shape):
        return Work()

    def build(self, rank):
        return CallableStep(lambda: attend_alone(self.method, rank))


def attend_alone(method: str, rank: Any) -> None:
    import torch.testing._internal.distributed.fake_pg  # importing it registers the backend "fake"

    from perfsuite.strategies.context_attention import new_core

    nobody = dist.new_group(backend="cpu:fake")
    silent = SimpleNamespace(device=rank.device, rank=rank.rank, shape=rank.shape, group=lambda *axes: nobody)
    core = new_core(cast(Rank, silent), method, "math")
    inputs = [torch.randn(BATCH, 4, 8, FEATURES, requires_grad=True) for _ in NAMES]
    if rank.rank == 0:
        core(*inputs).sum().backward()
        rank.record("shaped", float(all(x.grad.shape == x.shape for x in inputs)), reduce="only")
    came = torch.ones(1)
    dist.all_reduce(came, group=rank.group())
    rank.record("ranks", float(came), reduce="equal")
    dist.destroy_process_group(nobody)


@dataclass(frozen=True, kw_only=True)
class FaultyAttention(SpreadAttention):
    """Rank 1 dies or hangs in the midst of the ring, or between two exchanges of heads."""

    fault: str

    def build(self, rank):
        return CallableStep(lambda: measure_with_fault(self, rank))


def measure_with_fault(case: FaultyAttention, rank: Any) -> None:
    from perfsuite.strategies import context_attention as module

    name = "block_forward" if case.method in ("ring", "zigzag") else "_exchange"
    right = getattr(module, name)
    calls: list[int] = []

    def wrong(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        if rank.rank == 1 and len(calls) == 2:
            misbehave(case.fault)
        return right(*arguments, **named)

    setattr(module, name, wrong)
    try:
        measure(case, rank)
    finally:
        setattr(module, name, right)


def misbehave(fault: str) -> None:
    if fault == "die":
        os._exit(7)
    time.sleep(3600)
