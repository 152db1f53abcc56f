"""Turning what is known about failed ranks into one report that names the cause first.

When one rank fails, the others wait for it in a communication until they are ended: those are consequences, and the
report says so.  Which rank of a hang is the cause is read from the stacks (:mod:`.stacks`): the one that is not waiting
for the others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from perfsuite.errors import (
    ExpectedFailure,
    InvalidParameter,
    OutOfMemory,
    PerfsuiteError,
    RanksFailed,
    UnsupportedCase,
    WrongResult,
)

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
    "out_of_memory": OutOfMemory,
}
_BROKEN = re.compile(r"(RuntimeError|Dist\w*Error|Connection\w*Error|BrokenPipeError|TimeoutError)\b")
_TRANSPORT = re.compile(r"\bgloo/|\bNCCL\b|ProcessGroup|\bby (remote )?peer\b")


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
    kind: str = ""
    """Of the exception, see protocol.ERROR_KINDS; empty for a rank that raised none."""


def exception_of(world_size: int, failures: Sequence[RankFailure], limit: str) -> PerfsuiteError:
    """What stands for the whole case: what all that raised on their own raised alike, else RanksFailed with a report.

    ``limit`` is told where it ended the case.  A skip or an expected failure of some ranks is one of the case when no
    rank failed otherwise; what others raise because a rank ran out of memory is a consequence of that.
    """
    own = [each for each in consequences(failures) if each.state == "raised"]
    causes = [each for each in own if each.kind == "out_of_memory"]
    causes = causes or [each for each in own if each.kind not in _WORDS]
    for word in _WORDS:
        causes = causes or [each for each in own if each.kind == word]
    kinds = {each.kind for each in causes}
    if len(kinds) == 1 and kinds <= set(_EXCEPTIONS) and not any(each.state == "died" for each in failures):
        first = min(causes, key=lambda each: each.rank)
        return _EXCEPTIONS[first.kind](_where(first) + first.what)
    return RanksFailed(compose(world_size, failures, limit))


def _where(each: RankFailure) -> str:
    if each.kind == "wrong_result":
        return f"rank {each.rank} while {each.phase}: "
    word = _WORDS.get(each.kind)
    return f"rank {each.rank} on {each.host} {word}: " if word else ""


def consequences(failures: Sequence[RankFailure]) -> list[RankFailure]:
    """The same failures; errors that a communication raised because another rank was gone become ``dragged``."""
    own = [each for each in failures if each.state in _CAUSES and not _from_communication(each)]
    if not own:
        return list(failures)
    return [
        replace(each, state="dragged", detail="") if each.state == "raised" and _from_communication(each) else each
        for each in failures
    ]


def _from_communication(each: RankFailure) -> bool:
    if each.state != "raised" or not _BROKEN.match(each.what):
        return False
    files = re.findall(r'^  File "([^"]+)"', each.detail, re.MULTILINE)
    return bool(_TRANSPORT.search(each.what)) or (bool(files) and "/torch/distributed/" in files[-1])


def compose(world_size: int, failures: Sequence[RankFailure], limit: str) -> str:
    """The report: a first line that names the cause, then every failed rank with its stack.

    Of ranks in the same state the first of ``failures`` comes first.
    """
    told = [replace(each, state="skipped", detail="") if _is_word(each) else each for each in consequences(failures)]
    ordered = sorted(told, key=lambda each: _ORDER.index(each.state))
    lines = [f"{_headline(ordered[0])}{_more(ordered)} ({world_size} ranks{limit})"]
    for each in ordered:
        if each.state == "finished":
            continue
        detail = each.detail.rstrip()
        if detail and detail in lines:  # the same error on every rank is shown once
            lines.append(f"--- {_headline(each)}: as above")
            continue
        lines += [f"--- {_headline(each)}", *([detail] if detail else [])]
    return "\n".join(lines)


def _is_word(each: RankFailure) -> bool:
    return each.state == "raised" and each.kind in _WORDS


def _headline(each: RankFailure) -> str:
    verb = {
        "died": f"died: {each.what}",
        "raised": f"raised {each.what}",
        "hung": f"hung at {each.what}",
        "stuck": f"was stuck at {each.what}",
        "working": f"was still at work at {each.what}",
        "skipped": f"{_WORDS.get(each.kind) or 'skipped'}: {each.what}",
        "dragged": f"lost the others: {each.what}",
        "waiting": f"was waiting for the others in {each.what}",
        "finished": "had finished",
    }[each.state]
    return f"rank {each.rank} on {each.host} {verb} (while {each.phase})"


def _more(causes: Sequence[RankFailure]) -> str:
    others = [str(each.rank) for each in causes[1:] if each.state == causes[0].state]
    return f"; so did rank{'s' if len(others) > 1 else ''} {', '.join(others)}" if others else ""
