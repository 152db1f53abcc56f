"""What a strategy posts in one step, told without torch: the closed form that a counted step is held against.

A closed form is a tuple of :class:`Call`, one for each axis, collective and part; docs model-parallel derives them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

ATTENTION = "attention"
"""Part of a step: attention of all blocks, forward and backward."""
MLP = "mlp"
"""Part of a step: the MLPs or experts of all blocks, their dispatch included."""
DATA = "data"
"""Part of a step: parameters gathered and gradients summed over the ranks that see other samples."""
PIPELINE = "pipeline"
"""Part of a step: what passes between stages, and waiting for it."""
OTHER = "other"
"""Part of a step: norms, embeddings, the loss, the optimizer."""
PARTS = (ATTENTION, MLP, DATA, PIPELINE, OTHER)


@dataclass(frozen=True, kw_only=True)
class Call:
    """Calls of one collective along one axis for one part of the step."""

    axis: str
    """Axis of the mesh, or several joined by dashes in the mesh's order: ``tp``, ``dp-ep-cp``."""
    collective: str
    """all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send or receive."""
    part: str
    """One of PARTS."""
    calls: int
    message_bytes: int
    """S of all calls together, as nccl-tests counts it."""
    uneven: bool = False
    """The bytes are this rank's mean share: exact only over all ranks together."""


class Tally:
    """Calls added up by axis, collective and part; an axis that has one rank adds nothing.

    >>> tally = Tally()
    >>> tally.add("tp", "all_gather", "attention", 2, 512)
    >>> tally.add("tp", "all_gather", "attention", 1, 256)
    >>> tally.add("", "all_gather", "attention", 1, 256)
    >>> [(call.calls, call.message_bytes) for call in tally.calls()]
    [(3, 1280)]
    """

    def __init__(self) -> None:
        self._calls: Counter[tuple[str, str, str]] = Counter()
        self._bytes: Counter[tuple[str, str, str]] = Counter()
        self._uneven: set[tuple[str, str, str]] = set()

    def add(
        self, axis: str, collective: str, part: str, calls: int, message_bytes: int, *, uneven: bool = False
    ) -> None:
        """``calls`` of ``message_bytes`` each."""
        if axis and calls:
            key = (axis, collective, part)
            self._calls[key] += calls
            self._bytes[key] += calls * message_bytes
            if uneven:
                self._uneven.add(key)

    def calls(self) -> tuple[Call, ...]:
        """What was added, in the order in which each first came."""
        return tuple(
            Call(
                axis=key[0],
                collective=key[1],
                part=key[2],
                calls=count,
                message_bytes=self._bytes[key],
                uneven=key in self._uneven,
            )
            for key, count in self._calls.items()
        )


def padded_bytes(shapes: Sequence[tuple[int, ...]], ranks: int, item_bytes: int) -> int:
    """Bytes of parameters of these shapes, the first dimension of each padded to a multiple of ``ranks``.

    So FSDP2 gathers and reduces them.

    >>> padded_bytes([(5, 3), (8,)], 4, 4)
    128
    """
    total = 0
    for first, *rest in shapes:
        row = 1
        for size in rest:
            row *= size
        total += -(-first // ranks) * ranks * row
    return total * item_bytes


def buckets(sizes: Sequence[int], limit_bytes: float) -> int:
    """Messages in which DDP sends gradients of these bytes, in the order in which they are ready.

    A bucket is closed by the gradient with which it reaches the limit.

    >>> buckets([4, 4, 4], 8), buckets([4, 4, 4], 100), buckets([4, 4, 4], 1)
    (2, 1, 3)
    """
    count, filled = 0, 0
    for size in sizes:
        count += filled == 0
        filled += size
        if filled >= limit_bytes:
            filled = 0
    return count
