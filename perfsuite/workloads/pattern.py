"""Inputs with a closed form, so that every element of an output can be checked exactly.

Each element is a small whole number that depends on its place and its rank.  Small whole numbers are exact in every
dtype from int8 to bf16.  So are their sums in any order up to 127, so results are compared for equality.  Values repeat
after a prime number of places, so a buffer shifted or reordered in blocks of a round size is always found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PRIME = 113
_LARGEST_SUM = 127
_CHUNK_ELEMENTS = 1 << 24  # Elements per comparison, which allocates one byte per element


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """The inputs of all ranks of one case.

    >>> Pattern(world_size=2, summed=False).values(rank=1)[:4]
    [2, 4, 6, 8]
    >>> pattern = Pattern(world_size=2, summed=True)
    >>> [a + b for a, b in zip(pattern.values(rank=0), pattern.values(rank=1))] == pattern.totals()
    True
    """

    world_size: int
    summed: bool  # Whether the ranks' values are summed, so that all sums have to be exact

    @property
    def stride(self) -> int:
        """Every ``stride``-th rank adds to an element of a sum; above 127 ranks the others have zeros there."""
        return -(-self.world_size // _LARGEST_SUM) if self.summed else 1

    @property
    def period(self) -> int:
        """Places after which the values repeat."""
        return PRIME * self.stride

    def value(self, rank: int, index: int) -> int:
        """Return the input of ``rank`` at place ``index``, at least 0."""
        if (rank + index) % self.stride:
            return 0
        mixed = ((index + 1) * (rank % (PRIME - 1) + 1) + 31 * (rank // (PRIME - 1))) % PRIME
        contributors = -(-self.world_size // self.stride)
        return mixed % (_LARGEST_SUM // contributors + 1) if self.summed else mixed

    def values(self, *, rank: int, start: int = 0) -> list[int]:
        """Return one period of the inputs of ``rank`` from place ``start`` on."""
        return [self.value(rank, index) for index in range(start, start + self.period)]

    def totals(self, *, start: int = 0) -> list[int]:
        """Return one period of the sum over all ranks from place ``start`` on, at most 127 each."""
        return [
            sum(self.value(rank, index) for rank in range(self.world_size))
            for index in range(start, start + self.period)
        ]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The difference between a buffer and its expected values."""

    index: int  # First wrong element
    expected: float
    got: float
    wrong: int  # Number of wrong elements


def fill(buffer: torch.Tensor, values: Sequence[int]) -> None:
    """Write ``values`` into the flat ``buffer`` over and over."""
    import torch

    cycle = torch.tensor(values, dtype=buffer.dtype, device=buffer.device)
    whole = buffer.numel() // len(values) * len(values)
    buffer[:whole].view(-1, len(values)).copy_(cycle)
    buffer[whole:].copy_(cycle[: buffer.numel() - whole])


def poison(buffer: torch.Tensor) -> None:
    """Fill with a value that neither a pattern nor a sum has, so that an unwritten output is wrong."""
    import torch

    buffer.fill_(255 if buffer.dtype == torch.uint8 else -1)


def difference(buffer: torch.Tensor, values: Sequence[int]) -> Difference | None:
    """Return the first element of the flat ``buffer`` that differs from repeated ``values``, and their number."""
    import torch

    cycle = torch.tensor(values, dtype=buffer.dtype, device=buffer.device)
    step = max(1, _CHUNK_ELEMENTS // len(values)) * len(values)
    first, wrong = -1, 0
    for start in range(0, buffer.numel(), step):
        part = buffer[start : start + step]
        repeats = -(-part.numel() // len(values))
        unequal = part != cycle.repeat(repeats)[: part.numel()]
        count = int(unequal.sum())
        if count and first < 0:
            first = start + int(unequal.to(torch.uint8).argmax())
        wrong += count
    if not wrong:
        return None
    return Difference(index=first, expected=values[first % len(values)], got=float(buffer[first]), wrong=wrong)
