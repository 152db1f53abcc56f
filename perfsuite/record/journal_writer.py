"""Write a journal while its run goes on; :mod:`perfsuite.record.journal` describes its lines.

Journals are in the project's folder ``.perfsuite``, or in the user's cache if that is not writable.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from perfsuite.base.errors import ConfigurationError, JournalError
from perfsuite.base.files import user_cache, why
from perfsuite.base.units import plural
from perfsuite.base.writing import WriteFailed, put, why_not_private, write_all
from perfsuite.record.codec import to_json
from perfsuite.record.result import Peaks, Result
from perfsuite.record.run import GateRecord, Header, Projected, RunEnd

_CHANGED = "another program removed, replaced or changed it during the run"
_ASIDE = ("header", "skip", "peaks", "environment")  # Lines for which alone no journal is kept, where they come first.


class JournalWriter:
    """Appends to a new journal; every line is on disk when the method that adds it returns.

    If its file cannot be written or was changed by another program, the whole journal is written again in the first
    usable place of ``elsewhere``.  :attr:`problem` then says how many cases are kept where.
    """

    def __init__(
        self,
        path: Path,
        header: Header,
        elsewhere: Callable[[], Iterator[Path]] = lambda: iter(()),
        uninterrupted: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
        *,
        keeps_always: bool = False,
    ) -> None:
        """Raises JournalError, and leaves no file, when the file exists or cannot be made.

        ``uninterrupted`` holds signals back while a line is written; ``keeps_always`` keeps a journal without a case.
        """
        self.path = path
        self.trouble = ""  # Why the first place was given up; empty while it is in use.
        self._elsewhere = elsewhere
        self._uninterrupted = uninterrupted
        self._first = path
        self._lines: list[Mapping[str, Any] | Result] = []  # Every line that the file should have.
        self._written = 0  # How many of them it holds.
        self._end = 0  # Its bytes.
        self._environment: Mapping[str, Any] = {}  # Of the last result in the file.
        self._descriptor = -1
        self._is_worth_keeping = keeps_always
        self._lines.append({"header": to_json(header)})
        try:
            self._begin(path)
        except OSError as error:
            raise JournalError(
                f"journal {path} cannot be made: {why(error)}; name another file by --perf-journal"
            ) from None

    @property
    def problem(self) -> str:
        """How many cases are kept where, and why they are not all in the place of this journal; empty if they are."""
        if not self.trouble:
            return ""
        kept, cases = _cases(self._lines[: self._written]), _cases(self._lines)
        lost = f", {len(cases - kept)} lost" if cases - kept else ""
        place = "" if self.path == self._first else f"{self._first}: "
        return f"journal: {len(kept)} of {plural(len(cases), 'case')} kept in {self.path}{lost}: {place}{self.trouble}"

    def result(self, result: Result) -> None:
        """Add a finished case."""
        self._add(result)

    def peaks(self, peaks: Peaks) -> None:
        """Add peaks that were measured, for all results of the journal."""
        self._add({"peaks": to_json(peaks)})

    def failure(self, case: str, message: str) -> None:
        """Add a case that failed; it runs again when the journal is resumed."""
        self._add({"failure": {"case": case, "message": message}})

    def interrupted(self, case: str, signal: str) -> None:
        """Add the case that was running when ``signal`` (SIGTERM, SIGINT) ended the run; a resumed run runs it."""
        self._add({"interrupted": {"case": case, "signal": signal}})

    def projected(self, record: Projected) -> None:
        """Add the projection of a case."""
        self._add({"projected": to_json(record)})

    def skip(self, case: str, reason: str) -> None:
        """Add a case that was skipped; of nothing else no journal is kept, unless ``keeps_always``."""
        self._add({"skip": {"case": case, "reason": reason}})

    def judged(self, gate: GateRecord) -> None:
        """Add the verdicts of the gate."""
        self._add({"gate": to_json(gate)})

    def ended(self, end: RunEnd) -> None:
        """Add how the run ended; of a run in which no case finished nothing is kept."""
        if self._is_worth_keeping:
            self._add({"end": to_json(end)})

    def check(self) -> None:
        """Write the journal elsewhere if another program changed the file."""
        if self._descriptor >= 0:
            self._keep_up()

    def close(self) -> None:
        """Close the file, and remove it when no case finished.  Idempotent."""
        if self._descriptor >= 0:
            self._leave()
            if not self._is_worth_keeping:
                with contextlib.suppress(OSError):
                    self.path.unlink()

    def _add(self, line: Mapping[str, Any] | Result) -> None:
        with self._uninterrupted():
            self._lines.append(line)
            self._is_worth_keeping |= isinstance(line, Result) or next(iter(line)) not in _ASIDE
            if self._descriptor >= 0:
                self._keep_up()

    def _keep_up(self) -> None:
        try:
            self._write_rest()
        except OSError as error:
            self._move(why(error))

    def _write_rest(self) -> None:
        environment, data = self._environment, []
        for line in self._lines[self._written :]:
            if not isinstance(line, Result):
                data.append(_json(line))
                continue
            if line.environment != environment:
                environment = line.environment
                data.append(_json({"environment": to_json(environment)}))
            data.append(_json({"result": to_json(dataclasses.replace(line, environment={}))}))
        written = b"".join(data)
        try:
            write_all(self._descriptor, written)
            if written:
                os.fsync(self._descriptor)
            self._require_untouched(self._end + len(written))
        except OSError as error:
            if error.errno != errno.ESTALE:  # a torn line in the middle would make the file unreadable
                try:
                    os.ftruncate(self._descriptor, self._end)
                except OSError:
                    self._leave()
            raise
        self._environment = environment
        self._end += len(written)
        self._written = len(self._lines)

    def _require_untouched(self, size: int) -> None:
        """Raise OSError unless the path still names this file, and it has these many bytes."""
        own = os.fstat(self._descriptor)
        try:
            named = os.stat(self.path)
        except OSError:
            raise OSError(errno.ESTALE, _CHANGED) from None
        if not os.path.samestat(own, named) or own.st_size != size:
            raise OSError(errno.ESTALE, _CHANGED)

    def _move(self, reason: str) -> None:
        """Continue in another place; if there is none, here as soon as that is possible again."""
        if self.trouble:  # the other places were tried
            return
        self.trouble = reason
        before = self.path, self._descriptor, self._written, self._end, self._environment
        for path in self._elsewhere():
            try:
                self._begin(path)
            except OSError:
                continue
            if before[1] >= 0:
                with contextlib.suppress(OSError):
                    os.close(before[1])
            return
        self.path, self._descriptor, self._written, self._end, self._environment = before
        if reason == _CHANGED:
            self._written = 0
            self._leave()

    def _begin(self, path: Path) -> None:
        """Write all lines into a new file; OSError leaves none."""
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o644)
        self.path, self._written, self._end, self._environment = path, 0, 0, {}
        try:
            self._write_rest()
        except OSError:
            self._leave()
            with contextlib.suppress(OSError):
                path.unlink()
            raise

    def _leave(self) -> None:
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):  # every line is synced: nothing is lost here
                os.close(self._descriptor)
        self._descriptor = -1


def _json(line: Mapping[str, Any]) -> bytes:
    return json.dumps(line, separators=(",", ":"), default=str).encode() + b"\n"


def _cases(lines: Iterable[Mapping[str, Any] | Result]) -> set[str]:
    cases = (
        line.case if isinstance(line, Result) else line.get("failure", line.get("interrupted", {})).get("case")
        for line in lines
    )
    return set(filter(None, cases))


FOLDER = ".perfsuite"
_PATTERN = "journal-*.jsonl"


def cache_folder(root: Path) -> Path:
    """The folder in the user's cache that has the journals of the project in ``root``."""
    absolute = os.path.abspath(root)
    digits = hashlib.sha256(os.fsencode(absolute)).hexdigest()[:12]
    return user_cache() / "journals" / f"{Path(absolute).name[:60]}-{digits}"


def usable_folder(root: Path, here: Path) -> tuple[Path, str]:
    """A folder for a new journal, and why it is not the one in ``root``: empty if it is.

    The folders are ``.perfsuite`` in the root directory and in ``here``, the invocation directory, then the user's
    cache.  Raises ConfigurationError if none can be written to.
    """
    problems: list[str] = []
    for folder in dict.fromkeys((root / FOLDER, here / FOLDER, cache_folder(root))):
        problem = _why_not(folder)
        if not problem:
            return folder, "; ".join(problems)
        problems.append(f"{folder} {problem}")
    raise ConfigurationError(f"no place for the journal: {'; '.join(problems)}; name a file by --perf-journal")


def _why_not(folder: Path) -> str:
    """Make a folder for journals; why no file can be made in it, empty if one can."""
    if folder.name != FOLDER:
        return why_not_private(folder.parent.parent) or why_not_private(folder.parent) or why_not_private(folder)
    try:
        if not folder.exists():
            folder.mkdir()
            try:
                put(folder / ".gitignore", b"*\n")  # in other people's repositories too
            except WriteFailed as error:
                folder.rmdir()
                return str(error)
        if _is_foreign(folder):
            return "belongs to another user"
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return f"cannot be written: {why(error)}"
    return ""


def _is_foreign(folder: Path) -> bool:
    """Whether another user put the folder where everybody can put one, such as in ``/tmp``."""
    return bool(folder.parent.stat().st_mode & 0o002) and os.lstat(folder).st_uid != os.getuid()


def other_places(root: Path, path: Path) -> Iterator[Path]:
    """Where the rest of a run can go whose journal ``path`` was lost: the user's cache, then a new private folder."""
    folder = cache_folder(root)
    if not _why_not(folder):
        yield folder / path.name
    private = None
    with contextlib.suppress(OSError):  # no temporary folder can be written to
        private = Path(tempfile.mkdtemp(prefix="perfsuite-journal-"))
    if private is not None:
        yield private / path.name


def newest(here: Path) -> Path:
    """The newest journal of the project around ``here``; ConfigurationError if there is none."""
    for folder in (here, *here.parents):
        places = [place for place in (folder / FOLDER, cache_folder(folder)) if place.is_dir()]
        journals = [path for place in places if not _is_foreign(place) for path in place.glob(_PATTERN)]
        if journals:
            return max(journals, key=lambda path: path.name)
    raise ConfigurationError(
        f"no journal in {here / FOLDER}, in that folder of a parent directory or in {user_cache() / 'journals'}; "
        "name a journal or a baseline file"
    )
