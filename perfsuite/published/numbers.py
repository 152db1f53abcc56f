"""Printed numbers as intervals of the values that round to the printed digits, in exact fractions.

``18.9`` may be anything from 18.85 to 18.95.  A rule that divides two printed numbers divides their intervals, so that
a correctly rounded table passes.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from fractions import Fraction

_NUMBER = re.compile(
    r"(?<![\w.])(?P<sign>[-+]?)(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?)(?P<exponent>[eE][-+]?[0-9]+)?"
)
_LARGEST = 30  # Largest number of decimal places before or after the point of a figure
_BOUND = re.compile(r"^\s*(?:[<>≤≥~≈]|<=|>=)")
_OUT_OF_MEMORY = re.compile(r"\boom\b|out[ _-]of[ _-]memory|无法运行|显存不足", re.IGNORECASE)
_BLANK = frozenset({"", "-", "--", "---", "—", "/", "n/a", "na", "nan", "none", "null", "tbd"})


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A closed interval of exact numbers."""

    low: Fraction
    high: Fraction

    def __post_init__(self) -> None:
        assert self.low <= self.high, f"interval from {self.low} to {self.high} is empty"

    @classmethod
    def exactly(cls, value: Fraction | float) -> Interval:
        """Return the interval of one number; a float counts as the shortest decimal that prints like it."""
        exact = value if isinstance(value, Fraction) else Fraction(str(value))
        return cls(low=exact, high=exact)

    @property
    def middle(self) -> Fraction:
        """Middle of both ends: the printed number."""
        return (self.low + self.high) / 2

    def __add__(self, other: Interval) -> Interval:
        return Interval(low=self.low + other.low, high=self.high + other.high)

    def __sub__(self, other: Interval) -> Interval:
        return Interval(low=self.low - other.high, high=self.high - other.low)

    def __mul__(self, other: Interval) -> Interval:
        if self.low >= 0 and other.low >= 0:  # the usual case, with half the work
            return Interval(low=self.low * other.low, high=self.high * other.high)
        ends = [a * b for a in (self.low, self.high) for b in (other.low, other.high)]
        return Interval(low=min(ends), high=max(ends))

    def over(self, other: Interval) -> Interval | None:
        """Return the quotient; None if the divisor may be zero or negative."""
        if other.low <= 0:
            return None
        return self * Interval(low=1 / other.high, high=1 / other.low)

    def meets(self, other: Interval) -> bool:
        """Return whether some number is in both."""
        return self.low <= other.high and other.low <= self.high

    def gap(self, expected: Interval) -> Fraction:
        """Return the distance from ``expected`` as a share of its middle; 0 if the two meet.

        >>> printed("58.2").numbers[0].interval.gap(Interval.exactly(58.0)) == Fraction(15, 5800)
        True
        """
        if self.meets(expected):
            return Fraction(0)
        distance = self.low - expected.high if self.low > expected.high else expected.low - self.high
        return distance / abs(expected.middle) if expected.middle else Fraction(1)

    def __str__(self) -> str:
        return f"{float(self.middle):.4g}"

    @property
    def ends(self) -> str:
        """Both ends for a message, to four significant digits."""
        return f"{float(self.low):.4g} to {float(self.high):.4g}"


def total(parts: list[Interval]) -> Interval:
    """Return the sum; 0 without parts."""
    return Interval(low=sum((part.low for part in parts), Fraction(0)), high=sum((p.high for p in parts), Fraction(0)))


@dataclass(frozen=True, kw_only=True)
class Number:
    """One number as it was printed."""

    value: Fraction
    last_place: Fraction  # Weight of the last printed digit
    digits: int  # Significant digits: from the first that is not zero to the last printed
    filler: int = 0  # Zeros at the end of a whole number, possibly digits that were rounded away

    @property
    def interval(self) -> Interval:
        """Values that round to the printed digits, ties either way."""
        return Interval(low=self.value - self.last_place / 2, high=self.value + self.last_place / 2)

    @property
    def rounded(self) -> Interval:
        """Interval of a measured figure: 3810 may be 3814 to three digits, 9000 may be 8951 to two, 1000 not 700.

        >>> printed("3810").numbers[0].rounded.ends, printed("3811").numbers[0].rounded.ends
        ('3805 to 3815', '3810 to 3812')
        """
        zeros = max(0, min(self.filler, self.digits - 2))
        half = self.last_place * 10**zeros / 2
        return Interval(low=self.value - half, high=self.value + half)


@dataclass(frozen=True, kw_only=True)
class PrintedCell:
    """One cell of a table: its text and the numbers in it."""

    text: str
    numbers: tuple[Number, ...]
    bounded: bool  # Whether the text is a bound or an estimate (``> 80 GB``), so that it has no interval

    @property
    def blank(self) -> bool:
        """Whether the cell is empty, or has a placeholder such as ``-``."""
        return self.text.strip().lower() in _BLANK

    @property
    def out_of_memory(self) -> bool:
        """Whether the cell says that the run did not fit."""
        return bool(_OUT_OF_MEMORY.search(self.text))

    def number(self, index: int = 0) -> Number | None:
        """Return the number at this place in the text; None if there is none or only a bound."""
        return None if self.bounded or index >= len(self.numbers) else self.numbers[index]


@functools.lru_cache(maxsize=4096)
def printed(text: str) -> PrintedCell:
    """Return the numbers of a cell.  Digits after a letter belong to a name; ``15-33`` is two numbers, ``1,812`` is
    one.

    >>> [float(number.value) for number in printed("44.2/48.0").numbers]
    [44.2, 48.0]
    >>> str(printed("1,812 s/s").numbers[0].interval), printed("H100").numbers, printed("0.0023").numbers[0].digits
    ('1812', (), 2)
    """
    numbers = tuple(_number(match) for match in _NUMBER.finditer(text) if _is_figure(match))
    return PrintedCell(text=text, numbers=numbers, bounded=bool(_BOUND.match(text)))


def _is_figure(match: re.Match[str]) -> bool:
    exponent = (match["exponent"] or "e0")[1:].lstrip("+-").lstrip("0")
    return len(match["digits"]) <= _LARGEST and len(exponent) <= 2 and int(exponent or 0) <= _LARGEST


def _number(match: re.Match[str]) -> Number:
    digits = match["digits"].replace(",", "")
    exponent = int((match["exponent"] or "e0")[1:])
    decimals = len(digits.partition(".")[2])
    sign = -1 if match["sign"] == "-" else 1
    return Number(
        value=sign * Fraction(digits) * Fraction(10) ** exponent,
        last_place=Fraction(10) ** (exponent - decimals),
        digits=len(digits.replace(".", "").lstrip("0")),
        filler=0 if decimals or exponent else len(digits) - len(digits.rstrip("0")),
    )
