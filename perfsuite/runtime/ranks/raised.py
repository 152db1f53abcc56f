"""Describe an exception that a workload raised on its rank, for the driver.

pytest's outcomes are recognised only if the workload has imported pytest.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from types import TracebackType

import torch

from perfsuite.base.errors import CaseError, DeviceUnusable, InvalidParameter, OutOfMemory, UnsupportedCase, WrongResult
from perfsuite.base.text import MESSAGE_CHARS, TRACEBACK_CHARS, cut
from perfsuite.base.units import gib
from perfsuite.platforms.base import DeviceCode
from perfsuite.runtime.transports.base import Message

DESTROYED = (
    "its process group is gone: the workload called torch.distributed.destroy_process_group(), but the group belongs "
    "to perfsuite, which ends it after the case; remove the call"
)
MOST_TYPES = 20  # Largest number of classes of an exception in its description, the nearest first.
_OWN = Path(__file__).parent
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
