"""Histories without pytest runs: sessions with drawn times, files of them, and a repository whose git is scripted."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from datetime import datetime, timedelta, timezone

from perfsuite.history.file import CasePoint, HistorySession, line_of
from perfsuite.record.run import Revision

BEGIN = datetime(2026, 1, 1, tzinfo=timezone.utc)


def commit(number: int) -> str:
    """A full id; the first letters say which."""
    return f"{number:04x}".ljust(40, "c")


def session(number: int = 0, *, cases=("t.py::a",), level: Callable[[str], float] = lambda case: 0.0, **changes):
    """Session ``number``, an hour after the one before, at the commit of the same number on main."""
    plain = HistorySession(
        session=f"s{number:04d}",
        time=(BEGIN + timedelta(hours=number)).isoformat(),
        platform="cpu",
        fingerprint="cpu-test",
        revision=Revision(commit=commit(number), branch="main", subject=f"commit {number}"),
        cases={case: CasePoint(log_time=math.log(0.01) + level(case), clean_share=1.0, metrics={}) for case in cases},
    )
    return dataclasses.replace(plain, **changes)


def written(path, *sessions):
    path.write_text("".join(f"{line_of(one)}\n" for one in sessions))
    return path


def drawn(count, cases, level, *, noise=0.006, host=0.02, seed=1):
    """``count`` sessions with normal noise, a common shift each, and ``level(case, number)`` as the truth."""
    rng = random.Random(seed)
    sessions = []
    for number in range(count):
        shift = rng.gauss(0, host)
        levels = {case: level(case, number) + shift + rng.gauss(0, noise) for case in cases}
        sessions.append(session(number, cases=cases, level=levels.__getitem__))
    return sessions


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScriptedRepository:
    """What git would say: a branch of ``count`` commits, others that it has beside, whether it is there at all."""

    count: int
    beside: frozenset[str] = frozenset()
    shallow: bool = False
    first: int = 0
    root: str = "here"

    def is_there(self):
        return True

    def branch(self):
        return "main"

    def why_missing(self):
        return "this clone is shallow: git fetch --unshallow" if self.shallow else ""

    def first_parents(self, branch, since=""):
        return {commit(number): f"commit {number}" for number in range(self.first, self.count)}

    def present(self, commits):
        return frozenset(commits) & self.beside

    def last_tag(self, branch):
        return None
