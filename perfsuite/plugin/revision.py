"""Which revision of the code a run measures."""

from __future__ import annotations

import subprocess
from pathlib import Path

from perfsuite.baselines.runs import DIRTY

_DEADLINE_S = 10.0


def commit_of(root: Path, written: Path) -> str:
    """The revision of the root directory, with ``-dirty`` where tracked files differ from it; empty outside of git.

    Files in the folder ``written`` do not count: a baseline that was just stored changes no code.  Where git does not
    say in time whether anything differs, something may.
    """
    told = _git(root, "rev-parse", "--show-toplevel", "HEAD")
    if told is None:
        return ""
    top, commit = told.splitlines()
    changed = _git(root, "status", "--porcelain", "--untracked-files=no", "-z")
    own = written.resolve()
    clean = changed is not None and all(
        (Path(top) / entry[3:]).resolve().is_relative_to(own) for entry in changed.split("\0") if entry
    )
    return commit if clean else commit + DIRTY


def _git(root: Path, *arguments: str) -> str | None:
    """What a git command prints; None where it fails."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False, timeout=_DEADLINE_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
