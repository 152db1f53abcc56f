"""Project one step: time by resource, memory, binding resource and error band."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from perfsuite.base.errors import ConfigurationError, InvalidParameter
from perfsuite.base.units import plural
from perfsuite.models.program import Program
from perfsuite.platforms.quirks import architecture_number, quirks
from perfsuite.projection.calibration import Calibration, Regime
from perfsuite.projection.engine import Projector, StepTime
from perfsuite.projection.job import TrainingJob
from perfsuite.projection.memory import MemoryBreakdown, memory_of
from perfsuite.record.step import Timeline, Training
from perfsuite.schedules import make_schedule, simulate

Resource = Literal["matmul", "attention", "memory", "link", "network", "bubble", "straggler", "host"]
RESOURCES: tuple[Resource, ...] = ("matmul", "attention", "memory", "link", "network", "bubble", "straggler", "host")


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of a step; all of them sum to it."""

    name: str
    resource: Resource
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Flag:
    """A note that a reader of a projection needs."""

    name: str
    """machine, memory-limit, host-bound, tensor-across-nodes, stand-in, missing, overlap, outside-band or one of
    :data:`WIDENING`."""
    text: str


@dataclass(frozen=True, kw_only=True)
class Projection:
    """The projected figures of a case; never stored as a result, baseline or verdict."""

    training: Training
    platform: str
    world_size: int
    step_time_s: float
    low_s: float
    high_s: float
    """The band has 80 % of the measured steps of :attr:`regime`; it may exclude the step time."""
    parts: tuple[Part, ...]
    memory: MemoryBreakdown
    bubble_ratio: float
    regime: str
    band_source: str
    flags: tuple[Flag, ...] = ()
    calibration: str = ""
    lower_bound: bool = False
    """The step takes at least this long: memory is at its limit, or the host is the bottleneck."""

    @functools.cached_property
    def by_resource(self) -> dict[Resource, float]:
        """Return the seconds by resource."""
        totals: dict[Resource, float] = dict.fromkeys(RESOURCES, 0.0)
        for part in self.parts:
            totals[part.resource] += part.seconds
        return totals

    @property
    def binding(self) -> Resource:
        """Return the resource that takes most of the step."""
        return max(RESOURCES, key=lambda resource: self.by_resource[resource])


def project(
    job: TrainingJob, calibration: Calibration, projector: Projector | None = None, *, simulated: bool = False
) -> Projection:
    """Project the step of ``job`` with the constants of ``calibration``.

    ``projector`` has priced other layouts of the same job. Raises ConfigurationError if a required figure is missing: a
    rate of the dtype, or a network for several nodes.
    """
    require_figures(job, calibration, simulated=simulated)
    projector = projector or projector_of(job, calibration)
    layout = job.layout
    step_time = projector.step(layout)
    memory = with_program(job, memory_of(job.architecture, layout, job.implementation, job.capacity))
    beside = _program_parts(job, calibration, memory)
    step_time = step_time._replace(
        seconds=step_time.seconds + sum(seconds for _, _, seconds in beside), parts=(*step_time.parts, *beside)
    )
    flags, lower_bound = _flags(job, calibration, projector, step_time, memory)
    tested = max(calibration.largest_world, job.devices_per_node)  # up to these devices nothing is extrapolated
    if calibration.regime == "platform row only":
        tested = LARGEST_TESTED
    band = find_band(
        calibration.regime,
        kind=(job.device.name, job.training.dtype, calibration.software.partition(",")[0], job.architecture.experts),
        nodes=-(-layout.world_size // job.devices_per_node),
        octaves=math.log2(max(1.0, layout.world_size / tested)),
        doubts=sum(flag.name in WIDENING for flag in flags),
    )
    if not band.low <= 1 <= band.high:
        text = f"measured steps of this kind took {band.low:.2f} to {band.high:.2f} times the projected time"
        flags = (*flags, Flag(name="outside-band", text=f"{text}: the band does not contain it"))
    return Projection(
        training=job.training,
        platform=job.device.name,
        world_size=layout.world_size,
        step_time_s=step_time.seconds,
        low_s=band.low * step_time.seconds,
        high_s=band.high * step_time.seconds,
        parts=tuple(Part(name=name, resource=resource, seconds=value) for name, resource, value in step_time.parts),  # type: ignore[arg-type]
        memory=memory,
        bubble_ratio=step_time.bubble_ratio,
        regime=band.regime,
        band_source=band.source,
        flags=flags,
        calibration=_origin(calibration),
        lower_bound=lower_bound,
    )


def with_program(job: TrainingJob, memory: MemoryBreakdown) -> MemoryBreakdown:
    """Return ``memory`` plus the encoders and the EMA of the training program."""
    if not job.training.program:
        return memory
    program = Program.of(job.training.program)
    return dataclasses.replace(
        memory,
        encoders=float(program.encoders_bytes(job.model, job.training.dtype)),
        ema=memory.parameters / job.implementation.weight_bytes * program.ema_bytes,
    )


def _program_parts(
    job: TrainingJob, calibration: Calibration, memory: MemoryBreakdown
) -> tuple[tuple[str, str, float], ...]:
    """Return (name, resource, seconds) of the work of the training program outside the model.

    Encoders run at the rate of a large product. An average reads and writes memory.
    """
    training, parts = job.training, []
    if flops := Program.of(training.program).frozen_flops(job.model) if training.program else 0.0:
        rate = 1e12 * calibration.value(f"matmul_{training.dtype}_tflops")
        parts.append(("encoders", "matmul", flops * training.micro_batch_size * training.num_micro_batches / rate))
    bandwidth = 1e9 * calibration.value("memory_gb_per_s")
    if memory.ema and bandwidth:
        parts.append(("EMA", "memory", (memory.parameters + 2 * memory.ema) / bandwidth))
    return tuple(parts)


def projector_of(job: TrainingJob, calibration: Calibration) -> Projector:
    """Return the projector for all layouts of a job."""
    code = job.implementation
    if not calibration.simulated and fsdp2_waits(job):  # simulated devices have torch's own FSDP2
        code = dataclasses.replace(code, data_overlap=0.0)
    return Projector(
        model=job.architecture,
        code=code,
        calibration=calibration,
        devices_per_node=job.devices_per_node,
        dtype=job.training.dtype,
    )


def fsdp2_waits(job: TrainingJob) -> bool:
    """Return whether the device's FSDP2 does not overlap: the default on MUSA architectures below mp_31.

    The variable that turns the overlap on for a step turns it on for its projection as well.
    """
    training, device = job.training, job.device
    if training.strategy not in ("fsdp", "hybrid") or training.sharding not in ("gradients", "parameters"):
        return False
    found = quirks(device.family, version="", architecture=architecture_number(device.architecture))
    return any(quirk.name == "fsdp2-does-not-overlap" for quirk in found) and os.environ.get(OVERLAP_VARIABLE) != "0"


def pipeline_timeline(job: TrainingJob, calibration: Calibration) -> Timeline:
    """Simulate a step's pipeline, action by action, with the projected durations.

    Raises InvalidParameter for a layout without stages.
    """
    layout = job.layout
    ranks = layout.shape.size("pp")
    if ranks == 1:
        raise InvalidParameter(f"layout {layout} has no pipeline to draw; give it pp2 or more, or leave --trace out")
    schedule = make_schedule(
        layout.schedule, ranks=ranks, num_micro_batches=layout.num_micro_batches, stages_per_rank=layout.stages_per_rank
    )
    return simulate(schedule, projector_of(job, calibration).step(layout).stages.times, detail=True)


def require_figures(job: TrainingJob, calibration: Calibration, *, simulated: bool = False) -> None:
    """Raise ConfigurationError if a required figure is missing; ``simulated`` devices accept simulated constants."""
    dtype = job.training.dtype
    if calibration.simulated and not simulated:
        raise ConfigurationError(
            f"the calibration of {calibration.device} was measured on a simulated device and says nothing of platform "
            f"{job.device.name}; calibrate on the real one, or project the simulated platform"
        )
    if not calibration.value(f"matmul_{dtype}_tflops"):
        rated = [one for one in ("bf16", "fp16", "fp8", "tf32", "fp32") if calibration.value(f"matmul_{one}_tflops")]
        dtypes = [one for one in rated if one != "fp8" or "bf16" in rated]  # the ends of a model are wide
        choose = f"choose --dtype {', '.join(dtypes)}" if dtypes else "calibrate it (perfsuite calibrate)"
        raise ConfigurationError(f"no rate of {dtype} products is known of {calibration.device}; {choose}")
    wide = "bf16" if dtype == "fp8" else dtype
    for name, figure in (
        (f"matmul_{wide}_tflops", f"rate of {wide} products, in which the ends of a model run,"),
        (f"attention_{wide}_tflops", f"rate of attention in {wide}"),
        ("memory_gb_per_s", "memory bandwidth, which elementwise kernels and the optimizer wait for,"),
    ):
        if not calibration.value(name):
            raise ConfigurationError(
                f"no {figure} is known of {calibration.device}; give it in a --platform-file, or calibrate it"
            )
    world = job.layout.world_size
    if world > 1 and not calibration.value("link_gb_per_s"):
        raise ConfigurationError(
            f"no figure of the link between devices of {calibration.device} is known, and {world} of them talk; "
            "give link in a --platform-file, or calibrate collectives"
        )
    if world > job.devices_per_node and not calibration.value("network_gb_per_s"):
        raise ConfigurationError(
            f"{world} devices are more than the {job.devices_per_node} of a node of {calibration.device}, and no "
            "figure of its network is known; give --network GB/s (of a node, per direction)"
        )


def _origin(calibration: Calibration) -> str:
    if calibration.regime == "platform row only":
        return f"platform row of {calibration.device}, times the shares reached by devices of the back-test"
    software = calibration.software.partition(";")[0]
    return f"{calibration.device} under {software}, to {calibration.largest_world} devices"


def _flags(
    job: TrainingJob, calibration: Calibration, projector: Projector, step_time: StepTime, memory: MemoryBreakdown
) -> tuple[tuple[Flag, ...], bool]:
    """Return the notes of a projection, and whether its time is a lower bound."""
    flags = {"machine": job.node.machine}
    world, by_software = job.layout.world_size, calibration.regime.startswith("software")
    share = memory.share
    if share is not None and not memory.fits:
        fits = "does not fit" if share > 1 else "is at the limit: allocators retry, and steps took up to 36 % longer"
        flags["memory-limit"] = f"{100 * share:.0f} % of the memory by estimate: {fits}"
    if host_s := sum(seconds for name, _, seconds in step_time.parts if name == "launching kernels"):
        flags["host-bound"] = f"the host cannot start kernels faster: {host_s:.3g} s of the step"
    tp = job.layout.groups(job.devices_per_node).get("tp")
    if tp is not None and tp.nodes > 1:
        flags["tensor-across-nodes"] = f"tp{tp.ranks} spans {tp.nodes} nodes of {job.devices_per_node}"
    if calibration.kernels and (count := projector.times.found["rate"]):
        whole = sum(projector.times.found.values())
        flags["outside"] = f"{count} of {whole} kernels are outside the measured sizes"
    network = calibration.constant("network_gb_per_s")
    if world > job.devices_per_node and network is not None and network.source.startswith("assumed"):
        flags["network"] = f"{network.value:g} GB/s of a node is {network.source}; give --network"
    if world > LARGEST_NODE and job.device.devices_per_node is None:
        text = f"nothing is known of its nodes: all {world} devices are taken as one"
        flags["node"] = f"{text}; give devices_per_node in a --platform-file, or --machine"
    if not calibration.simulated and fsdp2_waits(job):
        text = f"FSDP2 does not overlap on {job.device.name} by default"
        flags["overlap"] = f"{text}; set {OVERLAP_VARIABLE}=0 if the step has it"
    if share is None:
        text = "its size is not known, nor whether the step fits and runs undisturbed"
        flags["memory-unknown"] = f"{text}; give memory in a --platform-file"
    used = used_constants(calibration, job.training.dtype)
    if standing := [name for name in used if "back-test" in calibration.constants[name].source]:
        name = "rates" if by_software and any("matmul" in name for name in standing) else "stand-in"
        flags[name] = f"not measured here, typical of other devices: {', '.join(standing)}"
    if by_software and job.architecture.experts > 0:
        once = "; a token is sent once to each node of its experts" * job.implementation.routes_once
        text = "the constants of this software are fitted to dense models; the band is of steps with experts"
        flags["experts"] = text + once
    if calibration.regime == "platform row only" and job.training.compiled:
        flags["compiled"] = "no published step of the back-test has blocks of torch.compile"
    if calibration.regime in ("in situ", "kernels only") and (unknown := calibration.missing()):
        flags["missing"] = f"nothing is known of {', '.join(unknown)}"
    notes = tuple(Flag(name=name, text=text) for name, text in flags.items() if text)
    return notes, bool({"memory-limit", "host-bound"} & flags.keys())


def used_constants(calibration: Calibration, dtype: str) -> list[str]:
    """Return the names of the constants that a step of this dtype uses."""
    dtypes = {dtype, "bf16"} if dtype == "fp8" else {dtype}
    return [one for one in calibration.constants if "_tflops" not in one or dtypes & set(one.split("_"))]


FILE = Path(__file__).with_name("bands.json")
"""File written by ``python -m benchmarks.backtest --write-bands``: for each regime the 10th and 90th percentile of
measured over projected time, and the number of rows."""
PER_OCTAVE = 0.2
"""Relative widening of the band for every doubling of devices beyond the measured ones: from one node to eight the 90th
percentile of llm-foundry on H100 grows by about this."""
LARGEST_TESTED = 2048
"""Devices of the largest row of the back-test."""
DOUBT = 0.5
"""Relative widening of the band for each flag of :data:`WIDENING`."""
WIDENING = ("outside", "network", "node", "memory-unknown", "rates", "compiled")
"""Flags of assumed or missing figures."""
OVERLAP_VARIABLE = "TORCH_MUSA_FSDP2_DISABLE_OVERLAP"
LARGEST_NODE = 8
"""Most devices of a node if the platform does not say it."""


@dataclass(frozen=True, kw_only=True)
class Band:
    """A band of measured over projected time."""

    low: float
    high: float
    regime: str
    """The measurements in words: kind, one node or more, distance."""
    source: str  # The back-test and its number of rows


def kinds_of(nodes: int, device: str = "", dtype: str = "", software: str = "", experts: int = 0) -> tuple[str, ...]:
    """Return the parts of a back-test that a step belongs to, the narrowest first; experts are a part of their own.

    >>> kinds_of(1, "a100_40gb", "bf16")
    ('a100 in 16 bits on one node', 'a100 in 16 bits', 'one node')
    """
    if experts:
        return (f"{software} with experts", "experts") if software else ("experts",)
    kind = f"{device.partition('_')[0]} in {'fp8' if dtype == 'fp8' else '16 bits'}"
    place = "one node" if nodes == 1 else "several nodes"
    own = (f"{software} on {kind} on {place}", f"{software} on {kind}") if software else ()
    return *own, f"{kind} on {place}", kind, place


def find_band(regime: Regime, *, nodes: int, octaves: float, doubts: int = 0, kind: tuple[Any, ...] = ()) -> Band:
    """Return the band of a projection; ``kind`` is its device, dtype, software and number of experts.

    ``octaves`` are doublings of devices beyond the measured ones; ``doubts`` are assumed or missing figures.

    >>> band = find_band("platform row only", nodes=1, octaves=0.0)
    >>> band.low < 1 < band.high
    True
    """
    names = (*(f"{regime}, {each}" for each in kinds_of(nodes, *kind)), regime)
    stored = next(_stored()[name] for name in names if name in _stored())
    wide = 1 + PER_OCTAVE * octaves + DOUBT * doubts
    low, high = stored["low"], stored["high"]
    middle = 1.0 if low <= 1 <= high else math.sqrt(low * high)
    place = "one node" if nodes == 1 else f"{nodes} nodes"
    beyond = f", {octaves:.1f} doublings beyond the measured devices" if octaves >= 0.05 else ""
    assumed = f", {plural(doubts, 'figure')} assumed or missing" if doubts else ""
    return Band(
        low=middle / (1 + wide * (middle / low - 1)),
        high=middle * (1 + wide * (high / middle - 1)),
        regime=f"{regime}, {place}{beyond}{assumed}",
        source=f"80 % of {stored['rows']} rows of the back-test ({stored['tables']})",
    )


@functools.lru_cache(maxsize=1)
def _stored() -> Mapping[str, Any]:
    return dict(json.loads(FILE.read_text(encoding="utf-8")))
