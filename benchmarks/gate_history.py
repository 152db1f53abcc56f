"""The gate on a repository with a history, by real processes: what a failing CI page shows.

    python benchmarks/gate_history.py [--step 0.02] [--merges 6]

A repository with its package under ``src/`` is made in a temporary directory and a baseline of five commits is stored.
Then: nothing changes; a setting of torch changes for both arms; merge after merge is a little slower, each judged with
the merge before as its base; the setting is accepted; the base cannot run; no sample is clean.  Sessions, arms, work
trees and ranks are real processes; the clock that they read is moved by the measured step, so that no load of the
machine decides.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.scripted_clock import SWITCHED_OUT, VARIABLES
from perfsuite.base.git import without_git

ROOT = Path(__file__).parent.parent
FILES = {
    "conftest.py": 'pytest_plugins = ["perfsuite.plugin"]\n',
    "pytest.ini": "[pytest]\naddopts = --strict-markers -p no:cacheprovider\npythonpath = src\n",
    ".gitignore": ".perfsuite/\n__pycache__/\n",
    "test_step.py": """
from trainer import train

def test_step(perf):
    perf(train)
""",
}
TRAINER = """
import os
import random

from benchmarks.scripted_clock import NOW_NS

STEP_S = {step_s}

def train(rank):
    checks = 1.1 if os.environ.get("TORCH_DISTRIBUTED_DEBUG") == "INFO" else 1.0
    run_ns = 1e9 * STEP_S * checks * random.uniform(0.998, 1.002)  # bounded: no draw is far from the others

    def step():
        NOW_NS[0] += round(run_ns * random.uniform(0.998, 1.002))

    return step
"""
SETTING = {"TORCH_DISTRIBUTED_DEBUG": "INFO"}  # DETAIL is an instrument, with which nothing is compared
STEP_S = 0.02
BASE = "--perf-against=HEAD~1"


@dataclass(frozen=True, kw_only=True)
class Page:
    """What one gated run ended with."""

    title: str
    code: int
    """Its exit code."""
    text: str
    """The failures, and the gate's own lines."""


class Repository:
    """The repository, and what is done to it."""

    def __init__(self, root: Path, platform: str = "scripted") -> None:
        self.root, self.platform = root, platform

    @classmethod
    def stored(cls, root: Path, platform: str = "scripted") -> Repository:
        """A repository of five commits, each in the baseline."""
        (root / "src" / "trainer").mkdir(parents=True)
        for name, text in FILES.items():
            (root / name).write_text(text)
        repository = cls(root, platform)
        repository.git("init", "-q")
        for number in range(5):
            repository.commit(STEP_S, f"commit {number}")
            code, printed = repository.pytest("--perf-update=append")
            if code:
                raise SystemExit(printed)
        repository.commit(STEP_S, "the baseline")
        return repository

    def copied(self, root: Path) -> Repository:
        """The same repository, baseline and all, elsewhere."""
        shutil.copytree(self.root, root)
        return Repository(root, self.platform)

    def git(self, *arguments: str) -> None:
        """A git command by somebody."""
        who = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.org")
        subprocess.run(["git", *who, *arguments], cwd=self.root, check=True, env=without_git(os.environ))

    def commit(self, step_s: float, message: str) -> None:
        """A commit whose step takes this long."""
        self.commit_code(TRAINER.format(step_s=step_s), message)

    def commit_code(self, text: str, message: str) -> None:
        """A commit whose package is this module."""
        (self.root / "src" / "trainer" / "__init__.py").write_text(text)
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", message)

    def pytest(self, *arguments: str, **variables: str) -> tuple[int, str]:
        """Exit code and what was printed."""
        command = [sys.executable, "-m", "pytest", "-q", f"--perf-platform={self.platform}", "--benchmark-max-time=0.3"]
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            **VARIABLES,
            **variables,
        }
        done = subprocess.run(
            [*command, *arguments],
            cwd=self.root,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        return done.returncode, done.stdout + done.stderr

    def gate(self, title: str, *arguments: str, **variables: str) -> Page:
        """One gated run with these options, or with the commit before as its base."""
        code, printed = self.pytest("--perf-gate", *(arguments or (BASE,)), **variables)
        left_out = ("perfsuite: ", ".", "F", "clock ", "journal ")
        said = [line for line in printed.splitlines() if not line.startswith(left_out)]
        failures = said[: next((i for i, line in enumerate(said) if f"perfsuite: {self.platform}" in line), 0)]
        gated = [line for line in said if line.startswith(("gate ", "SUITE ", "suite "))]
        return Page(title=title, code=code, text="\n".join([*gated, *(failures if code else [])]))


def story(repository: Repository, step: float, merges: int) -> Iterator[Page]:
    """Nothing changed, a setting changed, and merges until one is red."""
    step_s = STEP_S
    yield repository.gate("nothing changed")
    setting = ", ".join(f"{name}={value}" for name, value in SETTING.items())
    yield repository.gate(f"{setting}, 10 % slower, in both arms", **SETTING)
    for merge in range(1, merges + 1):
        step_s *= 1 + step
        repository.commit(step_s, f"merge {merge}")
        page = repository.gate(f"merge {merge}, {(1 + step) ** merge - 1:+.1%} since the baseline")
        yield page
        if page.code:
            break


def accepted(repository: Repository) -> Iterator[Page]:
    """What the setting costs is accepted with a reason; from then on it is green with it."""
    options = ("--perf-accept=environment", "--perf-reason=collectives are checked")
    yield repository.gate("the setting is accepted", *options, **SETTING)
    yield repository.gate("the setting from then on", **SETTING)


def without_base(repository: Repository) -> Page:
    """The commit before cannot run the case, and this one is twice as slow."""
    repository.commit_code("raise ImportError('half of a merge')", "broken")
    repository.commit(2 * STEP_S, "whole again, and slow")
    return repository.gate("twice as slow, and the base cannot run")


def switched_out(repository: Repository) -> Page:
    """Twice as slow under ``-x``, and no sample is clean."""
    repository.commit(2 * STEP_S, "slow")
    return repository.gate("twice as slow, under -x, no sample is clean", "-x", **{SWITCHED_OUT: "1"})


def pages(root: Path, step: float, merges: int) -> Iterator[Page]:
    """All of it."""
    repository = Repository.stored(root / "repository")
    setting, other = (repository.copied(root / name) for name in ("setting", "other"))
    yield from story(repository, step, merges)
    yield from accepted(setting)
    yield without_base(other)
    yield switched_out(Repository.stored(root / "counted", "counted"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", type=float, default=0.02, help="slowdown of every merge")
    parser.add_argument("--merges", type=int, default=6, help="merges at most")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        for page in pages(Path(directory), options.step, options.merges):
            print(f"-- {page.title}: exit code {page.code}", page.text, sep="\n", flush=True)


if __name__ == "__main__":
    main()
