"""Read the revision of the measured code from git."""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path

from perfsuite.base.git import GitFailed, git
from perfsuite.baselines.runs import DIRTY
from perfsuite.record.run import Revision

_DEADLINE_S = 10.0
_BRANCHES = ("GITHUB_HEAD_REF", "GITHUB_REF_NAME", "CI_COMMIT_REF_NAME", "CHANGE_BRANCH", "BRANCH_NAME")
"""Variables with the branch on CI services, which check out a detached head: GitHub, GitLab, Jenkins."""


def revision_of(root: Path, *written: Path) -> Revision:
    """Return the revision of the root directory; dirty if tracked files differ from it, or if git is too slow.

    Files and folders ``written`` by perfsuite are ignored: a stored baseline changes no code.  The message of a failed
    git command becomes the revision's ``problem``.
    """
    run = functools.partial(git, root, deadline_s=_DEADLINE_S)
    try:
        top, commit = run("rev-parse", "--show-toplevel", "HEAD^{commit}").rsplit("\n", 1)
    except GitFailed as failed:
        return Revision(problem="" if failed.outside else str(failed))
    clean, problem, subject, branch = False, "", "", ""
    with contextlib.suppress(GitFailed):  # a detached head has none
        branch = run("symbolic-ref", "--quiet", "--short", "HEAD")
    try:
        changed = run("status", "--porcelain", "--untracked-files=no", "-z")
        own = [path.resolve() for path in written]
        clean = all(
            any((Path(top) / entry[3:]).resolve().is_relative_to(path) for path in own)
            for entry in changed.split("\0")
            if entry
        )
        subject = run("log", "-1", "--format=%s")
    except GitFailed as failed:
        problem = str(failed)
    named = next((os.environ[name] for name in _BRANCHES if os.environ.get(name)), "")
    return Revision(
        commit=commit,
        branch=branch or named,
        dirty=not clean,
        subject=subject.strip(),
        problem=problem,
    )


def stamp(revision: Revision) -> str:
    """Return the commit in the form that baselines store."""
    return revision.commit + (DIRTY if revision.commit and revision.dirty else "")
