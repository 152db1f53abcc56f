"""The run that is about to end as reports see it, and its last lines in the journal."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING

import pytest

from perfsuite.plugin import written
from perfsuite.plugin.state import suite_key
from perfsuite.plugin.tables import SKIPPED, state_key

if TYPE_CHECKING:
    from perfsuite.plugin.gating import Gating
    from perfsuite.record.run import GateRecord, RunRecord

FAILED = "failed: "
"""What the reason of a failure begins with."""
_LONGEST = 2000
"""Characters of a failure's message that are kept."""
cases_key = pytest.StashKey[frozenset[str]]()
"""Node ids of the perf cases of this run."""
record_key: pytest.StashKey[RunRecord] = pytest.StashKey()
"""Of a run that has ended; absent in runs without perf cases."""


def end(session: pytest.Session, gate: Gating | None) -> None:
    """Put the run together once every case has its verdict, and write what the journal does not have yet."""
    config = session.config
    suite = config.stash.get(suite_key, None)
    if suite is None or suite.session is None or not suite.opened:
        return
    from perfsuite.plugin.summary import warnings
    from perfsuite.record.run import RunEnd, RunRecord

    written.settle(session)
    run, missing = suite.session, config.stash[state_key].missing
    judged = gate.record() if gate is not None and gate.keeper.verdicts else None
    last = RunEnd(
        at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        took_s=round(time.monotonic() - suite.first_case_at, 1) if suite.first_case_at is not None else 0.0,
        exit_status=int(session.exitstatus),
        warnings=() if suite.signals.hurried else tuple(warnings(suite, run)),
        failed={
            case: told.removeprefix(FAILED)[:_LONGEST]
            for case, told in missing.items()
            if told.startswith(FAILED) and not _fails(judged, case)
        },
    )
    run.end(judged, last)
    if run.journal_problem and run.journal_problem not in last.warnings:  # these very lines found the disk full
        last = replace(last, warnings=(*last.warnings, run.journal_problem))
    config.stash[record_key] = RunRecord(
        name=f"session {run.id}",
        platform=str(suite.machine),
        fingerprint=run.fingerprint,
        results=run.results,
        session=run.id,
        started_at=suite.started_at,
        versions=suite.versions,
        revision=suite.revision,
        arguments=suite.arguments,
        failures=last.failed,
        interrupted=run.interrupted,
        skips={
            case: told.removeprefix(SKIPPED)
            for case, told in missing.items()
            if told.startswith(SKIPPED) and case not in run.results
        },
        gate=judged,
        end=last,
    )


def _fails(judged: GateRecord | None, case: str) -> bool:
    """Whether the case failed by its verdict, which is told instead."""
    verdict = judged.by_case.get(case) if judged else None
    return judged is not None and verdict is not None and judged.fails(verdict.name)
