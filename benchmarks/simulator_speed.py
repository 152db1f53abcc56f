"""How long the event simulator takes for 100,000 actions; the aim is 1 s or less for every schedule.

    python benchmarks/simulator_speed.py [--actions 100000] [--ranks 8] [--rounds 5]

Printed per schedule: making and checking the orders, one simulation with its timeline (median and slowest of the
rounds), and bubble_ratio off that timeline; CPU seconds, since the simulator is one thread that waits for nothing.  The
garbage collector stays on, as in a session.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).parent.parent))

from perfsuite.metrics.pipeline import bubble_ratio
from perfsuite.schedules import SCHEDULES, Schedule, StageTimes, make_schedule, simulate

Made = TypeVar("Made")


def timed(work: Callable[[], Made]) -> tuple[float, Made]:
    start = time.process_time()
    made = work()
    return time.process_time() - start, made


def large_schedule(name: str, ranks: int, actions: int) -> Schedule:
    """A schedule of at least ``actions`` actions, with a number of micro-batches that suits every schedule."""
    spec = SCHEDULES[name]
    stages = ranks * spec.fewest_stages_per_rank
    per_micro_batch = stages * (3 if spec.splits_backward else 2)
    if name == "dualpipev":  # most of its backwards are whole
        per_micro_batch = stages * 2
    rounds = -(-actions // (per_micro_batch * ranks))
    return make_schedule(name, ranks=ranks, num_micro_batches=rounds * ranks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--actions", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; Python {sys.version.split()[0]}")
    print(f"{'schedule':24} {'actions':>8} {'make s':>7} {'simulate s':>11} {'slowest s':>10} {'bubble s':>9}")
    worst = 0.0
    for name in SCHEDULES:
        making, schedule = timed(lambda name=name: large_schedule(name, options.ranks, options.actions))
        times = StageTimes.in_proportion([1.0] * schedule.num_stages)
        rounds = [timed(lambda: simulate(schedule, times, communication_s=0.1)) for _ in range(options.rounds)]  # noqa: B023 - called at once
        took = [seconds for seconds, _ in rounds]
        reading, _ = timed(lambda: bubble_ratio(rounds[-1][1]))  # noqa: B023 - called at once
        actions = sum(map(len, schedule.orders))
        median = statistics.median(took) * options.actions / actions
        worst = max(worst, median)
        print(f"{name:24} {actions:8} {making:7.2f} {statistics.median(took):11.2f} {max(took):10.2f} {reading:9.2f}")
    print(f"{options.actions} actions: {worst:.2f} CPU s on the slowest schedule")


if __name__ == "__main__":
    main()
