"""Measure another revision, environment or interpreter: one *arm* of a comparison, as a pytest run of its own.

Both arms of a comparison run alternately in the same way, in a new interpreter with fresh rank processes, so that
drifts of the machine affect both. A revision gets a git work tree; the user's checkout is only read. The results of an
arm are read from its journal.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from perfsuite.base.errors import CaseError, ConfigurationError, JournalError, first_line
from perfsuite.base.git import GitFailed, git, why_missing, without_git
from perfsuite.metrics import read_run
from perfsuite.record.result import Result
from perfsuite.record.run import RunRecord
from perfsuite.run.measured_peaks import UNWANTED
from perfsuite.runtime import own_tree, scratch
from perfsuite.suite import pytest_arguments

_CHECKOUT_S = 1800.0  # Time limit for a work tree of a large repository, for which a filter may download files.
_TAIL_LINES = 15
_ENDED_BY_TESTS = (0, 1)  # pytest's exit codes if the tests ran, with and without failures.

_END_WITH_PARENT = """
import sys
sys.path[:] = filter(None, sys.path)  # -c puts the working directory first
import ctypes, os, signal
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG, kept by exec
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""
"""Program that runs a command which gets SIGTERM when its parent, the process of the first argument, is killed."""


class ArmFailed(CaseError):
    """An arm measured nothing; the message has the reason first, then the last lines of its pytest."""

    def __init__(self, message: str, *, whatever_case: bool = False) -> None:
        """``whatever_case``: another choice of cases would not help."""
        super().__init__(message)
        self.whatever_case = whatever_case


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One side of a comparison."""

    name: str  # Name for readers: a revision, ``working tree``, or its settings.
    root: Path  # Root directory of its pytest.
    interpreter: str = sys.executable  # Python that runs it.
    env: Mapping[str, str] = field(default_factory=dict)  # Variables of this arm alone.
    tree: Path | None = None  # Work tree of its revision; None: it runs the user's checkout.
    checkout: Path | None = None  # The user's checkout, which the work tree replaces; set together with ``tree``.


@contextmanager
def arm_of(repository: Path, revision: str, name: str) -> Iterator[Arm]:
    """Yield an arm in a temporary work tree of ``revision``.

    Its root is the directory that corresponds to ``repository``, which may lie below the top of its git repository.
    Raises ConfigurationError for a revision that git does not have.
    """
    top = Path(git(repository, "rev-parse", "--show-toplevel"))
    try:
        commit = git(repository, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    except GitFailed:
        remedy = why_missing(repository) or "name one that git log --all shows"
        raise ConfigurationError(f"revision {revision!r} is not a commit of {top}; {remedy}") from None
    with scratch.directory("base") as directory:
        tree = directory / "tree"
        _unregister(repository, lambda other: not other.exists())  # work trees of killed processes
        try:
            git(repository, "worktree", "add", "--detach", "--force", str(tree), commit, deadline_s=_CHECKOUT_S)
            root = tree / repository.resolve().relative_to(top.resolve())
            yield Arm(name=name, root=root, tree=tree, checkout=top)
        finally:
            _forget(repository, tree)


def _forget(repository: Path, tree: Path) -> None:
    """Remove a work tree and its registration, also after a signal ended git while it made them."""
    try:
        git(repository, "worktree", "remove", "--force", "--force", str(tree), deadline_s=_CHECKOUT_S)
    except GitFailed:  # incomplete: git refuses a work tree without a .git file
        _unregister(repository, lambda directory: directory.name == tree.parent.name)


def _unregister(repository: Path, leaves: Callable[[Path], bool]) -> None:
    """Remove the registrations of work trees in those scratch directories for which ``leaves`` is true."""
    common = Path(repository, git(repository, "rev-parse", "--git-common-dir"))
    for file in common.glob("worktrees/*/gitdir"):
        with contextlib.suppress(FileNotFoundError):  # another run may remove its own meanwhile
            directory = (file.parent / file.read_text().strip()).parent.parent  # git can write a relative path
            if directory.name.startswith(f"{scratch.PREFIX}base-") and leaves(directory):
                shutil.rmtree(file.parent)


def run_arm(arm: Arm, arguments: Sequence[str], deadline_s: float) -> Mapping[str, Result]:
    """Run pytest once in the arm and return its results by node id.

    Raises ArmFailed if pytest stopped before its tests (an old revision may lack an option), measured nothing, or did
    not end within ``deadline_s``.
    """
    with scratch.directory("arm") as directory:
        journal = directory / "journal.jsonl"
        child = start(arm_command(arm, journal, arguments), arm, arm_environment(arm))
        try:
            output, _ = child.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            raise ArmFailed(too_late(arm, deadline_s, end(child))) from None
        except BaseException:  # an interrupt: end the child first
            end(child)
            raise
        if child.returncode not in _ENDED_BY_TESTS or not journal.exists():
            raise ended(arm, child.returncode, output)
        return measured_of(arm, journal, output)[1]


def arm_command(arm: Arm, journal: Path, arguments: Sequence[str]) -> list[str]:
    """Return the command that measures an arm and writes this journal."""
    command = [arm.interpreter, "-m", "pytest", "-p", "no:cacheprovider", "-q", "--perf-fresh"]
    return [*command, f"--perf-journal={journal}", *arguments]


def too_late(arm: Arm, deadline_s: float, output: str) -> str:
    """Return the message about an arm that exceeded its time limit."""
    return f"{arm.name} did not end within {deadline_s:.0f} s; give it longer or fewer cases\n{_tail(output)}"


def ended(arm: Arm, code: int, output: str) -> ArmFailed:
    """Return the error of an arm whose pytest stopped before its tests, with the exception or the last error line."""
    why, lines = f"its pytest ended with exit code {code}", output.splitlines()
    marks = ("E   ", "ERROR: ")
    reasons = [line.removeprefix(mark).strip() for mark in marks for line in lines[::-1] if line.startswith(mark)]
    return ArmFailed(f"{arm.name} was not measured: {'; '.join([why, *reasons[:1]])}\n{_tail(output)}")


def measured_of(arm: Arm, journal: Path, output: str) -> tuple[RunRecord, dict[str, Result]]:
    """Return an arm's journal and results; raise ArmFailed without results, and for modules of another tree."""
    try:
        kept = read_run(journal)
    except JournalError as error:
        raise ArmFailed(f"{arm.name} was not measured: {error}") from None
    measured = {case: result for case, result in kept.results.items() if result.outcome == "measured"}
    foreign = [
        line for message in kept.case_errors.values() for line in message.splitlines() if own_tree.FOREIGN in line
    ]
    if foreign:  # imports of the other cases may be foreign as well
        why = foreign[0][foreign[0].index("module ") :]  # without the rank before it
        raise ArmFailed(f"{arm.name} was not measured: {why}\n{_tail(output)}", whatever_case=True)
    if not measured:
        raise none_measured(arm, kept.case_errors, kept.skips, output)
    return kept, measured


def none_measured(arm: Arm, failures: Mapping[str, str], skips: Mapping[str, str], output: str) -> ArmFailed:
    """Return the error of an arm that measured no case, with the reason of the first case."""
    why = first_line(next(iter({**failures, **skips}.values()), ""))
    return ArmFailed(f"{arm.name} measured no case{f': {why}' if why else ''}\n{_tail(output)}")


def _tail(output: str) -> str:
    return "\n".join(output.splitlines()[-_TAIL_LINES:])


def described_imports(results: Mapping[str, Result]) -> str:
    """Return from where an arm imported the modules of the project, in one phrase; empty if the arm is too old."""
    measurements = [result.measurement for result in results.values() if result.measurement]
    return own_tree.described(
        {name: file for measurement in measurements for name, file in measurement.imports.items()}
    )


def arm_environment(arm: Arm) -> dict[str, str]:
    """Return the environment of an arm: its own tree first on the import path, without an outer pytest or git hook."""
    kept = {name: value for name, value in without_git(os.environ).items() if not name.startswith("PYTEST_")}
    own = [str(arm.root)]
    if arm.tree is not None and arm.checkout is not None:
        own += own_tree.mirrored(arm.tree, arm.checkout)
        places = own_tree.variable(arm.tree, arm.checkout, own)
    else:
        top = own_tree.checkout_of(arm.root)
        places = own_tree.variable(top, top, own)
    path = os.pathsep.join(filter(None, [*own, kept.get("PYTHONPATH", "")]))
    return {**kept, **places, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", UNWANTED: "1", **arm.env}


def start(
    command: Sequence[str],
    arm: Arm,
    environment: Mapping[str, str],
    output: int | IO[bytes] = subprocess.PIPE,
    descriptors: Sequence[int] = (),
) -> subprocess.Popen[str]:
    """Start a command in an arm's root; it gets these descriptors, and SIGTERM when this process is killed."""
    return subprocess.Popen(
        [sys.executable, "-c", _END_WITH_PARENT, str(os.getpid()), *command],
        cwd=arm.root,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        pass_fds=descriptors,
    )


def end(child: subprocess.Popen[str]) -> str:
    """Send SIGTERM, which perfsuite's pytest turns into a clean end, then SIGKILL; return the output."""
    try:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.killpg(child.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                return child.communicate(timeout=10)[0] or ""
    except BaseException:  # a second Ctrl-C: leave no process running
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        raise
    return ""


_PLUGIN = Path(__file__).parents[1] / "plugin" / "turns.py"
_NAME = "perfsuite_turns"


class LiveArm:
    """The pytest of an arm, which waits between its turns without load."""

    def __init__(self, arm: Arm, arguments: Sequence[str], cases: Sequence[str]) -> None:
        self.arm, self._arguments, self._cases = arm, arguments, cases
        self._closing = contextlib.ExitStack()
        self._seen: Counter[str] = Counter()
        self._has_ended = False

    def start(self, deadline_s: float) -> None:
        """Start it and wait until it has collected its cases; raise ArmFailed if it stops before."""
        with contextlib.ExitStack() as on_failure, contextlib.ExitStack() as its_ends:
            on_failure.callback(self.close)
            directory = self._closing.enter_context(scratch.directory("arm"))
            path = directory / "path"
            path.mkdir()
            shutil.copyfile(_PLUGIN, path / f"{_NAME}.py")
            self._journal, self._output = directory / "journal.jsonl", directory / "output"
            lines, self._asked = os.pipe()
            its_ends.callback(os.close, lines)
            asked = self._closing.enter_context(contextlib.ExitStack())
            asked.callback(os.close, self._asked)
            self._answers, answers = os.pipe()
            its_ends.callback(os.close, answers)
            self._closing.callback(os.close, self._answers)
            own = arm_environment(self.arm)
            environment = {**own, "PYTHONPATH": os.pathsep.join([own["PYTHONPATH"], str(path)])}
            environment["PERFSUITE_TURNS"] = f"{lines},{answers}"
            cases = pytest_arguments(self._cases, self.arm.root)
            command = arm_command(self.arm, self._journal, ["-p", _NAME, *self._arguments, *cases])
            with self._output.open("wb") as output:
                self._child = start(command, self.arm, environment, output, (lines, answers))
            self._closing.callback(end, self._child)
            self._closing.callback(asked.close)  # first, so that it waits for no turn
            on_failure.pop_all()
        self._await("ready", deadline_s)

    def serves(self, cases: Sequence[str]) -> bool:
        """Return whether it can measure these cases."""
        return not self._has_ended and set(cases) <= set(self._cases)

    def measure(self, cases: Sequence[str], deadline_s: float) -> dict[str, Result]:
        """Measure these cases once more, as far as possible; raise ArmFailed if none is measured in time."""
        with contextlib.suppress(BrokenPipeError):  # it has ended: _await reports this
            os.write(self._asked, json.dumps(list(cases)).encode() + b"\n")
        self._await("done", deadline_s)
        kept, measured = measured_of(self.arm, self._journal, self._printed())
        fresh = {case: measured[case] for case in cases if case in measured and kept.measured[case] > self._seen[case]}
        self._seen = kept.measured
        if not fresh:
            failures = {case: kept.case_errors[case] for case in cases if case in kept.case_errors}
            raise none_measured(self.arm, failures, kept.skips, self._printed())
        return fresh

    def close(self) -> None:
        """End it. Idempotent."""
        self._has_ended = True
        self._closing.close()

    def _printed(self) -> str:
        return self._output.read_text(errors="replace")

    def _await(self, word: str, deadline_s: float) -> None:
        """Wait for one answer; if it does not come, end the arm, so that other runs are alone, and raise ArmFailed."""
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._answers, selectors.EVENT_READ)
                if not selector.select(deadline_s):
                    raise ArmFailed(too_late(self.arm, deadline_s, self._printed()))
            if os.read(self._answers, 64).decode().strip() != word:
                try:
                    code = self._child.wait(timeout=deadline_s)
                except subprocess.TimeoutExpired:
                    raise ArmFailed(too_late(self.arm, deadline_s, self._printed())) from None
                raise ended(self.arm, code, self._printed())
        except BaseException:
            self.close()
            raise
