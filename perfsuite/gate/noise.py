"""What stored runs say about a case: its level and its noise, freed from what the host did to all cases alike.

A value is the natural logarithm of a time (or of a metric, with the sign that makes larger worse), so a difference of
0.03 is 3 %.  Stored runs are fitted as case + session: the effect of a session, the median over its cases, is taken out
where enough cases share it, because a host that is slower on one day is slower for all of them.  What remains is noise.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perfsuite.gate.prior import Prior, priors
from perfsuite.gate.yardstick import slopes
from perfsuite.statistics.robust import huber_mean, median, rough_sigma, variance, without_spike

FLOOR = 5e-4
"""Smallest noise that is believed: stored quantiles have four significant digits."""
UNLIKE = 2.0
"""A case this many times as noisy as usual has little in common with the others."""
UNLIKE_PRIOR_DOF = 2
_ROUNDS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """The stored runs of one quantity of one case; the three series run parallel, at least two runs."""

    kind: str
    """Histories of one kind share what is known about noise."""
    sessions: tuple[str, ...]
    """The session that each run was measured in."""
    values: tuple[float, ...]
    """Logarithms of the quantity, larger is worse."""
    yardsticks: tuple[float, ...] = ()
    """Logarithms of the yardstick times; empty when they were not timed with every run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """Where a case is and how much it moves from run to run."""

    centre: float
    """Huber mean of the stored values."""
    sigma: float
    """Standard deviation of one run."""
    dof: int
    """Degrees of freedom of ``sigma``."""
    runs: int
    """Stored runs."""
    sessions: int
    """Sessions that they came from."""
    slope: float = 0.0
    """How much of the yardstick's logarithm is subtracted from a value."""
    yardstick: float | None = None
    """Median logarithm of the stored yardsticks."""

    def adjusted(self, value: float, yardstick: float | None, yardstick_shift: float) -> float | None:
        """A new value on the scale of ``centre``; None where its yardstick is missing.

        ``yardstick_shift`` is what all yardsticks of the session have in common.
        """
        if not self.slope:
            return value
        return None if yardstick is None else value - self.slope * (yardstick - yardstick_shift)


def levels(histories: Sequence[History], *, min_suite: float, use_yardstick: bool = True) -> tuple[Level, ...]:
    """The level of each history, estimated together.

    Sessions shared by at least ``min_suite`` histories are freed from their common effect; ``use_yardstick`` is False
    when this session's runs do not time it.
    """
    if not histories:
        return ()
    values: list[Sequence[float]] = [history.values for history in histories]
    freed = _freed(histories, values, session_effects(histories, values, min_suite))
    own = [0.0] * len(histories)
    yards = _yards(histories, min_suite) if use_yardstick else []
    if yards:
        helpful = slopes(
            (history.kind, row, yard) for history, row, yard in zip(histories, freed, yards, strict=True) if yard
        )
        own = [helpful.get(history.kind, 0.0) if yard else 0.0 for history, yard in zip(histories, yards, strict=True)]
    if any(own):
        values = [
            [value - slope * yard[index] if slope else value for index, value in enumerate(row)]
            for row, yard, slope in zip(values, yards, own, strict=True)
        ]
        freed = _freed(histories, values, session_effects(histories, values, min_suite))
    kept = _undisturbed(histories, freed)
    variances = [(max(FLOOR**2, variance(row)), len(row) - 1) for row in kept]
    usual = priors([history.kind for history in histories], variances)
    return tuple(
        _level(history, kept[index], variance=variances[index][0], prior=usual[history.kind], slope=own[index])
        for index, history in enumerate(histories)
    )


def _yards(histories: Sequence[History], min_suite: float) -> list[list[float]]:
    """Yardsticks without what their sessions have in common, as values lose it too; empty where some are missing."""
    complete = [history for history in histories if history.yardsticks]
    if not complete:
        return []
    rows = [history.yardsticks for history in complete]
    freed = iter(_freed(complete, rows, session_effects(complete, rows, min_suite)))
    return [next(freed) if history.yardsticks else [] for history in histories]


def _undisturbed(histories: Sequence[History], freed: Sequence[Sequence[float]]) -> list[list[float]]:
    """The values without a run that something else disturbed: one that lies far off when all others agree."""
    rough = [rough_sigma(row) for row in freed]
    by_kind: dict[str, list[float]] = {}
    for history, sigma in zip(histories, rough, strict=True):
        by_kind.setdefault(history.kind, []).append(sigma)
    usual = {kind: median(sigmas) for kind, sigmas in by_kind.items()}
    return [
        without_spike(row, max(sigma, usual[history.kind], FLOOR))
        for history, row, sigma in zip(histories, freed, rough, strict=True)
    ]


def _level(history: History, values: Sequence[float], *, variance: float, prior: Prior, slope: float) -> Level:
    dof = len(values) - 1
    weight = prior.dof if variance < UNLIKE**2 * prior.variance else min(prior.dof, UNLIKE_PRIOR_DOF)
    sigma = math.sqrt((weight * prior.variance + dof * variance) / (weight + dof))
    return Level(
        centre=huber_mean(values, sigma),
        sigma=sigma,
        dof=weight + dof,
        runs=len(values),
        sessions=len(set(history.sessions)),
        slope=slope,
        yardstick=median(history.yardsticks) if history.yardsticks else None,
    )


def session_effects(
    histories: Sequence[History], values: Sequence[Sequence[float]], min_suite: float
) -> dict[str, float]:
    """How much each session moved all its cases, by a median polish; only sessions shared by enough histories.

    ``values`` are a row per history.  The effects have median 0.
    """
    effects: dict[str, float] = {}
    if len(histories) < min_suite:
        return effects
    rows_of: dict[tuple[str, ...], list[Sequence[float]]] = defaultdict(list)
    for history, row in zip(histories, values, strict=True):
        rows_of[history.sessions].append(row)
    for _ in range(_ROUNDS):
        residuals: dict[str, list[float]] = defaultdict(list)
        for names, rows in rows_of.items():
            _add_residuals(residuals, names, rows, effects)
        shared = {name: median(above) for name, above in residuals.items() if len(above) >= min_suite}
        usual = median(list(shared.values())) if shared else 0.0
        effects = {name: effect - usual for name, effect in shared.items()}
    return effects


def _add_residuals(
    residuals: dict[str, list[float]],
    names: Sequence[str],
    rows: Sequence[Sequence[float]],
    effects: Mapping[str, float],
) -> None:
    """Add what each session of these cases lies above their centres; a case counts once per session."""
    shift = [effects.get(name, 0.0) for name in names]
    centres = [median(list(map(operator.sub, row, shift))) for row in rows]
    columns: dict[str, list[list[float]]] = defaultdict(list)
    for name, column in zip(names, zip(*rows, strict=True), strict=True):
        columns[name].append(list(map(operator.sub, column, centres)))
    for name, rows_above in columns.items():
        residuals[name].extend(
            rows_above[0]
            if len(rows_above) == 1
            else [sum(above) / len(above) for above in zip(*rows_above, strict=True)]
        )


def _freed(
    histories: Sequence[History], values: Sequence[Sequence[float]], effects: Mapping[str, float]
) -> list[list[float]]:
    if not effects:
        return [list(row) for row in values]
    shifts = {
        names: [effects.get(name, 0.0) for name in names] for names in {history.sessions for history in histories}
    }
    return [
        list(map(operator.sub, row, shifts[history.sessions])) for history, row in zip(histories, values, strict=True)
    ]
