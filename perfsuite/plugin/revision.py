"""Which revision of the code a run measures."""

from __future__ import annotations

import os
from pathlib import Path

from perfsuite.base.git import GitFailed, git
from perfsuite.baselines.runs import DIRTY
from perfsuite.record.run import Revision

_DEADLINE_S = 10.0
_BRANCHES = ("GITHUB_HEAD_REF", "GITHUB_REF_NAME", "CI_COMMIT_REF_NAME", "CHANGE_BRANCH", "BRANCH_NAME")
"""Where CI services, which check out a detached head, name the branch: GitHub, GitLab, Jenkins."""


def revision_of(root: Path, *written: Path) -> Revision:
    """The revision of the root directory; dirty where tracked files differ from it.

    Files and folders ``written`` by perfsuite do not count: a baseline that was just stored changes no code.  Where git
    does not say in time whether anything differs, something may.  What git refuses is the revision's ``problem``.
    """
    try:
        told = _git(root, "rev-parse", "--show-toplevel", "HEAD^{commit}", "--abbrev-ref", "HEAD")
    except GitFailed as failed:
        return Revision(problem="" if failed.outside else str(failed))
    top, commit, branch = told.splitlines()
    clean, problem, subject = False, "", ""
    try:
        changed = _git(root, "status", "--porcelain", "--untracked-files=no", "-z")
        own = [path.resolve() for path in written]
        clean = all(
            any((Path(top) / entry[3:]).resolve().is_relative_to(path) for path in own)
            for entry in changed.split("\0")
            if entry
        )
        subject = _git(root, "log", "-1", "--format=%s")
    except GitFailed as failed:
        problem = str(failed)
    named = next((os.environ[name] for name in _BRANCHES if os.environ.get(name)), "")
    return Revision(
        commit=commit,
        branch=named if branch == "HEAD" else branch,
        dirty=not clean,
        subject=subject.strip(),
        problem=problem,
    )


def stamp(revision: Revision) -> str:
    """The commit as runs of a baseline name it."""
    return revision.commit + (DIRTY if revision.commit and revision.dirty else "")


def _git(root: Path, *arguments: str) -> str:
    return git(root, *arguments, deadline_s=_DEADLINE_S)
