"""The messages of a training step, and their time when nothing is overlapped, from the build ``traffic``.

The build counts the messages of one step and sends them again without computation; this separates communication from
computation.  A single layer that computes and sends in turns has no such build: it marks the two by spans ``compute``
and ``communication``, and records ``communication_bytes`` and, for its axis, ``tp_bus_bytes``: the bytes S of its
messages, each times its collective's factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from perfsuite.base.collectives import TRAFFIC, busbw_factor
from perfsuite.base.units import gb_per_s
from perfsuite.metrics.spec import MetricSpec, MetricValue, recorded, unknown
from perfsuite.record.result import Measurement, Peaks, Work
from perfsuite.record.step import Traffic

REPLAYED = "replayed, nothing overlapped"
IN_TURNS = "of the median step, which computes and sends in turns"
_NOT_RUN = "not available: no traffic build was run"


def _of_layer(measurement: Measurement, part: str) -> MetricValue | None:
    """Return seconds in a part of a layer that computes and sends in turns; None for other workloads."""
    times = {span.name: span.time_s for span in measurement.spans}
    return MetricValue(value=times.get(part, 0.0), convention=IN_TURNS) if "compute" in times else None


def _time(work: Work, measurement: Measurement, peaks: Peaks, *, part: str) -> MetricValue:
    return _of_layer(measurement, part) or recorded(f"{part}_s", _NOT_RUN)(work, measurement, peaks)


def _percent(work: Work, measurement: Measurement, peaks: Peaks) -> MetricValue:
    sent, computed = (_time(work, measurement, peaks, part=part) for part in ("communication", "compute"))
    if sent.value is None or computed.value is None:
        return unknown(_NOT_RUN)
    whole = sent.value + computed.value
    if whole <= 0:
        return unknown("not available: the step is too short for the clock")
    return MetricValue(
        value=100 * sent.value / whole, note="" if sent.convention else REPLAYED, convention=sent.convention
    )


def _bytes(work: Work, measurement: Measurement, peaks: Peaks) -> MetricValue:
    if not measurement.components:
        return recorded("communication_bytes", _NOT_RUN)(work, measurement, peaks)
    return MetricValue(value=float(sum(_sent(entry) for entry in measurement.traffic)))


def _sent(entry: Traffic) -> int:
    """Return the bytes S; a receive counts 0, since another rank counts the send."""
    return 0 if entry.collective == "receive" else entry.message_bytes


def along(traffic: Sequence[Traffic], axis: str) -> list[Traffic]:
    """Return the messages of a model's parts along an axis; for ``dp`` all gradients.

    >>> entry = Traffic(
    ...     axis="dp-cp", collective="all_gather", part="data", calls=1, message_bytes=8, time_s=1e-3, ranks=4
    ... )
    >>> len(along([entry], "dp")), len(along([entry], "cp"))
    (1, 0)
    """
    if axis == "dp":
        return [entry for entry in traffic if entry.part == "data"]
    return [entry for entry in traffic if entry.axis == axis and entry.part != "data"]


def _busbw(work: Work, measurement: Measurement, peaks: Peaks, *, axis: str) -> MetricValue:
    layer = _of_layer(measurement, "communication")
    if layer is not None:
        return _layer_busbw(measurement, axis, layer)
    if not measurement.components:
        return unknown(_NOT_RUN)
    entries = along(measurement.traffic, axis)
    time_s = sum(entry.time_s for entry in entries)
    if not entries or time_s <= 0:
        return unknown(f"not available: the step sends nothing along {axis}")
    moved = sum(  # a message between two ranks has no factor
        _sent(entry) * (busbw_factor(entry.collective, entry.ranks) if entry.collective in TRAFFIC else 1.0)
        for entry in entries
    )
    return MetricValue(value=gb_per_s(moved, time_s), note=REPLAYED)


def _layer_busbw(measurement: Measurement, axis: str, sent: MetricValue) -> MetricValue:
    moved = sum(record.value for record in measurement.records if record.name == f"{axis}_bus_bytes")
    if not moved or not sent.value:
        return unknown(f"not available: the layer sends nothing along {axis}")
    return MetricValue(value=gb_per_s(moved, sent.value), convention=sent.convention)


METRICS = (
    MetricSpec("communication_time_s", "s", "lower", REPLAYED, partial(_time, part="communication"),
               observed=True, headline=False,
               doc="Time of all messages of a step, sent again without computation, on the rank that has most."),
    MetricSpec("compute_time_s", "s", "lower", "parts of the step without their messages",
               partial(_time, part="compute"), observed=True, headline=False,
               doc="Time of a step's parts without the communication that they wait for, on the rank that has most."),
    MetricSpec("communication_bytes", "bytes", "lower", "nccl-tests sizes of all calls, the rank that has most",
               _bytes, deterministic=True, tolerance=0.01, headline=False,
               doc="Bytes S of all messages of a rank in one step, each counted once."),
    MetricSpec("communication_percent", "percent", "lower", REPLAYED, _percent, observed=True, headline=False,
               doc="Communication over communication and computation of a step when nothing is overlapped."),
    *(
        MetricSpec(f"{axis}_busbw_gb_per_s", "GB/s", "higher", "nccl-tests, all calls of a step",
                   partial(_busbw, axis=axis), observed=True, headline=False, doc=doc)
        for axis, doc in (
            ("dp", "Bus bandwidth of gathering parameters and summing gradients, over all axes that share them."),
            ("tp", "Bus bandwidth of a model's messages along tp."),
            ("cp", "Bus bandwidth of attention's messages along cp."),
            ("ep", "Bus bandwidth of the experts' messages along ep."),
            ("pp", "Bandwidth of the messages between stages."),
        )
    ),
)  # fmt: skip
