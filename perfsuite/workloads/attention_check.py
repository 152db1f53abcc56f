"""Is an attention right: some rows of the output or of the gradients against fp64, for every sample and head of keys.

Shapes: G heads of queries that share one of keys, S tokens, E features, R rows that are looked at.

The inputs are standard normal.  Every result is a sum of products, each of which a kernel may round to its dtype, so
its error is about u times the root of the sum of their squares, with u = rounding of the dtype + sqrt(S) x that of
fp32, in which sums are kept.  Eight times that is allowed: a right kernel keeps it, a skipped or a wrong key is of the
order of the root itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perfsuite.base.errors import WrongResult
from perfsuite.workloads.product import ROUNDING

if TYPE_CHECKING:
    import torch

    from perfsuite.workloads.attention import Attention, AttentionStep

_ROWS = 16
_SLACK = 8.0
_CHUNK_ROWS = 512
"""Queries whose scores are held at a time, in fp64."""


@dataclass(frozen=True, kw_only=True)
class _Head:
    """One head of keys of one sample and the queries that look at it, in fp64."""

    case: Attention
    sample: int
    place: int
    """Of the head of keys."""
    query: torch.Tensor
    """(G, S, E)."""
    key: torch.Tensor
    """(S, E)."""
    value: torch.Tensor
    """(S, E)."""
    upstream: torch.Tensor
    """(G, S, E)."""

    @property
    def heads(self) -> slice:
        """Heads of queries."""
        group = len(self.query)
        return slice(self.place * group, (self.place + 1) * group)

    def weights(self, rows: torch.Tensor) -> torch.Tensor:
        """Softmax of the scores of the queries at ``rows``, (G, R, S)."""
        import torch

        scores = self.query[:, rows] @ self.key.T / math.sqrt(self.case.head_width)
        if self.case.causal:
            hidden = torch.arange(self.case.sequence_length)[None, :] > rows[:, None]
            scores = scores.masked_fill(hidden, float("-inf"))
        return scores.softmax(dim=-1)

    def score_gradients(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(weights, gradient of the scores, the size of what it is the difference of), (G, R, S) each."""
        weights, toward = self.weights(rows), self.upstream[:, rows] @ self.value.T
        mean = (weights * toward).sum(dim=-1, keepdim=True)
        return weights, weights * (toward - mean), weights * (toward.abs() + mean.abs() + 1)

    def compare(self, what: str, got: torch.Tensor, exact: torch.Tensor, squares: torch.Tensor) -> None:
        """Raise WrongResult unless ``got`` is ``exact``, whose terms' squares sum to ``squares``."""
        unit = self.case.rounding + math.sqrt(self.case.sequence_length) * ROUNDING["fp32"]
        excess = (got.cpu().double() - exact).abs() - _SLACK * unit * (exact.abs() + squares.sqrt())
        wrong = ~(excess <= 0)  # written so that a NaN is wrong
        if bool(wrong.any()):
            index = tuple(wrong.nonzero()[0].tolist())
            raise WrongResult(
                f"{what}, element {list(index)} of the rows looked at, of {self.case} "
                f"({int(wrong.sum())} elements beyond rounding)",
                expected=float(exact[index]),
                got=float(got[index]),
            )


def check_output(case: Attention, step: AttentionStep) -> None:
    """Rows of the output of every head."""
    rows = _chosen_rows(case)
    for head in _heads(case, step):
        weights = head.weights(rows)
        got = step.out[head.sample, head.heads][:, rows]
        what = f"output of sample {head.sample}, head {head.heads.start}"
        head.compare(what, got, weights @ head.value, weights**2 @ head.value**2)


def check_gradients(case: Attention, step: AttentionStep) -> None:
    """Rows of the gradients of queries, keys and values; of keys and values they come from all queries."""
    if len(step.gradients) != 3:
        raise WrongResult(f"attention {case}: no gradients were computed")
    for head in _heads(case, step):
        _check_head(case, step, head)


def _check_head(case: Attention, step: AttentionStep, head: _Head) -> None:
    import torch

    rows, scale = _chosen_rows(case), 1 / math.sqrt(case.head_width)
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
        mine = torch.isin(part, rows)
        if mine.any():
            key, got = head.key * scale, d_query[head.heads][:, part[mine]]
            what = f"gradient of queries of sample {head.sample}, head {head.heads.start}"
            head.compare(what, got, inner[:, mine] @ key, size[:, mine] ** 2 @ key**2)
    where = f"of sample {head.sample}, head of keys {head.place}"
    head.compare(f"gradient of keys {where}", d_key[head.place][rows], keys, key_squares)
    head.compare(f"gradient of values {where}", d_value[head.place][rows], values, value_squares)


def _over_queries(weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """(R, E) out of (G, S, R) and (G, S, E)."""
    return (weights.transpose(-1, -2) @ rows).sum(dim=0)


def _chosen_rows(case: Attention) -> torch.Tensor:
    import torch

    return torch.linspace(0, case.sequence_length - 1, min(_ROWS, case.sequence_length)).long()


def _heads(case: Attention, step: AttentionStep) -> Iterator[_Head]:
    """Every head of keys; for a backward, which needs all scores, the first and the last one."""
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
