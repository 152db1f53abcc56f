"""``--perf-project``: add projections to skipped cases that cannot run here, and to measured ones for comparison.

Only training steps are projected.  The journal stores a projection under its own word; baselines, the gate and A/B
ignore it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from perfsuite.base.errors import ConfigurationError, PerfsuiteError, did_you_mean, first_line
from perfsuite.plugin import collisions

if TYPE_CHECKING:
    from perfsuite.platforms import MachineModel
    from perfsuite.plugin.suite import Suite
    from perfsuite.projection.calibration import Calibration
    from perfsuite.record.result import Result, Work
    from perfsuite.record.run import Projected
    from perfsuite.run.session import Case

NO_TRAINING = "only training steps are projected"


@dataclass(kw_only=True)
class Projecting:
    """Calibration and projections of a run."""

    calibration: Calibration | None = None  # None: the platform's row.
    software: str = ""  # A published program, whose code is projected; empty: perfsuite's own modules.
    records: dict[str, Projected] = field(default_factory=dict)  # By node id.


state_key: pytest.StashKey[Projecting] = pytest.StashKey()  # Absent in a run without projections.


def configure(config: pytest.Config) -> None:
    """Read the calibration or the software of the option.  Raises UsageError before anything is measured."""
    written = collisions.option(config, "perf_project")
    if written is None:
        return
    state = Projecting()
    if written:
        from perfsuite.projection.calibration import read_calibration
        from perfsuite.projection.softwares import OWN, choices

        try:
            if (file := config.invocation_params.dir / written).is_file():
                state.calibration = read_calibration(file)
            elif written in choices():
                state.software = written if written != OWN else ""
            else:
                raise ConfigurationError(
                    f"{written} is not a file and not a software; {did_you_mean(written, choices())}; write "
                    "--perf-project=FILE for a file of perfsuite calibrate, or --perf-project as the last word to "
                    "project from the platform's row"
                )
        except PerfsuiteError as error:
            raise pytest.UsageError(f"--perf-project: {error}") from None
    config.stash[state_key] = state


def keep(suite: Suite, case: Case, why_not: str) -> None:
    """Project a skipped case, in a run with --perf-project."""
    state = suite.config.stash.get(state_key, None)
    if state is None:
        return
    from perfsuite.base.masking import masked_value
    from perfsuite.base.mesh import MeshShape
    from perfsuite.record.run import Projected
    from perfsuite.runtime.values import recorded

    work, reason = None, ""
    try:
        work = case.workload.work(MeshShape.on(case.world_size, case.workload.layout()))
    except PerfsuiteError as error:
        reason = first_line(error)
    unknown = Projected(
        kind="projected",
        case=case.id,
        platform=case.platform,
        world_size=case.world_size,
        workload=f"{type(case.workload).__module__}:{type(case.workload).__qualname__}",
        parameters=masked_value(recorded(case.workload.parameters())),
        reason=reason or NO_TRAINING,
        not_measured=why_not,
    )
    _add(suite, state, unknown, work)


def _keep_measured(suite: Suite, state: Projecting, results: Mapping[str, Result]) -> None:
    from perfsuite.record.run import Projected

    for case, result in results.items():
        if case not in state.records and result.work.training is not None and result.outcome != "smoke":
            unknown = Projected(
                kind="projected",
                case=case,
                platform=result.platform,
                world_size=result.world_size,
                workload=result.workload,
                parameters=result.parameters,
                reason=NO_TRAINING,
            )
            _add(suite, state, unknown, result.work, result.environment)


def projections(suite: Suite) -> tuple[Mapping[str, Projected], Mapping[str, Result]] | None:
    """Return projections and results, each by node id; None in a run without projections."""
    state = suite.config.stash.get(state_key, None)
    if state is None:
        return None
    results = suite.session.results if suite.session else {}
    _keep_measured(suite, state, results)
    return state.records, results


def _add(
    suite: Suite, state: Projecting, unknown: Projected, work: Work | None, environment: Mapping[str, Any] | None = None
) -> None:
    try:
        record = _projected(suite, state, unknown, work, environment) or unknown
        record = dataclasses.replace(record, workload=unknown.workload, parameters=unknown.parameters)
    except PerfsuiteError as error:
        record = dataclasses.replace(unknown, reason=first_line(error) or unknown.reason)
    state.records[record.case] = record
    assert suite.session is not None
    suite.session.project(record)


def _machine(suite: Suite, asked: Projected) -> MachineModel | None:
    """Return the machine to project a case on: for a published run that is not measured here, that of its report.

    For other cases it is the machine in [environment] of the platform file; None: a node of the vendor.
    """
    from perfsuite.reports.tables.published import recipe_of_case

    recipe = recipe_of_case(asked.case) if asked.not_measured else None
    found = recipe.machine(suite.catalog, asked.platform) if recipe else None
    here = suite.catalog.machines.get(str(suite.catalog.declared.get("machine", "")))
    return found or (here if here and here.platform == asked.platform else None)


def _projected(
    suite: Suite, state: Projecting, asked: Projected, work: Work | None, environment: Mapping[str, Any] | None
) -> Projected | None:
    if work is None or work.training is None:
        return None
    from perfsuite.models import find_projected
    from perfsuite.projection.calibration import Calibration
    from perfsuite.projection.calibration_of import require_kind, software_flag
    from perfsuite.projection.figures import projected
    from perfsuite.projection.job import Node, TrainingJob
    from perfsuite.projection.observation import software_key
    from perfsuite.projection.softwares import software_calibration, software_implementation
    from perfsuite.projection.step import Flag, project

    here = asked.platform == suite.machine.name
    device = suite.machine.model if here else suite.catalog.find(asked.platform)
    simulated = suite.machine.simulated and here
    calibration, code, training = state.calibration, None, work.training
    if state.software:
        if training.compiled:
            raise ConfigurationError(f"compiled blocks are perfsuite's own; --perf-project={state.software} has none")
        model = find_projected(training.model, training.overrides)
        calibration = software_calibration(state.software, device)
        code = software_implementation(state.software, model, dtype=training.dtype, device=device)
    elif calibration is None or calibration.device != asked.platform:
        calibration = Calibration.from_platform(device)
    else:
        require_kind(calibration, simulated=simulated)
    machine = _machine(suite, asked)
    node = Node.of(device)
    if machine is not None:
        device = machine.row(device)
        node = dataclasses.replace(Node.of(device), machine=machine.describe(asked.world_size))
        calibration = calibration.in_nodes_of(device)
    projection = project(
        TrainingJob.of(training, device, node=node, implementation=code), calibration, simulated=simulated
    )
    other = software_flag(calibration, software_key(environment)) if environment and code is None else ""
    if other:
        projection = dataclasses.replace(projection, flags=(*projection.flags, Flag(name="software", text=other)))
    return projected(asked.case, projection, work, device.peaks, not_measured=asked.not_measured, simulated=simulated)
