"""The training step: a model, a strategy, a mesh and a batch, with separate data, forward, backward and optimizer.

A step is one step of the optimizer with all its micro-batches.  If a rank has the whole model, the spans ``data``,
``forward``, ``backward`` and ``optimizer`` do not overlap and the remainder is the rest of the step.  Stages of a
pipeline have a timeline of actions instead.  There is no barrier before a sample.

Its memory is estimated without torch from the parts of :mod:`perfsuite.projection.memory`.  State that an option moves
to the host does not count.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from perfsuite.base.errors import InvalidParameter
from perfsuite.base.mesh import MeshShape
from perfsuite.base.units import GIB, plural
from perfsuite.record.workload import Rank, Step, Workload
from perfsuite.strategies.deepspeed.zero import BUCKET
from perfsuite.workloads.training.case import TrainCase

if TYPE_CHECKING:
    from perfsuite.platforms.base import DeviceModel
    from perfsuite.projection.memory import MemoryBreakdown


class TrainStep(TrainCase):
    """One optimizer step of a model under a strategy, on any mesh that the strategy supports."""

    def build(self, rank: Rank) -> Step:
        """Return the model under its strategy with its data; for other purposes than time, the step of a build."""
        if rank.purpose == "time":
            from perfsuite.workloads.training.on_rank import TrainingStep

            return TrainingStep(self, rank)
        from perfsuite.workloads.training import builds

        return builds.STEPS[rank.purpose](self, rank)

    def twin(self) -> Workload | None:
        """Return the same strategy on a model that one process can check."""
        from perfsuite.workloads.training.parity import TrainParity

        options = {name: value for name, value in self.options.items() if name != "config"}
        return TrainParity(
            model=self.model,
            strategy=self.strategy,
            overrides=self.overrides,
            options=options,
            # Stages keep the schedule; elsewhere two micro-batches are enough.
            accumulation=self.accumulation if self.staged else min(self.accumulation, 2),
            micro_batch_size=1 if self.staged else 2,
            dtype=self.dtype,
            checkpointing=self.checkpointing,
            attention=self.attention,
            compiled=self.compiled,
            program={} if (clip := self.find_program().clip) is None else {"clip": clip},
            seed=self.seed,
        )

    def check(self, rank: Rank, step: Step) -> None:
        """Raise WrongResult unless the loss is finite and ranks with copies of the same parameters agree."""
        from perfsuite.workloads.training.on_rank import TrainingStep

        if isinstance(step, TrainingStep):
            step.check()


_OFFLOADED: Mapping[str, tuple[str, ...]] = {
    "offload": ("parameters", "gradients", "optimizer", "updating"),
    "offload_optimizer": ("optimizer", "updating"),
    "offload_parameters": ("parameters",),
}
"""Parts of the estimate that an option moves to the host."""
_MOST_TIMES = 64  # Largest factor by which an error proposes more ranks


def estimate(step: TrainStep, world_size: int, device: DeviceModel) -> MemoryBreakdown | None:
    """Return the peak bytes of the fullest rank by part; None if the strategy or its options are not modelled.

    >>> from perfsuite.platforms import load_catalog
    >>> step = TrainStep(model="gpt2-xl", strategy="ddp", global_batch_size=32)
    >>> memory = estimate(step, 1, load_catalog(()).find("s4000"))
    >>> f"{memory.total / GIB:.0f} GiB, {memory.activations / GIB:.0f} of activations"
    '192 GiB, 151 of activations'
    """
    from perfsuite.projection.job import TrainingJob
    from perfsuite.projection.memory import memory_of
    from perfsuite.projection.step import with_program

    moved = [option for option in _OFFLOADED if step.options.get(option)]
    kept = {name: value for name, value in step.options.items() if name not in (*moved, "cpu_adam")}
    training = dataclasses.replace(step, options=kept).work(MeshShape.on(world_size, step.mesh)).training
    if training is None:
        return None
    job = TrainingJob.of(training, device)
    memory = with_program(job, memory_of(job.architecture, job.layout, job.implementation, job.capacity))
    return dataclasses.replace(memory, **{part: 0.0 for option in moved for part in _OFFLOADED[option]})


def held(step: TrainStep, world_size: int, device: DeviceModel) -> Mapping[str, float] | None:
    """Return the bytes of each part on one rank between steps; None without a closed form.

    The memory build measures the same parts (test_held.py).  DeepSpeed's wide copy of 16-bit weights counts as
    optimizer, except under zero0.  Buckets and other copies count as ``kept beside``.

    >>> from perfsuite.platforms import load_catalog
    >>> step = TrainStep(model="opensora", strategy="zero2", dtype="bf16",
    ...                  program={"encoders": "t5xxl-sdvae", "ema": "fp32"})
    >>> parts = held(step, 8, load_catalog(()).find("s4000"))
    >>> {part: round(size / GIB, 3) for part, size in parts.items()}, round(sum(parts.values()) / GIB, 2)
    ({'weights': 1.415, 'optimizer': 1.061, 'kept beside': 0.0, 'encoders': 8.934, 'EMA': 2.83}, 14.24)
    """
    shape, strategy = MeshShape.on(world_size, step.mesh), step.strategy
    if step.options.get("config") or any(shape.size(axis) > 1 for axis in ("pp", "tp", "cp", "ep")):
        return None
    if any(name.startswith("offload") and on for name, on in step.options.items()):
        return None
    memory = estimate(step, world_size, device)
    if memory is None:
        return None
    narrow, parameters = step.dtype in ("bf16", "fp16"), step.find_model().parameters
    beside, optimizer = 0.0, memory.optimizer
    if strategy in ("ddp", "zero_redundancy"):  # gradients stay in buckets
        beside = 4.0 * parameters
    elif strategy == "zero0" and narrow:  # the wide copy
        beside = 4.0 * parameters
        optimizer -= beside
    elif strategy == "zero3":  # the bucket of gathered gradients stays
        beside = memory.parameters + (2 if narrow else 4) * min(parameters, BUCKET)
    return {
        "weights": memory.parameters,
        "optimizer": optimizer,
        "kept beside": beside,
        "encoders": memory.encoders,
        "EMA": memory.ema,
    }


def why_not_fit(step: TrainStep, world_size: int, device: DeviceModel, shared_gib: float | None = None) -> str:
    """Return why a step does not fit on a platform's devices by estimate, part by part; empty if it fits.

    Also empty if the memory of the platform or of the strategy is unknown.  ``shared_gib`` is the memory of a host that
    the ranks share.

    >>> from perfsuite.platforms import load_catalog
    >>> step = TrainStep(model="gpt3-175b", strategy="fsdp", checkpointing="full", micro_batch_size=1)
    >>> text = why_not_fit(step, 8, load_catalog(()).find("a100"))
    >>> text.partition(" (")[0], text.rpartition(", ")[2]
    ('gpt3-175b under fsdp on 8 ranks takes 407 GiB by estimate', 'or spread it over 64 ranks')
    """
    memory_gib = shared_gib or (device.memory.value if device.memory else None)
    memory = estimate(step, world_size, device) if memory_gib else None
    if memory is None or _is_within(memory, world_size, shared_gib):
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
    ranks = None if shared_gib else _enough_ranks(step, world_size, device)
    return (
        f"{step.model} under {step.strategy} on {plural(world_size, 'rank')} takes {memory.total / GIB:.0f} GiB by "
        f"estimate ({listed}), and {device.title} has {memory_gib:.4g} GiB{' for all of them' if shared_gib else ''}; "
        f"take fewer samples at once, recompute more, or spread it{f' over {ranks} ranks' if ranks else ''}"
    )


def _is_within(memory: MemoryBreakdown, world_size: int, shared_gib: float | None) -> bool:
    return memory.total <= (shared_gib * GIB / world_size if shared_gib else memory.capacity)


def _enough_ranks(step: TrainStep, world_size: int, device: DeviceModel) -> int | None:
    """Return the smallest larger world, by doubling, on which the step fits; None if there is none."""
    ranks = 2 * world_size
    while not step.mesh and world_size > 1 and ranks <= _MOST_TIMES * world_size:
        try:
            memory = estimate(step, ranks, device)
        except InvalidParameter:  # the global batch does not divide by the ranks
            return None
        if memory is not None and _is_within(memory, ranks, None):
            return ranks
        ranks *= 2
    return None
