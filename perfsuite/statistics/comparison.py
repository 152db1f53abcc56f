"""One case on two arms of a comparison: the change, its interval and the outcome."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from perfsuite.base.units import format_seconds
from perfsuite.statistics.paired import paired_mean, pairs_needed, smallest_found

Outcome = Literal["slower", "faster", "no difference", "undecided"]

MOST_PAIRS = 200  # Limit of the pairs that are suggested.
COLUMNS = 100  # Largest width of a table; longer case ids have a line of their own.


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One case on both arms; ``b`` over ``a``."""

    case: str
    pairs: int
    a_s: float  # Seconds per iteration of arm a: geometric mean over pairs, outliers clipped; b_s / a_s - 1 = change.
    b_s: float
    change: float  # Relative change from a to b: 0.05 is 5 % slower.
    low: float  # Lower end of the interval of the change.
    high: float
    smallest: float  # Smallest slowdown that another comparison of this many pairs shows with 95 % probability.
    outcome: Outcome
    pairs_needed: int | None = None  # Pairs that distinguish the tolerance from none; None: over MOST_PAIRS.

    @property
    def is_near_tolerance(self) -> bool:
        """Whether only the comparison with the tolerance is undecided, although there are enough pairs."""
        return self.outcome == "undecided" and self.pairs_needed is not None and self.pairs_needed <= self.pairs

    @property
    def outcome_text(self) -> str:
        """Outcome for the table; undecided ones have the number of pairs that would decide."""
        if self.outcome != "undecided":
            return self.outcome
        if self.is_near_tolerance:
            return "undecided, near it"
        return f"undecided, {f'~{self.pairs_needed}' if self.pairs_needed else f'> {MOST_PAIRS}'} pairs"


def compare(
    case: str, a_s: Sequence[float], b_s: Sequence[float], tolerance: float, *, alpha: float = 0.05
) -> Comparison:
    """Compare times in seconds pair by pair; needs three pairs. The interval misses the truth with ``alpha``.

    The outcome is slower or faster if the interval excludes 0 and the change exceeds the tolerance; no difference if
    the interval lies within the tolerance; else undecided.

    >>> found = compare("case", [1.0, 1.01, 0.99, 1.0], [1.10, 1.12, 1.09, 1.09], tolerance=0.03)
    >>> round(found.change, 3), found.outcome
    (0.1, 'slower')
    """
    paired = paired_mean([math.log(b / a) for a, b in zip(a_s, b_s, strict=True)])
    reach = paired.reach(alpha)
    change, low, high = (math.expm1(value) for value in (paired.mean, paired.mean - reach, paired.mean + reach))
    outcome: Outcome = "undecided"
    if low > 0 and change > tolerance:
        outcome = "slower"
    elif high < 0 and change < -tolerance:
        outcome = "faster"
    elif -tolerance <= low and high <= tolerance:
        outcome = "no difference"
    a, b = (statistics.fmean(map(math.log, times)) for times in (a_s, b_s))
    clipped = (b - a - paired.mean) / 2  # half of the distance by which outliers were clipped, taken from each arm
    return Comparison(
        case=case,
        pairs=paired.pairs,
        a_s=math.exp(a + clipped),
        b_s=math.exp(b - clipped),
        change=change,
        low=low,
        high=high,
        smallest=math.expm1(smallest_found(paired, math.log1p(tolerance), alpha)),
        outcome=outcome,
        pairs_needed=pairs_needed(paired, math.log1p(tolerance), MOST_PAIRS, alpha),
    )


def progress(comparisons: Sequence[Comparison], pairs: int) -> str:
    """Return how many cases are decided, and how many will probably stay undecided after ``pairs`` pairs."""
    open_ = [comparison for comparison in comparisons if comparison.outcome == "undecided"]
    decided = f"{len(comparisons) - len(open_)} of {len(comparisons)} decided"
    hopeless = [comparison for comparison in open_ if (comparison.pairs_needed or MOST_PAIRS + 1) > pairs]
    return f"{decided}; {pairs} pairs will hardly decide {len(hopeless)}" if hopeless else decided


def table(comparisons: Sequence[Comparison], tolerance: float, columns: int = COLUMNS) -> Iterator[str]:
    """Yield a line per case of at most ``columns`` characters unless its id is longer, and a legend of its words."""
    rows = [("mean a", "mean b", "b/a - 1", "interval", "finds", "outcome"), *map(_figures, comparisons)]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)][:-1]
    lines = ["  ".join([*map(str.rjust, row[:-1], widths), row[-1]]) for row in rows]
    width = max((len(comparison.case) for comparison in comparisons), default=4)
    is_short = width + 2 + max(map(len, lines)) <= columns
    for case, line in zip(["case", *(comparison.case for comparison in comparisons)], lines, strict=True):
        yield from [f"{case:{width}}  {line}"] if is_short else [case, f"  {line}"]
    yield from _legend(comparisons, tolerance)


def _figures(compared: Comparison) -> tuple[str, ...]:
    return (
        format_seconds(compared.a_s),
        format_seconds(compared.b_s),
        _percent(compared.change),
        f"{_percent(compared.low)} to {_percent(compared.high)}",
        _percent(compared.smallest).lstrip("+"),
        compared.outcome_text,
    )


def _percent(share: float) -> str:
    """Return a signed per cent with one decimal below 100 %."""
    return f"{share:+.1%}" if abs(share) < 1 else f"{share:+.0%}" if share < 99 else "> 99x"


def _legend(comparisons: Sequence[Comparison], tolerance: float) -> Iterator[str]:
    if comparisons:
        yield "mean: geometric mean over the pairs, outliers clipped"
        yield "finds: smallest slowdown that this number of pairs finds on this host with 95 % probability"
    open_ = [comparison for comparison in comparisons if comparison.outcome == "undecided"]
    if any(comparison.pairs_needed and not comparison.is_near_tolerance for comparison in open_):
        yield f"undecided, ~N pairs: about N pairs distinguish a change of {tolerance:.1%} from none"
    if any(comparison.pairs_needed is None for comparison in open_):
        yield f"undecided, > {MOST_PAIRS} pairs: this host is too noisy for {tolerance:.1%}; use a larger --tolerance"
    if any(comparison.is_near_tolerance for comparison in open_):
        yield f"undecided, near it: a few more pairs cannot distinguish the change from {tolerance:.1%}"
