"""Mixtures of experts: how evenly tokens were routed, and what was dropped, as the ranks recorded it."""

from __future__ import annotations

from perfsuite.metrics.spec import MetricSpec, recorded

_NO_EXPERTS = "the model has no experts, or they do not tell"


METRICS = (
    MetricSpec(
        name="expert_imbalance",
        unit="",
        better="lower",
        convention="rows of the fullest expert over the mean, the worst layer",
        doc="How uneven the load of the experts is; 1 is even.",
        compute=recorded("expert_imbalance", _NO_EXPERTS),
        observed=True,
    ),
    MetricSpec(
        name="dropped_percent",
        unit="percent",
        better="lower",
        convention="rows without a place, mean of layers and ranks",
        doc="Share of the rows that tokens asked for and experts had no room for; 0 without a capacity.",
        compute=recorded("dropped_share", _NO_EXPERTS, lambda share: 100 * share),
        observed=True,
    ),
    MetricSpec(
        name="balance_loss",
        unit="",
        better="lower",
        convention="E x sum of f_e P_e per sample, mean of layers and ranks",
        doc="Loss that even routing makes smallest, without its weight; 1 is even.",
        compute=recorded("balance_loss", _NO_EXPERTS),
        observed=True,
        headline=False,
    ),
)
