"""A repository whose cases a scripted driver runs, with known times, and stored runs of eight sessions."""

from __future__ import annotations

import dataclasses
import functools
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from perfsuite.run import gatekeeper, settling
from perfsuite.run.arms import ArmFailed
from test_correctness.helpers.scripted_driver import measurement, repository

CASES = """
import pytest

@pytest.mark.parametrize("number", range(3))
def test_case(perf, number):
    perf(step, number=number)
"""


@pytest.fixture
def machine():
    """Times of the scripted cases."""
    return Machine()


@pytest.fixture
def repo(pytester, monkeypatch, machine):
    """The repository without stored runs."""
    return repository(pytester, monkeypatch, CASES, machine)


@pytest.fixture(scope="session")
def kept(tmp_path_factory):
    """Where the baselines of :func:`store` are kept once they have been made."""
    return tmp_path_factory.mktemp("kept") / "baselines"


@pytest.fixture
def stored(repo, kept, machine):
    """The repository with stored runs of eight sessions."""
    store(repo, kept)
    machine.draw.seed(2)  # the same from here on, whether they were made now or before
    return repo


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
        samples = [(run_s * self.draw.gauss(1, 0.002), 0.001 * self.draw.gauss(1, 0.002)) for _ in range(30)]
        times_s, yardsticks_s = zip(*samples, strict=True)
        return dataclasses.replace(measurement(job), times_s=times_s, yardsticks_s=yardsticks_s)


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


def commit_all(message):
    """A commit of the test file, in a repository that ignores everything else."""
    Path(".gitignore").write_text("*\n!test_it.py\n")
    commands = [["add", "test_it.py"], ["commit", "-q", "--allow-empty", "-m", message]]
    for arguments in commands if Path(".git").exists() else [["init", "-q"], *commands]:
        subprocess.run(["git", "-c", "user.name=n", "-c", "user.email=e", *arguments], check=True)


class ScriptedArms:
    """Arms of an A/B: what they measure of case 1 is scripted, in the present process."""

    def __init__(self, machine, monkeypatch, took=lambda: None, now=None):
        self.machine, self.took = machine, took
        self.factors = {"base": 1.0, "stored commit": 1.0}
        """How slow the case is on the older arms; None: it cannot be measured."""
        self.no_case = False
        self.names = []
        """Names of the arms, in the order in which they ran."""
        self.arguments = []
        """What the last arm was given."""
        self._session = None
        original = gatekeeper.Gatekeeper.__init__

        def remember(gate, *, session, **others):
            self._session = session
            others["clock"].now = now or others["clock"].now
            original(gate, session=session, **others)

        monkeypatch.setattr(gatekeeper.Gatekeeper, "__init__", remember)
        monkeypatch.setattr(settling, "LiveArm", functools.partial(Turns, self.run))

    def run(self, arm, arguments, deadline_s):
        self.names.append(arm.name)
        self.took()
        self.arguments = arguments
        kind = arm.name.partition(" (")[0]
        here = self.machine.factors.get(1, 1.0) if kind == "new code" else self.factors[kind]
        if here is None:
            raise ArmFailed(f"{kind} was not measured: its pytest ended with exit code 4", whatever_case=self.no_case)
        case = next(argument for argument in arguments if "::" in argument)
        self.machine.factors[1], kept = here, self.machine.factors.get(1, 1.0)
        try:
            return {case: self._session.rerun("test_it.py::test_case[cpu-1]")}
        finally:
            self.machine.factors[1] = kept


class Turns:
    """A live arm whose turns a function answers: (arm, options and node ids, deadline) -> results by node id."""

    def __init__(self, run, arm, arguments, cases):
        self.run, self.arm, self.arguments, self.cases = run, arm, arguments, cases

    def start(self, deadline_s):
        """It is there at once."""

    def serves(self, cases):
        return set(cases) <= set(self.cases)

    def measure(self, cases, deadline_s):
        return self.run(self.arm, [*self.arguments, *cases], deadline_s)

    def close(self):
        """Nothing was started."""
