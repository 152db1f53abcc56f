"""The metrics of a projection, by the registry's own formulas: no second definition of throughput or utilisation."""

from __future__ import annotations

from collections.abc import Mapping

from perfsuite.metrics import derive
from perfsuite.metrics.flop_conventions import Transformer, count_all
from perfsuite.models import Model
from perfsuite.platforms import DeviceModel
from perfsuite.projection.step import Projection
from perfsuite.record.result import ClockFacts, Measurement, Metric, Peaks, RankFacts, Sample, Work

_TOTALS = ("tokens_per_s", "samples_per_s")
_PER_DEVICE = (
    "tokens_per_s_per_device",
    "six_n_tflops_per_device",
    "palm_tflops_per_device",
    "megatron_tflops_per_device",
    "colossalai_tflops_per_device",
    "mfu_percent",
    "hfu_percent",
)


def figures(projection: Projection, model: Model, device: DeviceModel, samples: int) -> tuple[Metric, ...]:
    """Throughput and utilisation of a step of so many samples."""
    whole = _work(projection, model, samples)
    each = _divided(whole, projection.world_size)
    peaks = Peaks(tflops=device.tflops, unknown="" if device.tflops else "no peaks in the platform's row")
    measurement = _as_if_measured(projection.step_time_s)
    return (
        *derive(_TOTALS, work=whole, measurement=measurement, peaks=peaks),
        *derive(_PER_DEVICE, work=each, measurement=measurement, peaks=peaks),
    )


def _work(projection: Projection, model: Model, samples: int) -> Work:
    counted = Transformer(
        parameters=model.active_parameters,
        layers=model.layers,
        width=model.width,
        tokens=model.tokens_per_sample,
        vocabulary=model.vocabulary,
        forward_flops=model.forward_flops,
        block_flops=model.block_flops,
        recomputes=projection.training.checkpointing == "full",
    )
    flops = {name: samples * count for name, count in count_all(counted).items()}
    tokens = float(samples * model.tokens_per_sample)
    return Work(flops=flops, dtype=projection.training.dtype, samples=float(samples), tokens=tokens)


def _divided(work: Work, devices: int) -> Work:
    """One device's share: a peak is a device's, and a hundred thousand ranks need not be listed to divide by them."""
    flops: Mapping[str, float] = {name: count / devices for name, count in work.flops.items()}
    return Work(flops=flops, dtype=work.dtype, samples=work.samples / devices, tokens=work.tokens / devices)


def _as_if_measured(step_time_s: float) -> Measurement:
    rank = RankFacts(
        rank=0,
        host="projected",
        device="projected",
        threads=1,
        cores=None,
        median_s=step_time_s,
        min_s=step_time_s,
        max_s=step_time_s,
        cpu_share=1.0,
        max_rss_bytes=0,
    )
    return Measurement(
        samples=(Sample(time_s=step_time_s),),
        iterations=1,
        warmup_iterations=0,
        warmup_steady=True,
        aligned=False,
        clock=ClockFacts(name="projected", resolution_s=0.0, cost_s=0.0),
        ranks=(rank,),
        backend="",
        process="fresh",
        transport="",
    )
