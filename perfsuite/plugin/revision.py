"""Which revision of the code a run measures."""

from __future__ import annotations

import subprocess
from pathlib import Path

from perfsuite.baselines.runs import DIRTY

_DEADLINE_S = 10.0


def commit_of(root: Path, written: Path) -> str:
    """The revision of the root directory, with ``-dirty`` where tracked files differ from it; empty outside of git.

    The folder ``written`` does not count: a baseline that was just stored changes no code.
    """
    commit = _git(root, "rev-parse", "HEAD")
    if not commit:
        return ""
    changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", ".", f":(exclude){written}")
    return commit + (DIRTY if changed else "")


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False, timeout=_DEADLINE_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
