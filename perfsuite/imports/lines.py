"""Lines of logs: remove the prefixes that launchers, containers and CI services print, and separate runs in one log.

Removed are labels of ranks and hosts (srun, mpirun, torchrun, pdsh, docker compose, Ray), time stamps (kubectl, GitHub
Actions, GitLab, Jenkins, Python's logging), severity levels and colour codes, including codes that lost their ESC.

A repeated step is of another rank, or of a resumed run. A new run begins if a rank prints an earlier step or epoch,
repeats a step later, or prints an earlier time. Ranks print the same step within seconds; no program starts that fast.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

_COLOUR = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07|\x1b_[^\x07]*\x07")
_LOST_ESC = re.compile(
    r"(?:\\x1b|\\u001b|\\033|\\e|\^\[|\u241b)?"
    r"\[(?:0|1|2|4|0?[012];3\d|3\d|4[0-79]|9\d|[34]8;[25];[\d;]+)?m(?!\s*\d+(?:\.\d+)?s\b| left|\])"
)
"""A colour code without ESC, or with its name: ``[31m``, ``[38;2;180;60;0m``; not a duration such as ``[30m 2s]``."""

_DAY = r"\d{4}[-/]\d\d[-/]\d\d"
_TIME = r"\d\d:\d\d:\d\d(?:[.,]\d+)?"
_STAMP = rf"{_DAY}[ T]{_TIME}(?:Z|\s?[+-]\d\d:?\d\d)?"
_MONTHS = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
_LABEL = re.compile(
    r"\[[^\[\]\s,]*,(?P<mpirun>\d+)\](?:<std\w+>)?:\s?"  # mpirun --tag-output, with a job's name or without
    r"|\s*(?P<srun>\d{1,7}):(?: |(?=\s|$|#|[A-Za-z\[]))"  # srun --label
    r"|\[(?P<hydra>\d{1,7})\](?: |$)"  # mpiexec -prepend-rank
    r"|\[(?:[A-Za-z]+)?[Rr]ank ?(?P<torch>\d{1,7})\]:? ?|\[default(?P<local>\d{1,7})\]:? ?"  # torchrun
)
"""A launcher's prefix, with the rank that printed the line."""
_OTHER = re.compile(
    rf"\s*\[{_STAMP}\]\s|\s*{_STAMP}(?: std(?:out|err) [FP])?(?: \d\d[OE][ +]?)?(?:\s|$)"
    rf"|\[?{_TIME}\]?\s\s?|[A-Z][a-z]{{2}} {_MONTHS} [ \d]\d {_TIME} \d{{4}}(?=\[)"
    rf"|[^\t]*\t[^\t]*\t(?={_DAY}T{_TIME}Z)"  # gh run view --log
    r"|\([^()]*\bpid=\d+[^()]*\) "  # Ray
    r"|\[(?:pod|container)/[^\]\s]+\] "  # kubectl logs --prefix
    r"|\[(?:DEBUG|INFO|WARNING|WARN|ERROR)\] |(?:- (?:[\w.]+ - )?)?(?:DEBUG|INFO|WARNING|ERROR)(?::[\w.]*:|: | - )"
    r"|\[[\w.-]+\.py:\d+(?::\w+)?\] |\s*>+ |\w+\(\), [\w./-]+:\d+, ?"
)
_HOST = re.compile(r"(?P<host>(?=[^\s:|]*\d)(?=[^\s:|]*[A-Za-z])[\w.@/-]+?)(?::\s?| +\| ?)(?!\d)")
"""Prefixes of pdsh, clush and docker compose: ``node-1: ``, ``worker-1  | ``; removed if most lines of a file have one.
"""
_MOST_PREFIXES = 8


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a log."""

    number: int  # Number in the file, from 1.
    label: str  # The rank or host in the launcher's prefix; empty without one.
    text: str


def split_lines(text: str) -> list[str]:
    """Return the lines of a text without their ends; the carriage return of a progress bar also ends a line."""
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")


def labelled_lines(lines: Sequence[str]) -> list[Line]:
    """Return all lines without prefixes, each with the rank or host of its prefix."""
    found = [_stripped(number, line) for number, line in enumerate(lines, start=1)]
    hosts = _hosts(found)
    return [_without_host(line, hosts) for line in found] if hosts else found


def plain_lines(text: str) -> list[tuple[int, str]]:
    r"""Return number and text of every line, from 1, without prefixes.

    >>> plain_lines(" 0: #  Rank  0\n2026-03-11T10:26:41.12Z [1,0]<stdout>: # Rank 1\n[rank0]:step:  4")
    [(1, '#  Rank  0'), (2, '# Rank 1'), (3, 'step:  4')]
    """
    return [(line.number, line.text) for line in labelled_lines(split_lines(text))]


def _stripped(number: int, text: str) -> Line:
    if "\x1b" in text:
        text = _COLOUR.sub("", text)
    if "m" in text and "[" in text:
        text = _LOST_ESC.sub("", text)
    label = ""
    for _ in range(_MOST_PREFIXES):
        if match := _LABEL.match(text):
            label = next(part for part in match.groups() if part is not None)
        elif not (match := _OTHER.match(text)):
            break
        text = text[match.end() :]
    return Line(number=number, label=label, text=text)


def _hosts(lines: Sequence[Line]) -> frozenset[str]:
    """Return names that begin at least three lines each, and together four of five lines."""
    begins: Counter[str] = Counter()
    for line in lines:
        if match := _HOST.match(line.text):
            begins[match["host"]] += 1
    often = {host for host, count in begins.items() if count >= 3}
    filled = sum(bool(line.text.strip()) for line in lines)
    return frozenset(often) if sum(begins[host] for host in often) * 5 >= filled * 4 else frozenset()


def _without_host(line: Line, hosts: frozenset[str]) -> Line:
    match = _HOST.match(line.text)
    if match is None or match["host"] not in hosts:
        return line
    inner = _stripped(line.number, line.text[match.end() :])
    return Line(number=line.number, label=inner.label or line.label or match["host"], text=inner.text)


_DATED = re.compile(r"(?<!\d)(\d{4})[-/]?(\d\d)[-/]?(\d\d)[T ](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6}))?")
_SAME_S = 5.0  # A rank that repeats a step within this time printed it twice.
_AGAIN_S = 30.0  # Largest clock difference of ranks without a label.
_BACK_S = 60.0  # Largest backward jump of time by clocks and buffers.
_OTHER_S = 600.0  # Largest clock difference of two hosts.


def seconds(line: str, text: str) -> float | None:
    """Return the seconds of the last time stamp of ``line`` before ``text``, its end; None without one.

    >>> seconds("[2024-04-06 03:02:12] step: 1", "step: 1") - seconds("20240406 03:02:11,5 - step: 1", "step: 1")
    0.5
    """
    found = _DATED.findall(line)
    before = len(found) - len(_DATED.findall(text))
    if before < 1:
        return None
    *parts, fraction = found[before - 1]
    year, month, day, hour, minute, second = (int(part) for part in parts)
    try:
        since = datetime(year, month, day, hour, minute, second) - datetime(1970, 1, 1)
    except ValueError:
        return None
    return since.total_seconds() + float(f"0.{fraction or 0}")


Place = tuple[int, int]  # Epoch and step; the epoch is 0 if the step is of the run.


def _said(place: Place) -> str:
    epoch, step = place
    return f"step {step} of epoch {epoch}" if epoch else f"step {step}"


@dataclass(kw_only=True)
class Runs:
    """The runs of a log, in the order of its lines."""

    count: int = 1
    notes: list[str] = field(default_factory=list)
    _seen: dict[Place, tuple[float | None, str, dict[str, float]]] = field(default_factory=dict)
    """Time and text of each step, and the metrics that were taken from its lines; NaN for a refused one."""
    _last: dict[str, tuple[Place, float | None]] = field(default_factory=dict)  # Last step and time of each rank.

    def enter(self, line: int, step: Place, rank: str, time: float | None, text: str) -> tuple[dict[str, float], bool]:
        """Return the metrics taken from the step, and whether the line is its first; begin a new run if necessary."""
        if why := self._why_new(step, rank, time, text):
            self.count += 1
            self.notes.append(f"line {line}: {why}: run {self.count} begins")
            self._seen, self._last = {}, {}
        is_first = step not in self._seen
        *_, metrics = self._seen.setdefault(step, (time, text, {}))
        self._last[rank] = (step, time)
        return metrics, is_first

    def _why_new(self, step: Place, rank: str, time: float | None, text: str) -> str:
        (seen_s, seen_text, _), last = self._seen.get(step, (None, text, {})), self._last.get(rank)
        later = None if seen_s is None or time is None else time - seen_s
        if last is None:
            is_later = later is not None and later > _OTHER_S
            return f"{_said(step)} comes again {later:.0f} s later" if is_later else ""
        last_step, last_time = last
        if later is not None and abs(later) <= _SAME_S:
            return ""
        if step < last_step:
            return f"{_said(step)} follows {_said(last_step)}"
        if step == last_step and later is not None and later > _AGAIN_S:
            return f"{_said(step)} comes again {later:.0f} s later"
        is_again = step == last_step and rank.isdigit() and seen_text != text and time is None
        back = last_time - time if time is not None and last_time is not None else 0.0
        if is_again:
            return f"rank {rank} prints {_said(step)} again"
        return f"the time goes back by {back:.0f} s" if back > _BACK_S else ""
