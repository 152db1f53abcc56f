"""A repository whose cases a scripted driver runs, with known times, and stored runs of eight sessions."""

from __future__ import annotations

import dataclasses
import random
import shutil
from pathlib import Path

from perfsuite.records import Sample
from test_correctness.helpers.scripted_driver import measurement

CASES = """
import pytest

@pytest.mark.parametrize("number", range(3))
def test_case(perf, number):
    perf(step, number=number)
"""


class Machine:
    """Times of the scripted cases: 10 ms with 0.3 % of noise between runs, times what a test says."""

    def __init__(self):
        self.factors = {}
        self.spells = {}
        """Factors of a case's next runs, one each."""
        self.draw = random.Random(1)
        self.errors = {}

    def __call__(self, job):
        number = job.workload.parameters().get("number")
        if number in self.errors:
            raise self.errors[number]
        spell = self.spells[number].pop(0) if self.spells.get(number) else 1.0
        run_s = 0.01 * spell * self.factors.get(number, 1.0) * self.draw.gauss(1, 0.003)
        samples = tuple(
            Sample(time_s=run_s * self.draw.gauss(1, 0.002), yardstick_s=0.001 * self.draw.gauss(1, 0.002))
            for _ in range(30)
        )
        return dataclasses.replace(measurement(job), samples=samples)


def store(repo, kept):
    """Store runs of eight sessions, or copy those that were stored into ``kept`` before."""
    if kept.exists():
        shutil.copytree(kept, "baselines")
        return
    for _ in range(8):
        repo.run("--perf-update=append").stdout.fnmatch_lines(["*3 runs of 3 cases added"])
    shutil.copytree("baselines", kept)


def baseline_file():
    (file,) = Path("baselines/cpu").glob("*.json")
    return file
