"""``perfsuite project``: estimate the time of a training step on devices that are not here."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from perfsuite.base.errors import ConfigurationError
from perfsuite.base.units import format_seconds, gib, significant
from perfsuite.base.writing import write_file
from perfsuite.cli.job_checks import (
    check_options,
    choose_recipe,
    elasticities,
    published_lines,
    read_curve,
    read_mtbf,
    software_lines,
)
from perfsuite.cli.main import Command, platform_arguments, print_json, print_lines, screen_width
from perfsuite.models import counts, describe, find_projected
from perfsuite.models.base import Checkpointing
from perfsuite.platforms import DeviceModel, load_catalog
from perfsuite.projection.calibration import Calibration, achieved, read_calibration
from perfsuite.projection.figures import figures
from perfsuite.projection.job import Node, TrainingJob
from perfsuite.projection.layout import Layout, Sharding
from perfsuite.projection.memory import RESERVED, MemoryBreakdown
from perfsuite.projection.scaling import LLAMA3_MTBF_DEVICE_H, CurvePoint, curve, goodput
from perfsuite.projection.softwares import OWN, software_calibration, software_implementation
from perfsuite.projection.step import RESOURCES, Projection, pipeline_timeline, project, used_constants
from perfsuite.record.codec import to_json
from perfsuite.record.result import Metric
from perfsuite.record.step import Training
from perfsuite.reports.layout import lay_out
from perfsuite.reports.timelines.files import trace_text

_COMPONENTS = ("parameters", "gradients", "optimizer", "activations", "logits", "temporary", "updating")
SIMULATED = "calibrated on simulated devices: not valid for real ones"
CHECKPOINT_S = 60.0  # Default seconds of writing a checkpoint.
_DTYPES = ("bf16", "fp16", "fp8", "tf32", "fp32")


def _arguments(parser: argparse.ArgumentParser) -> None:
    platform_arguments(parser)
    job_arguments(parser, required=False).add_argument(
        "--recipe",
        metavar="NAME",
        help="project this published run, such as 003-MP_1x32x1_16_3072x32 (default: the job of the other options)",
    )
    add = parser.add_argument_group("layout").add_argument
    add("--layout", metavar="MESH", help="set the mesh, such as dp64-tp8-pp2 (default: all devices on dp)")
    add("--micro-batch", type=int, default=1, metavar="N", help="run N samples per forward (default: 1)")
    add("--schedule", default="", metavar="NAME", help="set the pipeline schedule (default: 1f1b)")
    add("--stages-per-rank", type=int, metavar="V", help="set the stages of a rank (default: the schedule's fewest)")
    add(
        "--sharding",
        choices=get_args(Sharding),
        default="none",
        help="shard this state across replicas: optimizer is ZeRO-1, gradients ZeRO-2, parameters ZeRO-3 "
        "(default: none)",
    )
    add(
        "--checkpointing", choices=get_args(Checkpointing), default="none", help="recompute activations (default: none)"
    )
    add("--sequence-parallel", action="store_true", help="split norms and residuals by tokens across tp")
    more = parser.add_argument_group("more results")
    add = more.add_argument
    add("--sensitivity", action="store_true", help="print the gain from one percent more of each resource")
    add("--curve", metavar="A..B", help="project the job on A to B devices, such as 8..1024 (default: no curve)")
    kind = more.add_mutually_exclusive_group()
    kind.add_argument("--weak", action="store_true", help="grow the batch with the devices of --curve (default)")
    kind.add_argument("--strong", action="store_true", help="keep the global batch on all devices of --curve")
    add(
        "--mtbf",
        metavar="HOURS",
        help="add goodput to --curve by Young's interval, from device-hours per interruption, a number or llama3 "
        f"({LLAMA3_MTBF_DEVICE_H:g}: arXiv:2407.21783) (default: no goodput)",
    )
    add(
        "--checkpoint-s",
        type=float,
        metavar="S",
        help=f"set the seconds of writing a checkpoint, with --mtbf (default: {CHECKPOINT_S:g})",
    )
    add("--trace", type=Path, metavar="FILE", help="write the simulated pipeline for Perfetto to FILE (default: none)")


def job_arguments(parser: argparse.ArgumentParser, *, required: bool = True) -> argparse._ArgumentGroup:
    """Add the options of a job, for every subcommand that projects, and return the group of the training step."""
    job = parser.add_argument_group("training step")
    add = job.add_argument
    add(
        "--model",
        required=required,
        metavar="NAME",
        help="project this model, such as llama3-8b, or a config.json (no default)",
    )
    add("--global-batch", type=int, required=required, metavar="N", help="set the samples of a step (no default)")
    add("--sequence-length", type=int, metavar="S", help="set the tokens of a sample (default: the model's)")
    add(
        "--override",
        action="append",
        default=[],
        metavar="FIELD=N",
        help="replace a field of the model, such as layers=4; repeatable (default: none)",
    )
    add("--dtype", choices=_DTYPES, help="set the dtype (default: bf16, or fp16 if the platform has no bf16)")
    add("--compiled", action="store_true", help="project blocks compiled by torch.compile")
    add = parser.add_argument_group("devices and their rates").add_argument
    add("--platform", metavar="NAME", help="project on this row of perfsuite platforms (default: this machine's)")
    add("--machine", metavar="NAME", help="project on these hosts, such as oneflow-4x8-v100 (default: none)")
    add("--world", type=int, metavar="N", help="project on N devices (default: as many as the layout has)")
    add("--calibration", type=Path, metavar="FILE", help="use a file of perfsuite calibrate (default: the row alone)")
    add(
        "--software",
        default=OWN,
        metavar="NAME",
        help="project the code of a published software by constants fitted to its published steps; list prints them "
        "(default: %(default)s's own modules)",
    )
    add(
        "--network",
        type=float,
        metavar="GB/S",
        help="set the nominal rate of all adapters of a node per direction, such as 50 for two of 200 Gbit/s "
        "(default: the platform's)",
    )
    return job


def _run(options: argparse.Namespace) -> None:
    if options.software == "list":
        print_lines(software_lines())
        return
    check_options(options)
    training = choose_recipe(options)
    device, calibration = read_platform(options)
    training = training or _training(options, calibration)
    job = make_job(options, training, device, node_of(options, device, Layout.of(training).world_size))
    found = project(job, calibration, simulated=calibration.simulated)
    metrics = figures(found, job.model, device, job.layout.global_batch)
    gains = elasticities(job, calibration) if options.sensitivity or options.json else {}
    points: list[CurvePoint] = []
    missing: list[str] = []
    mtbf, checkpoint_s = read_mtbf(options.mtbf), options.checkpoint_s or CHECKPOINT_S
    if options.curve:
        points, missing = curve(job, calibration, read_curve(options.curve), weak=not options.strong)
    if options.trace:
        write_file(options.trace, trace_text(pipeline_timeline(job, calibration)))
    if options.json:
        plain = _projection_json(found, metrics, gains)
        if options.curve:
            plain["curve"] = [_point_json(point, mtbf, checkpoint_s) for point in points]
            plain["curve_missing"] = missing
        print_json(plain)
        return
    print_lines(_lines(found, metrics, gains if options.sensitivity else {}, job, calibration))
    print_lines(published_lines(options.recipe, found) if options.recipe else ())
    if options.curve:
        print_lines(["", *_curve_lines(points, missing, mtbf, checkpoint_s)])
    if options.trace:
        print(f"wrote {options.trace}")


def read_platform(options: argparse.Namespace) -> tuple[DeviceModel, Calibration]:
    """Return the platform's row and its calibration: from a file, or from the row alone.

    Raises ConfigurationError if options contradict each other.
    """
    device, machine = load_catalog(options.platform_file).hosts(options.platform, options.machine)
    calibration = Calibration.from_platform(device)
    if options.software != OWN:
        calibration = software_calibration(options.software, device)
        wrong = [name for name in ("calibration", "compiled") if getattr(options, name)]
        if wrong:
            raise ConfigurationError(
                f"--{wrong[0]} is for perfsuite's own modules, not for --software={options.software}; leave one out"
            )
    if options.calibration:
        calibration = read_calibration(options.calibration)
        if calibration.device != device.name:
            raise ConfigurationError(
                f"--calibration {options.calibration} is for {calibration.device}, not for {device.name}; "
                "give one of the same platform, or leave it out"
            )
    if machine is not None:
        calibration = calibration.in_nodes_of(device)
    if options.network is not None:
        calibration = calibration.with_network(achieved("network", options.network, "--network"))
    return device, calibration


def read_overrides(options: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of the model to replace.  Raises ConfigurationError for a text other than FIELD=NUMBER."""
    overrides: dict[str, Any] = {}
    for text in options.override:
        name, sign, value = text.partition("=")
        if not sign or not value.lstrip("-").isdigit():
            raise ConfigurationError(f"--override {text} is not FIELD=NUMBER; write for example layers=4")
        overrides[name] = int(value)
    if options.sequence_length is not None:
        overrides["sequence_length"] = options.sequence_length
        if context := getattr(find_projected(options.model), "context", 0):
            overrides["context"] = max(options.sequence_length, context)
    return overrides


def base_training(options: argparse.Namespace, calibration: Calibration) -> Training:
    """Return the training step without a layout: strategy hybrid, which stores and sends 16 bits in 16-bit steps."""
    rated = (dtype for dtype in ("bf16", "fp16", "fp32") if calibration.value(f"matmul_{dtype}_tflops"))
    dtype = str(options.dtype or next(rated, "bf16"))
    narrow = {"bf16": "bf16", "fp16": "fp16", "fp8": "bf16"}
    return Training(
        model=options.model,
        overrides=read_overrides(options),
        strategy="hybrid",
        dtype=dtype,
        narrow=dtype in narrow,
        gradient_dtype=narrow.get(dtype, "fp32"),
        compiled=options.compiled,
    )


def node_of(options: argparse.Namespace, device: DeviceModel, world_size: int = 1) -> Node:
    """Return a node of the platform with the network of --network or of the platform's row."""
    network = options.network or (device.network.value if device.network else 0.0)
    _, machine = load_catalog(options.platform_file).hosts(options.platform, options.machine)
    description = machine.describe(world_size) if machine else ""
    if description and options.network:
        description += f"; --network gives {options.network:g} GB/s"
    return dataclasses.replace(Node.of(device), network_gb_per_s=network, machine=description)


def make_job(options: argparse.Namespace, training: Training, device: DeviceModel, node: Node) -> TrainingJob:
    """Return the job of a training step by the software of the options."""
    implementation = None  # the job finds perfsuite's own
    if options.software != OWN:
        model = find_projected(training.model, training.overrides)
        implementation = software_implementation(options.software, model, dtype=training.dtype, device=device)
    return TrainingJob.of(training, device, node=node, implementation=implementation)


def _training(options: argparse.Namespace, calibration: Calibration) -> Training:
    base = base_training(options, calibration)
    text = options.layout or (f"dp{options.world}" if options.world else "1")
    layout = Layout.parse(
        text,
        global_batch=options.global_batch,
        micro_batch_size=options.micro_batch,
        schedule=options.schedule,
        stages_per_rank=options.stages_per_rank,
        sharding=options.sharding,
        checkpointing=options.checkpointing,
        sequence_parallel=options.sequence_parallel,
    )
    layout.check(find_projected(base.model, base.overrides), world_size=options.world)
    same = ("sharding", "micro_batch_size", "num_micro_batches", "schedule", "stages_per_rank", "checkpointing")
    fields = {name: getattr(layout, name) for name in (*same, "sequence_parallel")}
    return dataclasses.replace(base, layout=str(layout), **fields)


def _lines(
    found: Projection, metrics: Sequence[Metric], gains: Mapping[str, float], job: TrainingJob, calibration: Calibration
) -> Iterator[str]:
    layout = job.layout
    schedule = f", {layout.schedule} x {layout.stages_per_rank}" if layout.schedule else ""
    yield (
        f"{found.training.model} on {found.world_size} x {found.platform}, {layout}, {found.training.dtype}, "
        f"{layout.num_micro_batches} micro-batches of {layout.micro_batch_size}{schedule}: projected"
    )
    if calibration.simulated:
        yield SIMULATED
    yield from (f"model            {line}" for line in describe(job.published, [layout.shape.size("tp")]))
    bound = "at least " if found.lower_bound else ""
    band = f"{format_seconds(found.low_s)} to {format_seconds(found.high_s)}"
    yield f"step time        {bound}{format_seconds(found.step_time_s)}   80 % band {band}"
    yield f"                 {found.regime}; {found.band_source}"
    if calibration.regime.startswith("software"):
        for title, text in zip(("software", ""), calibration.software.split("; ", 1), strict=True):
            yield f"{title:17}{text}"
    width = max((len(metric.name) for metric in metrics), default=0)
    for metric in metrics:
        value = "unknown" if metric.value is None else f"{significant(metric.value)} {metric.unit}"
        note = f"   {metric.convention}" if metric.convention not in ("aggregate", "per device") else ""
        yield f"{metric.name:{width}} {value}{note}{f'   {metric.note}' if metric.value is None else ''}"
    if found.training.schedule:
        yield f"{'bubble_ratio':{width}} {found.bubble_ratio:.3f}"
    yield from _memory_lines(found.memory)
    yield "step time by resource"
    for resource in RESOURCES:
        seconds = found.by_resource[resource]
        if seconds:
            gain = f"   1 % more gains {gains[resource]:.2f} %" if resource in gains else ""
            yield f"  {resource:10} {format_seconds(seconds):>10}  {100 * seconds / found.step_time_s:5.1f} %{gain}"
    yield f"binding          {found.binding}"
    for flag in found.flags:
        yield f"note             {flag.name}: {flag.text}"
    yield f"constants        {found.calibration}"
    used = {name: calibration.constants[name] for name in used_constants(calibration, found.training.dtype)}
    for name, constant in {**used, **calibration.traits}.items():
        error = f" +-{100 * constant.relative_error:.0f} %" if constant.relative_error else ""
        yield f"  {name:24} {significant(constant.value):>8} {constant.unit:7}{error}  {constant.source}"


def _memory_lines(memory: MemoryBreakdown) -> Iterator[str]:
    share = f" of {gib(memory.capacity):.1f} GiB, {100 * memory.share:.0f} %" if memory.share else ""
    yield f"memory           {gib(memory.total):.2f} GiB{share}"
    parts = [(name, getattr(memory, name)) for name in (*_COMPONENTS, "communication", "encoders", "ema")]
    apart = "" if memory.total >= sum(size for _, size in parts) else ", not all at once"
    yield "                 " + ", ".join(f"{name} {gib(size):.2f}" for name, size in parts if size) + apart
    low, high = (gib(factor * memory.total) for factor in RESERVED)
    yield f"                 the allocator reserves {low:.2f} to {high:.2f} GiB, by the ratios in public logs"


def _projection_json(found: Projection, metrics: Sequence[Metric], gains: Mapping[str, float]) -> dict[str, Any]:
    return {
        "kind": "projected",
        **to_json(found),
        "by_resource": dict(found.by_resource),
        "binding": found.binding,
        **counts(find_projected(found.training.model, found.training.overrides), found.training.layout),
        "memory_total_bytes": found.memory.total,
        "memory_reserved_bytes": [factor * found.memory.total for factor in RESERVED],
        "metrics": [to_json(metric) for metric in metrics],
        "elasticities": dict(gains),
    }


def _curve_lines(
    points: Sequence[CurvePoint], missing: Sequence[str], mtbf: float | None, checkpoint_s: float
) -> Iterator[str]:
    columns = ("devices", "layout", "step", "80 % band", "tokens/s", "efficiency", "binding", "goodput")
    rows = [
        (
            str(found.world_size),
            point.layout,
            f"{'>=' if found.lower_bound else ''}{format_seconds(found.step_time_s)}",
            f"{format_seconds(found.low_s)} to {format_seconds(found.high_s)}",
            f"{point.tokens_per_s:.0f}",
            f"{100 * point.efficiency:.1f} %",
            found.binding,
            "" if (share := _goodput(found, mtbf, checkpoint_s)) is None else f"{100 * share:.1f} %",
        )
        for point, found in ((point, point.projection) for point in points)
    ]
    count = len(columns) if mtbf else len(columns) - 1
    yield from lay_out(columns[:count], [row[:count] for row in rows], screen_width())
    yield from (f"{point.projection.world_size} devices: {point.note}" for point in points if point.note)
    yield from (f"left out {line}" for line in missing)


def _goodput(found: Projection, mtbf: float | None, checkpoint_s: float) -> float | None:
    if mtbf is None:
        return None
    return goodput(found.world_size, found.step_time_s, mtbf_device_h=mtbf, checkpoint_s=checkpoint_s)


def _point_json(point: CurvePoint, mtbf: float | None, checkpoint_s: float) -> dict[str, Any]:
    found = point.projection
    of_projection = {name: getattr(found, name) for name in ("step_time_s", "low_s", "high_s", "binding")}
    of_point = {name: getattr(point, name) for name in ("layout", "global_batch", "tokens_per_s", "efficiency", "note")}
    share, flags = _goodput(found, mtbf, checkpoint_s), [flag.name for flag in found.flags]
    return {"world_size": found.world_size, **of_point, **of_projection, "goodput": share, "flags": flags}


PROJECT = Command(
    help="project a training step onto other devices, with an error band and its binding resource; runs nothing",
    example="perfsuite project --model llama3-8b --platform h100 --layout dp8-tp2 --global-batch 64",
    arguments=_arguments,
    run=_run,
)
