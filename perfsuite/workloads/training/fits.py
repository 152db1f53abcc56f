"""Memory that a training step needs: a lower bound and an estimate, both without torch.

:func:`why_not_fit` uses a lower bound.  Weights, gradients and Adam's two moments take 16 bytes a parameter, in fp32 as
in 16 bits with a wide copy (Rajbhandari et al. 2020, ZeRO, section 3.1), spread by the strategy.  Full checkpointing
keeps only the input of every block of one micro-batch (Chen et al. 2016, section 3), in 2 bytes.  Logits, a block's
inner activations and buffers are left out.

:func:`why_beyond_estimate` counts these too, as projections do (:mod:`perfsuite.projection.memory`).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perfsuite.base.mesh import MeshShape
from perfsuite.base.units import GIB, plural
from perfsuite.workloads.training.train_step import TrainStep

if TYPE_CHECKING:
    from perfsuite.platforms.base import DeviceModel
    from perfsuite.projection.memory import MemoryBreakdown

STATE_BYTES = 16  # Bytes per parameter: weight, gradient and two moments in fp32, or in 16 bits with a wide copy
_SPREAD: dict[str, int] = {"zero_redundancy": 8, "zero1": 12, "zero2": 14, "zero3": STATE_BYTES, "fsdp": STATE_BYTES}
"""The bytes of them that are spread over the data axes; other strategies spread none."""
_GATHERED_BYTES = 2  # Bytes per parameter that stays gathered if ``reshard`` is off
_ACTIVATION_BYTES = 2
_OFFLOADED: dict[str, tuple[str, ...]] = {
    "offload": ("parameters", "gradients", "optimizer", "updating"),
    "offload_optimizer": ("optimizer", "updating"),
    "offload_parameters": ("parameters",),
}
"""Parts of the estimate that an option moves to the host."""


@dataclass(frozen=True, kw_only=True)
class LeastMemory:
    """Lower bound of the memory of the fullest rank."""

    state_bytes: float
    inputs_bytes: float
    rule: str  # Count of the state, in words

    @property
    def total_gib(self) -> float:
        """Sum of both."""
        return (self.state_bytes + self.inputs_bytes) / GIB


def least_memory(step: TrainStep, world_size: int) -> LeastMemory:
    """Return the lower bound of one rank.

    >>> step = TrainStep(model="llama2-7b", strategy="fsdp", checkpointing="full", micro_batch_size=3)
    >>> least = least_memory(step, 8)
    >>> round(least.state_bytes / 1e9, 2), least.rule
    (13.48, '16 bytes x 6.738e9 parameters / 8')
    """
    shape, model = MeshShape.on(world_size, step.mesh), step.find_model()
    spread, whole = _state(step)
    stages = shape.size("pp") * shape.size("tp")
    data = shape.replicas * shape.size("cp")
    copies = shape.size("ep")  # ranks of ep never copy experts, only other parameters
    per_parameter = spread / (stages * data) + whole / (stages * copies)
    parts = [
        f"{bytes_} bytes x {model.parameters / 1e9:.4g}e9 parameters{f' / {ranks}' if ranks > 1 else ''}"
        for bytes_, ranks in ((spread, stages * data), (whole, stages * copies))
        if bytes_
    ]
    program = step.find_program()
    others = {
        "encoders": program.encoders_bytes(model, step.dtype),
        "EMA": program.ema_bytes * model.parameters / (stages * (copies if whole else data)),
    }
    parts += [f"{size / GIB:.2f} GiB of {name}" for name, size in others.items() if size]
    state = per_parameter * model.parameters + sum(others.values())
    tokens = step.plan(shape).micro_batch_size * model.tokens_per_sample
    inputs = model.layers * tokens * model.width * _ACTIVATION_BYTES / (stages * shape.size("cp"))
    return LeastMemory(state_bytes=state, inputs_bytes=inputs, rule=" + ".join(parts))


def _state(step: TrainStep) -> tuple[int, int]:
    """Return (bytes of a parameter spread over the data axes, bytes that each of their ranks holds)."""
    options = step.options
    if options.get("offload") or options.get("offload_optimizer") or options.get("offload_parameters"):
        return 0, 0
    if step.strategy == "hybrid":
        spread = 0 if options.get("data") == "replicate" else STATE_BYTES
    else:
        spread = _SPREAD.get(step.strategy, 0)
    gathered = _GATHERED_BYTES if step.strategy == "fsdp" and options.get("reshard") is False else 0
    return spread, STATE_BYTES - spread + gathered


def why_not_fit(
    step: TrainStep, world_size: int, device: str, memory_gib: float | None, *, shared: bool = False
) -> str:
    """Return why a step cannot fit on devices of this memory, with figures and rule; empty if it may fit.

    ``shared``: the memory is the host's and is divided among the ranks.

    >>> step = TrainStep(model="gpt3-175b", strategy="fsdp", checkpointing="full", micro_batch_size=1)
    >>> text = why_not_fit(step, 8, "A100", 80.0)
    >>> text.partition(" (")[0], text.partition("; ")[2]
    ('gpt3-175b under fsdp on 8 ranks needs at least 330 GiB on each', 'it takes devices of 330 GiB, or 64 ranks')
    """
    least = least_memory(step, world_size)
    sharing = world_size if shared else 1
    if memory_gib is None or least.total_gib * sharing <= memory_gib:
        return ""
    state, inputs = least.state_bytes / GIB, least.inputs_bytes / GIB
    advice = f"it takes {'a host' if shared else 'devices'} of {math.ceil(least.total_gib * sharing)} GiB"
    if not shared and world_size > 1 and _state(step)[1] == 0 and inputs < memory_gib:
        ranks = world_size
        while state * world_size / ranks + inputs > memory_gib:
            ranks *= 2
        advice += f", or {ranks} ranks"
    return (
        f"{step.model} under {step.strategy} on {plural(world_size, 'rank')} needs at least {least.total_gib:.0f} GiB "
        f"on each ({state:.0f} of state: {least.rule}, {inputs:.0f} of blocks' inputs), and {device} has "
        f"{memory_gib:.4g} GiB{' for all of them' if sharing > 1 else ''}; {advice}"
    )


def estimate(step: TrainStep, world_size: int, device: DeviceModel) -> MemoryBreakdown | None:
    """Return the peak bytes of the fullest rank by part; None if the strategy or its options are not modelled.

    State that an option moves to the host does not count.

    >>> from perfsuite.platforms import load_catalog
    >>> step = TrainStep(model="gpt2-xl", strategy="ddp", global_batch_size=32)
    >>> memory = estimate(step, 1, load_catalog(()).find("s4000"))
    >>> f"{memory.total / GIB:.0f} GiB, {memory.activations / GIB:.0f} of activations"
    '192 GiB, 151 of activations'
    """
    from perfsuite.projection.job import Job
    from perfsuite.projection.memory import memory_of
    from perfsuite.projection.step import with_program

    moved = [option for option in _OFFLOADED if step.options.get(option)]
    kept = {name: value for name, value in step.options.items() if name not in (*moved, "cpu_adam")}
    training = dataclasses.replace(step, options=kept).work(MeshShape.on(world_size, step.mesh)).training
    if training is None:
        return None
    job = Job.of(training, device)
    memory = with_program(job, memory_of(job.architecture, job.layout, job.implementation, job.capacity))
    return dataclasses.replace(memory, **{part: 0.0 for option in moved for part in _OFFLOADED[option]})


def why_beyond_estimate(step: TrainStep, world_size: int, device: DeviceModel) -> str:
    """Return why a step does not fit on a platform's devices by estimate, part by part; empty if it fits.

    Also empty if the memory of the platform or of the strategy is unknown.

    >>> from perfsuite.platforms import load_catalog
    >>> step = TrainStep(model="gpt2-xl", strategy="ddp", global_batch_size=32)
    >>> text = why_beyond_estimate(step, 1, load_catalog(()).find("s4000"))
    >>> text.partition(" (")[0]
    'gpt2-xl under ddp on 1 rank takes 192 GiB by estimate'
    """
    memory = estimate(step, world_size, device) if device.memory else None
    if memory is None or device.memory is None or memory.share is None or memory.share <= 1:
        return ""
    passes = memory.accumulated + memory.activations + memory.logits + memory.temporary
    parts = {"weights": memory.parameters, "optimizer state": memory.optimizer, "buffers": memory.communication}
    parts |= {"encoders": memory.encoders, "EMA": memory.ema}
    if passes > memory.gradients + memory.updating:
        parts |= {"gradients with activations": memory.accumulated, "activations": memory.activations}
        parts |= {"logits": memory.logits, "temporary": memory.temporary}
    else:
        parts |= {"gradients": memory.gradients, "the optimizer's own": memory.updating}
    listed = ", ".join(f"{value / GIB:.1f} {name}" for name, value in parts.items() if value >= 0.05 * GIB)
    return (
        f"{step.model} under {step.strategy} on {plural(world_size, 'rank')} takes {memory.total / GIB:.0f} GiB by "
        f"estimate ({listed}), and {device.title} has {device.memory.value:.4g} GiB; "
        "take fewer samples at once, recompute more, or spread it"
    )
