"""A training step: throughput, arithmetic rates by convention, utilisation, parts of the step, memory, communication.

Throughput per device is the aggregate over the devices that the ranks ran on; ranks that share a device count together.
MFU takes the model's own operations, HFU adds what is computed again (PaLM, appendix B).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from perfsuite.metrics import flop_conventions as conventions
from perfsuite.metrics.spec import MetricSpec, Reading, devices_used
from perfsuite.records import ABOVE_MEASURED_PEAK, Measurement, Peaks, Work
from perfsuite.units import gib, tflops

Compute = Callable[[Work, Measurement, Peaks], Reading]


def _step_time(work: Work, measurement: Measurement, peaks: Peaks) -> Reading:
    return Reading(value=measurement.median_s)


def _throughput(field: str, *, per_device: bool) -> Compute:
    def compute(work: Work, measurement: Measurement, peaks: Peaks) -> Reading:
        count: float = getattr(work, field)
        if not count:
            return Reading(value=None, note=f"the work model counts no {field}")
        return Reading(value=count / measurement.median_s / (devices_used(measurement) if per_device else 1))

    return compute


def _rate(convention: str) -> Compute:
    def compute(work: Work, measurement: Measurement, peaks: Peaks) -> Reading:
        operations = work.flops.get(convention, 0.0)
        if not operations:
            return Reading(value=None, note=f"the work model counts no operations as {convention}")
        return Reading(value=tflops(operations / devices_used(measurement), measurement.median_s))

    return compute


def _utilisation(convention: str) -> Compute:
    rate = _rate(convention)

    def compute(work: Work, measurement: Measurement, peaks: Peaks) -> Reading:
        reached = rate(work, measurement, peaks)
        peak = peaks.tflops.get(work.dtype)
        if reached.value is None:
            return reached
        if peak is None:
            return Reading(value=None, note=peaks.unknown or f"no {work.dtype} peak in the platform's row")
        share = peak.share(reached.value)
        if share is None:
            return Reading(value=None, peak=peak, note=ABOVE_MEASURED_PEAK)
        return Reading(value=100 * share, peak=peak, note=f"of {peak.value:g} TFLOPS: {peak.source}")

    return compute


def _part(*spans: str) -> Compute:
    def compute(work: Work, measurement: Measurement, peaks: Peaks) -> Reading:
        times = {span.name: span.time_s for span in measurement.spans}
        if not times.keys() & set(spans):
            return Reading(value=None, note=f"the step has no span {' or '.join(spans)}")
        return Reading(value=1e3 * sum(times.get(span, 0.0) for span in spans))

    return compute


def _recorded(record: str, convert: Callable[[float], float], build: str) -> Compute:
    def compute(work: Work, measurement: Measurement, peaks: Peaks) -> Reading:
        for each in measurement.records:
            if each.name == record:
                return Reading(value=convert(each.value))
        return Reading(value=None, note=f"no {build} build was run" if build else "synthetic data have no end")

    return compute


def _exposed_kernels(work: Work, measurement: Measurement, peaks: Peaks) -> Reading:
    reading = _recorded("exposed_kernel_share", _percent, "exposed")(work, measurement, peaks)
    if reading.value is None and all(rank.device == "cpu" for rank in measurement.ranks):
        return Reading(value=None, note="not supported on a cpu: it has no kernels on a clock of their own")
    if reading.value is None and any(record.name == "exposed_share" for record in measurement.records):
        return Reading(value=None, note="unknown: torch's profiler saw no kernel of the communication library")
    return reading


def _device_utilisation(work: Work, measurement: Measurement, peaks: Peaks) -> Reading:
    told = [rank.utilisation_percent for rank in measurement.ranks]
    known = [value for value in told if value is not None]
    if len(known) < len(told):
        return Reading(value=None, note="unknown: no vendor's library tells it on every rank")
    return Reading(value=sum(known) / len(known))


def _largest_batch(work: Work, measurement: Measurement, peaks: Peaks) -> Reading:
    found = {record.name: record.value for record in measurement.records}
    if "largest_local_batch" not in found:
        return Reading(value=None, note="no batch was looked for")
    limit = found.get("search_limit")
    note = "" if limit is None else f"the search ended at {limit:.0f}, which fits"
    return Reading(value=found["largest_local_batch"], note=note)


def _time_to_target(work: Work, measurement: Measurement, peaks: Peaks) -> Reading:
    steps = _recorded("steps_to_target", _same, "loss")(work, measurement, peaks).value
    if steps is None:
        return Reading(value=None, note="no target loss was given, or the loss build did not reach it")
    return Reading(value=steps * measurement.median_s)


def _percent(share: float) -> float:
    return 100 * share


def _same(value: float) -> float:
    return value


_RATES = (
    (conventions.SIX_N, "six_n"),
    (conventions.PALM, "palm"),
    (conventions.MEGATRON, "megatron"),
    (conventions.COLOSSALAI, "colossalai"),
)
_MEDIAN_STEP = "of the median step"
_PARTS = {
    "data_ms": (("data",), _MEDIAN_STEP, "Waiting for the next batch."),
    "forward_ms": (("forward",), _MEDIAN_STEP, "Forward, loss included."),
    "backward_ms": (("backward",), f"{_MEDIAN_STEP}, optimizer outside", "Backward, the optimizer not included."),
    "optimizer_ms": (("optimizer",), _MEDIAN_STEP, "The optimizer's step."),
    "backward_with_optimizer_ms": (
        ("backward", "optimizer"),
        f"{_MEDIAN_STEP}, optimizer inside",
        "Backward and optimizer together, as report 000 has it.",
    ),
    "remainder_ms": (("remainder",), _MEDIAN_STEP, "What no part of the step covers."),
}
"""Spans, convention and meaning.  data + forward + backward + optimizer + remainder is the step."""
_MEMORY = {
    "weights": "Parameters and buffers of one rank.",
    "gradients": "Gradients of one rank, after the backward.",
    "optimizer": "Optimizer state of one rank, after a step.",
    "activations": "What the forward leaves allocated for the backward.",
    "peak": "Most allocated at any moment of a step.",
    "fragmentation": "Most that the allocator held beyond the peak.",
    "final_device": "Allocated after a step.",
    "untracked": "Allocated after a step beyond weights, gradients and optimizer: buckets, buffers of the strategy.",
    "final_host": "Resident set of the rank's process after a step.",
    "whole_device": "Total minus free memory of the device after a step, other processes included.",
}

_HEADLINES = (
    "largest_local_batch_samples",
    "samples_per_s",
    "tokens_per_s_per_device",
    "tflops_per_device",  # its share of the peak is the MFU
    "peak_gib",
)

_ALL = (
    MetricSpec(
        name="step_time_s",
        unit="s",
        better="lower",
        convention="optimizer included",
        doc="Median time of one optimizer step with all its micro-batches, the slowest rank's.",
        compute=_step_time,
    ),
    *(
        MetricSpec(
            name=f"{field}_per_s{'_per_device' if per_device else ''}",
            unit=f"{field}/s",
            better="higher",
            convention="per device" if per_device else "aggregate",
            doc=f"Training {field} per second of {'one device' if per_device else 'all devices together'}.",
            compute=_throughput(field, per_device=per_device),
        )
        for field in ("samples", "tokens")
        for per_device in (False, True)
    ),
    *(
        MetricSpec(
            name=f"{short}_tflops_per_device",
            unit="TFLOPS",
            better="higher",
            convention=convention,
            doc=f"Operations as {convention} counts them, per second of one device, 1e12 per second.",
            compute=_rate(convention),
        )
        for convention, short in _RATES
    ),
    MetricSpec(
        name="mfu_percent",
        unit="percent",
        better="higher",
        convention=conventions.EXACT,
        doc="Model FLOPs utilisation: the model's operations, every product counted, over the device's peak.",
        compute=_utilisation(conventions.EXACT),
    ),
    MetricSpec(
        name="hfu_percent",
        unit="percent",
        better="higher",
        convention=conventions.EXECUTED,
        doc="Hardware FLOPs utilisation: as MFU, and what is computed again in the backward.",
        compute=_utilisation(conventions.EXECUTED),
    ),
    *(
        MetricSpec(
            name=name,
            unit="ms",
            better="lower",
            convention=convention,
            doc=doc,
            compute=_part(*spans),
            observed=True,
        )
        for name, (spans, convention, doc) in _PARTS.items()
    ),
    *(
        MetricSpec(
            name=f"{what}_gib",
            unit="GiB",
            better="lower",
            convention="most of any rank",
            doc=f"{doc}  2**30 bytes.",
            compute=_recorded(f"{what}_bytes", gib, "memory"),
            deterministic=what in ("weights", "gradients", "optimizer"),
            observed=what not in ("weights", "gradients", "optimizer", "activations", "peak"),
        )
        for what, doc in _MEMORY.items()
    ),
    MetricSpec(
        name="largest_local_batch_samples",
        unit="samples",
        better="higher",
        convention="two steps fit",
        doc="Most samples of one forward on one rank with which two steps fit into its memory or budget.",
        compute=_largest_batch,
        deterministic=True,
        tolerance=0.01,
    ),
    MetricSpec(
        name="exposed_communication_percent",
        unit="percent",
        better="lower",
        convention="fake-group difference",
        doc="Share of the step that goes when its collectives do nothing; its interval is recorded beside it.",
        compute=_recorded("exposed_share", _percent, "exposed"),
        observed=True,
    ),
    MetricSpec(
        name="exposed_kernels_percent",
        unit="percent",
        better="lower",
        convention="profiler: only communication kernels ran",
        doc="Share of the step in which a device did nothing but communicate, by the times of its kernels.",
        compute=_exposed_kernels,
        observed=True,
    ),
    MetricSpec(
        name="device_utilisation_percent",
        unit="percent",
        better="higher",
        convention="vendor telemetry",
        doc="Share of the last moments of the samples in which a device ran any kernel, as its vendor's library tells.",
        compute=_device_utilisation,
        observed=True,
    ),
    MetricSpec(
        name="counted_tflop",
        unit="TFLOP",
        better="neither",
        convention="torch FlopCounterMode",
        doc="Operations of one step of all ranks as torch counts them while they run, 1e12.",
        compute=_recorded("counted_flops", lambda count: count / 1e12, "flops"),
        deterministic=True,
        observed=True,
    ),
    MetricSpec(
        name="final_loss",
        unit="",
        better="lower",
        convention="seeded run",
        doc="Mean loss of the last of a fixed number of steps from seeded values.",
        compute=_recorded("final_loss", _same, "loss"),
        observed=True,
    ),
    MetricSpec(
        name="steps_per_epoch",
        unit="steps/epoch",
        better="neither",
        convention="samples of the data set / global batch",
        doc="Steps in which every sample of the data set is seen once.",
        compute=_recorded("steps_per_epoch", _same, ""),
        deterministic=True,
        observed=True,
    ),
    MetricSpec(
        name="time_to_target_s",
        unit="s",
        better="lower",
        convention="steps of the loss build x step time",
        doc="Time of the steps that it takes from seeded values to the target loss.",
        compute=_time_to_target,
        observed=True,
    ),
)

METRICS = tuple(dataclasses.replace(spec, headline=spec.name in _HEADLINES) for spec in _ALL)
