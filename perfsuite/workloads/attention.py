"""Scaled dot product attention: one kernel, forward or backward, of a chosen backend.

Shapes: B batch, H heads of queries, K heads of keys (K divides H), S tokens, E features of a head; in the check G heads
of queries that share one head of keys, R compared rows.

The check compares some rows of the output or of the gradients with fp64, for every sample and head of keys.  The inputs
are standard normal.  Every result is a sum of products, and a kernel may round each to its dtype.  So its error is
about u times the root of the sum of their squares, with u = rounding of the dtype + sqrt(S) x that of the fp32 sums.
The limit is eight times that: a right kernel stays below it, and a missing or wrong key errs by about the root itself.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from perfsuite.base.errors import InvalidParameter, UnsupportedCase, WrongResult, first_line
from perfsuite.base.mesh import MeshShape
from perfsuite.models.base import divisors
from perfsuite.record.result import Work
from perfsuite.record.workload import Rank, Step
from perfsuite.workloads.checks import ROUNDING, NativeWorkload, require_choices, require_counts

if TYPE_CHECKING:
    import torch


Backend = Literal["flash", "efficient", "math", "cudnn"]
Direction = Literal["forward", "backward"]

CONVENTION = "FlashAttention"
_BACKENDS = {"flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "math": "MATH", "cudnn": "CUDNN_ATTENTION"}
_NO_KERNEL = ("No available kernel", "No viable backend", "requires", "not supported", "does not support")


@dataclass(frozen=True, kw_only=True)
class Attention(NativeWorkload):
    """``scaled_dot_product_attention`` of one layer, in the layout (B, H, S, E)."""

    batch_size: int  # B: samples.
    heads: int  # H: heads of queries.
    kv_heads: int  # K: heads of keys and values, each shared by H / K heads of queries (grouped query attention).
    sequence_length: int  # S: tokens.
    head_width: int  # E: features of a head.
    dtype: str = "bf16"  # fp32, bf16 or fp16.
    causal: bool = True  # A token sees only itself and earlier tokens.
    backend: Backend = "flash"  # The kernel; the case is skipped if the device lacks it for these shapes.
    direction: Direction = "forward"  # ``backward``: only the three gradients, from the output of one forward.

    metrics: ClassVar[tuple[str, ...]] = ("tflops",)
    captured: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_counts(self, "batch_size", "heads", "kv_heads", "sequence_length", "head_width")
        if self.heads % self.kv_heads:
            choices = sorted(divisors(self.heads, 1))
            raise InvalidParameter(
                f"kv_heads={self.kv_heads} does not divide heads={self.heads}; choose from {choices}"
            )
        require_choices(self, backend=get_args(Backend), direction=get_args(Direction), dtype=("fp32", "bf16", "fp16"))

    def work(self, shape: MeshShape) -> Work:
        """Return FlashAttention's count: 4 B H S^2 E forward, half of it if causal, and 2.5 times that backward.

        There are two products forward and five backward, because the scores count again in the backward of any backend.
        Source: benchmarks/benchmark_flash_attention.py of Dao-AILab/flash-attention.

        >>> shape = MeshShape.of(dp=1)
        >>> sizes = dict(batch_size=2, heads=4, kv_heads=2, sequence_length=8, head_width=16)
        >>> [Attention(**sizes, direction=way).work(shape).flops for way in ("forward", "backward")]
        [{'FlashAttention': 16384.0}, {'FlashAttention': 40960.0}]
        """
        pairs = self.batch_size * self.heads * self.sequence_length**2 / (2 if self.causal else 1)
        products = 10.0 if self.direction == "backward" else 4.0
        return Work(flops={CONVENTION: products * pairs * self.head_width * shape.world_size}, dtype=self.dtype)

    def build(self, rank: Rank) -> _AttentionStep:
        """Return queries, keys and values on the device; raises UnsupportedCase if the backend has no kernel."""
        return _AttentionStep(self, rank)

    def check(self, rank: Rank, step: Step) -> None:
        """Raise WrongResult unless output or gradients are right, in some rows against fp64."""
        assert isinstance(step, _AttentionStep)
        if self.direction == "forward":
            check_output(self, step)
        else:
            check_gradients(self, step)


class _AttentionStep(Step):
    """Inputs and results of one rank."""

    def __init__(self, workload: Attention, rank: Rank) -> None:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        case, dtype = workload, rank.dtype(workload.dtype)
        self._case, self._rank = case, rank
        self._chosen = contextlib.ExitStack()
        tail = (case.sequence_length, case.head_width)
        wide, narrow = (case.batch_size, case.heads, *tail), (case.batch_size, case.kv_heads, *tail)
        self.query, self.key, self.value, self.upstream = (
            torch.empty(shape, dtype=dtype, device=rank.device) for shape in (wide, narrow, narrow, wide)
        )
        self.out = self.upstream
        self.gradients: tuple[torch.Tensor, ...] = ()
        # Set once for all iterations: the switch is process-wide, and setting it would be timed.
        self._chosen.enter_context(sdpa_kernel(getattr(SDPBackend, _BACKENDS[case.backend])))
        try:
            self.refill()
            self.run()
        except RuntimeError as error:
            self._chosen.close()
            if isinstance(error, torch.OutOfMemoryError) or not any(word in str(error) for word in _NO_KERNEL):
                raise
            group = (
                f", {case.heads // case.kv_heads} heads of queries on one of keys" if case.heads > case.kv_heads else ""
            )
            raise UnsupportedCase(
                f"attention has no {case.backend} kernel on {rank.device.type} for {case.dtype}, heads of "
                f"{case.head_width}{group}: {first_line(error)}"
            ) from None

    def _attend(self) -> Any:
        from torch.nn import functional

        attend: Any = functional.scaled_dot_product_attention
        grouped = {"enable_gqa": True} if self._case.heads > self._case.kv_heads else {}
        return attend(self.query, self.key, self.value, is_causal=self._case.causal, **grouped)

    def run(self) -> None:
        import torch

        if self._case.direction == "forward":
            with torch.no_grad():
                self.out = self._attend()
        else:
            inputs = (self.query, self.key, self.value)
            self.gradients = torch.autograd.grad(self.out, inputs, self.upstream, retain_graph=True)

    def refill(self) -> None:
        """Fill the inputs from their seeds and clear the results; before a backward, run one forward."""
        generator = self._rank.generator(1)
        for tensor in (self.query, self.key, self.value, self.upstream):
            tensor.requires_grad_(False).normal_(generator=generator)
        self.gradients = ()
        self.out = self.upstream
        if self._case.direction == "backward":
            for tensor in (self.query, self.key, self.value):
                tensor.requires_grad_()
            self.out = self._attend()

    def close(self) -> None:
        self._chosen.close()
        del self.query, self.key, self.value, self.upstream, self.out, self.gradients


_ROWS = 16
_SLACK = 8.0
_CHUNK_ROWS = 512  # Queries whose fp64 scores are in memory at a time


@dataclass(frozen=True, kw_only=True)
class _Head:
    """One head of keys of one sample and its queries, in fp64."""

    case: Attention
    sample: int
    place: int  # Number of the head of keys
    query: torch.Tensor  # (G, S, E)
    key: torch.Tensor  # (S, E)
    value: torch.Tensor  # (S, E)
    upstream: torch.Tensor  # (G, S, E)

    @property
    def heads(self) -> slice:
        """Heads of queries."""
        group = len(self.query)
        return slice(self.place * group, (self.place + 1) * group)

    def weights(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the softmax of the scores of the queries at ``rows``, (G, R, S)."""
        import torch

        scores = self.query[:, rows] @ self.key.T / math.sqrt(self.case.head_width)
        if self.case.causal:
            hidden = torch.arange(self.case.sequence_length)[None, :] > rows[:, None]
            scores = scores.masked_fill(hidden, float("-inf"))
        return scores.softmax(dim=-1)

    def score_gradients(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (weights, gradient of the scores, magnitude of its terms), (G, R, S) each."""
        weights, toward = self.weights(rows), self.upstream[:, rows] @ self.value.T
        mean = (weights * toward).sum(dim=-1, keepdim=True)
        return weights, weights * (toward - mean), weights * (toward.abs() + mean.abs() + 1)

    def compare(self, name: str, got: torch.Tensor, exact: torch.Tensor, squares: torch.Tensor) -> None:
        """Raise WrongResult unless ``got`` is ``exact``, a sum of terms whose squares sum to ``squares``."""
        unit = ROUNDING[self.case.dtype] + math.sqrt(self.case.sequence_length) * ROUNDING["fp32"]
        excess = (got.cpu().double() - exact).abs() - _SLACK * unit * (exact.abs() + squares.sqrt())
        wrong = ~(excess <= 0)  # a NaN is wrong too
        if bool(wrong.any()):
            index = tuple(wrong.nonzero()[0].tolist())
            raise WrongResult(
                f"{name}, element {list(index)} of the compared rows, of {self.case} "
                f"({int(wrong.sum())} elements beyond rounding)",
                expected=float(exact[index]),
                got=float(got[index]),
            )


def check_output(case: Attention, step: _AttentionStep) -> None:
    """Compare rows of the output of every head."""
    rows = _chosen_rows(case)
    for head in _heads(case, step):
        weights = head.weights(rows)
        got = step.out[head.sample, head.heads][:, rows]
        name = f"output of sample {head.sample}, head {head.heads.start}"
        head.compare(name, got, weights @ head.value, weights**2 @ head.value**2)


def check_gradients(case: Attention, step: _AttentionStep) -> None:
    """Compare rows of the gradients of queries, keys and values; those of keys and values sum over all queries."""
    import torch

    if len(step.gradients) != 3:
        raise WrongResult(f"attention {case}: no gradients were computed")
    rows, scale = _chosen_rows(case), 1 / math.sqrt(case.head_width)
    for head in _heads(case, step):
        d_query, d_key, d_value = (gradient[head.sample] for gradient in step.gradients)
        keys, key_squares, values, value_squares = torch.zeros(4, len(rows), case.head_width, dtype=torch.float64)
        for start in range(0, case.sequence_length, _CHUNK_ROWS):
            part = torch.arange(start, min(start + _CHUNK_ROWS, case.sequence_length))
            weights, inner, size = head.score_gradients(part)
            query, upstream = head.query[:, part] * scale, head.upstream[:, part]
            keys += _over_queries(inner[..., rows], query)
            key_squares += _over_queries(size[..., rows] ** 2, query**2)
            values += _over_queries(weights[..., rows], upstream)
            value_squares += _over_queries(weights[..., rows] ** 2, upstream**2)
            among = torch.isin(part, rows)
            if among.any():
                key, got = head.key * scale, d_query[head.heads][:, part[among]]
                name = f"gradient of queries of sample {head.sample}, head {head.heads.start}"
                head.compare(name, got, inner[:, among] @ key, size[:, among] ** 2 @ key**2)
        where = f"of sample {head.sample}, head of keys {head.place}"
        head.compare(f"gradient of keys {where}", d_key[head.place][rows], keys, key_squares)
        head.compare(f"gradient of values {where}", d_value[head.place][rows], values, value_squares)


def _over_queries(weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return (R, E) for (G, S, R) weights and (G, S, E) rows."""
    return (weights.transpose(-1, -2) @ rows).sum(dim=0)


def _chosen_rows(case: Attention) -> torch.Tensor:
    import torch

    return torch.linspace(0, case.sequence_length - 1, min(_ROWS, case.sequence_length)).long()


def _heads(case: Attention, step: _AttentionStep) -> Iterator[_Head]:
    """Yield every head of keys; for a backward, which needs all scores, only the first and the last one."""
    places = [(sample, place) for sample in range(case.batch_size) for place in range(case.kv_heads)]
    if case.direction == "backward":
        places = sorted({places[0], places[-1]})
    group = case.heads // case.kv_heads
    for sample, place in places:
        heads = slice(place * group, (place + 1) * group)
        tensors = (step.query[sample, heads], step.key[sample, place], step.value[sample, place])
        query, key, value, upstream = (
            tensor.detach().cpu().double() for tensor in (*tensors, step.upstream[sample, heads])
        )
        yield _Head(case=case, sample=sample, place=place, query=query, key=key, value=value, upstream=upstream)
