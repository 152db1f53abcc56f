"""Latency and bandwidth of a collective out of its cases of all sizes: t(S) = alpha + S / beta."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from perfsuite.base.collectives import busbw_factor
from perfsuite.metrics import AlphaBeta, fit_alpha_beta
from perfsuite.record.result import Result
from perfsuite.reports.document import Grid

LEAST_SIZES = 3


@dataclass(frozen=True, kw_only=True)
class CollectiveFit:
    """The fit of one collective on so many ranks in one dtype."""

    collective: str
    world_size: int
    dtype: str
    sizes: int
    """Different message sizes that were measured."""
    fit: AlphaBeta | None
    """None where no straight line can be fitted; ``reason`` then says why."""
    reason: str = ""

    @property
    def busbw_limit_gb_per_s(self) -> float | None:
        """busbw that large messages approach, GB/s."""
        return None if self.fit is None else self.fit.beta_gb_per_s * busbw_factor(self.collective, self.world_size)


def fit_collectives(results: Iterable[Result]) -> tuple[CollectiveFit, ...]:
    """A fit per collective, world size and dtype that was measured at three sizes or more, in order of appearance."""
    points: dict[tuple[str, int, str], dict[float, float]] = {}
    for result in results:
        if result.outcome == "measured" and result.work.collective and result.work.message_bytes:
            key = (result.work.collective, result.world_size, result.work.dtype)
            points.setdefault(key, {})[result.work.message_bytes] = result.median_s
    return tuple(_fit(*key, list(times.items())) for key, times in points.items() if len(times) >= LEAST_SIZES)


def _fit(collective: str, world_size: int, dtype: str, points: list[tuple[float, float]]) -> CollectiveFit:
    fit, reason = None, ""
    try:
        fit = fit_alpha_beta(points)
    except ValueError as error:
        reason = str(error)
    return CollectiveFit(
        collective=collective, world_size=world_size, dtype=dtype, sizes=len(points), fit=fit, reason=reason
    )


def fits_grid(fits: Sequence[CollectiveFit]) -> Grid:
    """Return the fits with the standard errors of their parameters."""
    names = ("ranks", "dtype", "alpha\nus", "beta\nGB/s", "busbw\nlimit", "misfit", "sizes")
    rows = []
    for one in fits:
        fit, limit = one.fit, one.busbw_limit_gb_per_s
        figures = ("-", "-", "-", one.reason)
        if fit is not None and limit is not None:
            figures = (
                f"{fit.alpha_us:.4g} ±{fit.alpha_error_us:.2g}",
                f"{fit.beta_gb_per_s:.4g} ±{fit.beta_error_gb_per_s:.2g}",
                f"{limit:.4g}",
                f"{fit.misfit:.0%}{'' if fit.trusted else ' not a line'}",
            )
        rows.append((one.collective, str(one.world_size), one.dtype, *figures, str(one.sizes)))
    return Grid(title="", columns=("t(S) = alpha + S / beta", *names), rows=tuple(rows))
