"""Results of an iteration on a rank: its returned values, or the exception that it raised.

Returned values: wait for handles of work that the iteration started, and refuse work that has not begun.  An iteration
that returns without waiting would be timed as done.  The check and the first iterations of the warm-up inspect every
returned value, and :mod:`perfsuite.runtime.ranks.started` finds other work.  Without handles the samples call the
iteration itself.

Exceptions are described for the driver.  pytest's outcomes are recognised only if the workload has imported pytest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import re
import sys
import traceback
import types
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch

from perfsuite.base.errors import CaseError, DeviceUnusable, InvalidParameter, OutOfMemory, UnsupportedCase, WrongResult
from perfsuite.base.text import MESSAGE_CHARS, TRACEBACK_CHARS, cut
from perfsuite.base.units import gib
from perfsuite.platforms.base import DeviceCode
from perfsuite.record.workload import Step
from perfsuite.runtime.ranks.started import Started
from perfsuite.runtime.transports.base import Message

LOOKED_AT = 32  # Iterations of the warm-up whose returned values are inspected.
_NOTED = 8  # First iterations in which starts are noted, which takes 0.2 ms.
_HANDLES = (
    ("torch.distributed", "Work", "wait"),
    ("torch._C", "Future", "wait"),  # torch.futures, torch.jit.fork, rpc_async
    ("torch.distributed._functional_collectives", "AsyncCollectiveTensor", "wait"),
    ("torch.distributed.distributed_c10d", "_CoalescingManager", "wait"),
    ("concurrent.futures", "Future", "result"),
    ("multiprocessing.pool", "ApplyResult", "get"),
    ("multiprocessing.process", "BaseProcess", "join"),
    ("threading", "Thread", "join"),
    ("subprocess", "Popen", "wait"),
)
"""Classes of handles by module and name, with the method that waits."""
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_CONTAINERS = (list, tuple, set, frozenset, deque)
_CALLS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial, Step)
_REFUSED: tuple[tuple[tuple[type, ...], str, str], ...] = (
    ((Awaitable,), "an awaitable", "await it inside the iteration, for example by asyncio.run"),
    ((AsyncIterator,), "an asynchronous iterator", "read it to its end inside the iteration"),
    ((Iterator,), "an iterator", "read it to its end inside the iteration"),
    (_CALLS, "a callable", "call it inside the iteration"),
)


class Iteration:
    """One iteration of a step with all its work: a call waits for the handles that the step returned."""

    def __init__(self, run: Callable[[], Any], name: str, *, is_timed: bool = True) -> None:
        """``name`` names the workload in errors; only a timed iteration notes the work that it starts."""
        self._run = run
        self._name = name
        self._started = Started(name) if is_timed else None
        self._calls = 0
        self._kind: type | None = None  # Type of the last value that needed a wait.
        self._is_plain = False  # Whether the samples are taken without waiting.

    def __call__(self) -> None:
        """Run once and wait; raise InvalidParameter for a value that no wait can finish."""
        self._calls += 1
        notes = self._started if self._calls <= _NOTED or self._is_plain else None
        with notes or contextlib.nullcontext():
            value = self._run()
            waits = pending(value, self._name)
            for wait in waits:
                wait()
        if notes:
            notes.require_finished()
        if waits and self._is_plain:
            raise InvalidParameter(
                f"{self._name} returned a {type(value).__name__} only after its first iterations, so its samples "
                "lack that work; return the handle from every iteration"
            )
        if waits:
            self._kind = type(value)

    @property
    def feeds(self) -> bool:
        """Whether an inspected iteration gave work to an earlier thread: some later iterations wait for that thread."""
        return self._started is not None and self._started.feeds

    def settled(self) -> Callable[[], Any]:
        """Return the fastest equivalent after the first iterations: the step itself if it returned no handles."""
        if self._kind is None:
            self._is_plain = True
            return self._run
        run, kind, name, method = self._run, self._kind, self._name, _method_of(self._kind)

        def finished() -> None:
            value = run()
            if method and type(value) is kind:
                getattr(value, method)()
            else:
                for wait in pending(value, name):
                    wait()

        return finished


def pending(value: Any, name: str) -> list[Callable[[], Any]]:
    """Return the calls that wait for handles in ``value``; raise InvalidParameter for values without a known wait."""
    waits: list[Callable[[], Any]] = []
    seen: set[int] = set()
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, _PLAIN) or id(value) in seen:
            continue
        method = _method_of(cast(Any, type(value)))
        if method:
            waits.append(getattr(value, method))
            continue
        seen.add(id(value))
        left += reversed(_parts(value, name))
    return waits


def _parts(value: Any, name: str) -> Sequence[Any]:
    """Return the values inside of a value; raise InvalidParameter for one that is refused."""
    if "torch" in sys.modules and isinstance(value, sys.modules["torch"].Tensor):
        return (getattr(value, "_local_tensor", None),)  # the local tensor of a DTensor may need a wait
    _refuse(value, name)
    if isinstance(value, Mapping):
        return tuple(value.values())
    if dataclasses.is_dataclass(value):
        return tuple(getattr(value, field.name, None) for field in dataclasses.fields(value))
    return [*value] if isinstance(value, _CONTAINERS) else _in_attributes(value)


def _in_attributes(value: Any) -> list[Any]:
    """Return the handles in attributes and in containers there, without processes and threads, which may go on."""
    held = [] if isinstance(value, (type, types.ModuleType)) else getattr(value, "__dict__", {}).values()
    inner = ([*at.values()] if isinstance(at, dict) else at if isinstance(at, _CONTAINERS) else [at] for at in held)
    found = [each for part in inner for each in part if _method_of(cast(Any, type(each))) in ("wait", "result", "get")]
    return [each for each in found if not isinstance(each, getattr(sys.modules.get("subprocess"), "Popen", ()))]


def _refuse(value: Any, name: str) -> None:
    for kinds, description, remedy in _REFUSED:
        if isinstance(value, kinds) and not isinstance(value, io.IOBase):
            if isinstance(value, (types.CoroutineType, types.GeneratorType)):
                value.close()  # avoids Python's warning about a coroutine without await
            raise InvalidParameter(
                f"an iteration of {name} returned {description} ({type(value).__name__}), whose work is not done "
                f"when the iteration returns; {remedy}"
            )
    if callable(getattr(type(value), "wait", None)):
        raise InvalidParameter(
            f"an iteration of {name} returned a {type(value).__name__}, which has a method wait() but is not a handle "
            "that perfsuite supports; call wait() inside the iteration"
        )


@functools.cache
def _method_of(kind: Any) -> str:
    """Return the method that waits for a handle of this class; empty if the class is not a handle."""
    for module, name, method in _HANDLES:
        handle = getattr(sys.modules.get(module), name, None)
        if handle is not None and issubclass(kind, handle):
            return method
    return ""


DESTROYED = (
    "its process group is gone: the workload called torch.distributed.destroy_process_group(), but the group belongs "
    "to perfsuite, which ends it after the case; remove the call"
)
MOST_TYPES = 20  # Largest number of classes of an exception in its description, the nearest first.
_OWN = Path(__file__).parent
_WRAPPED = re.compile(r"Caught \S+ (?P<place>in .*)\.\nOriginal Traceback .*\n(?: .*\n)+(?P<cause>\S.*)")
"""torch's message about an error in another process, such as a loader's; the cause is the line below its frames."""
_CLEAN = (
    (WrongResult, "wrong_result"),
    (InvalidParameter, "invalid_parameter"),
    (UnsupportedCase, "unsupported"),
    (DeviceUnusable, "unusable"),
    (CaseError, "refused"),  # after its subclasses
)


def describe(error: BaseException, *, phase: str, code: DeviceCode | None, destroyed: bool) -> Message:
    """Return the ``error`` of an answer; ``destroyed``: the rank lost its process group, the likely cause."""
    kind, message = _kind(error, code)
    if destroyed:
        after = "" if DESTROYED in message else f" (then it raised {message})"
        kind, message = "exception", f"{CaseError.__name__}: {DESTROYED}{after}"
    trace = "".join(traceback.format_exception(type(error), error, _own_frames(error.__traceback__)))
    return {
        "kind": kind,
        "types": [[each.__module__, each.__qualname__] for each in type(error).__mro__[:-2][:MOST_TYPES]],
        "message": cut(message, MESSAGE_CHARS),
        "traceback": cut(trace, TRACEBACK_CHARS),
        "phase": phase,
    }


def _kind(error: BaseException, code: DeviceCode | None) -> tuple[str, str]:
    if isinstance(error, OutOfMemory) or (code is not None and code.is_out_of_memory(error)):
        return "out_of_memory", _out_of_memory(error, code)
    for clean, kind in _CLEAN:
        if isinstance(error, clean):
            return kind, _text(error)
    outcomes = sys.modules.get("_pytest.outcomes")
    if outcomes is not None and isinstance(error, outcomes.Skipped):
        return "skipped", _text(error)
    if outcomes is not None and isinstance(error, outcomes.XFailed):
        return "expected_failure", _text(error)
    text = _text(error)
    if wrapped := _WRAPPED.match(text):
        return "exception", f"{wrapped['cause']} ({wrapped['place']})"
    return "exception", f"{type(error).__name__}: {text}" if text else type(error).__name__


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as problem:  # a class of the workload may fail in any way
        return f"(its message could not be made: {type(problem).__name__})"


def _out_of_memory(error: BaseException, code: DeviceCode | None) -> str:
    assert code is not None
    used, space = code.peak_memory_bytes(), code.memory_bytes()
    if space is None:
        return f"OOM: {error}"
    reached = gib(used if used is not None else space[1] - space[0])
    text = f"OOM at {reached:.2f} GiB of {gib(space[1]):.2f} GiB"
    # Memory outside of torch's tensors ran out: the library's own message names the purpose.
    by_library = used is not None and not isinstance(error, (OutOfMemory, torch.OutOfMemoryError))
    return f"{text}: {_text(error).splitlines()[-1]}" if by_library and _text(error) else text


def _own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the call of the workload on; all of it for perfsuite's own errors."""
    inner = trace
    while inner is not None and Path(inner.tb_frame.f_code.co_filename).parent == _OWN:
        inner = inner.tb_next
    return inner or trace
