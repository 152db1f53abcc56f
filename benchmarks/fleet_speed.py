"""Seconds and memory of ``perfsuite fleet`` over many journals; the aim is 20 s and 1 GiB for 1,000.

python benchmarks/fleet_speed.py [--journals 1000] [--cases 16] [--samples 100]
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from test_correctness.helpers.fleets import CASES, write_node


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--journals", type=int, default=1000)
    parser.add_argument("--cases", type=int, default=16)
    parser.add_argument("--samples", type=int, default=100)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.journals):
            extra = options.cases // len(CASES) - 1
            write_node(Path(folder), f"node{number:04}", extra_cases=extra, samples=options.samples)
        size = sum(path.stat().st_size for path in Path(folder).iterdir()) / 2**20
        before = time.monotonic()
        command = [sys.executable, "-m", "perfsuite", "fleet", folder, "--nodes", str(options.journals)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        took_s = time.monotonic() - before
        most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**10
    print(done.stdout[-1500:] or done.stderr)
    print(f"{options.journals} journals of {options.cases} cases ({size:.0f} MiB): {took_s:.1f} s, {most:.0f} MiB")


if __name__ == "__main__":
    main()
