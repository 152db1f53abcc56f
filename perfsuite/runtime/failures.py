"""Make one report of the failed ranks that names the cause first.

When one rank fails, the others wait for it in a communication until they are ended: the report calls these
consequences. The stacks that faulthandler wrote show the cause of a hang: the rank that does not wait for the others.
Inside a backward pass, in a wait for the device, or without a stack, Python cannot show the place. Such a rank is
*stuck*; it is the cause only if no rank is *hung*.
"""

from __future__ import annotations

import contextlib
import linecache
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

from perfsuite.base.errors import (
    CaseError,
    DeviceUnusable,
    ExpectedFailure,
    InvalidParameter,
    OutOfMemory,
    PerfsuiteError,
    RanksFailed,
    UnsupportedCase,
    WrongResult,
    also,
)
from perfsuite.base.units import plural

RankState = Literal["died", "raised", "hung", "stuck", "working", "skipped", "dragged", "waiting", "finished"]
"""States, the likeliest cause first."""
_ORDER: Sequence[RankState] = get_args(RankState)
_CAUSES: Sequence[RankState] = ("died", "raised", "hung")
_WORDS: Mapping[str, str] = {"expected_failure": "expected to fail", "skipped": "skipped", "unsupported": ""}
"""Kinds of exceptions for a case without a measurement. Any error has priority over them, then the first of them."""
_EXCEPTIONS: Mapping[str, type[PerfsuiteError]] = {
    "wrong_result": WrongResult,
    "invalid_parameter": InvalidParameter,
    "unsupported": UnsupportedCase,
    "skipped": UnsupportedCase,
    "expected_failure": ExpectedFailure,
    "unusable": DeviceUnusable,
    "refused": CaseError,
    "out_of_memory": OutOfMemory,
}
_BROKEN = re.compile(r"(RuntimeError|Dist\w*Error|Connection\w*Error|BrokenPipeError|TimeoutError)\b")
_TRANSPORT = re.compile(r"\bgloo/|\bNCCL\b|ProcessGroup|\bby (remote )?peer\b")

UPSTREAM: Mapping[str, str] = {
    "no algorithm/protocol available": "NCCL has no algorithm that NCCL_ALGO allows for this collective",
    "Duplicate GPU detected": "NCCL before 2.30 refuses several ranks on one device",
    "0 active drivers": "triton finds no GPU while DeepSpeed is imported",
    "terminate called without an active exception": "gloo aborts at the end of a program",
    "Error while creating shared memory segment": "NCCL needs more than a container's 64 MiB of /dev/shm",
    "failed with error Cannot allocate memory": "NCCL may not lock memory for InfiniBand (ulimit -l)",
    "unable to allocate shared memory(shm)": "workers of a DataLoader need more than a container's 64 MiB of /dev/shm",
}
"""Faults of torch and its libraries, by a phrase of their messages; docs upstream has versions and sources."""


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """State of one rank of a failed case, with its cause."""

    rank: int
    host: str
    state: RankState
    what: str  # Exit status, exception message or the place at which the rank is stuck.
    phase: str  # Last phase of the rank: building, timing, checking before timing, ...
    detail: str = ""  # Traceback or stack.
    place: str = ""  # Position of the rank in the mesh, printed after its number; empty if the number is enough.
    kind: str = ""  # Kind of the exception, see protocol.ERROR_KINDS; empty if the rank raised none.
    types: Sequence[Sequence[str]] = ()  # Module and name of the exception's class and its bases, the nearest first.


def exception_of(world_size: int, failures: Sequence[RankFailure], limit: str) -> PerfsuiteError:
    """Return the exception to raise: the common one if all failing ranks agree, else RanksFailed with a report.

    It is also an instance of the ranks' own exception, so that ``pytest.raises`` and ``xfail(raises=...)`` match; the
    lowest rank decides if they differ. ``limit`` is the time limit, if it ended the case. A skip or an expected failure
    of some ranks applies to the case if no rank failed otherwise. If a rank ran out of memory, the other errors are
    consequences.
    """
    own = [failure for failure in consequences(failures) if failure.state == "raised"]
    causes = [failure for failure in own if failure.kind == "out_of_memory"]
    causes = causes or [failure for failure in own if failure.kind not in _WORDS]
    for word in _WORDS:
        causes = causes or [failure for failure in own if failure.kind == word]
    kinds = {failure.kind for failure in causes}
    if len(kinds) == 1 and kinds <= set(_EXCEPTIONS) and not any(failure.state == "died" for failure in failures):
        first = min(causes, key=lambda failure: failure.rank)
        kind = _EXCEPTIONS[first.kind]
        return also(kind, _loaded(first.types) or kind)(_where(first) + first.what)
    causes = [failure for failure in consequences(failures) if failure.state in _CAUSES and not _skips(failure)]
    types = [_loaded(failure.types) for failure in sorted(causes, key=lambda failure: failure.rank)]
    raised = () if None in types else tuple(dict.fromkeys(filter(None, types)))
    error = (also(RanksFailed, raised[0]) if raised else RanksFailed)(compose(world_size, failures, limit))
    error.raised = raised
    return error


def _loaded(types: Sequence[Sequence[str]]) -> type[BaseException] | None:
    """Return the nearest of these classes that this process has loaded; ``raises=`` of a test can name no other.

    ``pytest.exit`` of a rank fails its case: a class that is an ``Exit`` too would end the run.
    """
    for module, path in types:
        if (module, path) == ("_pytest.outcomes", "Exit"):
            continue
        held: Any = sys.modules.get(module)
        for name in path.split("."):
            held = getattr(held, name, None)
        if isinstance(held, type) and issubclass(held, Exception | SystemExit) and not issubclass(held, StopIteration):
            return held
    return None


def _where(failure: RankFailure) -> str:
    if failure.kind == "wrong_result":
        return f"rank {failure.rank}{failure.place} while {failure.phase}: "
    if failure.kind in ("refused", "unusable"):
        return f"rank {failure.rank}{failure.place} on {failure.host}: "
    word = _WORDS.get(failure.kind)
    return f"rank {failure.rank}{failure.place} on {failure.host} {word}: " if word else ""


def consequences(failures: Sequence[RankFailure]) -> list[RankFailure]:
    """Return the failures; an error of a communication that lost another rank becomes ``dragged``."""
    own = [failure for failure in failures if failure.state in _CAUSES and not _from_communication(failure)]
    if not own:
        return list(failures)
    return [
        replace(failure, state="dragged", detail="")
        if failure.state == "raised" and _from_communication(failure)
        else failure
        for failure in failures
    ]


def _from_communication(failure: RankFailure) -> bool:
    if failure.state != "raised" or not _BROKEN.match(failure.what):
        return False
    files = re.findall(r'^  File "([^"]+)"', failure.detail, re.MULTILINE)
    return bool(_TRANSPORT.search(failure.what)) or (bool(files) and "/torch/distributed/" in files[-1])


def compose(world_size: int, failures: Sequence[RankFailure], limit: str) -> str:
    """Return the report: a line that names the cause, then every failed rank with its stack, in a stable order."""
    ordered = [
        replace(failure, state="skipped", detail="") if _skips(failure) else failure
        for failure in consequences(failures)
    ]
    ordered.sort(key=lambda failure: _ORDER.index(failure.state))
    others = [str(failure.rank) for failure in ordered[1:] if failure.state == ordered[0].state]
    more = f"; so did {'rank' if len(others) == 1 else 'ranks'} {', '.join(others)}" if others else ""
    lines = [f"{_headline(ordered[0])}{more} ({plural(world_size, 'rank')}{limit})"]
    text = "\n".join(part.lower() for failure in ordered for part in (failure.what, failure.detail))
    if limit and ordered[0].state == "working":
        lines.append("it computes: if it is only slow, choose a longer --perf-timeout or a smaller size")
    lines += [
        f"known upstream: {fault} (perfsuite docs upstream)" for word, fault in UPSTREAM.items() if word.lower() in text
    ]
    for failure in ordered:
        if failure.state == "finished":
            continue
        detail = failure.detail.rstrip()
        if detail and detail in lines:  # print an error that every rank raised once
            lines.append(f"--- {_headline(failure)}: as above")
            continue
        lines += [f"--- {_headline(failure)}", *([detail] if detail else [])]
    return "\n".join(lines)


def _skips(failure: RankFailure) -> bool:
    return failure.state == "raised" and failure.kind in _WORDS


def _headline(failure: RankFailure) -> str:
    verb = {
        "died": f"died: {failure.what}",
        "raised": f"raised {failure.what}",
        "hung": f"hung at {failure.what}",
        "stuck": f"was stuck at {failure.what}",
        "working": f"was still working at {failure.what}",
        "skipped": f"{_WORDS.get(failure.kind) or 'skipped'}: {failure.what}",
        "dragged": f"lost the other ranks: {failure.what}",
        "waiting": f"was waiting for the other ranks in {failure.what}",
        "finished": "had finished",
    }[failure.state]
    return f"rank {failure.rank}{failure.place} on {failure.host} {verb} (while {failure.phase})"


_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>\S+)', re.MULTILINE)
_COMMUNICATION = re.compile(r"[/\\]torch[/\\](distributed|autograd|_\w+|utils[/\\]_pytree)")
"""Frames of torch that communicate or that call them: a tensor may wait for its collective at its first use."""
_MAY_WAIT = re.compile(r"[/\\]torch[/\\](autograd|accelerator|cuda)[/\\]|[/\\]torch_\w+[/\\]core[/\\]")
"""Frames that may wait: a backward pass for its reductions, a wait for the device for any kernel."""
_WAITS_HERE = re.compile(r"\.wait\(")  # A wait of an asynchronous collective is C++: only the calling line shows it.
_WAITS_FOR_RETURNED = "perfsuite/runtime/ranks/returned.py"  # Waits for handles that an iteration returned.
_WAITS_FOR_DEVICE = re.compile(r"\.(synchronize|item|tolist)\(")
_WORKER = "perfsuite/runtime/ranks/worker.py"
_MAIN = "in become_worker"
_STATE = "Process: "  # Begins the line that replaces a stack.
_STATES: Mapping[str, str] = MappingProxyType(
    {
        "D": "waits in the kernel and takes no signal, for example for a driver or a file system",
        "R": "runs code that blocks Python",
        "S": "sleeps in code that blocks Python",
        "T": "is stopped by a signal; kill -CONT continues it",
        "t": "is stopped by a debugger",
    }
)
"""Meaning of the states of proc(5) for a process that wrote no stack."""
_CORE_TIME = re.compile(r"Core time: (\d+)\n")
_BUSY_TICKS = 3  # Core time between two dumps, in hundredths of a second, that shows a computation.
_STACK_FRAMES = 25
_CUT_BY_FAULTHANDLER = "\n  ..."  # faulthandler writes the innermost 100 frames of a thread.


@dataclass(frozen=True, kw_only=True)
class Look:
    """State of the main thread of a worker at one moment."""

    state: Literal["hung", "stuck", "working", "waiting"]
    where: str
    stack: str


def is_whole(dump: str) -> bool:
    """Return whether faulthandler has written all of ``dump``: the main thread comes last."""
    whole = _MAIN in dump and dump.endswith(" in <module>\n")
    return whole or dump.endswith(_CUT_BY_FAULTHANDLER + "\n")


def state_of(pid: int) -> str:
    """Return the line that replaces a stack: the kernel's state of the process; empty if it has ended."""
    process = Path(f"/proc/{pid}")
    try:
        letter = (process / "stat").read_text().rsplit(")", 1)[1].split()[0]
    except (OSError, IndexError):
        return ""
    if letter not in _STATES:
        return ""
    at = ""
    with contextlib.suppress(OSError):  # unreadable for processes of other users
        at = (process / "wchan").read_text().strip() if letter == "D" else ""
    place = f", at {at}" if at not in ("", "0") else ""
    return f"{_STATE}{_STATES[letter]} (state {letter}{place})\n"


def core_time_of(pid: int) -> str:
    """Return the line that precedes a stack: the core time of the main thread, in ticks; empty if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return ""
    return f"Core time: {int(fields[11]) + int(fields[12])}\n"


def judge(earlier: str, later: str) -> Look:
    """Return a rank's state from two dumps of its process.

    A rank that moved in between works and is only slow. So does one whose main thread computed in one place, outside
    communication and waits: one product can take minutes.
    """
    look, before = judge_stack(later), _frames(earlier)
    moved = before and _frames(later) not in ([], before)
    ticks = [int(match[1]) for dump in (earlier, later) if (match := _CORE_TIME.match(dump))]
    if moved or (look.state == "hung" and len(ticks) == 2 and ticks[1] - ticks[0] >= _BUSY_TICKS):
        return Look(state="working", where=look.where, stack=look.stack)
    return look


def judge_stack(dump: str) -> Look:
    """Return the state of the main thread from one faulthandler dump of all threads of a worker."""
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
    innermost = linecache.getline(frames[0][0], int(frames[0][1]))  # empty if only another host has the file
    if waits:
        return Look(state="waiting", where=f"{operation}, called at {place}", stack=stack)
    if _WAITS_HERE.search(innermost) or frames[0][0].endswith(_WAITS_FOR_RETURNED):
        return Look(state="waiting", where=f"wait, called at {place}", stack=stack)
    if _MAY_WAIT.search(frames[0][0]) or _WAITS_FOR_DEVICE.search(innermost):
        return Look(state="stuck", where=place, stack=stack)
    return Look(state="hung", where=place, stack=stack)


def _without_stack(dump: str) -> Look:
    """Return a state from the kernel's line; a stopped process is ``hung``, for it waits for no other rank."""
    where = "an unknown place (no Python stack)"
    if not dump.startswith(_STATE):
        return Look(state="stuck", where=where, stack=dump)
    state = dump.removeprefix(_STATE).strip()
    stopped = state.startswith((_STATES["T"], _STATES["t"]))
    return Look(state="hung" if stopped else "stuck", where=f"{where}: its process {state}", stack="")


def _frames(dump: str) -> list[tuple[str, str, str]]:
    """Return (file, line, name) of the main thread, innermost first, without perfsuite's own frames."""
    threads = dump.rstrip("\n").split("\n\n")
    mains = [thread for thread in threads if _MAIN in thread]
    mains = mains or [thread for thread in threads[-1:] if thread.endswith(_CUT_BY_FAULTHANDLER)]
    frames = [(match["file"], match["line"], match["name"]) for thread in mains for match in _FRAME.finditer(thread)]
    own = next((index for index, frame in enumerate(frames) if frame[0].endswith(_WORKER)), len(frames))
    return frames[:own] or frames
