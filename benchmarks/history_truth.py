"""How often a history cries wolf, what it finds and how well it places it, and how long it takes.

    python benchmarks/history_truth.py                # all of it; seeded, so figures repeat
    python benchmarks/history_truth.py --histories 2  # fewer drawn histories, quicker

A drawn history has 60 sessions x 200 cases.  All times of a session share a shift (2 % from one to the next)
and each has noise of its own: normal, or Student's t with 4 degrees of freedom at the same standard deviation.
What is planted in every tenth case: nothing, a step of 2 %, two such steps 12 sessions apart, five merges of +1 % that
lie 1 to 6 sessions apart, each with 15 sessions on either side.
The last lines have noise that resembles that of the session before (correlation 0.4), which the numbers do not promise.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parent.parent))

from perfsuite.history import file
from perfsuite.history.file import CasePoint, HistorySession, line_of
from perfsuite.history.findings import Findings, findings_of
from perfsuite.history.order import OrderedSessions
from perfsuite.record.run import Revision
from perfsuite.statistics.change_points import find_changes
from perfsuite.statistics.robust import median

SESSIONS, CASES = 60, 200
EVERY = 10
"""Of so many cases one changes, where changes are planted."""
SIDE = 15
SHIFT = 0.02
SHAPES = ("normal", "t4")
METRICS = {"latency_us": 1234.56, "busbw_gb_per_s": 12.3456, "algbw_gb_per_s": 7.05432}

Times = NDArray[np.float64]
Plant = Callable[[np.random.Generator, Times], list[tuple[int, ...]]]
"""Adds changes to a table of sessions x cases; the first session after each merge, of each changed case."""


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What was found in drawn histories."""

    cases: int
    false: int
    """Changes where none was planted, or further than 3 sessions from what was."""
    found: int
    """Cases with a change."""
    placed: int
    """Cases all of whose changes lie within what was planted and 3 sessions around."""
    told: int
    """Cases all of whose merges are among the commits told,"""
    told_at_most: int
    """or among those that are told in case it was not one step."""
    commits: tuple[int, ...]
    """How many commits are told, of each found case."""


def noise(rng: np.random.Generator, shape: str, sigma: float, sessions: int, cases: int) -> Times:
    if shape == "t4":
        return rng.standard_t(4, (sessions, cases)) * sigma / math.sqrt(2)
    fresh = rng.normal(0, sigma, (sessions, cases))
    if shape == "alike":
        for row in range(1, sessions):
            fresh[row] = 0.4 * fresh[row - 1] + math.sqrt(1 - 0.16) * fresh[row]
    return fresh


def nothing(rng: np.random.Generator, table: Times) -> list[tuple[int, ...]]:
    return []


def _planted(rng: np.random.Generator, table: Times, size: float, merges: int, gaps: range) -> list[tuple[int, ...]]:
    planted = []
    for case in range(0, table.shape[1], EVERY):
        gap = int(rng.choice(gaps))
        first = int(rng.integers(SIDE, len(table) - SIDE - (merges - 1) * gap + 1))
        places = tuple(first + merge * gap for merge in range(merges))
        for place in places:
            table[place:, case] += size
        planted.append(places)
    return planted


def step(rng: np.random.Generator, table: Times) -> list[tuple[int, ...]]:
    """2 % in every tenth case."""
    return _planted(rng, table, 0.02, 1, range(1, 2))


def two_steps(rng: np.random.Generator, table: Times) -> list[tuple[int, ...]]:
    """2 % and 2 % again in every tenth case: two changes, which are not to be told as one."""
    return _planted(rng, table, 0.02, 2, range(12, 13))


def ramp(rng: np.random.Generator, table: Times) -> list[tuple[int, ...]]:
    """Five merges of +1 % in every tenth case."""
    return _planted(rng, table, 0.01, 5, range(1, 7))


def ordered(table: Times) -> OrderedSessions:
    """A branch with a session per commit."""
    sessions = tuple(
        HistorySession(
            session=f"s{number:05d}",
            time="2026-01-01T00:00:00+00:00",
            platform="cpu",
            fingerprint="cpu-example",
            revision=Revision(commit=f"{number:040x}", branch="main"),
            environment={"packages": {"torch": "2.13.0"}, "kernel": "6.1.0"},
            cases={
                f"test_perf/test_it.py::test_{case:03d}[cpu-ws2-1MiB-bf16]": CasePoint(
                    log_time=round(float(value), 5), clean_share=1.0, metrics=METRICS
                )
                for case, value in enumerate(row)
            },
        )
        for number, row in enumerate(table)
    )
    subjects = {session.revision.commit: "" for session in sessions}
    return OrderedSessions(branch="main", sessions=sessions, places=tuple(range(len(sessions))), subjects=subjects)


def drawn(rng: np.random.Generator, shape: str, sigma: float, plant: Plant) -> tuple[Findings, list[tuple[int, ...]]]:
    table = math.log(0.01) + noise(rng, shape, sigma, SESSIONS, CASES)
    planted = plant(rng, table)
    table += rng.normal(0, SHIFT, (SESSIONS, 1))
    return findings_of(ordered(table)), planted


def counts(histories: int, shape: str, sigma: float, plant: Plant, seed: int = 1) -> Counts:
    """What is found in so many drawn histories; the planted cases are every tenth."""
    rng = np.random.default_rng(seed)
    cases = false = found = placed = told = told_at_most = 0
    commits = []
    for _ in range(histories):
        findings, planted = drawn(rng, shape, sigma, plant)
        truth = dict(zip(findings.table.cases[::EVERY], planted, strict=False))
        changes = {case: [one for one in findings.changes if one.case == case] for case in findings.table.cases}
        near = {
            case: [places[0] - 3 <= one.at and one.until <= places[-1] + 3 for one in changes[case]]
            for case, places in truth.items()
        }
        cases += len(truth) or CASES
        found += sum(map(any, near.values()))
        placed += sum(bool(answers) and all(answers) for answers in near.values())
        false += sum(len(changes[case]) for case in changes if case not in truth)
        false += sum(answers.count(False) for answers in near.values())
        for case, places in truth.items():
            told += _covered(places, [(one.before, one.after) for one in changes[case]])
            told_at_most += _covered(places, [one.at_most for one in changes[case]])
            commits += [sum(one.after - one.before for one in changes[case])] if changes[case] else []
    return Counts(
        cases=cases,
        false=false,
        found=found,
        placed=placed,
        told=told,
        told_at_most=told_at_most,
        commits=tuple(commits),
    )


def _covered(places: tuple[int, ...], ranges: list[tuple[int, int]]) -> bool:
    return all(any(before < place <= after for before, after in ranges) for place in places)


def speed(sessions: int, cases: int) -> tuple[float, float, float]:
    """Processor seconds to read, to search, and the file's megabytes."""
    rng = np.random.default_rng(1)
    table = math.log(0.01) + noise(rng, "normal", 0.006, sessions, cases) + rng.normal(0, SHIFT, (sessions, 1))
    step(rng, table)
    made = ordered(table)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "h.jsonl"
        path.write_text("".join(f"{line_of(session)}\n" for session in made.sessions))
        begun = time.process_time()
        history = file.read(path)
        read = time.process_time()
        findings_of(
            OrderedSessions(branch="main", sessions=history.sessions, places=made.places, subjects=made.subjects)
        )
        return read - begun, time.process_time() - read, path.stat().st_size / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--histories", type=int, default=10, metavar="N", help="drawn histories of each kind")
    histories = parser.parse_args().histories
    begun = time.process_time()
    find_changes([0.0] * 10)
    print(f"import of ruptures and scipy: {time.process_time() - begun:.1f} s")
    read_s, searched_s, megabytes = speed(1000, CASES)
    print(f"1000 sessions x {CASES} cases: {megabytes:.0f} MB, read {read_s:.1f} s, searched {searched_s:.1f} s")
    print("| noise | planted | false changes per 200 cases | found | all placed | told | at most | commits |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for shape in (*SHAPES, "alike"):
        for sigma in (0.006, 0.02):
            for plant in (nothing, step, two_steps, ramp):
                if plant in (step, two_steps) and sigma > 0.006:
                    continue
                known = counts(histories, shape, sigma, plant)
                false = known.false * CASES / (histories * CASES)
                print(f"| {shape} {sigma:.1%} | {plant.__name__} | {false:.1f} | {_shares(known, plant)} |", flush=True)


def _shares(known: Counts, plant: Plant) -> str:
    if plant is nothing:
        return " | " * 4
    counted = (known.found, known.placed, known.told, known.told_at_most)
    shares = [f"{count / known.cases:.1%}" for count in counted]
    return " | ".join([*shares, f"{median(known.commits):.0f}"])


if __name__ == "__main__":
    main()
