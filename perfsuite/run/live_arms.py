"""Arms that stay alive and measure turn by turn: starting pytest and importing torch takes longer than most cases."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from perfsuite.record.result import Result
from perfsuite.run import arms
from perfsuite.run.arms import Arm, ArmFailed
from perfsuite.runtime import scratch

_PLUGIN = Path(__file__).parents[1] / "plugin" / "turns.py"
_NAME = "perfsuite_turns"


class LiveArm:
    """The pytest of an arm, which waits between its turns without using a core."""

    def __init__(self, arm: Arm, arguments: Sequence[str], cases: Sequence[str]) -> None:
        self.arm, self._arguments, self._cases = arm, arguments, cases
        self._closing = contextlib.ExitStack()
        self._seen: Counter[str] = Counter()
        self._has_ended = False

    def start(self, deadline_s: float) -> None:
        """Start it and wait until it has collected its cases; raises ArmFailed where it does not get that far."""
        self._start([*self._arguments, *self._cases])
        self._await("ready", deadline_s)

    def serves(self, cases: Sequence[str]) -> bool:
        """Whether it can be asked for these cases."""
        return not self._has_ended and set(cases) <= set(self._cases)

    def _start(self, arguments: Sequence[str]) -> None:
        directory = self._closing.enter_context(scratch.directory("arm"))
        path = directory / "path"
        path.mkdir()
        shutil.copyfile(_PLUGIN, path / f"{_NAME}.py")
        self._journal, self._output = directory / "journal.jsonl", directory / "output"
        lines, self._asked = os.pipe()
        self._told, answers = os.pipe()
        self._closing.callback(os.close, self._told)
        own = arms.arm_environment(self.arm)
        environment = {**own, "PYTHONPATH": os.pathsep.join([own["PYTHONPATH"], str(path)])}
        environment["PERFSUITE_TURNS"] = f"{lines},{answers}"
        command = arms.arm_command(self.arm, self._journal, ["-p", _NAME, *arguments])
        try:
            with self._output.open("wb") as output:
                child = arms.start(command, self.arm, environment, output, (lines, answers))
            self._child = child
            self._closing.callback(arms.end, child)
        finally:
            self._closing.callback(os.close, self._asked)  # first of all: then it waits for no turn
            os.close(lines)
            os.close(answers)

    def measure(self, cases: Sequence[str], deadline_s: float) -> dict[str, Result]:
        """Measure each of these cases once more; those that it could not measure are missing.

        Raises ArmFailed where it measures none of them, ends, or is not done within ``deadline_s``.
        """
        with contextlib.suppress(BrokenPipeError):  # it has ended, which is found out next
            os.write(self._asked, json.dumps(list(cases)).encode() + b"\n")
        self._await("done", deadline_s)
        kept = arms.journal_of(self.arm, self._journal)
        measured = arms.measured_of(self.arm, kept, self._printed())
        fresh = {case: measured[case] for case in cases if case in measured and kept.measured[case] > self._seen[case]}
        self._seen = kept.measured
        if not fresh:
            failures = {case: kept.case_errors[case] for case in cases if case in kept.case_errors}
            raise arms.none_measured(self.arm, failures, kept.skips, self._printed())
        return fresh

    def close(self) -> None:
        """End it.  Idempotent."""
        self._has_ended = True
        self._closing.close()

    def _printed(self) -> str:
        return self._output.read_text(errors="replace")

    def _await(self, word: str, deadline_s: float) -> None:
        """Wait for one answer; raises ArmFailed where it does not come, and ends the arm: other runs must be alone."""
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._told, selectors.EVENT_READ)
                if not selector.select(deadline_s):
                    raise ArmFailed(arms.too_late(self.arm, deadline_s, self._printed()))
            if os.read(self._told, 64).decode().strip() != word:
                try:
                    code = self._child.wait(timeout=deadline_s)
                except subprocess.TimeoutExpired:
                    raise ArmFailed(arms.too_late(self.arm, deadline_s, self._printed())) from None
                raise arms.ended(self.arm, code, self._printed())
        except BaseException:
            self.close()
            raise
