"""Whether the gate finds a step that is slow once in 7, 10, 30 or 60 iterations, or says that it cannot have seen it.

    python benchmarks/gate_rhythm.py [--sessions 50] [--seed a]

The repository of gate_history.py with five stored commits; then, session after session, code whose median is unchanged
and in which each n-th iteration takes 2 to 30 times as long: how many times, and where the rhythm begins, is drawn.
Processes are real; the clock that they read is moved by the step.  Found is exit code 1 with the case named; announced
is the line ``not seen`` that names it; the rest is silent.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.gate_history import STEP_S, TRAINER, Repository

RHYTHMS = (7, 10, 30, 60)
HEAD = """    from itertools import count as counter

    count = counter()

    def step():"""
SLOW = """        if next(count) % {every} == {phase}:
            NOW_NS[0] += round({more} * run_ns)
    return step"""


def code(every: int, phase: int, factor: float) -> str:
    """The trainer with one iteration in ``every`` that takes ``factor`` times as long."""
    slow = SLOW.format(every=every, phase=phase, more=factor - 1)
    return TRAINER.format(step_s=STEP_S).replace("    def step():", HEAD).replace("\n    return step", slow)


def session(repository: Repository, draw: random.Random, every: int) -> str:
    """What one gated session says of a rhythm."""
    factor = draw.uniform(2, 30)
    repository.commit_code(code(every, draw.randrange(every), factor), f"1 in {every}")
    status, printed = repository.pytest("--perf-gate")
    lines = [line.strip() for line in printed.splitlines()]
    if status == 1 and any(line.startswith("REGRESSED test_step.py::") for line in lines):
        return "found"
    unseen = next((index for index, line in enumerate(lines) if line.startswith("not seen")), None)
    if status == 0 and unseen is not None and "test_step" in " ".join(lines[unseen : unseen + 6]):
        return "announced"
    print(f"SILENT: 1 in {every}, x{factor:.1f}, exit code {status}\n{printed}", flush=True)
    return "silent"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=50)
    parser.add_argument("--seed", default="a")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    said: dict[int, Counter[str]] = {every: Counter() for every in RHYTHMS}
    with tempfile.TemporaryDirectory() as directory:
        repository = Repository.stored(Path(directory) / "repository")
        for number in range(options.sessions):
            every = RHYTHMS[number % len(RHYTHMS)]
            said[every][session(repository, draw, every)] += 1
    for every, names in said.items():
        print(f"1 in {every}: {', '.join(f'{count} {name}' for name, count in names.most_common())}")
    raise SystemExit(any(names["silent"] for names in said.values()))


if __name__ == "__main__":
    main()
