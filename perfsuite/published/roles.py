"""Roles: the meaning of the figures in a table's column, and their units."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Literal

from perfsuite.published.numbers import Interval


@dataclass(frozen=True)
class Role:
    """Meaning of the figures of a column."""

    about: str
    dimension: Literal[
        "text", "count", "number", "time", "rate", "memory", "share", "flops", "bandwidth", "size", "message"
    ]
    kind: Literal["configuration", "measured", "derived", "other"] = "other"
    """``configuration`` distinguishes runs, ``measured`` is from a clock or an allocator, ``derived`` is computed."""

    @property
    def exact(self) -> bool:
        """Whether figures are exact: counts are, all others are rounded."""
        return self.dimension == "count"


ROLES: Mapping[str, Role] = MappingProxyType(
    {
        "case": Role("name of the row; says nothing about the configuration by itself", "text"),
        "config": Role("any other setting that distinguishes rows", "text", "configuration"),
        "device": Role("device model", "text", "configuration"),
        "model": Role("model", "text", "configuration"),
        "strategy": Role("kind of parallelism", "text", "configuration"),
        "schedule": Role("pipeline schedule: naive, gpipe, 1f1b, interleaved, ...", "text", "configuration"),
        "collective": Role("collective that the communication time is spent in", "text", "configuration"),
        "dtype": Role("dtype of the weights", "text", "configuration"),
        "devices": Role("n, devices of the run", "count", "configuration"),
        "nodes": Role("hosts of the run", "count", "configuration"),
        "devices_per_node": Role("devices of each host", "count", "configuration"),
        "local_batch_size": Role("samples per device and step", "count", "configuration"),
        "micro_batch_size": Role("samples per micro-batch", "count", "configuration"),
        "num_micro_batches": Role("micro-batches per step (accumulation steps)", "count", "configuration"),
        "global_batch_size": Role("samples per step over all devices", "count", "configuration"),
        "batch_size": Role("samples per step, per device or not is not said", "count", "configuration"),
        "sequence_length": Role("tokens per sample", "count", "configuration"),
        "hidden_size": Role("width of the model", "count", "configuration"),
        "num_layers": Role("layers of the model", "count", "configuration"),
        "num_heads": Role("attention heads", "count", "configuration"),
        "num_workers": Role("data-loader processes", "count", "configuration"),
        "dp": Role("data-parallel degree", "count", "configuration"),
        "tp": Role("tensor-parallel degree", "count", "configuration"),
        "pp": Role("pipeline-parallel degree", "count", "configuration"),
        "cp": Role("context-parallel degree", "count", "configuration"),
        "sp": Role("sequence-parallel degree", "count", "configuration"),
        "ep": Role("expert-parallel degree", "count", "configuration"),
        "stages": Role("p, pipeline stages", "count", "configuration"),
        "virtual_stages": Role("v, stages per device in an interleaved schedule", "count", "configuration"),
        "experts": Role("experts per layer", "count", "configuration"),
        "top_k": Role("experts per token", "count", "configuration"),
        "parameters": Role("parameters of the model", "size", "configuration"),
        "active_parameters": Role("parameters that each token passes", "size", "configuration"),
        "message_size": Role(
            "size of the message of a collective, as nccl-tests counts it", "message", "configuration"
        ),
        "setting": Role("a number that no rule looks at", "number"),
        "note": Role("a remark", "text"),
        "throughput": Role("samples per second of all devices", "rate", "measured"),
        "throughput_per_device": Role("samples per second of one device", "rate", "measured"),
        "tokens_per_s": Role("tokens per second of all devices", "rate", "measured"),
        "tokens_per_s_per_device": Role("tokens per second of one device", "rate", "measured"),
        "iterations_per_s": Role("steps per second", "rate", "measured"),
        "latency": Role("time of a step", "time", "measured"),
        "training_time": Role("time of a whole training run", "time", "measured"),
        "whole": Role("time that the parts make up", "time", "measured"),
        "part": Role("a part of the step", "time", "measured"),
        "data_time": Role("part of the step: loading data", "time", "measured"),
        "forward_time": Role("part of the step: forward", "time", "measured"),
        "backward_time": Role("part of the step: backward", "time", "measured"),
        "optimizer_time": Role("part of the step: optimizer", "time", "measured"),
        "compute_time": Role("part of the step: computation", "time", "measured"),
        "communication_time": Role("part of the step: communication", "time", "measured"),
        "remainder_time": Role("rest of the step besides its other parts", "time", "derived"),
        "loss": Role("loss", "number", "measured"),
        "memory": Role("peak memory of a device", "memory", "measured"),
        "memory_baseline": Role("peak memory of a device without the feature under test", "memory", "measured"),
        "memory_final": Role("memory of a device that stays after the step", "memory", "measured"),
        "memory_weights": Role("memory of a device: weights", "memory", "measured"),
        "memory_gradients": Role("memory of a device: gradients", "memory", "measured"),
        "memory_optimizer": Role("memory of a device: optimizer state", "memory", "measured"),
        "memory_activations": Role("memory of a device: activations", "memory", "measured"),
        "memory_fragmentation": Role("memory of a device: reserved, not allocated", "memory", "measured"),
        "memory_remainder": Role("memory of a device that no other column holds", "memory", "derived"),
        "memory_host": Role("memory of the host process", "memory", "measured"),
        "bandwidth": Role("bytes per second of a communication", "bandwidth", "measured"),
        "algbw": Role("message size over time, as nccl-tests prints it", "bandwidth", "measured"),
        "busbw": Role("algbw x factor of the collective, as nccl-tests prints it", "bandwidth", "measured"),
        "speedup": Role("ratio to the smallest run", "number", "derived"),
        "efficiency": Role("speed-up over the ratio of devices", "share", "derived"),
        "mfu": Role("model FLOPs over peak", "share", "derived"),
        "tflops": Role("achieved operations per second of one device", "flops", "derived"),
        "bubble": Role("share of a pipeline's time that is idle", "share", "measured"),
        "communication_share": Role("share of the step spent in communication", "share", "measured"),
        "share": Role("share of a row in the total", "share", "derived"),
        "overhead": Role("time added, over the run without it", "share", "derived"),
        "peak_tflops": Role("dense peak of one device for the run's dtype", "flops"),
        "stated_peak_tflops": Role("peak of one device as the table states it", "flops"),
        "dense_peak_tflops": Role("dense peak of one device by its maker", "flops"),
        "flops_per_sample": Role("model FLOPs of one sample, forward and backward", "number"),
        "memory_capacity": Role("memory of one device", "memory"),
        "model_size": Role("size of the model's weights", "memory"),
        "available_devices": Role("devices of the largest machine that was there", "count"),
    }
)
"""Roles of columns."""

PARTS = (
    "part", "data_time", "forward_time", "backward_time", "optimizer_time", "compute_time", "communication_time",
    "remainder_time",
)  # fmt: skip
"""Roles of the parts of a step."""

DEGREES = ("dp", "tp", "pp", "cp", "sp", "ep")  # Roles of the sizes of a mesh

NEVER_ZERO = frozenset(
    {
        *("devices", "nodes", "devices_per_node", "sequence_length", "batch_size"),
        *("local_batch_size", "micro_batch_size", "global_batch_size", "num_micro_batches"),
        *("throughput", "throughput_per_device", "tokens_per_s", "tokens_per_s_per_device", "iterations_per_s"),
        *("latency", "training_time", "whole", "memory", "bandwidth", "algbw", "busbw", "tflops"),
    }
)
"""Roles for which 0 is not a figure: the run failed, or the value is below the printed digits."""

_K, _M, _G = Fraction(10**3), Fraction(10**6), Fraction(10**9)

# a printed MB or GB is as often a power of two as of ten: either counts
_BYTES = {"B": (1,), "KiB": (2**10,), "MiB": (2**20,), "GiB": (2**30,), "MB": (_M, 2**20), "GB": (_G, 2**30)}
SCALES: Mapping[str, Mapping[str, tuple[Fraction | int, ...]]] = MappingProxyType(
    {
        "time": {"us": (1 / _M,), "ms": (1 / _K,), "s": (1,), "min": (60,), "h": (3600,), "days": (86400,)},
        "memory": _BYTES,
        "share": {"": (1,), "%": (Fraction(1, 100),)},
        "flops": {"GFLOPS": (_G,), "TFLOPS": (_G * _K,), "PFLOPS": (_G * _M,)},
        "size": {"": (1,), "M": (_M,), "B": (_G,), "T": (_G * _K,)},
        "bandwidth": {"MB/s": (_M,), "GB/s": (_G,), "Gb/s": (_G / 8,)},
        "message": {**_BYTES, "KB": (_K, 2**10)},
    }
)
"""Factors to SI by dimension and unit, two for an ambiguous unit; dimensions without an entry are not scaled."""

DEFAULT_UNITS: Mapping[str, str] = MappingProxyType(
    {"time": "s", "memory": "GB", "share": "", "flops": "TFLOPS", "bandwidth": "GB/s", "size": "", "message": "B"}
)
"""Unit of a column without one."""


def scale(dimension: str, unit: str) -> Interval:
    """Return the factor from a unit to SI; an interval for an ambiguous unit (GB).  Raises KeyError for an unknown
    unit.

    >>> scale("time", "ms").low == scale("time", "ms").high == Fraction(1, 1000)
    True
    """
    if dimension not in SCALES:
        return Interval.exactly(Fraction(1))
    factors = SCALES[dimension][unit or DEFAULT_UNITS[dimension]]
    return Interval(low=Fraction(min(factors)), high=Fraction(max(factors)))
