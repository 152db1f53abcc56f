"""One case on two arms of a comparison: what differs, how well that is known, and what was left undecided."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from perfsuite.base.units import format_seconds
from perfsuite.statistics.paired import paired_mean, pairs_needed, smallest_found

Outcome = Literal["slower", "faster", "no difference", "undecided"]

MOST_PAIRS = 200
"""Pairs beyond which nobody waits."""
COLUMNS = 100
"""Width of a table at most; longer case ids stand on a line of their own."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One case on both arms; ``b`` over ``a``."""

    case: str
    pairs: int
    a_s: float
    """Seconds per iteration of arm a: geometric mean over the pairs, outliers drawn in.  b_s / a_s is 1 + change."""
    b_s: float
    change: float
    """Relative change from a to b: 0.05 is 5 % slower."""
    low: float
    """Lower end of the interval of the change."""
    high: float
    smallest: float
    """Smallest slowdown that another comparison of so many pairs shows with 95 % probability."""
    outcome: Outcome
    pairs_needed: int | None = None
    """About how many pairs tell a change of the tolerance from none; None: more than MOST_PAIRS."""

    @property
    def is_near_tolerance(self) -> bool:
        """Undecided with pairs enough: whether the change is more than the tolerance is what is open."""
        return self.outcome == "undecided" and self.pairs_needed is not None and self.pairs_needed <= self.pairs

    @property
    def told(self) -> str:
        """The outcome as the table has it, with what would decide."""
        if self.outcome != "undecided":
            return self.outcome
        if self.is_near_tolerance:
            return "undecided, near it"
        return f"undecided, {f'~{self.pairs_needed}' if self.pairs_needed else f'> {MOST_PAIRS}'} pairs"


def compare(
    case: str, a_s: Sequence[float], b_s: Sequence[float], tolerance: float, *, alpha: float = 0.05
) -> Comparison:
    """Paired comparison of times in seconds, pair by pair; needs three pairs.  The interval misses with ``alpha``.

    Outcome: slower or faster when the interval excludes 0 and the change exceeds the tolerance; no difference when the
    interval lies within the tolerance; else undecided.

    >>> found = compare("case", [1.0, 1.01, 0.99, 1.0], [1.10, 1.12, 1.09, 1.09], tolerance=0.03)
    >>> round(found.change, 3), found.outcome
    (0.1, 'slower')
    """
    known = paired_mean([math.log(b / a) for a, b in zip(a_s, b_s, strict=True)])
    reach = known.reach(alpha)
    change, low, high = (math.expm1(value) for value in (known.mean, known.mean - reach, known.mean + reach))
    outcome: Outcome = "undecided"
    if low > 0 and change > tolerance:
        outcome = "slower"
    elif high < 0 and change < -tolerance:
        outcome = "faster"
    elif -tolerance <= low and high <= tolerance:
        outcome = "no difference"
    a, b = (statistics.fmean(map(math.log, times)) for times in (a_s, b_s))
    drawn_in = (b - a - known.mean) / 2  # half of the distance by which outliers were drawn in, taken from each arm
    return Comparison(
        case=case,
        pairs=known.pairs,
        a_s=math.exp(a + drawn_in),
        b_s=math.exp(b - drawn_in),
        change=change,
        low=low,
        high=high,
        smallest=math.expm1(smallest_found(known, math.log1p(tolerance), alpha)),
        outcome=outcome,
        pairs_needed=pairs_needed(known, math.log1p(tolerance), MOST_PAIRS, alpha),
    )


def progress(comparisons: Sequence[Comparison], pairs: int) -> str:
    """What is decided so far, and what ``pairs`` pairs will probably not decide."""
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
        compared.told,
    )


def _percent(share: float) -> str:
    """Signed, one decimal below 100 %."""
    return f"{share:+.1%}" if abs(share) < 1 else f"{share:+.0%}" if share < 99 else "> 99x"


def _legend(comparisons: Sequence[Comparison], tolerance: float) -> Iterator[str]:
    if comparisons:
        yield "mean: geometric mean over the pairs, outliers drawn in"
        yield "finds: the smallest slowdown that so many pairs find on this host with 95 % probability"
    open_ = [comparison for comparison in comparisons if comparison.outcome == "undecided"]
    if any(comparison.pairs_needed and not comparison.is_near_tolerance for comparison in open_):
        yield f"undecided, ~N pairs: about so many tell a change of {tolerance:.1%} from none"
    if any(comparison.pairs_needed is None for comparison in open_):
        yield f"undecided, > {MOST_PAIRS} pairs: this host is too noisy for {tolerance:.1%}; give a larger --tolerance"
    if any(comparison.is_near_tolerance for comparison in open_):
        yield f"undecided, near it: the change is too near to {tolerance:.1%} to be told from it by a few pairs more"
