"""Turning what is known about failed ranks into one report that names the cause first.

When one rank fails, the others wait for it in a communication until they are ended: those are consequences, and the
report says so.  Which rank of a hang is the cause is read from the stacks (:mod:`.stacks`): the one that is not waiting
for the others.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

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
_ORDER: Sequence[RankState] = (
    "died",
    "raised",
    "hung",
    "stuck",
    "working",
    "skipped",
    "dragged",
    "waiting",
    "finished",
)
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
"""Faults of torch and its libraries, by a phrase of their messages: docs/upstream.md has versions and sources."""


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
    lines += [f"known upstream: {fault} (docs/upstream.md)" for word, fault in UPSTREAM.items() if word.lower() in said]
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
