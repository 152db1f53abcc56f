"""What a rank of a pipeline does next: one computation of one stage on one micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["forward", "backward", "backward_input", "backward_weight"]
"""``backward`` is both gradients at once; a schedule that splits it runs ``backward_input`` (the gradient that the
previous stage waits for) and, any time later, ``backward_weight``."""

LETTERS: Mapping[Kind, str] = {"forward": "F", "backward": "B", "backward_input": "I", "backward_weight": "W"}
"""One letter per kind, as torch and the zero-bubble paper write them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """One entry of a rank's order.

    >>> print(Action(kind="forward", stage=2, micro_batch=5))
    2F5
    """

    kind: Kind
    stage: int
    """0 is the stage that holds the embedding."""
    micro_batch: int
    joined: bool = False
    """One unit with the rank's next action (an overlapped forward and backward): what this action sends to another rank
    leaves when that one has ended too."""

    def __str__(self) -> str:
        return f"{self.stage}{LETTERS[self.kind]}{self.micro_batch}{'+' if self.joined else ''}"


Order = tuple[Action, ...]
"""What one rank does, first to last."""

Durations = Callable[[Action], float]
"""Seconds that an action takes; the simulator only adds and compares them, so that fractions stay exact."""
