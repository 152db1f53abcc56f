"""The constants of a device and of the software on it, each with its error and source.

Device constants (matrix products, attention, memory, link, network) apply to every software. Traits of the software
(ratio of a block to its kernels, host time, overlap) apply to every device. A file has one pair::

    {"kind": "perfsuite calibration", "schema": 1, "checksum": "sha256 of what follows", "calibration": {...}}
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from perfsuite.base.errors import ConfigurationError
from perfsuite.base.text import json_text
from perfsuite.base.writing import write_file
from perfsuite.platforms import DeviceModel
from perfsuite.record.codec import from_json, read_json, to_json

SCHEMA = 1
KIND = "perfsuite calibration"

_ELEMENT_BYTES: Mapping[str, float] = MappingProxyType({"fp32": 4.0, "tf32": 4.0, "fp64": 8.0})
"""Bytes of an element in memory; 2 for all other dtypes, because fp8 is stored wide."""


def product_bytes(shape: Sequence[float], dtype: str) -> float:
    """Return the bytes that a product (groups, m, n, k) reads and writes."""
    groups, m, n, k = shape
    return _ELEMENT_BYTES.get(dtype, 2.0) * groups * (m * k + k * n + m * n)


Regime = Literal["in situ", "kernels only", "software and device", "software, another device", "platform row only"]
"""The measurements behind a calibration. in situ: steps of a block on this device. kernels only: kernels on this
device. software and device: published steps of the software on it. software, another device: published steps on another
device. platform row only: a data sheet."""


@dataclass(frozen=True, kw_only=True)
class Constant:
    """A number, its unit, its error and where it comes from."""

    value: float
    unit: str
    source: str
    """Case ids, the platform's row, or the substitute."""
    relative_error: float = 0.0
    """Half the width of its 80 % interval over its value."""


@dataclass(frozen=True, kw_only=True)
class KernelPoint:
    """One kernel that was measured."""

    kind: Literal["matmul", "grouped_matmul", "attention_forward", "attention_backward"]
    dtype: str
    shape: tuple[int, ...]
    """matmul (batch, m, n, k); grouped_matmul (groups, m, n, k); attention (batch, tokens, heads, key heads, features
    of a head), causal unless ``causal`` says otherwise."""
    time_s: float
    source: str = ""
    stage: str = ""
    """forward, backward_input or backward_weight if the kernel differs by it; empty: any."""
    causal: bool = True

    @property
    def flops(self) -> float:
        """Return the operations; a causal mask halves attention, a backward pass recomputes the scores.

        >>> KernelPoint(kind="matmul", dtype="bf16", shape=(1, 2, 3, 4), time_s=1.0).flops
        48.0
        """
        if self.kind in ("matmul", "grouped_matmul"):
            return 2.0 * math.prod(self.shape)
        batch, tokens, heads, _, features = self.shape
        pairs = batch * heads * tokens**2 * (0.5 if self.causal else 1.0)
        return 4.0 * pairs * features * (2.5 if self.kind == "attention_backward" else 1.0)


@dataclass(frozen=True, kw_only=True)
class CollectiveLine:
    """Alpha and beta of one collective over groups with the same placement."""

    collective: str
    """all_reduce, all_gather, reduce_scatter, all_to_all, send_recv."""
    ranks: int
    alpha_us: float
    beta_gb_per_s: float
    """busbw that large messages approach, GB/s."""
    nodes: int = 1
    stride: int = 1
    """Distance of neighbours in ranks."""
    concurrent: int = 1
    """Number of such groups that sent at the same time."""
    relative_error: float = 0.0
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The constants and measurements of one device under one software."""

    device: str
    software: str = ""
    """Key of the software: the versions that change times; empty without a measurement."""
    regime: Regime = "platform row only"
    constants: Mapping[str, Constant] = field(default_factory=dict)
    """Constants of the device by name: see :data:`DEVICE_CONSTANTS`."""
    traits: Mapping[str, Constant] = field(default_factory=dict)
    """Traits of the software by name: see :data:`SOFTWARE_TRAITS`."""
    kernels: tuple[KernelPoint, ...] = ()
    collectives: tuple[CollectiveLine, ...] = ()
    largest_world: int = 1
    """Devices of the largest measured run."""
    fingerprint: str = ""
    simulated: bool = False
    """Made of results of a simulated device; such a calibration never projects a real device."""

    def constant(self, name: str) -> Constant | None:
        """Return the constant of the device or the trait of the software; None if there is none."""
        return self.constants.get(name) or self.traits.get(name)

    def value(self, name: str, default: float = 0.0) -> float:
        """Return the value of a constant or trait, or ``default``."""
        constant = self.constant(name)
        return default if constant is None else constant.value

    def missing(self) -> tuple[str, ...]:
        """Return the names of constants and traits without a measurement, in the order of the tables."""
        return tuple(name for name in (*DEVICE_CONSTANTS, *SOFTWARE_TRAITS) if self.constant(name) is None)

    def in_nodes_of(self, row: DeviceModel) -> Calibration:
        """Return the same device in nodes with the network of ``row``, or without any."""
        return self.with_network(Calibration.from_platform(row).constants["network_gb_per_s"] if row.network else None)

    def with_network(self, network: Constant | None) -> Calibration:
        """Return the same device with another network between nodes, and without lines measured between nodes.

        With None no step on several nodes can be projected.
        """
        others = {name: constant for name, constant in self.constants.items() if name != "network_gb_per_s"}
        return dataclasses.replace(
            self,
            constants={**others, "network_gb_per_s": network} if network else others,
            collectives=tuple(line for line in self.collectives if line.nodes == 1),
        )

    @classmethod
    def from_platform(cls, row: DeviceModel) -> Calibration:
        """Return the peaks of a data sheet times the shares that devices of the back-test reach."""
        constants: dict[str, Constant] = {}
        for dtype, peak in row.tflops.items():
            for kernel in ("matmul", "attention"):
                constants[f"{kernel}_{dtype}_tflops"] = achieved(kernel, peak.value, peak.source, "TFLOPS")
        for name, sheet in (
            ("memory_gb_per_s", row.memory_bandwidth),
            ("link_gb_per_s", row.link or row.host_link),
            ("network_gb_per_s", row.network),
        ):
            if sheet is not None:
                constants[name] = achieved(name.partition("_")[0], sheet.value, sheet.source)
        if row.network is None:
            constants["network_gb_per_s"] = ASSUMED_NETWORK
        for name in ("link_us", "network_us", "kernel_us", "wave_outputs", "rank_spread_ratio"):
            constants[name] = TYPICAL[name]
        if row.family == "cpu":
            constants["wave_outputs"] = Constant(value=0.0, unit="outputs", source="cores share a product of any size")
        return cls(device=row.name, constants=constants)


def achieved(kind: str, nominal: float, source: str, unit: str = "GB/s") -> Constant:
    """Return the typical share of a nominal rate of matmul, attention, memory, link or network.

    >>> achieved("network", 400.0, "--network").value
    280.0
    """
    share = TYPICAL[kind]
    return Constant(
        value=share.value * nominal,
        unit=unit,
        source=f"{share.value:g} of {nominal:g}: {source}; {share.source}",
        relative_error=share.relative_error,
    )


DEVICE_CONSTANTS: Mapping[str, str] = MappingProxyType(
    {
        "matmul_bf16_tflops": "sustained rate of large matrix products, by dtype (matmul_fp16_tflops, ...)",
        "attention_bf16_tflops": "sustained rate of attention, causal halves counted as computed, by dtype",
        "memory_gb_per_s": "sustained device memory, reads plus writes (copy, triad)",
        "link_gb_per_s": "busbw of large messages within a node",
        "link_us": "time that one rank adds to a ring within a node",
        "network_gb_per_s": "busbw of a whole node per direction",
        "network_us": "time that one node adds to a ring",
        "wave_outputs": "outputs of a product whose time lost to idle units: half of the outputs of one wave",
        "kernel_us": "fixed time of a kernel",
    }
)
"""The meaning of each constant; names with bf16 represent all dtypes."""

SOFTWARE_TRAITS: Mapping[str, str] = MappingProxyType(
    {
        "in_situ_ratio": "a block's time in steady state over the sum of its kernels",
        "optimizer_ratio": "the optimizer's time over the time of its bytes",
        "host_step_s": "seconds of a step that no device works: data, launch of the first kernels, loss read back",
        "launch_us": "host time to start one kernel; steps below it are bound by the host",
        "overlap_ratio": "share of messages that could hide behind work and does",
        "rank_spread_ratio": "standard deviation of ranks' step times over their mean",
    }
)

_BACK_TEST = "typical of the devices of the back-test (perfsuite docs projection)"
TYPICAL: Mapping[str, Constant] = MappingProxyType(
    {
        "matmul": Constant(value=0.70, unit="ratio", source=_BACK_TEST, relative_error=0.15),
        "attention": Constant(value=0.40, unit="ratio", source=_BACK_TEST, relative_error=0.4),
        "memory": Constant(value=0.80, unit="ratio", source=_BACK_TEST, relative_error=0.1),
        "link": Constant(value=0.70, unit="ratio", source=_BACK_TEST, relative_error=0.25),
        "network": Constant(value=0.70, unit="ratio", source=_BACK_TEST, relative_error=0.25),
        "link_us": Constant(value=1.5, unit="us", source=_BACK_TEST, relative_error=0.5),
        "network_us": Constant(value=10.0, unit="us", source=_BACK_TEST, relative_error=0.5),
        "wave_outputs": Constant(value=1.0e6, unit="outputs", source=_BACK_TEST, relative_error=0.5),
        "rank_spread_ratio": Constant(value=0.013, unit="ratio", source=_BACK_TEST, relative_error=0.5),
        "kernel_us": Constant(value=5.0, unit="us", source=_BACK_TEST, relative_error=0.5),
    }
)
"""Typical shares of a data sheet's figures, and typical times, for constants without a measurement."""
ASSUMED_NETWORK = Constant(
    value=35.0,
    unit="GB/s",
    source="assumed: 0.7 of two adapters of 200 Gbit/s for a node, because the platform's is not published",
    relative_error=0.6,
)
"""The network of a platform whose row has none; every projection that uses it prints a note."""


def write_calibration(calibration: Calibration, path: Path) -> None:
    """Write the file atomically. Raises ConfigurationError with the reason if it cannot be written."""
    body = to_json(calibration)
    write_file(path, json_text({"kind": KIND, "schema": SCHEMA, "checksum": _checksum(body), "calibration": body}))


def read_calibration(path: Path) -> Calibration:
    """Return the calibration in a file. Raises ConfigurationError with line and reason for a damaged or newer file."""
    remedy = "write it anew with perfsuite calibrate"
    whole = read_json(path, ConfigurationError, remedy, kind="calibration ")
    if not isinstance(whole, Mapping) or whole.get("kind") != KIND:
        raise ConfigurationError(f"{path}, line 1: no calibration (kind {KIND!r}); perfsuite calibrate writes one")
    schema = whole.get("schema")
    if not isinstance(schema, int) or schema > SCHEMA:
        raise ConfigurationError(
            f"calibration {path} has schema {schema}, this perfsuite reads up to {SCHEMA}; use the newer perfsuite "
            "that wrote it, or calibrate anew"
        )
    body = whole.get("calibration")
    if whole.get("checksum") != _checksum(body):
        raise ConfigurationError(
            f"calibration {path}: the checksum does not match, so the file was edited or damaged; calibrate anew"
        )
    try:
        return from_json(Calibration, body)
    except ValueError as error:
        raise ConfigurationError(f"calibration {path}: {error}; calibrate anew") from None


def _checksum(body: Any) -> str:
    text = json.dumps(body, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()
