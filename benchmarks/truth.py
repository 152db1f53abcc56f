"""Accuracy of the suite, against bare loops in the same ranks and an injected delay.

    python benchmarks/truth.py [--pairs 20] [--device cpu]

Prints, each with a 95 % interval over interleaved pairs: the time of a matrix product by the suite over a bare loop,
the same for all-reduce on two ranks, and the reported time of a delay that is injected into one rank.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from perfsuite.platforms import families
from perfsuite.record.workload import Budget, FunctionWorkload
from perfsuite.runtime.driver import Driver, Job
from perfsuite.runtime.transports.local import LocalTransport
from perfsuite.statistics.robust import ratio_interval

BUDGET = Budget(min_rounds=10, max_time_s=0.1, warmup_time_s=0.05)
TURNS = 4
"""Turns of both arms in one ratio.  It compares medians, because the speed of the host changes within a second."""


def product(rank, size=512):
    """The suite's arm: one matrix product."""
    import torch

    a = torch.randn(size, size, device=rank.device)
    out = torch.empty_like(a)
    return lambda: torch.mm(a, a, out=out)


def add_up(rank, elements=1 << 16):
    """The suite's arm: one all-reduce."""
    import torch
    import torch.distributed as dist

    buffer = torch.zeros(elements, device=rank.device)
    return lambda: dist.all_reduce(buffer)


def bare(rank, arm="product", rounds=20, iterations=8):
    """The same operation by a hand-written loop: barrier, k iterations, device idle; median of the worst rank."""
    import torch
    import torch.distributed as dist

    run = {"product": product, "add_up": add_up}[arm](rank)
    wait = torch.cuda.synchronize if rank.device.type == "cuda" else (lambda: None)

    def loop():
        run()
        times = []
        for _ in range(rounds):
            if rank.world_size > 1:
                dist.barrier()
            wait()
            start = time.perf_counter()
            for _ in range(iterations):
                run()
            wait()
            times.append((time.perf_counter() - start) / iterations)
        worst = torch.tensor(times, dtype=torch.float64, device=rank.device)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        rank.record("bare_s", statistics.median(worst.tolist()))

    return loop


def late(rank, delay_s=0.0, culprit=1):
    """All-reduce to which one rank comes ``delay_s`` late."""
    run = add_up(rank, elements=256)

    def step():
        if delay_s and rank.rank == culprit:
            time.sleep(delay_s)
        run()

    return step


def compare(driver, arm, world_size, pairs):
    """Suite over bare loop, arms alternating in the same rank processes."""
    functions = {"product": product, "add_up": add_up}
    suite = Job(workload=FunctionWorkload(function=functions[arm]), world_size=world_size, budget=BUDGET)
    arguments = {"arm": arm, "iterations": driver.run(suite).iterations}
    once = Budget(min_rounds=1, max_rounds=1, warmup_min_iterations=1, warmup_time_s=0.0)
    by_hand = Job(workload=FunctionWorkload(function=bare, arguments=arguments), world_size=world_size, budget=once)
    ratios = []
    for _ in range(pairs):
        suite_s, bare_s = [], []
        for turn in range(TURNS):
            for which in ("suite", "bare") if turn % 2 else ("bare", "suite"):
                if which == "suite":
                    suite_s.append(driver.run(suite).median_s)
                else:
                    bare_s.append(driver.run(by_hand).records[0].value)
        ratios.append(statistics.median(suite_s) / statistics.median(bare_s))
    mean, low, high = ratio_interval(ratios)
    print(f"{arm} on {world_size} rank(s), suite over bare loop: {mean:.4f} [{low:.4f}, {high:.4f}] from {pairs} pairs")


def delays(driver, pairs):
    """Injected delay against what was reported, and the rank that was named."""
    for delay_s in (0.005, 0.02, 0.05):
        shares, named = [], 0
        for _ in range(pairs):
            arguments = {"delay_s": delay_s, "culprit": 1}
            workload = FunctionWorkload(function=late, arguments=arguments)
            measurement = driver.run(Job(workload=workload, world_size=2, budget=BUDGET))
            shares.append(measurement.arrival.lag_s / delay_s)
            named += measurement.arrival.late_rank == 1
        mean, low, high = ratio_interval(shares)
        print(
            f"delay of {delay_s * 1e3:g} ms in rank 1: reported lag over delay {mean:.4f} [{low:.4f}, {high:.4f}], "
            f"rank named in {named} of {pairs}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as logs:
        preload = ("torch", "torch.distributed", "perfsuite.runtime.ranks.worker")
        transport = LocalTransport(start_method="fork", preload=preload, log_directory=Path(logs))
        family = families()[arguments.device]
        driver = Driver(transport=transport, family=family, rootpath=Path(__file__).parent, device_count=1)
        try:
            compare(driver, "product", 1, arguments.pairs)
            if arguments.device == "cpu":
                compare(driver, "add_up", 2, arguments.pairs)
                delays(driver, max(5, arguments.pairs // 4))
        finally:
            driver.close()


if __name__ == "__main__":
    main()
