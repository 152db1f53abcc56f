"""Compute the metrics of a projection with the formulas of the registry."""

from __future__ import annotations

from perfsuite.metrics import TIMED, derive
from perfsuite.metrics.flop_conventions import Transformer, count_all
from perfsuite.models import Model
from perfsuite.platforms import DeviceModel
from perfsuite.projection.step import Projection
from perfsuite.record.result import ClockFacts, Measurement, Metric, Peaks, RankFacts, Work
from perfsuite.record.run import Projected

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
    """Return throughput and utilisation of a projected step.

    HFU is left out under selective recomputation of a software, because each runs other operations again.
    """
    per_device = tuple(name for name in _PER_DEVICE if name != "hfu_percent" or _has_hfu(projection))
    whole = _work(projection, model, samples)
    devices = projection.world_size  # peaks are per device, and dividing needs no list of all ranks
    flops = {name: count / devices for name, count in whole.flops.items()}
    each = Work(flops=flops, dtype=whole.dtype, samples=whole.samples / devices, tokens=whole.tokens / devices)
    peaks = Peaks(tflops=device.tflops, unknown="" if device.tflops else "no peaks in the platform's row")
    measurement = _as_if_measured(projection.step_time_s)
    return (
        *derive(_TOTALS, work=whole, measurement=measurement, peaks=peaks),
        *derive(per_device, work=each, measurement=measurement, peaks=peaks),
    )


def projected(
    case: str, projection: Projection, work: Work, peaks: Peaks, *, not_measured: str = "", simulated: bool = False
) -> Projected:
    """Return the record of a projection; ``work`` is the work of all ranks of the case."""
    return Projected(
        kind="projected",
        case=case,
        platform=projection.platform,
        world_size=projection.world_size,
        not_measured=not_measured,
        training=projection.training,
        step_time_s=projection.step_time_s,
        low_s=projection.low_s,
        high_s=projection.high_s,
        metrics=tuple(
            metric
            for metric in metrics_of(projection.step_time_s, projection.world_size, work, peaks)
            if metric.name != "hfu_percent" or _has_hfu(projection)
        ),
        memory_bytes=projection.memory.total,
        seconds={str(resource): seconds for resource, seconds in projection.by_resource.items() if seconds},
        binding=projection.binding,
        regime=projection.regime,
        band_source=projection.band_source,
        calibration=projection.calibration,
        flags=tuple(f"{flag.name}: {flag.text}" for flag in projection.flags),
        lower_bound=projection.lower_bound,
        simulated=simulated,
    )


def metrics_of(step_time_s: float, world_size: int, work: Work, peaks: Peaks) -> tuple[Metric, ...]:
    """Return the metrics of a step time, computed like those of a measurement."""
    metrics = derive(TIMED, work=work, measurement=_as_if_measured(step_time_s, world_size), peaks=peaks)
    return tuple(metric for metric in metrics if metric.value is not None)


def _has_hfu(projection: Projection) -> bool:
    """Return whether the recomputed operations are counted: those of perfsuite's own modules."""
    return projection.training.checkpointing != "selective" or not projection.regime.startswith("software")


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


def _as_if_measured(step_time_s: float, world_size: int = 1) -> Measurement:
    ranks = tuple(
        RankFacts(
            rank=rank,
            host="",
            device=str(rank),
            threads=1,
            cores=None,
            median_s=step_time_s,
            min_s=step_time_s,
            max_s=step_time_s,
            cpu_share=1.0,
            max_rss_bytes=0,
        )
        for rank in range(world_size)
    )
    return Measurement(
        times_s=(step_time_s,),
        iterations=1,
        warmup_iterations=0,
        warmup_steady=True,
        aligned=False,
        clock=ClockFacts(name="projected", resolution_s=0.0, cost_s=0.0),
        ranks=ranks,
        backend="",
        process="fresh",
        transport="",
    )
