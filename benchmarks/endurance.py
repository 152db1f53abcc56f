"""Many ranks, many cases: 128 ranks run on this host, and over 100 cases nothing grows.

    python benchmarks/endurance.py [--ranks 128] [--cases 100]

The cases change their number of ranks (1, 2, 4, 3) from one to the next, so that every one forms a new process group
in processes that live on.  Descriptors, threads and resident memory are those of the driver and of rank 0's process.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from itertools import cycle, islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from perfsuite.platforms import families
from perfsuite.plugin.launch import PRELOAD
from perfsuite.runtime.driver import Driver, Job
from perfsuite.runtime.transports.local import LocalTransport
from perfsuite.units import MIB
from perfsuite.workload import Budget, FunctionWorkload
from perfsuite.workloads.collective import AllReduce

ROOT = Path(__file__).parent.parent
BUDGET = Budget(min_rounds=5, max_rounds=20, max_time_s=0.02, warmup_time_s=0.02, timeout_s=300)
WORLD_SIZES = (1, 2, 4, 3)
SETTLED = 20
"""Cases after which libraries have allocated what they keep."""


def add_up(rank):
    """One all-reduce of 4 KiB, and what the process of rank 0 holds."""
    import torch
    import torch.distributed as dist

    buffer = torch.ones(1024, device=rank.device)
    if rank.rank == 0:
        for name, count in held(os.getpid()).items():
            rank.record(name, float(count), unit="", reduce="only")
    return lambda: dist.all_reduce(buffer)


def held(pid: int) -> dict[str, int]:
    """Descriptors, threads and resident KiB of a process of this host."""
    process = Path("/proc") / str(pid)
    fields = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    return {
        "descriptors": len(list((process / "fd").iterdir())),
        "threads": int(fields["Threads"]),
        "resident_kib": int(fields["VmRSS"].split()[0]),
    }


def first_result(driver: Driver) -> None:
    """From the driver's start, with nothing imported, to what two ranks measured."""
    started_s = time.perf_counter()
    driver.run(Job(workload=AllReduce(message_bytes=1 << 10), world_size=2, budget=BUDGET))
    print(f"first two-rank result {time.perf_counter() - started_s:.1f} s after the driver's start")


def many_ranks(driver: Driver, ranks: int) -> None:
    """One case on ``ranks`` ranks of this host."""
    started_s = time.perf_counter()
    measured = driver.run(Job(workload=AllReduce(message_bytes=1 << 10), world_size=ranks, budget=BUDGET))
    wall_s = time.perf_counter() - started_s
    median_s = statistics.median(sample.time_s for sample in measured.samples)
    print(f"{ranks} ranks: {len(measured.ranks)} reported, {len(measured.samples)} samples of {median_s * 1e3:.1f} ms,")
    print(f"  every element checked; {wall_s:.1f} s with the start of the processes")


def many_cases(driver: Driver, cases: int) -> None:
    """Cases in a row; prints what is held after SETTLED of them and at the end."""
    series: list[dict[str, dict[str, int]]] = []
    for world_size in islice(cycle(WORLD_SIZES), cases):
        job = Job(workload=FunctionWorkload(function=add_up), world_size=world_size, budget=BUDGET)
        records = {record.name: int(record.value) for record in driver.run(job).records}
        series.append({"driver": held(os.getpid()), "rank 0": records})
    for who in ("driver", "rank 0"):
        for name in series[0][who]:
            early, late = series[min(SETTLED, cases) - 1][who][name], series[-1][who][name]
            print(
                f"{who}: {name} {early} after case {min(SETTLED, cases)}, {late} after case {cases}: {late - early:+d}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=128)
    parser.add_argument("--cases", type=int, default=100)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as logs:
        transport = LocalTransport(start_method="fork", preload=PRELOAD, log_directory=Path(logs))
        driver = Driver(transport=transport, family=families()["cpu"], rootpath=ROOT, device_count=1)
        try:
            first_result(driver)
            many_cases(driver, arguments.cases)
            many_ranks(driver, arguments.ranks)
        finally:
            driver.close()
    print(f"the driver's own peak is {_peak_mib():.0f} MiB")


def _peak_mib() -> float:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MIB


if __name__ == "__main__":
    main()
