"""The gate on a repository with a history, by real processes: what a failing CI page shows.

    python benchmarks/gate_history.py [--step 0.02] [--merges 6]

A repository with its package under ``src/`` is made in a temporary directory and a baseline of five commits is stored.
Then: nothing changes, a setting of a library changes for both arms, and merge after merge is a little slower, each
judged with the merge before as its base.  The measured step sleeps for a known time, so that the machine may be busy.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

FILES = {
    "conftest.py": 'pytest_plugins = ["perfsuite.plugin"]\n',
    "pytest.ini": "[pytest]\naddopts = --strict-markers -p no:cacheprovider\npythonpath = src\n",
    ".gitignore": ".perfsuite/\n__pycache__/\n",
    "test_step.py": """
import pytest
from trainer import train

@pytest.mark.parametrize("ranks", [1, 2])
def test_step(perf, ranks):
    perf(train, on=ranks)
""",
}
TRAINER = """
import os
import time

STEP_S = {step_s}

def train(rank):
    slow_library = 1.1 if os.environ.get("NCCL_ALGO") == "Tree" else 1.0
    return lambda: time.sleep(STEP_S * slow_library)
"""


class Repository:
    """The repository, and what is done to it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name, text in FILES.items():
            (root / name).write_text(text)
        (root / "src" / "trainer").mkdir(parents=True)
        self.git("init", "-q")

    def git(self, *arguments: str) -> None:
        """A git command by somebody."""
        who = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.org")
        subprocess.run(["git", *who, *arguments], cwd=self.root, check=True)

    def commit(self, step_s: float, message: str) -> None:
        """A commit whose step takes this long."""
        (self.root / "src" / "trainer" / "__init__.py").write_text(TRAINER.format(step_s=step_s))
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", message)

    def pytest(self, *arguments: str, **variables: str) -> tuple[int, str]:
        """Exit code and what was printed."""
        command = [sys.executable, "-m", "pytest", "-q", "--benchmark-max-time=0.3", *arguments]
        done = subprocess.run(
            command,
            cwd=self.root,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        return done.returncode, done.stdout + done.stderr

    def gate(self, title: str, **variables: str) -> int:
        """One gated run with the commit before as its base; shows what a reader of the CI page sees."""
        code, printed = self.pytest("--perf-gate", "--perf-base=HEAD~1", **variables)
        said = [
            line for line in printed.splitlines() if not line.startswith(("perfsuite: ", ".", "clock ", "journal "))
        ]
        failures = "\n".join(said[: next((i for i, line in enumerate(said) if "perfsuite: cpu" in line), 0)])
        gated = [line for line in said if line.startswith(("gated ", "SUITE ", "suite ", "not decided"))]
        print(f"-- {title}: exit code {code}", *gated, *([failures] if code else []), sep="\n", flush=True)
        return code


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", type=float, default=0.02, help="slowdown of every merge")
    parser.add_argument("--merges", type=int, default=6, help="merges at most")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        repository = Repository(Path(directory))
        step_s = 0.02
        for number in range(5):
            repository.commit(step_s, f"commit {number}")
            repository.pytest("--perf-update=append")
        repository.commit(step_s, "the baseline")
        repository.gate("nothing changed")
        repository.gate("a setting of the library, 10 % slower, in both arms", NCCL_ALGO="Tree")
        for merge in range(1, options.merges + 1):
            step_s *= 1 + options.step
            repository.commit(step_s, f"merge {merge}")
            if repository.gate(f"merge {merge}, {(1 + options.step) ** merge - 1:+.1%} since the baseline"):
                break


if __name__ == "__main__":
    main()
