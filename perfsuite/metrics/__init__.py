"""What the numbers mean: one file per family of formulas, assembled into one immutable registry."""

from perfsuite.collectives import busbw_factor
from perfsuite.metrics.collective import AlphaBeta, fit_alpha_beta
from perfsuite.metrics.registry import REGISTRY, derive, find, rederive
from perfsuite.metrics.spec import MetricSpec, Reading

__all__ = [
    "REGISTRY",
    "AlphaBeta",
    "MetricSpec",
    "Reading",
    "busbw_factor",
    "derive",
    "find",
    "fit_alpha_beta",
    "rederive",
]
