"""Times of cases over sessions, without the common shift of all cases in a session."""

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
"""Fewest cases of a session for an estimate of their common shift, as in the gate."""
_ROUNDS = 4
"""Rounds of Tukey's median polish; more rounds change nothing."""


@dataclass(frozen=True, kw_only=True)
class SeriesTable:
    """ln times of all cases in all sessions."""

    cases: tuple[str, ...]
    """Node ids, sorted."""
    values: Times
    """One row per session, one column per case; NaN if the session does not have the case."""
    shifts: tuple[float, ...]
    """Common shift of all cases in each session, subtracted from its row; 0 if unknown."""
    knows_shift: tuple[bool, ...]
    """Whether a session has enough cases for an estimate."""

    def rows_of(self, column: int) -> list[int]:
        """Return the rows that have a case."""
        rows: list[int] = (self.values[:, column] == self.values[:, column]).nonzero()[0].tolist()  # NaN is not itself
        return rows

    def values_of(self, column: int) -> list[float]:
        """Return the values of a case in the rows that have it."""
        values: list[float] = self.values[self.rows_of(column), column].tolist()
        return values


def table_of(sessions: Sequence[HistorySession], *, witnesses: Collection[str] | None = None) -> SeriesTable:
    """Return the table of sessions in their order.

    The shift of a session with at least MIN_SUITE cases is the median distance of its cases from their levels; levels
    and shifts are estimated in turn (Tukey's median polish).  ``witnesses``: estimate the shifts from these cases only,
    if every session has enough of them.
    """
    import numpy as np

    cases = sorted({case for session in sessions for case in session.cases})
    column = {case: index for index, case in enumerate(cases)}
    values = np.full((len(sessions), len(cases)), np.nan)
    for row, session in enumerate(sessions):
        columns = [column[case] for case in session.cases]
        values[row, columns] = [point.log_time for point in session.cases.values()]
    knows = tuple(len(session.cases) >= MIN_SUITE for session in sessions)
    chosen = values if witnesses is None else values[:, [column[case] for case in witnesses]]
    enough = (~np.isnan(chosen)).sum(axis=1) >= MIN_SUITE
    shifts = _shifts(chosen if all(enough[list(knows)]) else values, knows)
    return SeriesTable(
        cases=tuple(cases), values=values - shifts[:, None], shifts=tuple(shifts.tolist()), knows_shift=knows
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
