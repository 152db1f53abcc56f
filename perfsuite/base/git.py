"""The only place that starts git: with a clean environment, a time limit, and errors of one line.

A hook of git runs with variables that name the repository and the index of the new commit. A child process that
inherits them works on those, in any folder.
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
"""Variables with the settings of the user and the machine, and with the connection of a partial clone to its remote.

All others are removed: the list of ``git rev-parse --local-env-vars`` grows with git's versions.
"""
_SETTINGS = ("core.hooksPath=/dev/null", "core.fsmonitor=", "log.showSignature=false")
"""Settings against programs of the user: hooks of a checkout, file monitors, gpg."""
_SAFE = "safe.directory"
_DEPTHS = {
    "GITHUB_ACTIONS": "fetch-depth: 0 at actions/checkout, whose default is 1",
    "GITLAB_CI": 'GIT_DEPTH: "0" among the variables of the job',
    "BITBUCKET_BUILD_NUMBER": "clone: depth: full in bitbucket-pipelines.yml",
    "TF_BUILD": "fetchDepth: 0 at the checkout step",
    "TRAVIS": "git: depth: false in .travis.yml",
}
"""Setting that fetches the whole history, by the variable of the CI service."""


class GitFailed(ConfigurationError):
    """A git command failed, in one line."""

    def __init__(self, message: str, *, outside: bool = False) -> None:
        """``outside``: the folder is outside of any git repository, which is allowed."""
        super().__init__(message)
        self.outside = outside


class GitTimeout(GitFailed):
    """A git command exceeded its time limit."""


def without_git(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables that name a repository to child processes."""
    return {name: value for name, value in environ.items() if not name.startswith("GIT_") or _KEPT.fullmatch(name)}


def git(root: Path, *arguments: str, stdin: str = "", deadline_s: float = 60.0) -> str:
    """Return the output of a git command in ``root`` without the last line feed; raise GitFailed if it fails."""
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
            output, errors = child.communicate(_bytes(stdin), timeout=deadline_s)
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):  # after Ctrl-C it may have ended
                os.killpg(child.pid, signal.SIGKILL)  # also a filter that git started and that holds the pipes open
            if isinstance(error, subprocess.TimeoutExpired):
                raise GitTimeout(f"git {arguments[0]} in {root} took longer than {deadline_s:g} s") from None
            raise
    if child.returncode != 0:
        raise _failure(root, arguments, os.fsdecode(errors))
    return os.fsdecode(output).removesuffix("\n")


def _bytes(text: str) -> bytes:
    try:
        return os.fsencode(text)
    except UnicodeEncodeError:
        return text.encode(errors="backslashreplace")


def refusal(root: Path) -> str:
    """Return why git refuses the repository of ``root``; empty if it reads it, or if there is none."""
    try:
        git(root, "rev-parse", "--git-dir")
    except GitFailed as failed:
        return "" if failed.outside else str(failed)
    return ""


def why_missing(root: Path) -> str:
    """Return why the repository at ``root`` may lack a commit, with a remedy; empty if it is complete."""
    if git(root, "rev-parse", "--is-shallow-repository") != "true":
        return ""
    settings = [setting for name, setting in _DEPTHS.items() if os.environ.get(name)]
    setting = settings[0] if settings else "fetch-depth: 0 on GitHub, GIT_DEPTH: 0 on GitLab"
    return f"this clone is shallow: git fetch --unshallow; in CI: {setting}"


def _safe_directories(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield settings for the folders that the environment declares safe, as CI services and containers do."""
    count = environ.get("GIT_CONFIG_COUNT", "")
    for index in range(int(count) if count.isdigit() else 0):
        if environ.get(f"GIT_CONFIG_KEY_{index}", "").lower() == _SAFE:
            yield f"{_SAFE}={environ.get(f'GIT_CONFIG_VALUE_{index}', '')}"


def _failure(root: Path, arguments: tuple[str, ...], errors: str) -> GitFailed:
    reason = next((line for line in errors.splitlines() if line.startswith("fatal: ")), errors.strip())
    reason = reason.partition("\n")[0].removeprefix("fatal: ") or "failed"
    marker = _marker(root)
    if reason.startswith("not a git repository") and marker is None:
        ignored = " (GIT_DIR is not followed)" if "GIT_DIR" in os.environ else ""
        return GitFailed(f"{root} is not in a git repository{ignored}", outside=not ignored)
    return GitFailed(f"git {arguments[0]} refuses in {root}: {reason}; {_remedy(reason, root, marker)}")


def _remedy(reason: str, root: Path, marker: Path | None) -> str:
    here = shlex.quote(str(root))
    if "dubious ownership" in reason or "unsafe repository" in reason:
        named = re.search(r"'(.+?)'", reason)
        folder = shlex.quote(named[1]) if named else here
        return f"if you trust it: git config --global --add {_SAFE} {folder}"
    if reason.startswith("not a git repository: "):
        return f"the repository of this work tree was moved or removed: git worktree repair, or remove {marker}"
    if reason.startswith("not a git repository"):
        return f"{marker} is damaged, or GIT_CEILING_DIRECTORIES or a mount hides it"
    if "must be run in a work tree" in reason:
        return "this repository is bare: run in a work tree of it (git worktree add)"
    if "'HEAD^{commit}': unknown revision" in reason:
        return "it has no commit yet, or lacks that of HEAD: commit first, or run git fsck"
    return f"run git -C {here} status"


def _marker(root: Path) -> Path | None:
    """Return the ``.git`` of the folder or of the nearest one above; None if there is none."""
    folder = root.absolute()
    return next((place / ".git" for place in (folder, *folder.parents) if os.path.lexists(place / ".git")), None)
