"""Traits of the code that runs a step: what its elementwise kernels move, what it keeps, what overlaps.

Bytes are linear in tokens x width and tokens x hidden features, so they are counted from the code and never fitted
to step times.  Every row names the source of its counts.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from perfsuite.models import Model
from perfsuite.records import Training


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """How a block is computed and its messages are sent."""

    name: str
    source: str
    """How the counts were made."""
    forward_width_bytes: float = 20.0
    """Bytes that elementwise kernels of a block move in its forward, per token and width."""
    forward_hidden_bytes: float = 4.0
    """Per token and hidden feature of the MLP."""
    backward_width_bytes: float = 36.0
    backward_hidden_bytes: float = 6.0
    forward_logit_bytes: float = 8.0
    """Per token and word."""
    backward_logit_bytes: float = 8.0
    score_bytes: tuple[float, float] = (0.0, 0.0)
    """Forward and backward, per head and pair of tokens; zeros where scores are never written (flash)."""
    causal_skips: bool = True
    """Whether attention computes only the half that a causal mask leaves."""
    forward_kernels: int = 16
    """Kernels of a block's forward that are no matrix product."""
    backward_kernels: int = 30
    optimizer_bytes: float = 30.0
    """Bytes that the optimizer moves per parameter that a rank updates."""
    kept_width_bytes: float = 16.0
    """Bytes that a block keeps for its backward, per token and width, that tensor parallelism splits."""
    kept_whole_bytes: float = 10.0
    """Those that it splits under sequence parallelism only."""
    kept_hidden_bytes: float = 4.0
    """Per token and hidden feature."""
    weight_bytes: float = 4.0
    """Of a parameter as it is kept."""
    compute_bytes: float = 2.0
    """Of a parameter as it is sent and multiplied; equal to ``weight_bytes`` without a copy."""
    gradient_bytes: float = 4.0
    optimizer_state_bytes: float = 8.0
    tensor_overlap: float = 0.0
    """Share of tensor parallelism's messages that hides behind products."""
    data_overlap: float = 1.0
    """Share of the messages of data parallelism that hides where there is work to hide behind."""
    stage_overlap: float = 0.0
    """Share of messages between stages that hides."""
    stage_messages: Literal["whole", "split"] = "whole"
    """Whether tensor-parallel ranks send a part each."""


PLAIN = Implementation(name="plain", source="counted by hand from perfsuite.models: one kernel per operation")
"""perfsuite's own modules without autocast, until a dry run has counted them."""


def implementation_of(model: Model, training: Training) -> Implementation:
    """The row of perfsuite's own modules for a step."""
    return dataclasses.replace(PLAIN, data_overlap=1.0 if training.overlap else 0.0)
