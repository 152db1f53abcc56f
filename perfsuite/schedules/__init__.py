"""Pipeline schedules as action orders, the event simulator, balanced splits; no torch."""

from perfsuite.schedules.action import Action, Durations, Kind, Order
from perfsuite.schedules.balance import Split, balance, check_layers, split_costs
from perfsuite.schedules.catalog import (
    SCHEDULES,
    ScheduleSpec,
    check_counts,
    find_schedule,
    formula_bubble,
    make_schedule,
    micro_batch_size,
)
from perfsuite.schedules.durations import StageTimes, durations_of, evened_durations
from perfsuite.schedules.imbalance import Imbalance, find_imbalance
from perfsuite.schedules.replay import Replay, replay, schedule_of
from perfsuite.schedules.schedule import Placement, Schedule, stages_of
from perfsuite.schedules.simulator import simulate

__all__ = [
    "SCHEDULES",
    "Action",
    "Durations",
    "Imbalance",
    "Kind",
    "Order",
    "Placement",
    "Replay",
    "Schedule",
    "ScheduleSpec",
    "Split",
    "StageTimes",
    "balance",
    "check_counts",
    "check_layers",
    "durations_of",
    "evened_durations",
    "find_imbalance",
    "find_schedule",
    "formula_bubble",
    "make_schedule",
    "micro_batch_size",
    "replay",
    "schedule_of",
    "simulate",
    "split_costs",
    "stages_of",
]
