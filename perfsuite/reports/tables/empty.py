"""Why a cell of a measured case is empty."""

from __future__ import annotations

from collections.abc import Mapping

from perfsuite.reports.tables.case import TableCase

_BUILD_OF: Mapping[str, str] = {
    "final_loss": "loss",
    "time_to_target_s": "loss",
    "communication_share": "exposed",
    "communication_overhead": "exposed",
}
_SOURCES: Mapping[str, str] = {
    "communication_share": "exposed_communication_percent",
    "communication_overhead": "exposed_communication_percent",
    "mfu_palm_percent": "mfu_percent",
}
"""Metrics that values of tables follow from."""


def why_empty(case: TableCase, key: str) -> str:
    """Why a measured case has no value for a column; empty when it has, or when nothing of it was measured."""
    if key in case.values or case.missing or (key == "over_base" and key not in case.reasons):
        return ""
    told = case.reasons.get(_SOURCES.get(key, key), "")
    build = _BUILD_OF.get(key, "memory" if key.endswith("_gib") else "")
    ran = bool(build) and build in case.parameters.get("builds", ()) and key != "time_to_target_s"
    if told and not (ran and told == f"no {build} build was run"):
        return told
    if ran:
        return f"the {build} build does not tell it here"
    if key == "steps_per_epoch":
        return "synthetic data have no end"
    return f"the case has no {build} build" if build else "not measured by this case"
