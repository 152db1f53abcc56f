"""Published training softwares: traits with their sources, and fitted constants.

``software_constants.json`` has the constants; ``python -m benchmarks.backtest --write-bands`` writes it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from perfsuite.base.errors import ConfigurationError, did_you_mean
from perfsuite.base.units import plural
from perfsuite.models import Model
from perfsuite.platforms import DeviceModel, load_catalog
from perfsuite.projection.architecture import Architecture
from perfsuite.projection.calibration import TYPICAL, Calibration, Constant, Regime
from perfsuite.projection.implementation import Implementation
from perfsuite.record.codec import from_json
from perfsuite.record.result import Peak

FILE = Path(__file__).with_name("software_constants.json")
OWN = "perfsuite"
"""The suite's own modules; their traits are in implementation.py."""
_SHARES = ("matmul", "matmul_fp8", "attention", "link")
"""Constants that are shares of a device's peaks; all others except the network are traits of the software."""
_TRAITS = ("kernel_us", "link_us", "network_us", "traffic_ratio", "in_situ_ratio", "overlap_ratio", "rank_spread_ratio",
           "host_step_s")  # fmt: skip
_FITTED = 0.05
"""Relative error of a fitted constant."""

TRAITS = Path(__file__).with_name("software_traits.json")
SOFTWARES: Mapping[str, Implementation] = MappingProxyType(
    {name: from_json(Implementation, plain) for name, plain in json.loads(TRAITS.read_text(encoding="utf-8")).items()}
)
"""Traits by name; simumax is a simulator with measured steps; "pure" is Composer's mixed_precision PURE."""


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """The constants of a software on one device, fitted to one table of published steps."""

    table: str
    software: str
    device: str
    rows: int
    """Number of rows of the fit."""
    world: int
    """Devices of the largest row."""
    values: Mapping[str, float]
    """Shares of the device's peaks (matmul, matmul_fp8, attention, link, network), and traits by name."""
    release: str = ""
    """Releases of the software that the table is of."""
    variant: str = ""
    """A device with the chip of ``device`` but other figures, on which the steps ran: its shares of peaks are not used
    elsewhere. Empty: ``device`` itself."""
    later: str = ""
    """Measured over projected times of public steps of later releases, in words."""


@functools.lru_cache(maxsize=1)
def fitted_constants() -> tuple[Fitted, ...]:
    """Return the constants of all tables that ship."""
    return tuple(Fitted(**row) for row in json.loads(FILE.read_text(encoding="utf-8")))


def choices() -> tuple[str, ...]:
    """Return the names of the softwares."""
    return (OWN, *dict.fromkeys(one.software for one in fitted_constants()))


def constants_for(software: str, device: DeviceModel, tables: Sequence[Fitted] | None = None) -> tuple[Fitted, Regime]:
    """Return the constants of a software on a device, and the regime: same device or another one.

    A table of the same software and device gives all constants except the network, which belongs to its cluster.
    Otherwise traits come from the device with the nearest peak. Shares of peaks are then the median of the tables of
    the same chip (equal peak or name), of this software if it has any; without tables they are typical.
    Raises ConfigurationError with the known softwares.
    """
    tables = fitted_constants() if tables is None else tables
    own = [one for one in tables if one.software == software]
    if not own:
        raise ConfigurationError(f"software {software!r} is unknown; {did_you_mean(software, choices())}")
    exact = next((one for one in own if one.device == device.name and not one.variant), None)
    if exact is not None:
        kept = {name: value for name, value in exact.values.items() if name != "network"}
        return dataclasses.replace(exact, values=kept), "software and device"
    peaks, peak = _peaks_of_tables(), _peak(device)
    nearest = min(own, key=lambda one: abs(math.log(peaks[one.device] / peak)) if peak else 0.0)
    name = device.name.split("_")[0]
    chip = [
        one for one in tables if not one.variant and (peaks[one.device] == peak or one.device.split("_")[0] == name)
    ]
    chip = [one for one in chip if one.software == software] or chip
    values = {name: value for name, value in nearest.values.items() if name not in (*_SHARES, "network")}
    for share in (share for share in _SHARES if share != "matmul_fp8" or share in nearest.values):
        if shares := [one.values[share] for one in chip if share in one.values]:
            values[share] = statistics.median(shares)
    table = f"{nearest.table}, rates of {plural(len(chip), 'table')} of this chip" if chip else nearest.table
    return dataclasses.replace(nearest, table=table, values=values), "software, another device"


def _peak(device: DeviceModel) -> float:
    """TFLOPS in 16 bits; 0: unknown."""
    return next((device.tflops[dtype].value for dtype in ("bf16", "fp16") if dtype in device.tflops), 0.0)


@functools.lru_cache(maxsize=1)
def _peaks_of_tables() -> Mapping[str, float]:
    catalog = load_catalog(())  # the tables' devices are rows that ship
    return {one.device: _peak(catalog.find(one.device)) for one in fitted_constants()}


def constants_of(
    device: DeviceModel, values: Mapping[str, float], *, source: str, network_gb_per_s: float = 0.0
) -> dict[str, Constant]:
    """Return the constants of a device from ``values``, completed by its row.

    ``network_gb_per_s`` is the nominal rate of a whole node per direction; 0: the row's.
    """
    sheets: dict[str, tuple[str, Peak | None]] = {
        "matmul_fp8_tflops": ("matmul_fp8", device.tflops.get("fp8")),
        "memory_gb_per_s": ("memory", device.memory_bandwidth),
        "link_gb_per_s": ("link", device.link),
    }
    wide = [dtype for dtype in ("bf16", "fp16") if dtype in device.tflops]
    for dtype in wide:
        sheets |= {f"{name}_{dtype}_tflops": (name, device.tflops[dtype]) for name in ("matmul", "attention")}
    found = {name: values[share] * sheet.value for name, (share, sheet) in sheets.items() if sheet and share in values}
    nominal = network_gb_per_s or (device.network.value if device.network else 0.0)
    if nominal and ("network" in values or network_gb_per_s):
        found["network_gb_per_s"] = values.get("network", TYPICAL["network"].value) * nominal
    found |= {name: values[name] for name in _TRAITS if name in values}
    units = {"tflops": "TFLOPS", "s": "GB/s", "us": "us", "ratio": "ratio"}
    constants = dict(Calibration.from_platform(device).constants)
    for name, value in found.items():
        unit = "s" if name == "host_step_s" else units[name.rpartition("_")[2]]
        constants[name] = Constant(value=value, unit=unit, source=source, relative_error=_FITTED)
    for dtype in wide:
        forward = constants[f"attention_{dtype}_tflops"]
        backward = forward.value * values.get("attention_backward", 1.0)
        constants[f"attention_backward_{dtype}_tflops"] = dataclasses.replace(forward, value=backward)
    return constants


def software_calibration(software: str, device: DeviceModel) -> Calibration:
    """Return the calibration of a device from published steps of a software; it has no rates of fp32 and tf32."""
    found, regime = constants_for(software, device)
    source = f"fitted to {found.rows} steps: {found.table}"
    unknown = {"fp32", "tf32", "fp64", "int8", *(() if "matmul_fp8" in found.values else ("fp8",))}
    constants = constants_of(device, found.values, source=source)
    return Calibration(
        device=device.name,
        software=f"{software}, constants {source}; constants of release {found.release}; {found.later}",
        regime=regime,
        constants={name: one for name, one in constants.items() if not unknown & set(name.split("_"))},
        largest_world=found.world,
    )


def software_implementation(software: str, model: Model, *, dtype: str, device: DeviceModel) -> Implementation:
    """Return the traits of a software for a model, including the fitted ones."""
    code = software_of(software, dtype=dtype, gated=Architecture.of(model).gated)
    values = constants_for(software, device)[0].values
    return dataclasses.replace(code, tensor_overlap=values.get("tensor_overlap", code.tensor_overlap))


def software_of(software: str, *, dtype: str, gated: bool, gradients_in_fp32: bool = True) -> Implementation:
    """Return the traits of a software for one job: gated MLPs move more bytes, fp8 adds casts.

    ``gradients_in_fp32``: FSDP accumulates gradients in 32 bits; Composer's mixed_precision PURE does not.
    """
    code = SOFTWARES[software]
    if software == "llm-foundry":
        # Rows without autocast in their name, mixed_precision PURE, are of 2023-04-04 (commit 9fa3ceb9): torch 1.13.1,
        # limit_all_gathers.  The others are of 2023-10-19 (b2a43a14): torch 2.1.0, whose checkpoints end early.  Both
        # have Composer's BACKWARD_POST, but two gathers may be under way: the host asks for the next block's while the
        # device computes the one behind.
        return code if gradients_in_fp32 else SOFTWARES[f"{software} pure"]
    if software == "torchtitan" and dtype == "fp8":  # amax and cast of inputs, weights and gradients
        return dataclasses.replace(
            code,
            forward_width_bytes=code.forward_width_bytes + 10.0,
            forward_hidden_bytes=code.forward_hidden_bytes + 5.0,
            backward_width_bytes=code.backward_width_bytes + 10.0,
            backward_hidden_bytes=code.backward_hidden_bytes + 10.0,
        )
    if software in ("nemo", "simumax"):
        casts = 16.0 if dtype == "fp8" else 0.0
        return dataclasses.replace(
            code,
            forward_hidden_bytes=6.0 if gated else 4.0,
            backward_hidden_bytes=10.0 if gated else 6.0,
            kept_hidden_bytes=6.0 if gated else 4.0,
            forward_width_bytes=code.forward_width_bytes + casts,
            backward_width_bytes=code.backward_width_bytes + casts,
        )
    return code
