"""How many floating-point operations a training step is said to take: the conventions in use, one function each.

The same run reads 46 % to 70 % of a device's peak depending on the convention, so every figure carries the name of its
own.  All of them count one sample of S tokens, forward and backward: three times the forward's products, and a fourth
time if activations are recomputed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

EXACT = "exact"
EXECUTED = "exact with recompute"
SIX_N = "6N"
PALM = "PaLM"
MEGATRON = "Megatron"
COLOSSALAI = "ColossalAI"
FROZEN = "frozen encoders"
"""No convention: the forward of encoders that are not trained, which none of the above counts."""


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """The figures of a model that conventions use."""

    parameters: int  # N: those that a token meets, all of them but for a mixture of experts.
    layers: int  # L.
    width: int  # h: heads x features of a head.
    tokens: int  # S: tokens of a sample.
    vocabulary: int  # V; 0 for a model that predicts no words.
    forward_flops: float  # Operations of one sample's forward, every product counted.
    block_flops: float  # Operations of the blocks, which full checkpointing runs again.
    recomputes: bool = False
    """Full activation checkpointing: the blocks' forward runs again in the backward.  Selective checkpointing of the
    suite keeps the results of all products and of attention, so it runs none of the counted operations again."""


def exact(model: Transformer) -> float:
    """Three times every product of the forward; the backward of a product is two.  The model's work: for MFU."""
    return 3 * model.forward_flops


def executed(model: Transformer) -> float:
    """:func:`exact` and the blocks' forward once more where it is computed again.  The device's work: for HFU."""
    return 3 * model.forward_flops + (model.block_flops if model.recomputes else 0.0)


def six_n(model: Transformer) -> float:
    """6 N S: two operations per parameter and token in the forward, four in the backward; no attention scores.

    Source: Kaplan et al. 2020, section 2.1.  FlagPerf rounds N to 7e9 for a 7B model.

    >>> six_n(LLAMA2_7B) / LLAMA2_7B.tokens / 1e9
    40.430493696
    """
    return 6.0 * model.parameters * model.tokens


def palm(model: Transformer) -> float:
    """(6 N + 12 L h S) S: 6N and the attention scores, counted in full.

    Source: Chowdhery et al. 2022 (PaLM), appendix B.

    >>> round(palm(LLAMA2_7B) / LLAMA2_7B.tokens / 1e9, 1)
    46.9
    """
    per_token = 6.0 * model.parameters + 12.0 * model.layers * model.width * model.tokens
    return per_token * model.tokens


def megatron(model: Transformer) -> float:
    """24 f S L h^2 (1 + S / 6h + V / 16Lh), f = 3 passes, 4 with full recompute; an MLP of 4h and no grouped queries.

    Source: Narayanan et al. 2021, equation 3, whose 96 is 24 x 4.  f multiplies the logits too, as published.

    >>> round(megatron(LLAMA2_7B) / LLAMA2_7B.tokens / 1e9, 1)
    45.7
    """
    layers, width, tokens = model.layers, model.width, model.tokens
    terms = 1 + tokens / (6 * width) + model.vocabulary / (16 * layers * width)
    return 24.0 * _passes(model) * tokens * layers * width**2 * terms


def colossalai(model: Transformer) -> float:
    """2 f N S, f = 3 passes, 4 with full recompute: 6N or 8N.

    Source: ColossalAI's PerformanceEvaluator, which the Open-Sora report used.

    >>> round(colossalai(LLAMA2_7B) / LLAMA2_7B.tokens / 1e9, 1)
    40.4
    """
    return 2.0 * _passes(model) * model.parameters * model.tokens


def _passes(model: Transformer) -> int:
    return 4 if model.recomputes else 3


def count_all(model: Transformer) -> Mapping[str, float]:
    """Operations of one sample by convention."""
    return {
        EXACT: exact(model),
        EXECUTED: executed(model),
        SIX_N: six_n(model),
        PALM: palm(model),
        MEGATRON: megatron(model),
        COLOSSALAI: colossalai(model),
    }


LLAMA2_7B = Transformer(
    parameters=6738415616,
    layers=32,
    width=4096,
    tokens=4096,
    vocabulary=32000,
    forward_flops=62921270886400.0,
    block_flops=61847529062400.0,
)
"""The example of this module."""
