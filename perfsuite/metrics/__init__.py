"""What the numbers mean: one file per family of formulas, assembled into one immutable registry."""

from perfsuite.metrics.collective import AlphaBeta, fit_alpha_beta
from perfsuite.metrics.registry import REGISTRY, derive, find, is_headline, read_run, rederive
from perfsuite.metrics.spec import MetricSpec, MetricValue
from perfsuite.metrics.training import TIMED

__all__ = [
    "REGISTRY",
    "TIMED",
    "AlphaBeta",
    "MetricSpec",
    "MetricValue",
    "derive",
    "find",
    "fit_alpha_beta",
    "is_headline",
    "read_run",
    "rederive",
]
