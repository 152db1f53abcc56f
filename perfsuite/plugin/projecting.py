"""``--perf-project``: cases that cannot run here stay skipped and carry a projection; measured ones have it beside.

Only training steps are projected: their work says what they train.  The record goes into the journal under its own
word; baselines, the gate and A/B never see it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from perfsuite.errors import PerfsuiteError, first_line

if TYPE_CHECKING:
    from perfsuite.plugin.suite import Suite
    from perfsuite.projection.calibration import Calibration
    from perfsuite.projection.record import Projected
    from perfsuite.records import Result, Work
    from perfsuite.session import Case

NO_TRAINING = "only training steps are projected, whose work says all of what they train"


@dataclass(kw_only=True)
class Projecting:
    """What a run that projects knows and has projected."""

    file: Path | None
    """The calibration; None: the platform's row."""
    calibration: Calibration | None = None
    """Read when the first case is projected."""
    records: dict[str, Projected] = field(default_factory=dict)
    """By node id."""
    parameters: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """Of those cases."""


state_key: pytest.StashKey[Projecting] = pytest.StashKey()
"""Absent in a run that projects nothing."""


def declare(parser: pytest.Parser) -> None:
    """Declare the option."""
    parser.getgroup("perfsuite").addoption(
        "--perf-project",
        nargs="?",
        const="",
        metavar="CALIBRATION",
        help="project training steps that cannot run here, from a file of perfsuite calibrate, else from the "
        "platform's row; write --perf-project=FILE, or put it last",
    )


def configure(config: pytest.Config) -> None:
    """Check the option before anything is measured."""
    written = config.getoption("perf_project")
    if written is None:
        return
    file = config.invocation_params.dir / written if written else None
    if file is not None and not file.is_file():
        raise pytest.UsageError(
            f"--perf-project: {written} is no file; write --perf-project=FILE with a file of perfsuite calibrate, or "
            "--perf-project as the last word to project from the platform's row"
        )
    state = Projecting(file=file)
    if file is not None:
        from perfsuite.projection.calibration import read_calibration

        try:
            state.calibration = read_calibration(file)
        except PerfsuiteError as error:
            raise pytest.UsageError(f"--perf-project: {error}") from None
    config.stash[state_key] = state


def keep(suite: Suite, case: Case, why_not: str) -> None:
    """Project a case that is skipped, if the run asks for it."""
    state = suite.config.stash.get(state_key, None)
    if state is None:
        return
    from perfsuite.mesh import MeshShape

    layout = case.workload.layout()
    work, reason = None, ""
    try:
        work = case.workload.work(MeshShape.parse(layout) if layout else MeshShape.of(dp=case.world_size))
    except PerfsuiteError as error:
        reason = first_line(error)
    state.parameters[case.id] = case.workload.parameters()
    _add(
        suite,
        state,
        case=case.id,
        platform=case.platform,
        world_size=case.world_size,
        work=work,
        reason=reason,
        not_measured=why_not,
    )


def keep_measured(suite: Suite, results: Mapping[str, Result]) -> None:
    """Project the training steps that were measured, so that both stand side by side."""
    state = suite.config.stash.get(state_key, None)
    if state is None:
        return
    for case, result in results.items():
        if case not in state.records and result.work.training is not None and result.outcome != "smoke":
            state.parameters[case] = result.parameters
            _add(
                suite,
                state,
                case=case,
                platform=result.platform,
                world_size=result.world_size,
                work=result.work,
                environment=result.environment,
            )


def lines(suite: Suite) -> list[str]:
    """The terminal's table; nothing in a run that projects nothing."""
    state = suite.config.stash.get(state_key, None)
    if state is None:
        return []
    from perfsuite.reports.projected import projected_lines

    results = suite.session.results if suite.session else {}
    keep_measured(suite, results)
    return list(projected_lines(state.records, results, state.parameters))


def rows(suite: Suite) -> Sequence[Mapping[str, object]]:
    """For files of other programs; nothing in a run that projects nothing."""
    state = suite.config.stash.get(state_key, None)
    if state is None:
        return []
    from perfsuite.reports.projected import as_json

    results = suite.session.results if suite.session else {}
    keep_measured(suite, results)
    return as_json(state.records, results, state.parameters)


def markdown(suite: Suite) -> list[str]:
    """For a page; nothing in a run that projects nothing."""
    state = suite.config.stash.get(state_key, None)
    if state is None:
        return []
    from perfsuite.reports.projected import projected_markdown

    return projected_markdown(state.records, suite.session.results if suite.session else {}, state.parameters)


def _add(
    suite: Suite,
    state: Projecting,
    *,
    case: str,
    platform: str,
    world_size: int,
    work: Work | None,
    reason: str = "",
    not_measured: str = "",
    environment: Mapping[str, Any] | None = None,
) -> None:
    from perfsuite.projection.record import Projected

    record = None
    if work is not None:
        try:
            record = _projected(
                suite,
                state,
                case=case,
                platform=platform,
                work=work,
                not_measured=not_measured,
                environment=environment,
            )
        except PerfsuiteError as error:
            reason = first_line(error)
    if record is None:
        record = Projected(
            kind="projected",
            case=case,
            platform=platform,
            world_size=world_size,
            reason=reason or NO_TRAINING,
            not_measured=not_measured,
        )
    state.records[case] = record
    assert suite.session is not None
    suite.session.project(record)


def _projected(
    suite: Suite,
    state: Projecting,
    *,
    case: str,
    platform: str,
    work: Work,
    not_measured: str,
    environment: Mapping[str, Any] | None,
) -> Projected | None:
    """None for what is no training step; ``environment`` is that of the measured case, if it was measured."""
    if work.training is None:
        return None
    from perfsuite.projection.calibration import Calibration
    from perfsuite.projection.calibration_of import require_kind, software_flag
    from perfsuite.projection.job import Job
    from perfsuite.projection.observation import software_key
    from perfsuite.projection.record import projected
    from perfsuite.projection.step import Flag, project
    from perfsuite.records import Peaks

    here = platform == suite.machine.name
    device = suite.machine.model if here else suite.catalog.find(platform)
    simulated = suite.machine.simulated and here
    calibration = state.calibration
    if calibration is None or calibration.device != platform:
        calibration = Calibration.from_platform(device)
    else:
        require_kind(calibration, simulated=simulated)
    peaks = Peaks(
        tflops=device.tflops, memory_bandwidth=device.memory_bandwidth, link=device.link, host_link=device.host_link
    )
    projection = project(Job.of(work.training, device), calibration, simulated=simulated)
    other = software_flag(calibration, software_key(environment)) if environment else ""
    if other:
        projection = dataclasses.replace(projection, flags=(*projection.flags, Flag(name="software", text=other)))
    return projected(case, projection, work, peaks, not_measured=not_measured, simulated=simulated)
