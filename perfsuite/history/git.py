"""Read a repository's commits and the measured revision from git, also without a repository."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from perfsuite.base.errors import ConfigurationError
from perfsuite.base.git import GitFailed, GitTimeout, git, refusal, why_missing
from perfsuite.baselines.runs import DIRTY
from perfsuite.record.run import Revision

_SHORT = 10


@dataclass(frozen=True, kw_only=True)
class Repository:
    """A git repository, or a folder outside of any."""

    root: Path

    def branch(self) -> str:
        """Return the checked-out branch; empty without one."""
        return self._ask("symbolic-ref", "--quiet", "--short", "HEAD")

    def commit(self, revision: str) -> str:
        """Return the full id of a revision's commit; empty for an unknown revision."""
        return self._ask("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")

    def revision(self, named: str) -> Revision:
        """Return commit and subject of a revision.  Raises ConfigurationError if it is unknown."""
        self._require(named, "give one that it has")
        commit, _, subject = self._ask("log", "-1", "--format=%H %s", "--end-of-options", named, "--").partition(" ")
        return Revision(commit=commit, subject=subject)

    def _require(self, revision: str, remedy: str) -> None:
        if not self.commit(revision):
            raise ConfigurationError(
                self.refusal
                or f"{revision!r} is not a commit of the repository at {self.root}; {self.why_missing() or remedy}"
            )

    @functools.cached_property
    def refusal(self) -> str:
        """Reason why git cannot read the repository; empty if it can, or without a repository."""
        return refusal(self.root)

    def is_there(self) -> bool:
        """Return whether there is a repository with a commit."""
        return bool(self.commit("HEAD"))

    def why_missing(self) -> str:
        """Return why a commit may be missing, with a remedy; empty if the history is complete."""
        try:
            return why_missing(self.root)
        except GitFailed:
            return ""

    def first_parents(self, branch: str, since: str = "") -> Mapping[str, str]:
        """Return the subjects of a branch's first-parent commits by full id, oldest first.

        ``since``: only commits that are not reachable from this revision.  Raises ConfigurationError for an unknown
        revision.
        """
        for revision in filter(None, (branch, since)):
            self._require(revision, "give a branch, tag or commit that it has, or fetch it")
        span = f"{since}..{branch}" if since else branch
        log = git(self.root, "log", "--first-parent", "--reverse", "--format=%H %s", "--end-of-options", span, "--")
        return dict(line.split(" ", 1) for line in log.split("\n") if line)

    def present(self, commits: Iterable[str]) -> frozenset[str]:
        """Return the commits that the repository has."""
        asked = [commit for commit in commits if commit]
        lines = self._ask("cat-file", "--batch-check=%(objectname) %(objecttype)", stdin="\n".join(asked) + "\n")
        found = {line.split()[0] for line in lines.splitlines() if line.endswith(" commit")}
        return frozenset(found & set(asked))

    def last_tag(self, branch: str) -> tuple[str, str] | None:
        """Return name and full commit id of the newest tag before a first-parent branch's tip; None without one."""
        name = self._ask("describe", "--tags", "--abbrev=0", "--first-parent", f"{branch}~1")
        return (name, self.commit(name)) if name else None

    def _ask(self, *arguments: str, stdin: str = "") -> str:
        try:
            return git(self.root, *arguments, stdin=stdin)
        except GitTimeout:
            raise
        except GitFailed:
            return ""


def short(commit: str) -> str:
    """Return the first characters of a commit id, or ``no commit``."""
    return commit[:_SHORT] or "no commit"


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
    return Revision(commit=commit, branch=branch or named, dirty=not clean, subject=subject.strip(), problem=problem)


def stamp(revision: Revision) -> str:
    """Return the commit in the form that baselines store."""
    return revision.commit + (DIRTY if revision.commit and revision.dirty else "")
