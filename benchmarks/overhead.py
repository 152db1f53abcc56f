"""What a two-rank case costs beyond sampling and warm-up, and how that compares with one torchrun per case.

    python benchmarks/overhead.py [--cases 40] [--launches 10]

The suite's cases run under a real ``pytest``, once before and once after as many ``torchrun`` launches of the same
measurement.  Sampling is asked to last a tenth of a second; what of it is not in samples, the ranks meet in barriers
and tell each other their times, is told as well: it grows with the time that is asked for, the rest does not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
SAMPLING_S = 0.1
CASES = """
    import pytest
    from perfsuite import world_sizes

    def step(rank):
        import torch
        import torch.distributed as dist
        buffer = torch.ones(1024, device=rank.device)
        return lambda: dist.all_reduce(buffer)

    @pytest.mark.parametrize("number", range({cases}))
    @world_sizes(2)
    def test_case(perf, ranks, number):
        perf(step, on=ranks)
"""
SCRIPT = """
    import statistics, time
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    buffer = torch.ones(1024)
    times = []
    until = time.perf_counter() + {seconds}
    for _ in range({rounds}):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(buffer)
        times.append(time.perf_counter() - start)
    worst = torch.tensor(times)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(statistics.median(worst.tolist()))
    dist.destroy_process_group()
"""


def suite_overheads(folder: Path, cases: int, name: str) -> list[tuple[float, float, float]]:
    """(seconds beyond sampling and warm-up, of sampling between samples, in all) of each case of one pytest session."""
    (folder / "test_overhead.py").write_text(textwrap.dedent(CASES.format(cases=cases)))
    (folder / "pytest.ini").write_text(f"[pytest]\naddopts = --benchmark-max-time={SAMPLING_S}\n")
    (folder / "conftest.py").write_text('pytest_plugins = ["perfsuite.plugin"]\n')
    journal, report = folder / f"{name}.jsonl", folder / f"{name}.xml"
    command = [sys.executable, "-m", "pytest", "-q", f"--perf-journal={journal}", f"--junitxml={report}"]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(done.stdout + done.stderr)
    walls = {case.attrib["name"]: float(case.attrib["time"]) for case in ElementTree.parse(report).iter("testcase")}
    costs = []
    for line in journal.read_text().splitlines():
        entry = json.loads(line)
        result = entry.get("result", entry)
        if "measurement" not in result:
            continue
        measurement = result["measurement"]
        wall = walls[result["case"].partition("::")[2]]
        timed = sum(measurement["times_s"]) * measurement["iterations"]
        sampling = max(timed, SAMPLING_S)
        costs.append((wall - sampling - measurement["warmup_s"], sampling - timed, wall))
    return costs[1:]  # the first case waits for torch's import


def torchrun_case(folder: Path) -> float:
    """Seconds of one launch of the same measurement."""
    script = folder / "script.py"
    script.write_text(textwrap.dedent(SCRIPT.format(seconds=SAMPLING_S, rounds=100)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    started = time.perf_counter()
    subprocess.run(command, cwd=folder, capture_output=True, check=True)
    return time.perf_counter() - started


def environment() -> dict[str, str]:
    """This checkout first on the path, whether or not it is installed."""
    import os

    return {**os.environ, "PYTHONPATH": str(ROOT)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=40)
    parser.add_argument("--launches", type=int, default=10)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        costs = suite_overheads(folder, arguments.cases, "before")
        launches = [torchrun_case(folder) for _ in range(arguments.launches)]
        costs += suite_overheads(folder, arguments.cases, "after")
    overhead_s, between_s, whole_s = map(statistics.median, zip(*costs, strict=True))
    launch_s = statistics.median(launches)
    beyond_s = statistics.median(fixed + between for fixed, between, _ in costs)
    print(f"suite, two ranks: {beyond_s * 1e3:.0f} ms per case beyond samples and warm-up, of {len(costs)} cases")
    print(f"suite, two ranks: {overhead_s * 1e3:.0f} ms per case beyond sampling and warm-up")
    print(f"suite, two ranks: {between_s * 1e3:.0f} of {SAMPLING_S * 1e3:.0f} ms of sampling are between samples")
    print(f"suite, two ranks: {whole_s * 1e3:.0f} ms per case in all")
    print(f"torchrun, two ranks: {launch_s:.2f} s per case, of {len(launches)} cases")
    print(f"torchrun over suite, whole case: {launch_s / whole_s:.1f}x")


if __name__ == "__main__":
    main()
