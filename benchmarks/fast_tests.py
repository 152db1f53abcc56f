"""What the fast tests cost: CPU seconds of all processes that they start, and wall seconds.

    python benchmarks/fast_tests.py [argument of pytest ...]

A control group of its own counts them: many are forks of one template, and nobody waits for those.  Needs root.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
GROUPS = Path("/sys/fs/cgroup")


def new_group() -> Path:
    """A control group that counts CPU time, of either version."""
    above = GROUPS / "cpuacct" if (GROUPS / "cpuacct").is_dir() else GROUPS
    group = above / f"fast-tests-{os.getpid()}"
    group.mkdir()
    return group


def cpu_s(group: Path) -> float:
    """CPU seconds of all that ran in the group."""
    if (group / "cpuacct.usage").exists():
        return int((group / "cpuacct.usage").read_text()) / 1e9
    counts = dict(line.split() for line in (group / "cpu.stat").read_text().splitlines())
    return int(counts["usage_usec"]) / 1e6


def main() -> int:
    arguments = sys.argv[1:] or ["test_correctness"]
    group = new_group()
    members = group / ("tasks" if (group / "tasks").exists() else "cgroup.procs")
    enter = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(members)]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", *arguments]
    started_s = time.monotonic()
    try:
        code = subprocess.run([*enter, *command], cwd=ROOT, check=False).returncode
        load = os.getloadavg()[2]
        print(f"{cpu_s(group):.0f} s of CPU, {time.monotonic() - started_s:.0f} s of wall, load {load:.1f}")
    finally:
        group.rmdir()
    return code


if __name__ == "__main__":
    sys.exit(main())
