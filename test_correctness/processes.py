"""Looking at processes from outside, for tests of what is left behind."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path


def descendants(pid: int) -> list[int]:
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rsplit(")", 1)[1].split()[1])
    found = [child for child, parent in parents.items() if parent == pid]
    for child in found:
        found.extend(grandchild for grandchild, parent in parents.items() if parent == child)
    return found


def gone(pids, within_s=20.0):
    def alive(pid):
        try:
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
        except OSError:
            return False

    until = time.monotonic() + within_s
    while time.monotonic() < until and any(alive(pid) for pid in pids):
        time.sleep(0.05)
    return not any(alive(pid) for pid in pids)


def processes_with(*variables: str) -> list[int]:
    """Processes that were started with these ``NAME=value`` in their environment."""
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if {variable.encode() for variable in variables} <= set(file.read_bytes().split(b"\0")):
                found.append(int(file.parent.name))
    return found
