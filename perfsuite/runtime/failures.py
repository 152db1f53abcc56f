"""Turning what is known about failed ranks into one report that names the cause first.

When one rank fails, the others wait for it in a communication until they are ended: those are consequences, and the
report says so.  Which rank of a hang is the cause is read from the stacks: the one that is not waiting for the others.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

RankState = Literal["died", "raised", "hung", "dragged", "waiting", "finished"]
_ORDER: Sequence[RankState] = ("died", "raised", "hung", "dragged", "waiting", "finished")
_CAUSES: Sequence[RankState] = ("died", "raised", "hung")
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>\S+)', re.MULTILINE)
_WAITS = re.compile(r"[/\\]torch[/\\](distributed|_ops|autograd)")
_WORKER = "perfsuite/runtime/worker.py"
_STACK_FRAMES = 25


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


def judge_stack(dump: str) -> tuple[bool, str, str]:
    """(waits for other ranks, where it is, its stack) from a faulthandler dump of all threads of a worker.

    A rank waits for others when the innermost Python frames of its main thread are torch's distributed code.
    """
    threads = [block for block in dump.split("\n\n") if "in become_worker" in block]
    thread = threads[0] if threads else dump
    frames = [(match["file"], match["line"], match["name"]) for match in _FRAME.finditer(thread)]
    own = next((index for index, frame in enumerate(frames) if frame[0].endswith(_WORKER)), len(frames))
    frames = frames[:own] or frames  # below are only perfsuite's own frames, the same in every stack
    if not frames:
        return False, "no Python stack could be taken", dump
    waits, operation = False, frames[0][2]
    for file, _, name in frames:
        if not _WAITS.search(file):
            break
        waits = waits or "distributed" in file
        operation = operation if name == "wrapper" else name
    where = next((frame for frame in frames if not _WAITS.search(frame[0])), frames[0])
    place = f"{where[0]}:{where[1]} in {where[2]}"
    stack = "\n".join(f'  File "{file}", line {line}, in {name}' for file, line, name in frames[:_STACK_FRAMES])
    return (True, f"{operation}, called at {place}", stack) if waits else (False, place, stack)


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
    files = re.findall(r'^  File "([^"]+)"', each.detail, re.MULTILINE)
    return each.state == "raised" and bool(files) and "/torch/distributed/" in files[-1]


def compose(world_size: int, failures: Sequence[RankFailure], limit: str) -> str:
    """The report: a first line that names the cause, then every failed rank with its stack."""
    ordered = sorted(consequences(failures), key=lambda each: (_ORDER.index(each.state), each.rank))
    causes = [each for each in ordered if each.state in _CAUSES] or ordered
    lines = [f"{_headline(causes[0])}{_more(causes)} ({world_size} ranks{limit})"]
    for each in ordered:
        if each.state == "finished":
            continue
        if each.detail and each.detail in lines:  # the same error on every rank is shown once
            lines.append(f"--- {_headline(each)}: as above")
            continue
        lines.append(f"--- {_headline(each)}")
        if each.detail:
            lines.append(each.detail.rstrip())
    return "\n".join(lines)


def _headline(each: RankFailure) -> str:
    verb = {
        "died": f"died: {each.what}",
        "raised": f"raised {each.what}",
        "hung": f"hung at {each.what}",
        "dragged": f"lost the others: {each.what}",
        "waiting": f"was waiting for the others in {each.what}",
        "finished": "had finished",
    }[each.state]
    return f"rank {each.rank} on {each.host} {verb} (while {each.phase})"


def _more(causes: Sequence[RankFailure]) -> str:
    others = [str(each.rank) for each in causes[1:] if each.state == causes[0].state]
    return f"; so did rank{'s' if len(others) > 1 else ''} {', '.join(others)}" if others else ""
