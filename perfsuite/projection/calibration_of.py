"""Make a calibration for each device and software from stored results, and list the missing constants.

A constant without a measurement comes from another software of the same device, else from the platform's row; its
source says so. Simulated and real results are never mixed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from perfsuite.base.errors import ConfigurationError
from perfsuite.platforms import Catalog, DeviceModel
from perfsuite.projection.calibration import DEVICE_CONSTANTS, SOFTWARE_TRAITS, Calibration, Regime
from perfsuite.projection.device_constants import collective_lines, constants_of, kernel_points, link_constants
from perfsuite.projection.observation import Observation
from perfsuite.projection.traits import traits_of
from perfsuite.suite import runnable

OTHER_SOFTWARE = 0.15
"""Relative error of a constant measured under another software: a release changes times by 10 to 15 %."""
NOISY = 0.3
"""Relative error above which a constant must be measured again."""
_TESTS: Mapping[str, str] = MappingProxyType(
    {
        "matmul": "test_perf/test_matmul.py",
        "attention": "test_perf/test_kernels.py::test_attention_kernel",
        "wave": "test_perf/test_matmul.py",
        "memory": "test_perf/test_memory_bandwidth.py",
        "kernel": "test_perf/test_memory_bandwidth.py",
        "link": "test_perf/test_collectives.py",
        "network": "test_perf/test_collectives.py",
        "launch": "test_perf/test_kernels.py::test_kernel_launch",
        "in_situ": "test_perf/test_calibration.py::test_depth",
        "optimizer": "test_perf/test_calibration.py",  # test_depth and test_depth_of_larger_batches
        "host": "test_perf/test_calibration.py::test_depth",
        "overlap": "test_perf/test_calibration.py::test_contention",
        "rank": "test_perf/test_every_device.py::test_matmul_everywhere",
    }
)
"""The tests that measure a constant, by the beginning of its name."""
_LAUNCHER = "torchrun --nnodes=2 --nproc-per-node={devices} -m pytest"
"""Command that measures a network; it needs two nodes."""


@dataclass(frozen=True, kw_only=True)
class Gap:
    """A constant without a measurement."""

    name: str
    meaning: str
    stand_in: str
    """The substitute and its source; empty if there is none."""
    command: str
    """The command that measures the constant."""


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """A calibration and its notes."""

    calibration: Calibration
    gaps: tuple[Gap, ...]
    notes: tuple[str, ...] = ()
    """Reasons why cases could not be used."""
    cases: int = 0
    """Number of cases that were used."""


def calibrate(observations: Iterable[Observation], catalog: Catalog) -> tuple[Calibrated, ...]:
    """Return a calibration for every device and software among the observations.

    Raises ConfigurationError if no case calibrates, if simulated and real results are mixed, and for an unknown
    platform.
    """
    seen = tuple(observations)
    if not seen:
        raise ConfigurationError("none of the results has times; run cases of test_perf and give their journal")
    if len({one.simulated for one in seen}) > 1:
        raise ConfigurationError(
            "some of the results are of simulated devices and some of real ones; the two never meet: give either kind"
        )
    pairs = sorted({(one.platform, one.software) for one in seen})
    made = []
    for platform, software in pairs:
        own = [one for one in seen if (one.platform, one.software) == (platform, software)]
        others = [one for one in seen if one.platform == platform and one.software != software]
        device, measured = catalog.find(platform), _measured(own)
        if measured.kernels or measured.constants or measured.collectives:
            made.append(_calibrated(measured, own, others, device))
    if not made:
        kinds = ", ".join(sorted({one.kind for one in seen}))
        raise ConfigurationError(
            f"nothing calibrates a device in results of {kinds}; run test_perf/test_matmul.py, "
            "test_memory_bandwidth.py and test_calibration.py first"
        )
    return tuple(made)


def _calibrated(
    measured: Calibration, own: Sequence[Observation], others: Sequence[Observation], device: DeviceModel
) -> Calibrated:
    elsewhere = _of_other_software(_measured(others), others)
    points = measured.kernels or elsewhere.kernels
    regime: Regime = "kernels only" if points else "platform row only"
    whole = dataclasses.replace(
        measured,
        device=device.name,
        software=own[0].software,
        regime=regime,
        constants={**Calibration.from_platform(device).constants, **elsewhere.constants, **measured.constants},
        kernels=points,
        collectives=measured.collectives or elsewhere.collectives,
        largest_world=max(one.world_size for one in own),
        fingerprint=own[0].fingerprint,
        simulated=own[0].simulated,
    )
    traits, notes = traits_of(own, device, whole)
    whole = dataclasses.replace(whole, traits=traits, regime="in situ" if "in_situ_ratio" in traits else regime)
    constants = {**measured.constants, **traits}
    wanted = _wanted(whole)
    if device.family == "cpu":  # it starts a kernel by computing it
        del wanted["launch_us"]
    gaps = tuple(_gap(name, meaning, whole) for name, meaning in wanted.items() if name not in constants)
    contradicting = (
        f"{name} is known to +-{100 * constant.relative_error:.0f} % only; measure its cases again on a quiet "
        f"machine: {constant.source}"
        for name, constant in constants.items()
        if constant.relative_error > NOISY and name not in ("kernel_us", "wave_outputs", "host_step_s")
    )
    return Calibrated(calibration=whole, gaps=gaps, notes=(*notes, *contradicting), cases=len(own))


def _measured(observations: Sequence[Observation]) -> Calibration:
    points, lines = kernel_points(observations), collective_lines(observations)
    constants = {**constants_of(observations, points), **link_constants(lines)}
    return Calibration(device="", constants=constants, kernels=points, collectives=lines)


def _of_other_software(measured: Calibration, others: Sequence[Observation]) -> Calibration:
    """Return the same constants with the wider error of another software; their source names it."""
    if not others:
        return measured
    names = "; ".join(sorted({one.software for one in others}))
    constants = {
        name: dataclasses.replace(
            constant,
            source=f"under other software ({names}): {constant.source}",
            relative_error=max(constant.relative_error, OTHER_SOFTWARE),
        )
        for name, constant in measured.constants.items()
    }
    return dataclasses.replace(measured, constants=constants)


def _wanted(calibration: Calibration) -> dict[str, str]:
    """Return names and meanings of all constants, in the dtype that was measured."""
    dtypes = {point.dtype for point in calibration.kernels if point.kind == "matmul"}
    dtype = "bf16" if "bf16" in dtypes or not dtypes else sorted(dtypes)[0]
    wanted = {name.replace("bf16", dtype): meaning for name, meaning in DEVICE_CONSTANTS.items()}
    return {**wanted, **SOFTWARE_TRAITS}


def _gap(name: str, meaning: str, calibration: Calibration) -> Gap:
    constant = calibration.constant(name)
    stand_in = f"{constant.value:.4g} {constant.unit} ({constant.source})" if constant else ""
    return Gap(name=name, meaning=meaning, stand_in=stand_in, command=command_for(name, calibration.device))


def command_for(name: str, platform: str) -> str:
    """Return the command that measures a constant on a platform.

    >>> command_for("matmul_bf16_tflops", "s4000")
    'python -m pytest test_perf/test_matmul.py -k "s4000"'
    """
    test = next((path for beginning, path in _TESTS.items() if name.startswith(beginning)), "test_perf")
    start = _LAUNCHER.format(devices="N") if name.startswith("network") else "python -m pytest"
    return runnable(f'{start} {test} -k "{platform}"')


def software_flag(calibration: Calibration, software: str) -> str:
    """Return a warning if the calibration is of another software than ``software``; empty otherwise.

    >>> software_flag(Calibration(device="s4000", software="torch 2.5.0"), "torch 2.7.1")
    'calibrated under torch 2.5.0, not torch 2.7.1: a release moves a device by 10 to 15 %; calibrate anew'
    """
    if not calibration.software or not software or calibration.software == software:
        return ""
    return (
        f"calibrated under {calibration.software}, not {software}: a release moves a device by 10 to 15 %; "
        "calibrate anew"
    )


def require_kind(calibration: Calibration, *, simulated: bool) -> None:
    """Raise ConfigurationError if a calibration of simulated devices is used for real ones, or the reverse."""
    if calibration.simulated != simulated:
        made, wanted = ("simulated", "real") if calibration.simulated else ("real", "simulated")
        raise ConfigurationError(
            f"the calibration of {calibration.device} was made on {made} devices and never projects {wanted} ones; "
            f"calibrate on {wanted} ones"
        )
