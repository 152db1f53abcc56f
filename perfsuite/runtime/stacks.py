"""What a stuck rank is doing, read from the stacks that faulthandler wrote of its process.

A rank that waits for the others is not the one that hangs.  Where Python's stack cannot tell (inside a backward pass,
in a wait for the device, where no stack could be taken) the rank is *stuck*: named only when nobody is known to hang.
"""

from __future__ import annotations

import contextlib
import linecache
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>\S+)', re.MULTILINE)
_COMMUNICATION = re.compile(r"[/\\]torch[/\\](distributed|autograd|_\w+|utils[/\\]_pytree)")
"""Also what calls it in torch: a tensor that waits for its collective when it is first used may do so anywhere."""
_MAY_WAIT = re.compile(r"[/\\]torch[/\\](autograd|accelerator|cuda)[/\\]|[/\\]torch_\w+[/\\]core[/\\]")
"""A backward pass waits for the reductions that it started, a wait for the device for whatever runs there."""
_WAITS_HERE = re.compile(r"\.wait\(")
"""``work.wait()`` of an asynchronous collective is C++: no frame of torch's tells of it, only the calling line."""
_WAITS_FOR_RETURNED = "perfsuite/runtime/ranks/returned.py"
"""Where perfsuite waits for a handle that an iteration returned."""
_WAITS_FOR_DEVICE = re.compile(r"\.(synchronize|item|tolist)\(")
_WORKER = "perfsuite/runtime/ranks/worker.py"
_MAIN = "in become_worker"
_STATE = "Process: "
"""Begins the line that takes the place of a stack."""
_STATES: Mapping[str, str] = MappingProxyType(
    {
        "D": "waits in the kernel and takes no signal meanwhile, as for a driver or a file system",
        "R": "is running code that lets no Python run",
        "S": "sleeps in code that lets no Python run",
        "T": "is stopped by a signal; kill -CONT lets it go on",
        "t": "is stopped by a debugger",
    }
)
"""What a process in each state of proc(5) does that gives no stack."""
_STACK_FRAMES = 25
_CUT_BY_FAULTHANDLER = "\n  ..."
"""faulthandler writes the innermost 100 frames of a thread."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """What the main thread of a worker was doing at one moment."""

    state: Literal["hung", "stuck", "working", "waiting"]
    where: str
    stack: str


def is_whole(dump: str) -> bool:
    """Whether faulthandler has written all of ``dump``: the main thread, the oldest, comes last."""
    whole = _MAIN in dump and dump.endswith(" in <module>\n")
    return whole or dump.endswith(_CUT_BY_FAULTHANDLER + "\n")


def state_of(pid: int) -> str:
    """What takes the place of a stack that could not be taken: what the kernel says of the process.

    Empty where it says nothing, as of a process that has ended.
    """
    process = Path(f"/proc/{pid}")
    try:
        letter = (process / "stat").read_text().rsplit(")", 1)[1].split()[0]
    except (OSError, IndexError):
        return ""
    if letter not in _STATES:
        return ""
    at = ""
    with contextlib.suppress(OSError):  # of other users' processes it is not told
        at = (process / "wchan").read_text().strip() if letter == "D" else ""
    place = f", at {at}" if at not in ("", "0") else ""
    return f"{_STATE}{_STATES[letter]} (state {letter}{place})\n"


def judge(earlier: str, later: str) -> Look:
    """What a rank was doing, from two dumps of its process taken one after the other.

    A rank that has moved in between neither hangs nor waits: it is at work, and the case is slower than its deadline.
    """
    look, before = judge_stack(later), _frames(earlier)
    if before and _frames(later) not in ([], before):
        return Look(state="working", where=look.where, stack=look.stack)
    return look


def judge_stack(dump: str) -> Look:
    """What the main thread was doing, from one faulthandler dump of all threads of a worker."""
    frames = _frames(dump)
    if not frames:
        return _without_stack(dump)
    waits, operation = False, frames[0][2]
    for file, _, name in frames:
        if not _COMMUNICATION.search(file):
            break
        waits = waits or "distributed" in file
        operation = operation if name == "wrapper" else name
    outside = (frame for frame in frames if not (_COMMUNICATION.search(frame[0]) or _MAY_WAIT.search(frame[0])))
    where = next(outside, frames[0])
    place = f"{where[0]}:{where[1]} in {where[2]}"
    stack = "\n".join(f'  File "{file}", line {line}, in {name}' for file, line, name in frames[:_STACK_FRAMES])
    innermost = linecache.getline(frames[0][0], int(frames[0][1]))  # empty where another host alone has the file
    if waits:
        return Look(state="waiting", where=f"{operation}, called at {place}", stack=stack)
    if _WAITS_HERE.search(innermost) or frames[0][0].endswith(_WAITS_FOR_RETURNED):
        return Look(state="waiting", where=f"wait, called at {place}", stack=stack)
    if _MAY_WAIT.search(frames[0][0]) or _WAITS_FOR_DEVICE.search(innermost):
        return Look(state="stuck", where=place, stack=stack)
    return Look(state="hung", where=place, stack=stack)


def _without_stack(dump: str) -> Look:
    """Who is stopped waits for nobody."""
    where = "an unknown place, no Python stack could be taken"
    if not dump.startswith(_STATE):
        return Look(state="stuck", where=where, stack=dump)
    state = dump.removeprefix(_STATE).strip()
    stopped = state.startswith((_STATES["T"], _STATES["t"]))
    return Look(state="hung" if stopped else "stuck", where=f"{where}: its process {state}", stack="")


def _frames(dump: str) -> list[tuple[str, str, str]]:
    """(file, line, name) of the main thread, innermost first, without perfsuite's own, the same in every stack."""
    threads = dump.rstrip("\n").split("\n\n")
    mains = [thread for thread in threads if _MAIN in thread]
    mains = mains or [thread for thread in threads[-1:] if thread.endswith(_CUT_BY_FAULTHANDLER)]
    frames = [(match["file"], match["line"], match["name"]) for thread in mains for match in _FRAME.finditer(thread)]
    own = next((index for index, frame in enumerate(frames) if frame[0].endswith(_WORKER)), len(frames))
    return frames[:own] or frames
