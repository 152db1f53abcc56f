"""What git says of a repository's commits; every question has an answer where there is no repository too."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from perfsuite.base.errors import ConfigurationError
from perfsuite.base.git import GitFailed, GitTimeout, git, refusal, why_missing
from perfsuite.record.run import Revision

_SHORT = 10


@dataclass(frozen=True, kw_only=True)
class Tag:
    """A tag on a branch."""

    name: str
    commit: str
    """Full id of the commit that it names."""


@dataclass(frozen=True, kw_only=True)
class Repository:
    """A git repository, or a folder outside of any."""

    root: Path

    def branch(self) -> str:
        """The branch that is checked out; empty where there is none."""
        return self._ask("symbolic-ref", "--quiet", "--short", "HEAD")

    def subject(self, revision: str) -> str:
        """First line of a commit's message; empty for an unknown one."""
        return self._ask("log", "-1", "--format=%s", "--end-of-options", revision, "--")

    def commit(self, revision: str) -> str:
        """Full id of the commit of a revision; empty where it names none."""
        return self._ask("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")

    def revision(self, named: str) -> Revision:
        """A revision as a line of a history has it; ConfigurationError where the repository does not have it."""
        commit = self.commit(named)
        if not commit:
            raise ConfigurationError(
                self.refusal
                or f"{named!r} names no commit of the repository at {self.root}; "
                f"{self.why_missing() or 'name one that it has'}"
            )
        return Revision(commit=commit, subject=self.subject(commit))

    @functools.cached_property
    def refusal(self) -> str:
        """Why git does not read the repository; empty where it does, and where there is none."""
        return refusal(self.root)

    def is_there(self) -> bool:
        """Whether there is a repository with a commit."""
        return bool(self.commit("HEAD"))

    def why_missing(self) -> str:
        """Why it may lack a commit, and what to do; empty where its history is complete."""
        try:
            return why_missing(self.root)
        except GitFailed:
            return ""

    def first_parents(self, branch: str, since: str = "") -> Mapping[str, str]:
        """Subjects of a branch's commits by their full id, first-parent ancestry, oldest first.

        ``since``: only those that cannot be reached from this revision.  ConfigurationError for an unknown revision.
        """
        for revision in filter(None, (branch, since)):
            if not self.commit(revision):
                raise ConfigurationError(
                    self.refusal
                    or f"{revision!r} names no commit of the repository at {self.root}; "
                    f"{self.why_missing() or 'name a branch, tag or commit that it has, or fetch it'}"
                )
        span = f"{since}..{branch}" if since else branch
        told = git(self.root, "log", "--first-parent", "--reverse", "--format=%H %s", "--end-of-options", span, "--")
        return {line[:40]: line[41:] for line in told.splitlines()}

    def known(self, commits: Iterable[str]) -> frozenset[str]:
        """Those of the commits that the repository has."""
        asked = [commit for commit in commits if commit]
        told = self._ask("cat-file", "--batch-check=%(objectname) %(objecttype)", given="\n".join(asked) + "\n")
        there = {line.split()[0] for line in told.splitlines() if line.endswith(" commit")}
        return frozenset(there & set(asked))

    def last_tag(self, branch: str) -> Tag | None:
        """The newest tag on a branch's first-parent line before its tip: a release looks back at the one before."""
        name = self._ask("describe", "--tags", "--abbrev=0", "--first-parent", f"{branch}~1")
        return Tag(name=name, commit=self.commit(name)) if name else None

    def _ask(self, *arguments: str, given: str = "") -> str:
        """What a git command prints; empty where it fails."""
        try:
            return git(self.root, *arguments, stdin=given)
        except GitTimeout:
            raise
        except GitFailed:
            return ""


def short(commit: str) -> str:
    """A commit as people read it."""
    return commit[:_SHORT] or "no commit"
