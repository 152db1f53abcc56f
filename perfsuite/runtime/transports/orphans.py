"""Processes that a rank's code left behind: found and ended wherever they went.

A child may start a session of its own (``start_new_session=True``), or lose its parent (a daemon forks twice): then no
process group names it.  But a *subreaper* becomes the parent of every descendant whose own parent ended
(prctl(2), PR_SET_CHILD_SUBREAPER), so nothing that descends from it gets out of its sight.  The forkserver is one, and
so is each worker: while a worker lives, what it started stays below it and is left alone; once it has ended, all of
that is the forkserver's, and goes.
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
MARK = "PERFSUITE_FORKSERVER"
"""Variable in the environment of a forkserver, and so of all that descends from it; its value is of this one alone."""
_PAUSE_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Child:
    """A child of this process, as ``/proc/<pid>/stat`` tells."""

    pid: int
    group: int
    session: int
    has_ended: bool = False
    """Nobody has reaped it yet."""

    def kill(self) -> bool:
        """Kill it and all of its group; False when it is not ours to kill (it runs as another user).

        Only where no one else reaps it meanwhile: until then its pid and its group's id are nobody else's.
        """
        try:
            if self.group != os.getpgrp():
                with contextlib.suppress(ProcessLookupError):  # it left that group since, and was the last in it
                    os.killpg(self.group, signal.SIGKILL)  # in one call: nobody in it can fork a successor unseen
            os.kill(self.pid, signal.SIGKILL)
        except PermissionError:
            return False
        return True


def adopt_orphans() -> None:
    """Make this process the parent of every descendant that loses its own; kept by exec, not inherited by fork."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children() -> Iterator[Child]:
    """Every child of this process, adopted ones among them.  It must be the only one to reap them."""
    for pid in _candidates():
        with contextlib.suppress(OSError):
            # pid (name) state parent group session ...; the name may hold spaces and parentheses
            state, parent, group, session = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:4]
            if int(parent) == os.getpid():
                yield Child(pid=int(pid), group=int(group), session=int(session), has_ended=state == "Z")


def _candidates() -> list[str]:
    """Process ids among which the children are: the kernel's own list where it keeps one, else all."""
    lists = list(Path("/proc/self/task").glob("*/children"))  # CONFIG_PROC_CHILDREN
    if lists:
        return [pid for file in lists for pid in file.read_text().split()]
    return [name for name in os.listdir("/proc") if name.isdigit()]


def end_marked(value: str, deadline_s: float) -> None:
    """Kill every process of this user whose environment has ``MARK=value``, until none is left or time is up.

    For what a forkserver that was killed can no longer end.  Not found is a process that emptied its environment, or
    one that started its successor and ended while ``/proc`` was read.
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
            if entry in file.read_bytes().split(b"\0"):  # a zombie's is empty
                yield int(file.parent.name)
