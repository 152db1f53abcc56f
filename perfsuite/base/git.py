"""The only place that starts git: a clean environment, a time-out, and one line where git refuses.

A hook of git runs with variables that name the repository and the index of the commit that is being made.  A child that
inherits them works on those, whatever folder it is given.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from perfsuite.base.errors import ConfigurationError

_KEPT = re.compile(
    r"GIT_(CONFIG_(GLOBAL|SYSTEM|NOSYSTEM)|CEILING_DIRECTORIES|DISCOVERY_ACROSS_FILESYSTEM|EXEC_PATH"
    r"|SSH|SSH_COMMAND|SSH_VARIANT|SSL_\w+|TEST_ASSUME_DIFFERENT_OWNER)"
)
"""Variables that say where the settings of the user and the machine are, and how a partial clone reaches its remote.

All others are left out: what ``git rev-parse --local-env-vars`` lists grows with git's versions.
"""
_SETTINGS = ("core.hooksPath=/dev/null", "core.fsmonitor=", "log.showSignature=false")
"""No program of the user's runs unasked: no hook of a checkout, no monitor of files, no gpg."""
_SAFE = "safe.directory"
_DEPTHS = {
    "GITHUB_ACTIONS": "fetch-depth: 0 at actions/checkout, whose default is 1",
    "GITLAB_CI": 'GIT_DEPTH: "0" among the variables of the job',
    "BITBUCKET_BUILD_NUMBER": "clone: depth: full in bitbucket-pipelines.yml",
    "TF_BUILD": "fetchDepth: 0 at the checkout step",
    "TRAVIS": "git: depth: false in .travis.yml",
}
"""By the variable that a CI service sets: the setting with which it fetches the whole history."""


class GitFailed(ConfigurationError):
    """A git command failed, in one line."""

    def __init__(self, message: str, *, outside: bool = False) -> None:
        """``outside``: the folder is outside of any git repository.  That is allowed."""
        super().__init__(message)
        self.outside = outside


class GitTimeout(GitFailed):
    """A git command did not end in time."""


def without_git(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables by which git tells a child which repository to work on."""
    return {name: value for name, value in environ.items() if not name.startswith("GIT_") or _KEPT.fullmatch(name)}


def git(root: Path, *arguments: str, given: str = "", deadline_s: float = 60.0) -> str:
    """Return what a git command prints in ``root``, without the last line feed; GitFailed where it fails."""
    settings = [word for setting in (*_SETTINGS, *_safe_directories(os.environ)) for word in ("-c", setting)]
    kept = {name: value for name, value in without_git(os.environ).items() if name != "SSH_ASKPASS"}
    try:
        child = subprocess.Popen(
            ["git", *settings, "-C", str(root), *(_bytes(argument.replace("\0", "\\0")) for argument in arguments)],
            env={**kept, "LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        why = "is not installed" if isinstance(error, FileNotFoundError) else f"cannot be started: {error.strerror}"
        raise GitFailed(f"git {why}; it is needed to name revisions", outside=_marker(root) is None) from None
    with child:
        try:
            output, errors = child.communicate(_bytes(given), timeout=deadline_s)
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):  # after Ctrl-C it may have ended
                os.killpg(child.pid, signal.SIGKILL)  # a filter that git started holds the pipes open
            if isinstance(error, subprocess.TimeoutExpired):
                raise GitTimeout(f"git {arguments[0]} in {root} took longer than {deadline_s:g} s") from None
            raise
    if child.returncode != 0:
        raise _failure(root, arguments, os.fsdecode(errors))
    return os.fsdecode(output).removesuffix("\n")


def _bytes(text: str) -> bytes:
    """Paths as the system has them; a name of others that can be no text of a file names nothing git has."""
    try:
        return os.fsencode(text)
    except UnicodeEncodeError:
        return text.encode(errors="backslashreplace")


def refusal(root: Path) -> str:
    """Return why git does not read the repository that ``root`` is in; empty where it does, and where there is none."""
    try:
        git(root, "rev-parse", "--git-dir")
    except GitFailed as failed:
        return "" if failed.outside else str(failed)
    return ""


def why_missing(root: Path) -> str:
    """Return why a commit may not be in the repository at ``root``, and what to do; empty where it is complete."""
    if git(root, "rev-parse", "--is-shallow-repository") != "true":
        return ""
    known = [setting for name, setting in _DEPTHS.items() if os.environ.get(name)]
    setting = known[0] if known else "fetch-depth: 0 on GitHub, GIT_DEPTH: 0 on GitLab"
    return f"this clone is shallow: git fetch --unshallow; in CI: {setting}"


def _safe_directories(environ: Mapping[str, str]) -> Iterator[str]:
    """Folders that the environment declares safe, as CI services and containers do, as settings."""
    count = environ.get("GIT_CONFIG_COUNT", "")
    for index in range(int(count) if count.isdigit() else 0):
        if environ.get(f"GIT_CONFIG_KEY_{index}", "").lower() == _SAFE:
            yield f"{_SAFE}={environ.get(f'GIT_CONFIG_VALUE_{index}', '')}"


def _failure(root: Path, arguments: tuple[str, ...], errors: str) -> GitFailed:
    said = next((line for line in errors.splitlines() if line.startswith("fatal: ")), errors.strip())
    said = said.partition("\n")[0].removeprefix("fatal: ") or "failed"
    marker = _marker(root)
    if said.startswith("not a git repository") and marker is None:
        ignored = " (GIT_DIR is not followed)" if "GIT_DIR" in os.environ else ""
        return GitFailed(f"{root} is not in a git repository{ignored}", outside=not ignored)
    return GitFailed(f"git {arguments[0]} refuses in {root}: {said}; {_remedy(said, root, marker)}")


def _remedy(said: str, root: Path, marker: Path | None) -> str:
    here = shlex.quote(str(root))
    if "dubious ownership" in said or "unsafe repository" in said:
        named = re.search(r"'(.+?)'", said)
        folder = shlex.quote(named[1]) if named else here
        return f"if you trust it: git config --global --add {_SAFE} {folder}"
    if said.startswith("not a git repository: "):
        return f"the repository of this work tree was moved or removed: git worktree repair, or remove {marker}"
    if said.startswith("not a git repository"):
        return f"{marker} is damaged, or GIT_CEILING_DIRECTORIES or a mount hides it"
    if "must be run in a work tree" in said:
        return "this repository is bare: run in a work tree of it (git worktree add)"
    if "'HEAD^{commit}': unknown revision" in said:
        return "it has no commit yet, or lacks that of HEAD: commit first, or see git fsck"
    return f"see what git -C {here} status says"


def _marker(root: Path) -> Path | None:
    """The ``.git`` of the folder or of the nearest one above; None where there is none."""
    folder = root.absolute()
    return next((place / ".git" for place in (folder, *folder.parents) if os.path.lexists(place / ".git")), None)
