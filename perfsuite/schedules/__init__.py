"""Pipeline schedules as orders of actions, their simulator, and balanced splits of layers; without torch."""

from perfsuite.schedules.catalog import SCHEDULES as SCHEDULES
from perfsuite.schedules.catalog import check_counts as check_counts
from perfsuite.schedules.catalog import find_schedule as find_schedule
from perfsuite.schedules.catalog import formula_bubble as formula_bubble
from perfsuite.schedules.catalog import make_schedule as make_schedule
from perfsuite.schedules.replay import Imbalance as Imbalance
from perfsuite.schedules.replay import StageTimes as StageTimes
from perfsuite.schedules.replay import durations_of as durations_of
from perfsuite.schedules.replay import find_imbalance as find_imbalance
from perfsuite.schedules.replay import replay as replay
from perfsuite.schedules.replay import schedule_of as schedule_of
from perfsuite.schedules.schedule import Action as Action
from perfsuite.schedules.schedule import Kind as Kind
from perfsuite.schedules.schedule import Order as Order
from perfsuite.schedules.schedule import Schedule as Schedule
from perfsuite.schedules.schedule import balance as balance
from perfsuite.schedules.schedule import check_layers as check_layers
from perfsuite.schedules.schedule import simulate as simulate
from perfsuite.schedules.schedule import split_costs as split_costs
from perfsuite.schedules.schedule import stages_of as stages_of
