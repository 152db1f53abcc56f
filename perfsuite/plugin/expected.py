"""Failures as pytest shows them, and which of them an ``xfail`` mark expects."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest
from _pytest.skipping import xfailed_key

from perfsuite.base.errors import PerfsuiteError, RanksFailed, VerdictFailed, also

if TYPE_CHECKING:
    from _pytest.skipping import Xfail


def failure(message: str, kind: type[BaseException] | None = None) -> BaseException:
    """Return a failure that shows its message alone, and is a ``kind`` too for ``xfail(raises=...)``.

    What ranks wrote may hold escape sequences, and a terminal is not theirs to colour.
    """
    from perfsuite.base.text import escaped

    shown = pytest.fail.Exception if kind is None else also(pytest.fail.Exception, kind)
    made: BaseException = shown("\n".join(map(escaped, message.split("\n"))), pytrace=False)
    return made


def mark_of(item: pytest.Item) -> Xfail | None:
    """The ``xfail`` mark that holds for this test: its condition is true and --runxfail was not given."""
    if getattr(item.config.option, "runxfail", False):
        return None
    return item.stash.get(xfailed_key, None)


def shown_type(item: pytest.Item, error: PerfsuiteError) -> type[BaseException]:
    """The type that stands for ``error``: of what ranks raised the first that the test's ``xfail`` does not expect.

    So a mark that names the exception of one rank does not cover another one that a second rank raised.
    """
    mark = mark_of(item)
    types: list[type[BaseException]] = [also(RanksFailed, each) for each in getattr(error, "raised", ())] or [
        type(error)
    ]
    raises = mark.raises if mark else None
    if isinstance(raises, type | tuple):
        return next((each for each in types if not issubclass(each, raises)), types[0])
    return types[0]


def covers_verdict(item: pytest.Item) -> str | None:
    """The reason of an ``xfail`` mark that expects a verdict: only one that names VerdictFailed does."""
    mark = mark_of(item)
    named = mark.raises if mark else None
    names = named if isinstance(named, tuple) else (named,)
    return cast("Xfail", mark).reason if VerdictFailed in names else None


def refuse_unnamed_verdict(item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
    """Make a report a failure again whose verdict an ``xfail`` without ``raises`` has covered."""
    verdict = call.excinfo is not None and isinstance(call.excinfo.value, VerdictFailed)
    if verdict and report.skipped and covers_verdict(item) is None:
        report.outcome = "failed"
        del report.wasxfail
