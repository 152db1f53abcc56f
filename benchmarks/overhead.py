"""What a two-rank case costs beyond its samples and warm-up, and how that compares with one torchrun per case.

    python benchmarks/overhead.py [--cases 40] [--launches 10]

The suite's cases run under a real ``pytest``, once before and once after as many ``torchrun`` launches of the same
measurement.
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


def suite_overheads(folder: Path, cases: int, name: str) -> tuple[list[float], list[float]]:
    """(seconds per case beyond samples and warm-up, whole seconds per case) of one pytest session."""
    (folder / "test_overhead.py").write_text(textwrap.dedent(CASES.format(cases=cases)))
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --benchmark-max-time=0.1\n")
    (folder / "conftest.py").write_text('pytest_plugins = ["perfsuite.plugin"]\n')
    journal, report = folder / f"{name}.jsonl", folder / f"{name}.xml"
    command = [sys.executable, "-m", "pytest", "-q", f"--perf-journal={journal}", f"--junitxml={report}"]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(done.stdout + done.stderr)
    walls = {case.attrib["name"]: float(case.attrib["time"]) for case in ElementTree.parse(report).iter("testcase")}
    overheads, whole = [], []
    for line in journal.read_text().splitlines():
        entry = json.loads(line)
        result = entry.get("result", entry)
        if "measurement" not in result:
            continue
        measurement = result["measurement"]
        wall = walls[result["case"].partition("::")[2]]
        timed = sum(sample["time_s"] for sample in measurement["samples"]) * measurement["iterations"]
        overheads.append(wall - timed - measurement["warmup_s"])
        whole.append(wall)
    return overheads[1:], whole[1:]  # the first case waits for torch's import


def torchrun_case(folder: Path) -> float:
    """Seconds of one launch of the same measurement."""
    script = folder / "script.py"
    script.write_text(textwrap.dedent(SCRIPT.format(seconds=0.1, rounds=100)))
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
        overheads, whole = suite_overheads(folder, arguments.cases, "before")
        launches = [torchrun_case(folder) for _ in range(arguments.launches)]
        overheads_again, whole_again = suite_overheads(folder, arguments.cases, "after")
    overheads += overheads_again
    whole += whole_again
    overhead_s, whole_s, launch_s = map(statistics.median, (overheads, whole, launches))
    print(f"suite, two ranks: {overhead_s * 1e3:.0f} ms per case beyond samples and warm-up, of {len(overheads)} cases")
    print(f"suite, two ranks: {whole_s * 1e3:.0f} ms per case in all")
    print(f"torchrun, two ranks: {launch_s:.2f} s per case, of {len(launches)} cases")
    print(f"torchrun over suite, whole case: {launch_s / whole_s:.1f}x")


if __name__ == "__main__":
    main()
