"""Roles: what the figures of a table's column mean, and the units they may be printed in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Literal

from perfsuite.published.numbers import Interval

Dimension = Literal["text", "count", "number", "time", "rate", "memory", "share", "flops", "bandwidth", "size"]


@dataclass(frozen=True, kw_only=True)
class Role:
    """What the figures of a column mean."""

    dimension: Dimension
    about: str
    kind: Literal["configuration", "measured", "derived", "other"] = "other"
    """``configuration`` distinguishes runs, ``measured`` was read off a clock or an allocator, ``derived`` computed."""

    @property
    def exact(self) -> bool:
        """Counts are exact; everything else was rounded when it was printed."""
        return self.dimension == "count"


def _configuration(about: str, dimension: Dimension = "count") -> Role:
    return Role(dimension=dimension, about=about, kind="configuration")


def _measured(about: str, dimension: Dimension) -> Role:
    return Role(dimension=dimension, about=about, kind="measured")


def _derived(about: str, dimension: Dimension) -> Role:
    return Role(dimension=dimension, about=about, kind="derived")


ROLES: Mapping[str, Role] = MappingProxyType(
    {
        "case": Role(dimension="text", about="name of the row; says nothing about the configuration by itself"),
        "config": _configuration("any other setting that distinguishes rows", "text"),
        "device": _configuration("device model", "text"),
        "model": _configuration("model", "text"),
        "strategy": _configuration("kind of parallelism", "text"),
        "schedule": _configuration("pipeline schedule: naive, gpipe, 1f1b, interleaved, ...", "text"),
        "collective": _configuration("collective that the communication time is spent in", "text"),
        "dtype": _configuration("dtype of the weights", "text"),
        "devices": _configuration("n, devices of the run"),
        "nodes": _configuration("hosts of the run"),
        "devices_per_node": _configuration("devices of each host"),
        "local_batch_size": _configuration("samples per device and step"),
        "micro_batch_size": _configuration("samples per micro-batch"),
        "num_micro_batches": _configuration("micro-batches per step (accumulation steps)"),
        "global_batch_size": _configuration("samples per step over all devices"),
        "batch_size": _configuration("samples per step, per device or not is not said"),
        "sequence_length": _configuration("tokens per sample"),
        "hidden_size": _configuration("width of the model"),
        "num_layers": _configuration("layers of the model"),
        "num_heads": _configuration("attention heads"),
        "num_workers": _configuration("data-loader processes"),
        "dp": _configuration("data-parallel degree"),
        "tp": _configuration("tensor-parallel degree"),
        "pp": _configuration("pipeline-parallel degree"),
        "sp": _configuration("sequence-parallel degree"),
        "ep": _configuration("expert-parallel degree"),
        "stages": _configuration("p, pipeline stages"),
        "virtual_stages": _configuration("v, stages per device in an interleaved schedule"),
        "experts": _configuration("experts per layer"),
        "top_k": _configuration("experts per token"),
        "parameters": _configuration("parameters of the model", "size"),
        "active_parameters": _configuration("parameters that each token passes", "size"),
        "setting": Role(dimension="number", about="a number that no rule looks at"),
        "note": Role(dimension="text", about="a remark"),
        "throughput": _measured("samples per second of all devices", "rate"),
        "throughput_per_device": _measured("samples per second of one device", "rate"),
        "tokens_per_s": _measured("tokens per second of all devices", "rate"),
        "tokens_per_s_per_device": _measured("tokens per second of one device", "rate"),
        "iterations_per_s": _measured("steps per second", "rate"),
        "latency": _measured("time of a step", "time"),
        "whole": _measured("time that the parts make up", "time"),
        "part": _measured("a part of the step", "time"),
        "data_time": _measured("part of the step: loading data", "time"),
        "forward_time": _measured("part of the step: forward", "time"),
        "backward_time": _measured("part of the step: backward", "time"),
        "optimizer_time": _measured("part of the step: optimizer", "time"),
        "compute_time": _measured("part of the step: computation", "time"),
        "communication_time": _measured("part of the step: communication", "time"),
        "remainder_time": _derived("what no other part of the step holds", "time"),
        "loss": _measured("loss", "number"),
        "memory": _measured("peak memory of a device", "memory"),
        "memory_baseline": _measured("peak memory of a device without the feature under test", "memory"),
        "memory_final": _measured("memory of a device that stays after the step", "memory"),
        "memory_weights": _measured("memory of a device: weights", "memory"),
        "memory_gradients": _measured("memory of a device: gradients", "memory"),
        "memory_optimizer": _measured("memory of a device: optimizer state", "memory"),
        "memory_activations": _measured("memory of a device: activations", "memory"),
        "memory_fragmentation": _measured("memory of a device: reserved, not allocated", "memory"),
        "memory_remainder": _derived("memory of a device that no other column holds", "memory"),
        "memory_host": _measured("memory of the host process", "memory"),
        "bandwidth": _measured("bytes per second of a communication", "bandwidth"),
        "speedup": _derived("ratio to the smallest run", "number"),
        "efficiency": _derived("speed-up over the ratio of devices", "share"),
        "mfu": _derived("model FLOPs over peak", "share"),
        "tflops": _derived("achieved operations per second of one device", "flops"),
        "bubble": _measured("share of a pipeline's time that is idle", "share"),
        "communication_share": _measured("share of the step spent in communication", "share"),
        "share": _derived("share of a row in the total", "share"),
        "overhead": _derived("time added, over the run without it", "share"),
        "peak_tflops": Role(dimension="flops", about="dense peak of one device for the run's dtype"),
        "stated_peak_tflops": Role(dimension="flops", about="peak of one device as the table states it"),
        "dense_peak_tflops": Role(dimension="flops", about="dense peak of one device by its maker"),
        "flops_per_sample": Role(dimension="number", about="model FLOPs of one sample, forward and backward"),
        "memory_capacity": Role(dimension="memory", about="memory of one device"),
        "model_size": Role(dimension="memory", about="size of the model's weights"),
        "available_devices": Role(dimension="count", about="devices of the largest machine that was there"),
    }
)
"""Every role that a column may have."""

PARTS = (
    "part", "data_time", "forward_time", "backward_time", "optimizer_time", "compute_time", "communication_time",
    "remainder_time",
)  # fmt: skip
"""Roles of the parts of a step."""

DEGREES = ("dp", "tp", "pp", "sp", "ep")
"""Roles of the sizes of a mesh."""

_K, _M, _G = Fraction(10**3), Fraction(10**6), Fraction(10**9)

SCALES: Mapping[str, Mapping[str, tuple[Fraction | int, ...]]] = MappingProxyType(
    {
        "time": {"us": (1 / _M,), "ms": (1 / _K,), "s": (1,), "min": (60,)},
        # a printed MB or GB is as often a power of two as of ten: either counts
        "memory": {"B": (1,), "KiB": (2**10,), "MiB": (2**20,), "GiB": (2**30,), "MB": (_M, 2**20), "GB": (_G, 2**30)},
        "share": {"": (1,), "%": (Fraction(1, 100),)},
        "flops": {"GFLOPS": (_G,), "TFLOPS": (_G * _K,), "PFLOPS": (_G * _M,)},
        "size": {"": (1,), "M": (_M,), "B": (_G,), "T": (_G * _K,)},
        "bandwidth": {"MB/s": (_M,), "GB/s": (_G,), "Gb/s": (_G / 8,)},
    }
)
"""Factors to SI by dimension and unit, two for an ambiguous unit; dimensions without an entry are not scaled."""

DEFAULT_UNITS: Mapping[str, str] = MappingProxyType(
    {"time": "s", "memory": "GB", "share": "", "flops": "TFLOPS", "bandwidth": "GB/s", "size": ""}
)
"""Unit of a column that names none."""


def scale(dimension: str, unit: str) -> Interval:
    """Factor from a unit to SI; an ambiguous unit (GB) gives an interval.  KeyError for an unknown unit.

    >>> scale("time", "ms").low == scale("time", "ms").high == Fraction(1, 1000)
    True
    """
    if dimension not in SCALES:
        return Interval.exactly(Fraction(1))
    factors = SCALES[dimension][unit or DEFAULT_UNITS[dimension]]
    return Interval(low=Fraction(min(factors)), high=Fraction(max(factors)))
