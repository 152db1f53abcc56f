"""Check that a run of 200 cases with changing world sizes does not grow, and that 128 ranks run on this host.

    python benchmarks/endurance.py [--platform cpu] [--cases 200] [--ranks 128]

Each case has another number of ranks than the one before: 1, 2, 4, 3 on a CPU, 8, 2, 4, 1 on devices, if there are
enough.  So every case forms a new process group in living processes.  The benchmark reads descriptors, threads and
resident memory of the driver and of rank 0, and on an accelerator the used device memory with the communicators'
buffers.  It fails if descriptors, threads or device memory grew between the 20th and the last case of the same number
of ranks.  ``--ranks`` needs a CPU, where ranks may outnumber devices.  On the simulated device:
``PERFSUITE_FAMILIES=simmusa=simmusa.family:SimMusa python benchmarks/endurance.py --platform simmusa``.
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

from perfsuite.base.errors import ConfigurationError
from perfsuite.base.units import MIB
from perfsuite.platforms import Machine, detect_machine, load_catalog
from perfsuite.plugin.launch import PRELOAD
from perfsuite.record.workload import Budget, FunctionWorkload
from perfsuite.runtime.driver import Driver, Job
from perfsuite.runtime.transports.local import LocalTransport
from perfsuite.workloads.collective import AllReduce

ROOT = Path(__file__).parent.parent
BUDGET = Budget(min_rounds=5, max_rounds=20, max_time_s=0.02, warmup_time_s=0.02, timeout_s=300)
HOST_SIZES, DEVICE_SIZES = (1, 2, 4, 3), (8, 2, 4, 1)
SETTLED = 20
"""Cases after which libraries have allocated what they keep."""
MAY_GROW = "resident_kib"
"""Printed, but growth is not a failure: the heap of a process varies."""


def add_up(rank):
    """One all-reduce of 4 KiB, and what the process of rank 0 holds."""
    import torch
    import torch.distributed as dist

    buffer = torch.ones(1024, device=rank.device)
    if rank.rank == 0:
        counts = held(os.getpid())
        if rank.device.type != "cpu":
            free, total = torch.get_device_module(rank.device).mem_get_info()
            counts["device_kib"] = (total - free) >> 10
        for name, count in counts.items():
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
    median_s = statistics.median(measured.times_s)
    print(f"{ranks} ranks: {len(measured.ranks)} reported, {len(measured.times_s)} samples of {median_s * 1e3:.1f} ms,")
    print(f"  every element checked; {wall_s:.1f} s with the start of the processes")


def many_cases(driver: Driver, sizes: tuple[int, ...], cases: int) -> list[str]:
    """Cases in a row; prints what is held after SETTLED of them and at the end, and gives what has grown."""
    series: list[dict[str, dict[str, int]]] = []
    for world_size in islice(cycle(sizes), cases):
        job = Job(workload=FunctionWorkload(function=add_up), world_size=world_size, budget=BUDGET)
        records = {record.name: int(record.value) for record in driver.run(job).records}
        series.append({"driver": held(os.getpid()), "rank 0": records})
    settled = min(SETTLED, cases)
    last = settled + (cases - settled) // len(sizes) * len(sizes)  # of as many ranks
    print(f"{cases} cases of {', '.join(map(str, sizes))} ranks in turn")
    grown = []
    for who in ("driver", "rank 0"):
        for name in series[0][who]:
            early, late = series[settled - 1][who][name], series[last - 1][who][name]
            print(f"{who}: {name} {early} after case {settled}, {late} after case {last}: {late - early:+d}")
            if late > early and name != MAY_GROW:
                grown.append(f"{who}: {name}")
    return grown


def sizes_of(machine: Machine) -> tuple[int, ...]:
    """The world sizes that this machine can have."""
    if machine.family.shareable:
        return HOST_SIZES
    return tuple(dict.fromkeys(min(size, machine.device_count) for size in DEVICE_SIZES))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--platform", default="cpu", help="as --perf-platform (default: %(default)s)")
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=128, help="ranks of one case on a CPU's host")
    arguments = parser.parse_args()
    if arguments.cases < 1 or arguments.ranks < 1:
        parser.error(f"--cases={arguments.cases} --ranks={arguments.ranks}: at least one of each")
    try:
        machine = detect_machine(load_catalog(), arguments.platform)
    except ConfigurationError as problem:
        parser.error(str(problem))
    if machine.absent:
        parser.error(f"--platform={arguments.platform}: {machine.absent}")
    if len(sizes_of(machine)) < 2:
        parser.error(f"--platform={arguments.platform}: one device here, a world that changes its size needs two")
    with tempfile.TemporaryDirectory() as logs:
        start = machine.family.start_method
        transport = LocalTransport(start_method=start, preload=PRELOAD, log_directory=Path(logs))
        driver = Driver(transport=transport, family=machine.family, rootpath=ROOT, device_count=machine.device_count)
        try:
            first_result(driver)
            grown = many_cases(driver, sizes_of(machine), arguments.cases)
            if machine.family.shareable:
                many_ranks(driver, arguments.ranks)
        finally:
            driver.close()
    print(f"the driver's own peak is {_peak_mib():.0f} MiB")
    print(f"grown: {', '.join(grown) or 'nothing'}")
    return 1 if grown else 0


def _peak_mib() -> float:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MIB


if __name__ == "__main__":
    raise SystemExit(main())
