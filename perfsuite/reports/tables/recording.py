"""The cases of a report: from journals, baseline files or a session, and from a base on another machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perfsuite.base.errors import ConfigurationError
from perfsuite.reports.ids import without_ranks
from perfsuite.reports.scaling import Point, Scaling, scale, series_of
from perfsuite.reports.stored import Recording
from perfsuite.reports.tables.case import TableCase, from_projection, from_result, unmeasured

RATIOS = ("speedup", "scaling_efficiency")  # Values that are counted from a base.


def scaled(cases: Sequence[TableCase]) -> list[TableCase]:
    """The cases with speed-up and efficiency, each named after the base of its series."""
    scalings = scale(point for case in cases if (point := _point(case)) is not None)
    kinds = {without_ranks(case): scaling.kind for case, scaling in scalings.items()}
    with_ratios = (_with_scaling(case, scalings.get(_key(case))) for case in cases)
    return [dataclasses.replace(one, kind=kinds.get(without_ranks(_key(one)), "")) for one in with_ratios]


def _with_scaling(case: TableCase, scaling: Scaling | None) -> TableCase:
    if not case.values:
        return case
    if scaling is None:
        reasons = dict.fromkeys(RATIOS, "no other number of ranks was measured")
        return dataclasses.replace(case, reasons={**case.reasons, **reasons})
    return dataclasses.replace(
        case,
        values={**case.values, **dict(zip(RATIOS, (scaling.speed_up, scaling.efficiency), strict=True))},
        bases={**case.bases, **dict.fromkeys(RATIOS, scaling.base_name)},
        base_ranks=scaling.base.ranks,
        shared=scaling.shared and scaling.point is not scaling.base,
    )


def _key(case: TableCase) -> str:
    return f"{case.fingerprint} {case.case}"


def _point(case: TableCase) -> Point | None:
    samples = case.settings.get("global_batch_size")
    if not samples or "median_s" not in case.values:
        return None
    return Point(
        case=_key(case),
        series=series_of(case.case, case.workload, case.parameters, case.platform, case.fingerprint),
        ranks=case.ranks,
        work=float(samples),
        time_s=case.values["median_s"],
        devices=case.settings.get("devices"),
    )


@dataclass(frozen=True, kw_only=True)
class ReportCases:
    """All cases of a report with speed-ups, and the reasons of cases without a row."""

    cases: tuple[TableCase, ...]
    rest: Mapping[str, str]
    base: str = ""  # Platform of the base; empty without one.


def table_cases(recording: Recording) -> list[TableCase]:
    """The cases of a recording as tables take them."""
    return list(map(from_result, recording.run.results.values()))


def projected_cases(recording: Recording) -> list[TableCase]:
    """Return the projections of cases that a recording did not measure."""
    run = recording.run
    return [from_projection(one) for case, one in run.projections.items() if not (one.reason or case in run.results)]


def gathered(recordings: Sequence[Recording], base: Recording | None) -> ReportCases:
    """The cases of all recordings and of the base; ConfigurationError where the two cannot be compared."""
    cases: list[TableCase] = []
    rest: dict[str, str] = {}
    for recording in recordings:
        measured_cases, projected = scaled(table_cases(recording)), scaled(projected_cases(recording))
        ids = {case.case for case in projected}
        missing = {case: why for case, why in recording.run.missing.items() if case not in ids}
        rows, without = unmeasured(measured_cases, missing)
        cases += [_with_device(case, recording) for case in (*measured_cases, *rows)] + projected
        rest.update(without)
    if base is not None:
        _require_comparable(recordings, base)
        other = [_with_device(case, base) for case in scaled(table_cases(base))]
        cases = [*(_over(case, other, base) for case in cases), *other]
    measured = {case.case for case in cases if case.values and not case.projected}
    cases = [case for case in cases if not (case.projected and case.case in measured)]
    return ReportCases(cases=tuple(_newest(cases)), rest=rest, base=base.run.platform if base else "")


def _with_device(case: TableCase, recording: Recording) -> TableCase:
    memory = recording.device.memory if recording.device else None
    settings = {**case.settings, "memory_there": f"{memory.value:g}"} if memory else case.settings
    return dataclasses.replace(case, settings=settings)


def _newest(cases: Sequence[TableCase]) -> list[TableCase]:
    """A case that several files have on the same hardware counts once, as in the last of them that measured it."""
    newest: dict[tuple[str, str], TableCase] = {}
    for case in cases:
        key = (case.fingerprint, case.case)
        if case.values or not (key in newest and newest[key].values):
            newest[key] = case
    return list(newest.values())


def _require_comparable(recordings: Sequence[Recording], base: Recording) -> None:
    other = base.run
    for run in (recording.run for recording in recordings):
        if run.simulated != other.simulated:
            first, second = ("simulated", "real") if run.simulated else ("real", "simulated")
            raise ConfigurationError(
                f"{run.name} is of {first} devices and the base {other.name} of {second} ones; the two never meet"
            )
        if run.fingerprint == other.fingerprint and run.fingerprint:
            raise ConfigurationError(
                f"the base {other.name} is of the same hardware as {run.name}, {run.hardware}; give the "
                "results of another machine as the base, or compare two runs of one machine with perfsuite ab"
            )
    models, base_models = (
        {case.model for recording in side for case in table_cases(recording)} for side in (recordings, (base,))
    )
    if not models & base_models - {""}:
        there = ", ".join(sorted(base_models - {""})) or "none"
        raise ConfigurationError(
            f"the base {other.name} of {other.hardware} has no model in common with the results; its models: {there}"
        )


_SAME_RUN = ("model", "ranks", "local_batch_size", "global_batch_size", "strategy", "dtype")


def _over(case: TableCase, others: Sequence[TableCase], base: Recording) -> TableCase:
    """The case with its throughput over that of the base's case of the same run; loaders may differ, not otherwise."""
    rate = case.values.get("samples_per_s")
    trained = (other for other in others if other.values.get("samples_per_s"))
    alike = [one for one in trained if all(case.settings.get(name) == one.settings.get(name) for name in _SAME_RUN)]
    if rate is None or not alike:
        reason = f"{base.run.platform} has no run of this model, batch and number of ranks" if rate is not None else ""
        return dataclasses.replace(case, reasons={**case.reasons, "over_base": reason}) if reason else case
    workers = case.settings.get("num_workers")
    nearest = min(alike, key=lambda other: (other.settings.get("num_workers") != workers, other.case))
    ratio = rate / nearest.values["samples_per_s"]
    return dataclasses.replace(case, values={**case.values, "over_base": ratio})
