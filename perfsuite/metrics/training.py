"""A training step: throughput, arithmetic rates by convention, utilisation, parts of the step, memory, communication.

Throughput per device is the aggregate over the devices that the ranks ran on; ranks that share a device count together.
MFU counts the model's own operations, HFU also recomputed ones (PaLM, appendix B).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

from perfsuite.base.units import gib, tflops
from perfsuite.metrics import flop_conventions as conventions
from perfsuite.metrics.spec import Compute, MetricSpec, MetricValue, devices_used, recorded, unknown
from perfsuite.record.result import ABOVE_MEASURED_PEAK, Measurement, Peaks, Work

TIMED = (
    *("step_time_s", "samples_per_s", "samples_per_s_per_device", "tokens_per_s", "tokens_per_s_per_device"),
    *("tflops_per_device", "six_n_tflops_per_device", "palm_tflops_per_device", "megatron_tflops_per_device"),
    *("colossalai_tflops_per_device", "mfu_percent", "hfu_percent"),
)
"""Metrics of a training step that follow from its work and time alone, also for projections."""


def _throughput(work: Work, measurement: Measurement, peaks: Peaks, *, field: str, per_device: bool) -> MetricValue:
    count: float = getattr(work, field)
    if not count:
        return unknown(f"the work model counts no {field}")
    return MetricValue(value=count / measurement.median_s / (devices_used(measurement) if per_device else 1))


def _rate(work: Work, measurement: Measurement, peaks: Peaks, *, convention: str) -> MetricValue:
    operations = work.flops.get(convention, 0.0)
    if not operations:
        return unknown(f"the work model counts no operations as {convention}")
    return MetricValue(value=tflops(operations / devices_used(measurement), measurement.median_s))


def _utilisation(work: Work, measurement: Measurement, peaks: Peaks, *, convention: str) -> MetricValue:
    reached = _rate(work, measurement, peaks, convention=convention)
    peak = peaks.tflops.get(work.dtype)
    if reached.value is None:
        return reached
    if peak is None:
        return unknown(peaks.unknown or f"no {work.dtype} peak in the platform's row")
    share = peak.share(reached.value)
    if share is None:
        return MetricValue(value=None, peak=peak, note=ABOVE_MEASURED_PEAK)
    return MetricValue(value=100 * share, peak=peak, note=f"of {peak.value:g} TFLOPS: {peak.source}")


def _part(work: Work, measurement: Measurement, peaks: Peaks, *, spans: Sequence[str]) -> MetricValue:
    times = {span.name: span.time_s for span in measurement.spans}
    if not times.keys() & set(spans):
        return unknown(f"the step has no span {' or '.join(spans)}")
    raw = spans == ("data",) and any(record.name == "raw_frames" and record.value for record in measurement.records)
    note = "raw frames, not decoded: PyAV is not installed" if raw else ""
    return MetricValue(value=1e3 * sum(times.get(span, 0.0) for span in spans), note=note)


def _built(record: str, build: str, convert: Callable[[float], float] = float) -> Compute:
    return recorded(record, f"no {build} build was run", convert)


BY_KERNELS = "profiler: only communication kernels ran"
_NOT_SILENT = (
    "not available: collectives can be made to do nothing on a mesh of one axis (dp, tp or cp) alone, under a strategy "
    "that makes no groups of its own"
)


def _exposed_end(work: Work, measurement: Measurement, peaks: Peaks, *, record: str) -> MetricValue:
    reached = _built(record, "exposed", _percent)(work, measurement, peaks)
    names = {entry.name for entry in measurement.records}
    if reached.value is None and "exposed_without_silent" in names:
        return unknown(_NOT_SILENT)
    if reached.value is None and "exposed_kernel_share" in names:
        return unknown("by the times of kernels, which have no interval")
    return reached


def _exposed(work: Work, measurement: Measurement, peaks: Peaks) -> MetricValue:
    """Return the difference to a silent twin if it was measured, else the share by kernels."""
    reached = _exposed_end(work, measurement, peaks, record="exposed_share")
    if reached.value is None:
        kernels = _built("exposed_kernel_share", "exposed", _percent)(work, measurement, peaks)
        if kernels.value is not None:
            return dataclasses.replace(kernels, convention=BY_KERNELS)
    return reached


def _exposed_kernels(work: Work, measurement: Measurement, peaks: Peaks) -> MetricValue:
    reached = _built("exposed_kernel_share", "exposed", _percent)(work, measurement, peaks)
    names = {record.name for record in measurement.records}
    if reached.value is None and all(rank.device == "cpu" for rank in measurement.ranks):
        return unknown("not supported on a cpu: it has no kernels on a clock of their own")
    if reached.value is None and names & {"exposed_share", "exposed_without_silent"}:
        lost = "exposed_kernels_lost" in names
        why = "did not see the same kernels in every step" if lost else "saw no kernel of the communication library"
        return unknown(f"unknown: torch's profiler {why}")
    return reached


def _device_utilisation(work: Work, measurement: Measurement, peaks: Peaks) -> MetricValue:
    percents = [rank.utilisation_percent for rank in measurement.ranks]
    measured = [value for value in percents if value is not None]
    if len(measured) < len(percents):
        return unknown("unknown: the vendor's library does not report it on every rank")
    return MetricValue(value=sum(measured) / len(measured))


def _largest_batch(work: Work, measurement: Measurement, peaks: Peaks) -> MetricValue:
    records = {record.name: record.value for record in measurement.records}
    if "largest_local_batch" not in records:
        return unknown("no batch was looked for")
    limit = records.get("search_limit")
    note = "" if limit is None else f"the search ended at {limit:.0f}, which fits"
    return MetricValue(value=records["largest_local_batch"], note=note)


def _time_to_target(work: Work, measurement: Measurement, peaks: Peaks) -> MetricValue:
    steps = _built("steps_to_target", "loss")(work, measurement, peaks).value
    if steps is None:
        return unknown("no target loss was given, or the loss build did not reach it")
    return MetricValue(value=steps * measurement.median_s)


def _percent(share: float) -> float:
    return 100 * share


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
    "encoders_ms": (("encoders",), _MEDIAN_STEP, "Frozen encoders, from pixels and words to the model's inputs."),
    "ema_ms": (("ema",), _MEDIAN_STEP, "The moving average of the weights."),
    "logging_ms": (("logging",), _MEDIAN_STEP, "The loss, averaged over the ranks and read by the host."),
    "saving_ms": (("saving",), _MEDIAN_STEP, "A checkpoint, to its file."),
    "remainder_ms": (("remainder",), _MEDIAN_STEP, "Time of the step outside of all parts."),
}
"""Spans, convention and meaning.  All but the sum of two are the step."""
_MEMORY = {
    "weights": "Parameters and buffers of one rank.",
    "gradients": "Gradients of one rank, after the backward.",
    "optimizer": "Optimizer state of one rank, after a step.",
    "encoders": "Frozen encoders of one rank.",
    "ema": "Moving average of the weights, of one rank, on its device.",
    "activations": "Allocated by the forward for the backward.",
    "peak": "Most allocated at any moment of a step.",
    "fragmentation": "Most that the allocator held beyond the peak.",
    "final_device": "Allocated after a step.",
    "untracked": "Allocated after a step beyond all that is named: buckets, buffers of the strategy.",
    "final_host": "Resident set of the rank's process after a step.",
    "whole_device": "Total minus free memory of the device after a step, other processes included.",
}
_HELD = ("weights", "gradients", "optimizer", "encoders", "ema")

_HEADLINES = (
    "largest_local_batch_samples",
    "samples_per_s",
    "tokens_per_s_per_device",
    "tflops_per_device",  # its share of the peak is the MFU
    "peak_gib",
    "expert_imbalance",
    "dropped_percent",
)
_NO_EXPERTS = "the model has no experts, or they do not record it"

_ALL = (
    MetricSpec("step_time_s", "s", "lower", "optimizer included",
               lambda work, measurement, peaks: MetricValue(value=measurement.median_s),
               doc="Median time of one optimizer step with all its micro-batches, the slowest rank's."),
    *(
        MetricSpec(f"{field}_per_s{'_per_device' if per_device else ''}", f"{field}/s", "higher",
                   "per device" if per_device else "aggregate",
                   partial(_throughput, field=field, per_device=per_device),
                   doc=f"Training {field} per second of {'one device' if per_device else 'all devices together'}.")
        for field in ("samples", "tokens")
        for per_device in (False, True)
    ),
    *(
        MetricSpec(f"{short}_tflops_per_device", "TFLOPS", "higher", convention, partial(_rate, convention=convention),
                   doc=f"Operations as {convention} counts them, per second of one device, 1e12 per second.")
        for convention, short in _RATES
    ),
    MetricSpec("mfu_percent", "percent", "higher", conventions.EXACT,
               partial(_utilisation, convention=conventions.EXACT),
               doc="Model FLOPs utilisation: the model's operations, every product counted, over the device's peak."),
    MetricSpec("hfu_percent", "percent", "higher", conventions.EXECUTED,
               partial(_utilisation, convention=conventions.EXECUTED),
               doc="Hardware FLOPs utilisation: as MFU, with the operations that the backward computes again."),
    *(
        MetricSpec(name, "ms", "lower", convention, partial(_part, spans=spans), observed=True, doc=doc)
        for name, (spans, convention, doc) in _PARTS.items()
    ),
    *(
        MetricSpec(f"{what}_gib", "GiB", "lower", "most of any rank", _built(f"{what}_bytes", "memory", gib),
                   deterministic=what in _HELD,
                   observed=what not in (*_HELD, "activations", "peak"),
                   doc=f"{doc}  2**30 bytes.")
        for what, doc in _MEMORY.items()
    ),
    MetricSpec("largest_local_batch_samples", "samples", "higher", "two steps fit", _largest_batch, deterministic=True,
               tolerance=0.01,
               doc="Most samples of one forward on one rank with which two steps fit into its memory or budget."),
    MetricSpec("exposed_communication_percent", "percent", "lower", "fake-group difference", _exposed, observed=True,
               interval=("exposed_communication_low_percent", "exposed_communication_high_percent"),
               doc="Share of the step that goes when its collectives do nothing, or by a device's kernels; 0 on one "
                   "rank."),
    *(
        MetricSpec(f"exposed_communication_{end}_percent", "percent", "neither",
                   "95 % interval over 12 pairs of steps", partial(_exposed_end, record=f"exposed_share_{end}"),
                   observed=True,
                   doc=f"The {which} end of the interval of the exposed communication.")
        for end, which in (("low", "lower"), ("high", "upper"))
    ),
    MetricSpec("exposed_kernels_percent", "percent", "lower", BY_KERNELS, _exposed_kernels, observed=True,
               doc="Share of the step in which a device did nothing but communicate, by the times of its kernels."),
    MetricSpec("device_utilisation_percent", "percent", "higher", "vendor telemetry", _device_utilisation,
               observed=True,
               doc="Share of the last moments of the samples in which a device ran any kernel, from its vendor's "
                   "library."),
    MetricSpec("counted_tflop", "TFLOP", "neither", "torch FlopCounterMode",
               _built("counted_flops", "flops", lambda count: count / 1e12), deterministic=True, observed=True,
               doc="Operations of one step of all ranks as torch counts them while they run, 1e12."),
    MetricSpec("final_loss", "", "lower", "seeded run", _built("final_loss", "loss"), deterministic=True,
               tolerance=0.02,
               doc="Mean loss of the last of a fixed number of steps from seeded values."),
    MetricSpec("steps_per_epoch", "steps/epoch", "neither", "samples of the data set / global batch",
               recorded("steps_per_epoch", "synthetic data have no end"), deterministic=True, observed=True,
               doc="Steps in which every sample of the data set is seen once."),
    MetricSpec("time_to_target_s", "s", "lower", "steps of the loss build x step time", _time_to_target, observed=True,
               doc="Time of the steps that it takes from seeded values to the target loss."),
    MetricSpec("expert_imbalance", "", "lower", "rows of the fullest expert over the mean, the worst layer",
               recorded("expert_imbalance", _NO_EXPERTS), observed=True,
               doc="How uneven the load of the experts is; 1 is even."),
    MetricSpec("dropped_percent", "percent", "lower", "rows without a place, mean of layers and ranks",
               recorded("dropped_share", _NO_EXPERTS, lambda share: 100 * share), observed=True,
               doc="Share of the rows of tokens that exceeded the experts' capacity; 0 without a capacity."),
    MetricSpec("balance_loss", "", "lower", "E x sum of f_e P_e per sample, mean of layers and ranks",
               recorded("balance_loss", _NO_EXPERTS), observed=True,
               doc="Loss that even routing makes smallest, without its weight; 1 is even."),
)  # fmt: skip

METRICS = tuple(dataclasses.replace(spec, headline=spec.name in _HEADLINES) for spec in _ALL)
