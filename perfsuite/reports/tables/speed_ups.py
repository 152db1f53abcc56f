"""Speed-up and efficiency of cases, each over the base of its series."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from perfsuite.reports.ids import without_ranks
from perfsuite.reports.scaling import Point, Scaling, scale, series_of
from perfsuite.reports.tables.case import TableCase


def scaled(cases: Sequence[TableCase]) -> list[TableCase]:
    """The cases with speed-up and efficiency, each named after the base of its series."""
    scalings = scale(point for case in cases if (point := _point(case)) is not None)
    kinds = {without_ranks(case): scaling.kind for case, scaling in scalings.items()}
    return [
        dataclasses.replace(
            _with_scaling(case, scalings.get(_key(case))), kind=kinds.get(without_ranks(_key(case)), "")
        )
        for case in cases
    ]


def _with_scaling(case: TableCase, scaling: Scaling | None) -> TableCase:
    if not case.values:
        return case
    if scaling is None:
        reason = "no other number of ranks was measured"
        return dataclasses.replace(
            case, reasons={**case.reasons, **dict.fromkeys(("speedup", "scaling_efficiency"), reason)}
        )
    return dataclasses.replace(
        case,
        values={**case.values, "speedup": scaling.speed_up, "scaling_efficiency": scaling.efficiency},
        bases={**case.bases, **dict.fromkeys(("speedup", "scaling_efficiency"), scaling.base_name)},
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


# -- values ------------------------------------------------------------------------------------------------------
