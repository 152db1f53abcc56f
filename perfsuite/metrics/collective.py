"""Latency and bandwidth of collectives, exactly as nccl-tests counts them, and the alpha-beta model of their time.

``algbw`` = S / t and ``busbw`` = algbw x factor, where S is the size of the table in docs metrics.  The factor makes
busbw comparable with the speed of a link, for any number of ranks n.  Source: nccl-tests, doc/PERFORMANCE.md.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from perfsuite.base.collectives import TRAFFIC, busbw_factor, require_known
from perfsuite.base.units import gb_per_s, plural, seconds_to_us
from perfsuite.metrics.spec import MetricSpec, MetricValue, unknown
from perfsuite.record.result import Measurement, Peak, Peaks, Work

LATENCY_FLOOR_US = 0.3  # 3 % of 10 us: below 10 us the clock and the scheduler blur a relative change.


def _latency_p99(work: Work, measurement: Measurement, peaks: Peaks) -> MetricValue:
    times = measurement.times_s
    if len(times) < 100:
        return unknown(f"{plural(len(times), 'sample')}; a 99th percentile needs 100")
    return MetricValue(value=seconds_to_us(statistics.quantiles(times, n=100, method="inclusive")[98]))


def link_of(measurement: Measurement, peaks: Peaks) -> tuple[Peak | None, str]:
    """The peak of a link between the ranks, or why there is none."""
    hosts = len({rank.host for rank in measurement.ranks})
    if hosts > 1:
        return None, f"the ranks are on {hosts} hosts; the link of the platform's row is the one within a node"
    return peaks.link, "" if peaks.link else peaks.unknown or "no link in the platform's row"


def _bandwidth(work: Work, measurement: Measurement, peaks: Peaks, *, of_link: bool) -> MetricValue:
    require_known(work.collective)
    if work.collective not in TRAFFIC:
        return unknown(f"{work.collective or 'the workload'} moves no message that a bandwidth could be taken of")
    if not work.message_bytes:
        return unknown("the message is empty")
    algbw = gb_per_s(work.message_bytes, measurement.median_s)
    if not of_link:
        return MetricValue(value=algbw)
    peak, note = link_of(measurement, peaks)
    return MetricValue(value=algbw * busbw_factor(work.collective, measurement.world_size), peak=peak, note=note)


METRICS = (
    MetricSpec("latency_us", "us", "lower", "median",
               lambda work, measurement, peaks: MetricValue(value=seconds_to_us(measurement.median_s)),
               absolute_floor=LATENCY_FLOOR_US,
               doc="Median time of one iteration, the slowest rank's."),
    MetricSpec("latency_p99_us", "us", "lower", "99th percentile", _latency_p99, observed=True,
               doc="Time that 99 of 100 samples stay below, the slowest rank's."),
    MetricSpec("algbw_gb_per_s", "GB/s", "higher", "nccl-tests", functools.partial(_bandwidth, of_link=False),
               doc="Size over time: how fast the collective looks to its caller, 1e9 bytes per second."),
    MetricSpec("busbw_gb_per_s", "GB/s", "higher", "nccl-tests", functools.partial(_bandwidth, of_link=True),
               doc="algbw x the collective's factor: comparable with one direction of the link, 1e9 bytes per second."),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class AlphaBeta:
    """t(S) = alpha + S / beta, fitted over the sizes of one collective."""

    alpha_us: float  # Time of an empty message.
    beta_gb_per_s: float  # algbw that large messages approach; times the busbw factor it is the busbw they approach.
    alpha_error_us: float  # Standard error of ``alpha_us``.
    beta_error_gb_per_s: float  # Standard error of ``beta_gb_per_s``.
    misfit: float  # Root mean square of (measured - model) / measured; a protocol switch between sizes shows here.
    points: int  # Sizes that went in.

    @property
    def trusted(self) -> bool:
        """Whether the straight line describes the points: a typical misfit of at most 25 %."""
        return self.misfit <= 0.25


def fit_alpha_beta(points: Sequence[tuple[float, float]]) -> AlphaBeta:
    """Fit t(S) = alpha + S / beta to (message_bytes, time_s) points by relative least squares.

    Each residual is divided by its own time: sizes span six decades, and an absolute fit would see the largest only.
    From five points on, points that lie far off lose weight (Huber's function of the residual over 1.345 robust
    standard deviations).  alpha is not allowed below 0.  Raises ValueError for fewer than three different sizes, for
    times that are not positive, and where time does not grow with size.

    >>> fit = fit_alpha_beta([(1e3, 21e-6), (1e6, 1.02e-3), (16e6, 16.02e-3)])
    >>> round(fit.alpha_us, 6), round(fit.beta_gb_per_s, 6), fit.trusted
    (20.0, 1.0, True)
    """
    sizes = len({size for size, _ in points})
    if sizes < 3:
        raise ValueError(f"an alpha-beta fit over {sizes} different sizes says nothing; measure at least 3")
    if any(time_s <= 0 for _, time_s in points):
        raise ValueError("an alpha-beta fit needs positive times")
    weights = [1.0] * len(points)
    line = _fit_line(points, weights)
    for _ in range(20 if len(points) >= 5 else 0):
        weights = _huber(_residuals(line, points))
        line = _fit_line(points, weights)
    if line[1] <= 0:
        raise ValueError("time does not grow with size, so there is no bandwidth to fit")
    return _describe(line, points, weights)


_Line = tuple[float, float, float, float]
"""Intercept and slope, and their variances per unit of residual variance."""


def _residuals(line: _Line, points: Sequence[tuple[float, float]]) -> list[float]:
    intercept, slope, *_ = line
    return [(time_s - intercept - slope * size) / time_s for size, time_s in points]


def _fit_line(points: Sequence[tuple[float, float]], weights: Sequence[float]) -> _Line:
    relative = [weight / time_s**2 for weight, (_, time_s) in zip(weights, points, strict=True)]
    total = sum(relative)
    mean_size = sum(w * size for w, (size, _) in zip(relative, points, strict=True)) / total
    mean_time = sum(w * time_s for w, (_, time_s) in zip(relative, points, strict=True)) / total
    spread = sum(w * (size - mean_size) ** 2 for w, (size, _) in zip(relative, points, strict=True))
    shared = sum(w * (size - mean_size) * (t - mean_time) for w, (size, t) in zip(relative, points, strict=True))
    slope = shared / spread
    intercept = mean_time - slope * mean_size
    if intercept >= 0:
        variance = 1 / total + mean_size**2 / spread
        return intercept, slope, variance, 1 / spread
    square = sum(w * size**2 for w, (size, _) in zip(relative, points, strict=True))
    slope = sum(w * size * time_s for w, (size, time_s) in zip(relative, points, strict=True)) / square
    return 0.0, slope, 0.0, 1 / square


def _huber(residuals: Sequence[float]) -> list[float]:
    limit = 1.345 * max(1.4826 * statistics.median(abs(residual) for residual in residuals), 1e-6)
    return [min(1.0, limit / abs(residual)) if residual else 1.0 for residual in residuals]


def _describe(line: _Line, points: Sequence[tuple[float, float]], weights: Sequence[float]) -> AlphaBeta:
    intercept, slope, intercept_variance, slope_variance = line
    residuals = _residuals(line, points)
    variance = sum(w * residual**2 for w, residual in zip(weights, residuals, strict=True)) / (len(points) - 2)
    beta = 1 / slope
    return AlphaBeta(
        alpha_us=seconds_to_us(intercept),
        beta_gb_per_s=beta / 1e9,
        alpha_error_us=seconds_to_us((variance * intercept_variance) ** 0.5),
        beta_error_gb_per_s=(variance * slope_variance) ** 0.5 * beta**2 / 1e9,
        misfit=(sum(residual**2 for residual in residuals) / len(residuals)) ** 0.5,
        points=len(points),
    )
