"""A time over another, with its interval."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """A time over another, and its 95 % interval: 1.05 is 5 % slower."""

    value: float
    low: float
    high: float

    @classmethod
    def of_logs(cls, value: float, low: float, high: float) -> Ratio:
        """Of differences of logarithms."""
        return cls(value=math.exp(value), low=math.exp(low), high=math.exp(high))

    @property
    def percent(self) -> str:
        """The change alone: ``+5.0 %``."""
        return f"{100 * (self.value - 1):+.1f} %"

    def __str__(self) -> str:
        low, high = (f"{percent:+.1f}" for percent in (100 * (self.low - 1), 100 * (self.high - 1)))
        return f"{self.percent} [{low}, {high}]"
