"""Rank the layouts that fit by step time, with ties where the difference is within its error.

Constants that two layouts share cancel in the difference of their steps. The error of a resource counts only for the
time that one layout waits longer for it than the other.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from perfsuite.base.units import GIB
from perfsuite.models import find_projected, trained_like
from perfsuite.models.decoder import Decoder
from perfsuite.models.language import LanguageModel
from perfsuite.projection.calibration import Calibration
from perfsuite.projection.engine import Projector, StepTime
from perfsuite.projection.job import TrainingJob
from perfsuite.projection.layout import Layout, Layouts
from perfsuite.projection.memory import MEMORY_LIMIT, Memories, MemoryBreakdown
from perfsuite.projection.step import fsdp2_waits, projector_of
from perfsuite.record.step import Training

DIFFERENCE_FLOOR = 0.01
"""Smallest difference that separates two layouts, relative to a step. In every measured group of the back-test the best
layout was projected within 0.7 % of the first choice."""
_AGAIN = 40
"""Number of top layouts whose unequal stages are simulated."""
_ERROR_OF: Mapping[str, tuple[str, float]] = MappingProxyType(
    {
        "matmul": ("matmul", 0.15),
        "attention": ("attention", 0.4),
        "memory": ("memory", 0.1),
        "link": ("link_gb", 0.25),
        "network": ("network_gb", 0.25),
        "bubble": ("", 0.05),
        "straggler": ("rank_spread", 0.5),
        "host": ("host_step", 0.5),
    }
)
"""By resource: the constant that it depends on, and its relative error if the calibration has none."""
_MOST_DEVICES = 1 << 17


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A layout that fits into memory."""

    layout: Layout
    step: StepTime
    memory: MemoryBreakdown

    @functools.cached_property
    def by_resource(self) -> dict[str, float]:
        """Return the seconds of the step by resource."""
        totals: Counter[str] = Counter()
        for _, resource, seconds in self.step.parts:
            totals[resource] += seconds  # type: ignore[assignment] # a Counter of seconds
        return dict(totals)

    @property
    def binding(self) -> str:
        """Return the resource that takes most of the step."""
        return max(self.by_resource, key=self.by_resource.__getitem__)

    @property
    def simplicity(self) -> tuple[int, int, int, int, float]:
        """Return a sort key: fewest kinds of parallelism, then least recomputation, sharding and stages, then time."""
        layout = self.layout
        kinds = sum(size > 1 for _, size in layout.shape.axes)
        again = ("none", "selective", "full").index(layout.checkpointing)
        spread = ("none", "optimizer", "gradients", "parameters").index(layout.sharding)
        return kinds, again, spread, layout.stages_per_rank, self.step.seconds


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The ranked layouts of a job, the ties of the fastest, and the reasons of rejections."""

    job: TrainingJob
    world_size: int
    global_batch: int
    ranked: tuple[Candidate, ...]
    """All layouts that fit, the fastest first."""
    ties: tuple[Candidate, ...]
    """Layouts whose difference to the fastest is within its error, the simplest first."""
    legal: int
    rejected: Mapping[str, int]
    """Number of rejected layouts by reason, including memory."""
    errors: Mapping[str, float]
    smallest: tuple[int, Layout, MemoryBreakdown] | None = None
    """If no layout fits: the smallest world on which one fits, the layout and its memory."""

    @property
    def chosen(self) -> Candidate | None:
        """Return the simplest of the ties; None if no layout fits."""
        return self.ties[0] if self.ties else None

    @functools.cached_property
    def tied(self) -> frozenset[int]:
        """Return the ``id`` of each of the :attr:`ties`; comparing thousands of layouts by field takes longer."""
        return frozenset(id(one) for one in self.ties)

    @property
    def others(self) -> tuple[Candidate, ...]:
        """Return the layouts that fit outside the ties, the fastest first."""
        return tuple(one for one in self.ranked if id(one) not in self.tied)

    def of_mesh(self, mesh: str) -> tuple[Candidate, ...]:
        """Return the layouts of a mesh as written, the fastest first; empty if none fits."""
        return tuple(candidate for candidate in self.ranked if str(candidate.layout) == mesh)


def advise(
    training: Training, *, base: TrainingJob, calibration: Calibration, world_size: int, global_batch: int
) -> Advice:
    """Rank every legal layout of a training step on ``world_size`` devices.

    ``training`` has the model, the dtype and all fields that are independent of the layout. ``base`` is any job of it.
    """
    choices = _choices(base, world_size, global_batch)
    pricing = _Pricing(base, calibration)
    fitting, legal = [], 0
    for layout in choices.legal():
        legal += 1
        memory = pricing.memory(layout)
        if memory.fits:
            fitting.append(Candidate(layout=layout, step=pricing.step(layout), memory=memory))
    fitting.sort(key=lambda candidate: candidate.step.seconds)
    top = [dataclasses.replace(one, step=pricing.step(one.layout, simulated=True)) for one in fitting[:_AGAIN]]
    ranked = (*sorted(top, key=lambda candidate: candidate.step.seconds), *fitting[_AGAIN:])
    rejected = Counter(choices.rejected)
    if too_large := legal - len(fitting):
        rejected[f"more than {MEMORY_LIMIT:.0%} of {base.capacity / GIB:.4g} GiB"] = too_large
    errors = errors_of(calibration)
    return Advice(
        job=base,
        world_size=world_size,
        global_batch=global_batch,
        ranked=ranked,
        ties=ties_of(ranked, errors),
        legal=legal,
        rejected=dict(rejected.most_common()),
        errors=errors,
        smallest=None if fitting else smallest_that_fits(base, calibration, world_size, global_batch),
    )


def _choices(base: TrainingJob, world_size: int, global_batch: int) -> Layouts:
    return Layouts(
        model=base.model,
        world_size=world_size,
        global_batch=global_batch,
        devices_per_node=base.node.devices or world_size,
        fused_attention=not any((*base.implementation.score_bytes, (base.implementation.selective or (0.0,))[0])),
    )


class _Pricing:
    """Memory and step of layouts; layouts whose code is the same share their prices."""

    def __init__(self, base: TrainingJob, calibration: Calibration) -> None:
        self._base, self._calibration = base, calibration
        sharded = dataclasses.replace(base.training, sharding="gradients")
        self._waits = fsdp2_waits(dataclasses.replace(base, training=sharded))
        self._kept: dict[object, tuple[Memories, Projector]] = {}

    def memory(self, layout: Layout) -> MemoryBreakdown:
        """Return the memory of the fullest rank."""
        return self._of(layout)[0].of(layout)

    def step(self, layout: Layout, *, simulated: bool = False) -> StepTime:
        """Return the step from the closed form, or from ``simulated`` actions of the pipeline."""
        return self._of(layout)[1].step(layout, simulated=simulated)

    def _of(self, layout: Layout) -> tuple[Memories, Projector]:
        # The fields of a layout that change the code: tp (padded words), sharding, gradient accumulation.
        key = (
            *(layout.shape.size("tp"), layout.sharding == "parameters", layout.num_micro_batches > 1),
            self._waits and layout.sharding == "gradients",
        )
        if key not in self._kept:
            job = job_of(self._base, layout)
            memories = Memories(model=job.architecture, code=job.implementation, capacity=job.capacity)
            self._kept[key] = memories, projector_of(job, self._calibration)
        return self._kept[key]


def job_of(base: TrainingJob, layout: Layout) -> TrainingJob:
    """Return the job of the same training step with another layout."""
    training = dataclasses.replace(base.training, **layout.recorded)
    code = base.implementation if base.published_software else None
    return TrainingJob.of(training, base.device, node=base.node, implementation=code)


def errors_of(calibration: Calibration) -> dict[str, float]:
    """Return the relative error of each resource, from the constants that it depends on."""
    errors = {name: one.relative_error for name, one in {**calibration.constants, **calibration.traits}.items()}
    return {
        resource: max((error for name, error in errors.items() if start and name.startswith(start)), default=unknown)
        for resource, (start, unknown) in _ERROR_OF.items()
    }


def difference_error(first: Candidate, second: Candidate, errors: Mapping[str, float]) -> float:
    """Return the error of the difference of two steps in seconds.

    Each resource counts with the time that one step waits longer for it. The floor is the error of the model's terms.
    """
    one, other = first.by_resource, second.by_resource
    squares = sum(((one.get(name, 0.0) - other.get(name, 0.0)) * error) ** 2 for name, error in errors.items())
    return math.sqrt(squares) + DIFFERENCE_FLOOR * min(first.step.seconds, second.step.seconds)


def ties_of(ranked: Sequence[Candidate], errors: Mapping[str, float]) -> tuple[Candidate, ...]:
    """Return the layouts whose difference to the fastest is within its error, the simplest first."""
    if not ranked:
        return ()
    best = ranked[0]
    alike = [one for one in ranked if one.step.seconds - best.step.seconds <= difference_error(best, one, errors)]
    return tuple(sorted(alike, key=lambda candidate: candidate.simplicity))


def smallest_that_fits(
    base: TrainingJob, calibration: Calibration, world_size: int, global_batch: int
) -> tuple[int, Layout, MemoryBreakdown] | None:
    """Double the world until a layout fits; return world, layout and memory, or None."""
    count, pricing = world_size * 2, _Pricing(base, calibration)
    while count <= _MOST_DEVICES:
        legal = _choices(base, count, max(global_batch, count)).legal()
        sized = ((pricing.memory(layout), layout) for layout in legal)
        memory, layout = min(sized, key=lambda pair: pair[0].total, default=(None, None))
        if memory and layout and memory.fits:
            return count, layout, memory
        count *= 2
    return None


def case_of(training: Training, layout: Layout) -> str:
    """Return the ``perf(...)`` call that measures a layout; empty if the suite has no such model or strategy."""
    model = find_projected(training.model, training.overrides)
    like = trained_like(model) if isinstance(model, Decoder) else (training.model, training.overrides)
    if like is None:
        return ""
    shape = layout.shape
    options: dict[str, object] = {}
    strategy = "hybrid"
    staged, several = shape.size("pp") > 1, shape.replicas * shape.size("cp") > 1
    if layout.sharding == "optimizer":
        if shape.names != ("dp",):
            return ""
        strategy = "zero1"
    elif several and layout.sharding == "none":
        options["data"] = "replicate"
    elif layout.sharding == "gradients" and not staged:
        options["reshard"] = False
    if staged and layout.schedule != "1f1b":
        options |= {"schedule": layout.schedule, "stages_per_rank": layout.stages_per_rank}
    model = find_projected(*like)
    padding = model.padding(shape.size("tp")) if isinstance(model, LanguageModel) else {}
    overrides = {**like[1], **padding}
    arguments = {
        "model": like[0],
        **({"overrides": overrides} if overrides else {}),
        "strategy": strategy,
        "mesh": str(layout),
        **({"options": options} if options else {}),
        "micro_batch_size": layout.micro_batch_size,
        "accumulation": layout.num_micro_batches,
        "dtype": training.dtype,
        **({"checkpointing": layout.checkpointing} if layout.checkpointing != "none" else {}),
    }
    fields = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return f"perf(workloads.TrainStep({fields}), on={layout.world_size})"


def described(layout: Layout, shardings: Sequence[str] = ()) -> str:
    """Return a layout in one line; ``shardings`` are alternatives to its own sharding.

    >>> described(Layout.parse("dp4-tp2", global_batch=64, micro_batch_size=2, sharding="optimizer"))
    'dp4-tp2, optimizer sharded, 8 x 2 samples'
    """
    parts = [str(layout)]
    if layout.sharding != "none":
        parts.append(f"{' or '.join(shardings or [layout.sharding])} sharded")
    if layout.schedule:
        parts.append(layout.schedule + (f" v{layout.stages_per_rank}" if layout.stages_per_rank > 1 else ""))
    if layout.checkpointing != "none":
        parts.append(f"{layout.checkpointing} recomputation")
    return ", ".join([*parts, f"{layout.num_micro_batches} x {layout.micro_batch_size} samples"])
