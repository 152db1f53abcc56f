"""A repository of 40 commits with a slow drift and a merge of two histories: what ``perfsuite history show`` names.

    python benchmarks/history_drift.py            # makes it in a temporary folder and shows it
    python benchmarks/history_drift.py --keep DIR # keeps it for a look around

Five of the commits make one case 1 % slower each, one commit another case 6 % slower.  CI measures every commit of main
and adds a line to ``perf-history.jsonl``; meanwhile a branch adds lines of its own, and git merges the two by
``merge=union``.  Times are drawn (seeded), everything else is real: git, the file, the command.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from perfsuite.base.git import without_git
from perfsuite.cli.main import main as perfsuite
from perfsuite.history import file
from perfsuite.history.file import CasePoint, HistorySession
from perfsuite.history.git import Repository
from perfsuite.record.run import Revision

COMMITS = 40
DRIFT = (16, 18, 20, 22, 24)
"""Commits that make the drifting case 1 % slower each."""
STEP = 28
"""The commit that makes the stepping case 6 % slower."""
DRIFTING, STEPPING = "test_perf/test_it.py::test_drifting[cpu]", "test_perf/test_it.py::test_stepping[cpu]"
CASES = (DRIFTING, STEPPING, *(f"test_perf/test_it.py::test_{number:02d}[cpu]" for number in range(28)))
NOISE = 0.006
BEGIN = datetime(2026, 1, 1, tzinfo=timezone.utc)
FILE = "perf-history.jsonl"
_PERSON = {
    f"GIT_{who}_{what}": value
    for who in ("AUTHOR", "COMMITTER")
    for what, value in (("NAME", "a"), ("EMAIL", "a@example.com"), ("DATE", "2026-01-01T00:00:00Z"))
}


def git(root: Path, *arguments: str) -> str:
    environment = {**without_git(os.environ), **_PERSON, "GIT_CONFIG_GLOBAL": os.devnull}
    done = subprocess.run(
        ["git", "-C", str(root), *arguments], check=True, capture_output=True, text=True, env=environment
    )
    return done.stdout.strip()


def log_time(case: str, commit: int) -> float:
    """What a case takes at a commit of main, without noise."""
    drift = 0.01 * sum(commit >= at for at in DRIFT) if case == DRIFTING else 0.0
    return math.log(0.01) + drift + (0.06 if case == STEPPING and commit >= STEP else 0.0)


def measure(root: Path, rng: random.Random, number: int, branch: str, commit: int) -> None:
    """Add what a session at the repository's commit would."""
    host = rng.gauss(0, 0.02)
    session = HistorySession(
        session=f"session-{number:03d}",
        time=(BEGIN + timedelta(hours=number)).isoformat(),
        platform="cpu",
        fingerprint="cpu-example",
        revision=Revision(
            commit=git(root, "rev-parse", "HEAD"), branch=branch, subject=git(root, "log", "-1", "--format=%s")
        ),
        environment={"packages": {"torch": "2.12.1" if commit < 34 else "2.13.0"}},
        cases={
            case: CasePoint(log_time=log_time(case, commit) + host + rng.gauss(0, NOISE), clean_share=1.0, metrics={})
            for case in CASES
        },
    )
    file.append(root / FILE, session)


def make(root: Path, measured: Callable[..., None] = measure) -> None:
    """The repository: main of 40 commits and a branch of three that is merged, each measured."""
    rng = random.Random(17)
    git(root, "init", "-q", "-b", "main")
    (root / ".gitattributes").write_text(f"{FILE} merge=union\n")
    (root / ".gitignore").write_text(f".{FILE}.*\n")
    git(root, "add", ".")
    number = 0
    for commit in range(COMMITS - 1):
        if commit == 30:  # a branch leaves main here and is measured three times
            git(root, "add", "-A")
            git(root, "commit", "-q", "-m", "history so far")
            git(root, "switch", "-q", "-c", "feature")
            for _ in range(3):
                git(root, "commit", "-q", "--allow-empty", "-m", "work in progress")
                measured(root, rng, number := number + 1, "feature", commit)
            git(root, "commit", "-q", "-a", "-m", "history of the branch")
            git(root, "switch", "-q", "main")
        subject = "make it " + ("a little slower" if commit in DRIFT else "much slower" if commit == STEP else "nicer")
        (root / "code.py").write_text(f"version = {commit}\n")
        git(root, "add", "code.py")
        git(root, "commit", "-q", "-m", f"{commit}: {subject}")
        measured(root, rng, number := number + 1, "main", commit)
        if commit == 12:
            git(root, "tag", "v1.0")
    git(root, "commit", "-q", "-a", "-m", "history of main")
    git(root, "merge", "-q", "--no-edit", "feature")
    measured(root, rng, number + 1, "main", COMMITS - 1)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="an empty folder to make it in")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        root = options.keep or Path(folder)
        root.mkdir(exist_ok=True)
        make(root)
        assert Repository(root=root).branch() == "main"
        return perfsuite(["history", "show", str(root / FILE), "--repository", str(root), "--branch", "main"])


if __name__ == "__main__":
    sys.exit(main())
