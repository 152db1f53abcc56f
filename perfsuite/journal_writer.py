"""Writing a journal while its run goes on; its lines are told in :mod:`perfsuite.journal`."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perfsuite.decoding import to_json
from perfsuite.errors import JournalError
from perfsuite.journal import Header
from perfsuite.projection.record import Projected
from perfsuite.records import Peaks, Result
from perfsuite.run_record import GateRecord, RunEnd


class JournalWriter:
    """Appends to a new journal; every line is on disk when :meth:`result` or :meth:`failure` returns."""

    def __init__(self, path: Path, header: Header) -> None:
        """Raises JournalError when the file exists or cannot be made."""
        self.path = path
        self._end = 0
        self._head = -1
        self._environment: Mapping[str, Any] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise JournalError(
                f"journal {path} cannot be made: {error.strerror}; name another file by --perf-journal"
            ) from None
        self._append({"header": to_json(header)})
        self._head = self._end

    def result(self, result: Result) -> None:
        """Add a finished case; raises JournalError when it does not reach the disk."""
        if result.environment != self._environment:
            self._append({"environment": to_json(result.environment)})
            self._environment = result.environment
        self._append({"result": to_json(dataclasses.replace(result, environment={}))})

    def peaks(self, peaks: Peaks) -> None:
        """Add peaks that were measured, for all results of the journal."""
        nothing_finished = self._end == self._head
        self._append({"peaks": to_json(peaks)})
        if nothing_finished:
            self._head = self._end

    def failure(self, case: str, message: str) -> None:
        """Add a case that failed; it runs again when the journal is resumed."""
        self._append({"failure": {"case": case, "message": message}})

    def interrupted(self, case: str, signal: str) -> None:
        """Add the case that was running when ``signal`` (SIGTERM, SIGINT) ended the run; a resumed run runs it."""
        self._append({"interrupted": {"case": case, "signal": signal}})

    def projected(self, record: Projected) -> None:
        """Add what a case would measure."""
        self._append({"projected": to_json(record)})

    def skip(self, case: str, reason: str) -> None:
        """Add a case that was skipped; a journal of nothing else is not kept."""
        nothing_finished = self._end == self._head
        self._append({"skip": {"case": case, "reason": reason}})
        if nothing_finished:
            self._head = self._end

    def judged(self, gate: GateRecord) -> None:
        """Add what the gate said of the whole run."""
        self._append({"gate": to_json(gate)})

    def ended(self, end: RunEnd) -> None:
        """Add how the run ended; of a run in which no case finished nothing is kept."""
        if self._end != self._head:
            self._append({"end": to_json(end)})

    def close(self) -> None:
        """Close the file, and remove it when no case finished.  Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            if self._end == self._head:
                self.path.unlink(missing_ok=True)

    def _append(self, line: Mapping[str, Any]) -> None:
        data = json.dumps(line, separators=(",", ":"), default=str).encode() + b"\n"
        try:
            left = data
            while left:
                left = left[os.write(self._descriptor, left) :]
            os.fsync(self._descriptor)
        except OSError as error:
            self._drop_partial_line()
            raise JournalError(
                f"journal {self.path} cannot be written: {error.strerror}; the cases before are safe in it"
            ) from None
        self._end += len(data)

    def _drop_partial_line(self) -> None:
        # A torn line in the middle would make the file unreadable if there is room again for the next one.
        try:
            os.ftruncate(self._descriptor, self._end)
            os.lseek(self._descriptor, self._end, os.SEEK_SET)
        except OSError:
            self.close()
