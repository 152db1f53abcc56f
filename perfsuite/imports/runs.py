"""Separate runs in one log: a repeated step is of another rank, or of a resumed run.

A new run begins if a rank prints an earlier step, repeats a step later, or prints an earlier time. Ranks print the same
step within seconds; no program starts that fast.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import datetime

_STAMP = re.compile(r"(?<!\d)(\d{4})[-/]?(\d\d)[-/]?(\d\d)[T ](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6}))?")
_SAME_S = 5.0
"""A rank that repeats a step within this time printed it twice."""
_AGAIN_S = 30.0
"""Largest clock difference of ranks without a label."""
_BACK_S = 60.0
"""Largest backward jump of time by clocks and buffers."""
_OTHER_S = 600.0
"""Largest clock difference of two hosts."""


def seconds(line: str, text: str) -> float | None:
    """Return the seconds of the last time stamp of ``line`` before ``text``, its end; None without one.

    >>> seconds("[2024-04-06 03:02:12] step: 1", "step: 1") - seconds("20240406 03:02:11,5 - step: 1", "step: 1")
    0.5
    """
    found = _STAMP.findall(line)
    before = len(found) - len(_STAMP.findall(text))
    if before < 1:
        return None
    *parts, fraction = found[before - 1]
    year, month, day, hour, minute, second = (int(part) for part in parts)
    try:
        since = datetime(year, month, day, hour, minute, second) - datetime(1970, 1, 1)
    except ValueError:
        return None
    return since.total_seconds() + float(f"0.{fraction or 0}")


@dataclass(kw_only=True)
class StepSeen:
    """A step of a run."""

    time: float | None
    text: str
    metrics: set[str] = field(default_factory=set)
    """Metrics already taken from a line of the step."""


@dataclass(kw_only=True)
class Runs:
    """The runs of a log, in the order of its lines."""

    count: int = 1
    notes: list[str] = field(default_factory=list)
    _seen: dict[int, StepSeen] = field(default_factory=dict)
    _last: dict[str, tuple[int, float | None]] = field(default_factory=dict)
    """Last step and time of each rank."""

    def enter(self, line: int, step: int, rank: str, time: float | None, text: str) -> tuple[StepSeen, bool]:
        """Return the step of a line, and whether the line is its first one; begin a new run if necessary."""
        if why := self._why_new(step, rank, time, text):
            self.count += 1
            self.notes.append(f"line {line}: {why}: run {self.count} begins")
            self._seen, self._last = {}, {}
        is_first = step not in self._seen
        seen = self._seen.setdefault(step, StepSeen(time=time, text=text))
        self._last[rank] = (step, time)
        return seen, is_first

    def _why_new(self, step: int, rank: str, time: float | None, text: str) -> str:
        seen, last = self._seen.get(step), self._last.get(rank)
        later = None if seen is None or seen.time is None or time is None else time - seen.time
        if last is None:
            is_later = later is not None and later > _OTHER_S
            return f"step {step} comes again {later:.0f} s later" if is_later else ""
        last_step, last_time = last
        if later is not None and abs(later) <= _SAME_S:
            return ""
        if step < last_step:
            return f"step {step} follows step {last_step}"
        if step == last_step and later is not None and later > _AGAIN_S:
            return f"step {step} comes again {later:.0f} s later"
        is_again = step == last_step and rank.isdigit() and seen is not None and seen.text != text and time is None
        back = last_time - time if time is not None and last_time is not None else 0.0
        return f"rank {rank} prints step {step} again" if is_again else _back(back)


def _back(seconds_back: float) -> str:
    return f"the time goes back by {seconds_back:.0f} s" if seconds_back > _BACK_S else ""
