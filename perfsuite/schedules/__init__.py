"""Pipeline schedules as orders of actions, their simulator, and balanced splits of layers; without torch."""

from perfsuite.schedules.catalog import (
    SCHEDULES,
    check_counts,
    find_schedule,
    formula_bubble,
    make_schedule,
)
from perfsuite.schedules.replay import (
    Imbalance,
    StageTimes,
    durations_of,
    find_imbalance,
    replay,
    schedule_of,
)
from perfsuite.schedules.schedule import (
    Action,
    Kind,
    Order,
    Schedule,
    balance,
    check_layers,
    simulate,
    split_costs,
    stages_of,
)

__all__ = [
    "SCHEDULES",
    "Action",
    "Imbalance",
    "Kind",
    "Order",
    "Schedule",
    "StageTimes",
    "balance",
    "check_counts",
    "check_layers",
    "durations_of",
    "find_imbalance",
    "find_schedule",
    "formula_bubble",
    "make_schedule",
    "replay",
    "schedule_of",
    "simulate",
    "split_costs",
    "stages_of",
]
