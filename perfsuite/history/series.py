"""Times of cases over sessions, with what a session did to all of them taken off."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perfsuite.history.session import HistorySession

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Times = NDArray[np.float64]

MIN_SUITE = 20
"""Cases from which on a session tells what it did to all of them; as the gate counts."""
_ROUNDS = 4
"""Of taking medians off rows and columns in turn; more change nothing by then."""


@dataclass(frozen=True, kw_only=True)
class SeriesTable:
    """ln times of all cases in all sessions."""

    cases: tuple[str, ...]
    """Node ids, sorted."""
    values: Times
    """One row per session, one column per case; NaN where the session does not have the case."""
    shifts: tuple[float, ...]
    """What each session did to all cases, taken off its row; 0 where that is not known."""
    knows_shift: tuple[bool, ...]
    """Whether a session has enough cases to tell."""

    def rows_of(self, column: int) -> list[int]:
        """Rows that have a case."""
        rows: list[int] = (self.values[:, column] == self.values[:, column]).nonzero()[0].tolist()  # NaN is not itself
        return rows

    def values_of(self, column: int) -> list[float]:
        """The values of a case in the rows that have it."""
        values: list[float] = self.values[self.rows_of(column), column].tolist()
        return values


def table_of(sessions: Sequence[HistorySession], *, witnesses: Collection[str] | None = None) -> SeriesTable:
    """The table of sessions in their order.

    The shift of a session is the median over its cases of their distance from their own level, as far as it has
    MIN_SUITE cases (levels and shifts by turns: Tukey's median polish).  ``witnesses``: only these cases tell it, where
    a session has as many of them.
    """
    import numpy as np

    cases = sorted({case for session in sessions for case in session.cases})
    column = {case: index for index, case in enumerate(cases)}
    values = np.full((len(sessions), len(cases)), np.nan)
    for row, session in enumerate(sessions):
        columns = [column[case] for case in session.cases]
        values[row, columns] = [point.log_time for point in session.cases.values()]
    knows = tuple(len(session.cases) >= MIN_SUITE for session in sessions)
    telling = values if witnesses is None else values[:, [column[case] for case in witnesses]]
    enough = (~np.isnan(telling)).sum(axis=1) >= MIN_SUITE
    shifts = _shifts(telling if all(enough[list(knows)]) else values, knows)
    return SeriesTable(
        cases=tuple(cases),
        values=values - shifts[:, None],
        shifts=tuple(shifts.tolist()),
        knows_shift=knows,
    )


def _shifts(values: Times, knows: Sequence[bool]) -> Times:
    import numpy as np

    total = np.zeros(len(values))
    rows = np.flatnonzero(knows)
    if not len(rows):
        return total
    rest = values[rows]
    rest = rest[:, ~np.isnan(rest).all(axis=0)]
    taken = np.zeros(len(rows))
    for _ in range(_ROUNDS):
        away = np.nanmedian(rest - np.nanmedian(rest, axis=0), axis=1)
        rest = rest - away[:, None]
        taken += away
    total[rows] = taken - np.median(taken)
    return total
