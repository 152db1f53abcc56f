"""Find and end the processes that a rank's code left behind.

A child may start its own session (``start_new_session=True``) or lose its parent (a daemon forks twice): then no
process group contains it. But a *subreaper* becomes the parent of every descendant whose parent ended (prctl(2),
PR_SET_CHILD_SUBREAPER). The forkserver and each worker are subreapers. While a worker lives, its descendants stay below
it and are left alone. After its end they belong to the forkserver, which kills them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
MARK = "PERFSUITE_FORKSERVER"  # Variable with a unique value in a forkserver and its descendants.
_PAUSE_S = 0.02


@dataclass(frozen=True, kw_only=True)
class ChildProcess:
    """A child of this process, read from ``/proc/<pid>/stat``."""

    pid: int
    group: int
    session: int
    has_ended: bool = False  # Whether it is a zombie.

    def kill(self) -> bool:
        """Kill it and its group; return False if it belongs to another user. Only the caller may reap meanwhile."""
        try:
            if self.group != os.getpgrp():
                with contextlib.suppress(ProcessLookupError):  # it was the last in that group and has left it
                    os.killpg(self.group, signal.SIGKILL)  # one call: no member can fork a successor unseen
            os.kill(self.pid, signal.SIGKILL)
        except PermissionError:
            return False
        return True


def adopt_orphans() -> None:
    """Make this process the parent of every descendant that loses its parent; exec keeps this, fork does not."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children() -> Iterator[ChildProcess]:
    """Yield every child of this process, adopted ones included. Only the caller may reap them."""
    lists = list(Path("/proc/self/task").glob("*/children"))  # CONFIG_PROC_CHILDREN; without it read all processes
    pids: list[str] = [] if lists else list(filter(str.isdigit, os.listdir("/proc")))
    for file in lists:
        with contextlib.suppress(OSError):  # the thread has ended
            pids += file.read_text().split()
    for pid in pids:
        with contextlib.suppress(OSError):
            # pid (name) state parent group session ...; the name may hold spaces and parentheses
            state, parent, group, session = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:4]
            if int(parent) == os.getpid():
                yield ChildProcess(pid=int(pid), group=int(group), session=int(session), has_ended=state == "Z")


def end_marked(value: str, deadline_s: float) -> None:
    """Kill every process of this user whose environment has ``MARK=value``, until none is left or time is up.

    The driver calls it for a forkserver that was killed. It misses a process that cleared its environment, and one that
    started its successor and ended while ``/proc`` was read.
    """
    until = time.monotonic() + deadline_s
    while (left := list(_marked(f"{MARK}={value}".encode()))) and time.monotonic() < until:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_PAUSE_S)


def _marked(entry: bytes) -> Iterator[int]:
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if entry in file.read_bytes().split(b"\0"):  # empty for a zombie
                yield int(file.parent.name)
