"""Turning what is known about failed ranks into one report that names the cause first.

When one rank fails, the others wait for it in a communication until they are ended: those are consequences, and the
report says so.  Which rank of a hang is the cause is read from the stacks that faulthandler wrote: the one that is not
waiting for the others.  Where Python's stack cannot tell (inside a backward pass, in a wait for the device, where no
stack could be taken) the rank is *stuck*: named only when nobody is known to hang.
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
"""The likeliest cause first."""
_ORDER: Sequence[RankState] = get_args(RankState)
_CAUSES: Sequence[RankState] = ("died", "raised", "hung")
_WORDS: Mapping[str, str] = {"expected_failure": "expected to fail", "skipped": "skipped", "unsupported": ""}
"""Kinds of exceptions by which a workload says that there is nothing to measure; any error counts for more, then the
first of these."""
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
}
"""Faults of torch and its libraries, by a phrase of their messages: docs upstream has versions and sources."""


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """What became of one rank of a failed case."""

    rank: int
    host: str
    state: RankState
    what: str
    """Exit status, exception message or the place where the rank is stuck."""
    phase: str
    """What the rank had last begun: building, timing, checking before timing, ..."""
    detail: str = ""
    """Traceback or stack."""
    place: str = ""
    """Behind the rank's number, where it stands in the mesh; empty where the number says it."""
    kind: str = ""
    """Of the exception, see protocol.ERROR_KINDS; empty for a rank that raised none."""
    types: Sequence[Sequence[str]] = ()
    """Module and name of the exception's class and of those that it inherits from, the nearest first."""


def exception_of(world_size: int, failures: Sequence[RankFailure], limit: str) -> PerfsuiteError:
    """What stands for the whole case: what all that raised on their own raised alike, else RanksFailed with a report.

    It is an instance of what the ranks raised too, of the lowest rank's where they raised several, so that
    ``pytest.raises`` and ``xfail(raises=...)`` see it.  ``limit`` is told where it ended the case.  A skip or an
    expected failure of some ranks is one of the case when no rank failed otherwise; what others raise because a rank
    ran out of memory is a consequence of that.
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
        return also(kind, _known(first.types) or kind)(_where(first) + first.what)
    raised = _raised(failures)
    error = (also(RanksFailed, raised[0]) if raised else RanksFailed)(compose(world_size, failures, limit))
    error.raised = raised
    return error


def _raised(failures: Sequence[RankFailure]) -> tuple[type[BaseException], ...]:
    """The types that the ranks raised, by rank; none where another rank died or hung, or raised what is not known."""
    causes = [failure for failure in consequences(failures) if failure.state in _CAUSES and not _is_word(failure)]
    types = [_known(failure.types) for failure in sorted(causes, key=lambda failure: failure.rank)]
    return () if None in types else tuple(dict.fromkeys(filter(None, types)))


def _known(types: Sequence[Sequence[str]]) -> type[BaseException] | None:
    """The nearest of these classes that this process has, without importing anything.

    Only the test's own process has a use for it, in ``raises=``, and what that names is loaded.
    """
    for module, path in types:
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
    """The same failures; errors that a communication raised because another rank was gone become ``dragged``."""
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
    """The report: a first line that names the cause, then every failed rank with its stack.

    Of ranks in the same state the first of ``failures`` comes first.
    """
    told = [
        replace(failure, state="skipped", detail="") if _is_word(failure) else failure
        for failure in consequences(failures)
    ]
    ordered = sorted(told, key=lambda failure: _ORDER.index(failure.state))
    lines = [f"{_headline(ordered[0])}{_more(ordered)} ({plural(world_size, 'rank')}{limit})"]
    said = "\n".join(text.lower() for failure in ordered for text in (failure.what, failure.detail))
    lines += [
        f"known upstream: {fault} (perfsuite docs upstream)" for word, fault in UPSTREAM.items() if word.lower() in said
    ]
    for failure in ordered:
        if failure.state == "finished":
            continue
        detail = failure.detail.rstrip()
        if detail and detail in lines:  # the same error on every rank is shown once
            lines.append(f"--- {_headline(failure)}: as above")
            continue
        lines += [f"--- {_headline(failure)}", *([detail] if detail else [])]
    return "\n".join(lines)


def _is_word(failure: RankFailure) -> bool:
    return failure.state == "raised" and failure.kind in _WORDS


def _headline(failure: RankFailure) -> str:
    verb = {
        "died": f"died: {failure.what}",
        "raised": f"raised {failure.what}",
        "hung": f"hung at {failure.what}",
        "stuck": f"was stuck at {failure.what}",
        "working": f"was still at work at {failure.what}",
        "skipped": f"{_WORDS.get(failure.kind) or 'skipped'}: {failure.what}",
        "dragged": f"lost the others: {failure.what}",
        "waiting": f"was waiting for the others in {failure.what}",
        "finished": "had finished",
    }[failure.state]
    return f"rank {failure.rank}{failure.place} on {failure.host} {verb} (while {failure.phase})"


def _more(causes: Sequence[RankFailure]) -> str:
    others = [str(failure.rank) for failure in causes[1:] if failure.state == causes[0].state]
    return f"; so did rank{'s' if len(others) > 1 else ''} {', '.join(others)}" if others else ""


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
