"""``perfsuite project --sensitivity``: the gain of a step time from one faster resource."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from perfsuite.projection.calibration import Calibration, Constant
from perfsuite.projection.job import Job
from perfsuite.projection.step import projector_of

_FASTER = 0.01
_RATES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "matmul": ("matmul_",),
        "attention": ("attention_",),
        "memory": ("memory_gb_per_s",),
        "link": ("link_",),
        "network": ("network_",),
    }
)
"""Resource -> prefixes of the names of its constants."""


def elasticities(job: Job, calibration: Calibration) -> dict[str, float]:
    """Return the percent by which the step gets shorter for one percent more of each resource, 0 to 1."""
    base = projector_of(job, calibration).step(job.layout, simulated=False).seconds
    moved = {}
    for resource, beginnings in _RATES.items():
        faster = _faster(calibration, resource, beginnings)
        time = projector_of(job, faster).step(job.layout, simulated=False).seconds
        moved[resource] = (base / time - 1) / _FASTER
    return moved


def _faster(calibration: Calibration, resource: str, beginnings: tuple[str, ...]) -> Calibration:
    def scaled(name: str, constant: Constant) -> Constant:
        if not name.startswith(beginnings):
            return constant
        factor = 1 / (1 + _FASTER) if constant.unit == "us" else 1 + _FASTER
        return dataclasses.replace(constant, value=factor * constant.value)

    kinds = {"matmul": ("matmul", "grouped_matmul"), "attention": ("attention_forward", "attention_backward")}
    return dataclasses.replace(
        calibration,
        constants={name: scaled(name, constant) for name, constant in calibration.constants.items()},
        kernels=tuple(
            dataclasses.replace(point, time_s=point.time_s / (1 + _FASTER))
            if point.kind in kinds.get(resource, ())
            else point
            for point in calibration.kernels
        ),
        collectives=tuple(
            dataclasses.replace(
                line, alpha_us=line.alpha_us / (1 + _FASTER), beta_gb_per_s=line.beta_gb_per_s * (1 + _FASTER)
            )
            if (resource == "link" and line.nodes == 1) or (resource == "network" and line.nodes > 1)
            else line
            for line in calibration.collectives
        ),
    )
