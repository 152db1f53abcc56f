"""A layout: mesh, sharding, pipeline schedule and batch, with its rules.

The axes have the order of :mod:`perfsuite.base.mesh`: tp has neighbouring ranks, pp is outermost.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

from perfsuite.base.errors import InvalidParameter
from perfsuite.base.mesh import DATA_PARALLEL, MeshShape
from perfsuite.models import Model
from perfsuite.models.base import Checkpointing
from perfsuite.models.language import LanguageModel
from perfsuite.record.step import Training
from perfsuite.schedules import check_counts, find_schedule

Sharding = Literal["none", "optimizer", "gradients", "parameters"]


class Group(NamedTuple):
    """Placement of one group along an axis."""

    ranks: int
    per_node: int
    """Most ranks of the group on one node."""
    nodes: int
    stride: int
    concurrent: int
    """Groups of this axis that send from one node at the same time and share its network."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way to spread a job over devices.

    >>> layout = Layout.parse("dp64-tp8-pp2", global_batch=1024, micro_batch_size=1)
    >>> str(layout), layout.num_micro_batches, layout.groups(8)["dp"]
    ('pp2-dp64-tp8', 16, Group(ranks=64, per_node=1, nodes=64, stride=8, concurrent=8))
    """

    shape: MeshShape
    sharding: Sharding = "none"
    schedule: str = ""
    stages_per_rank: int = 1
    micro_batch_size: int = 1
    num_micro_batches: int = 1
    checkpointing: Checkpointing = "none"
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        for name in ("stages_per_rank", "micro_batch_size", "num_micro_batches"):
            if getattr(self, name) < 1:
                raise InvalidParameter(f"{name}={getattr(self, name)} is not a count; choose a whole number from 1")
        if self.schedule:
            find_schedule(self.schedule)
        if self.stages_per_rank > 1 and self.shape.size("pp") == 1:
            raise InvalidParameter(
                f"stages_per_rank={self.stages_per_rank} cuts the layers of a pipeline, and layout {self} has no "
                "pp; add pp2 or more, or leave it out"
            )

    @classmethod
    def parse(
        cls,
        text: str,
        *,
        global_batch: int,
        micro_batch_size: int = 1,
        schedule: str = "",
        stages_per_rank: int | None = None,
        sharding: Sharding = "none",
        checkpointing: Checkpointing = "none",
        sequence_parallel: bool = False,
    ) -> Layout:
        """Return the layout of a mesh; micro-batches follow from the global batch.

        A pipeline without a schedule gets 1f1b. Raises InvalidParameter with the legal batches, the nearest first.
        """
        shape = MeshShape.parse(text)
        about = {"pp": schedule and f"schedule {schedule}", "tp": sequence_parallel and "sequence_parallel"}
        for axis, option in about.items():
            if option and shape.size(axis) == 1:
                raise InvalidParameter(
                    f"{option} is about {axis}, which layout {text} lacks; add {axis}2 or leave it out"
                )
        if not schedule and shape.size("pp") > 1:
            schedule = "1f1b" if (stages_per_rank or 1) == 1 else "interleaved_1f1b"
        stages = stages_per_rank or (find_schedule(schedule).fewest_stages_per_rank if schedule else 1)
        spread = shape.replicas * micro_batch_size
        if global_batch < 1 or global_batch % spread:
            below = global_batch // spread * spread
            near = sorted({below or spread, below + spread}, key=lambda batch: abs(batch - global_batch))
            raise InvalidParameter(
                f"global batch {global_batch} does not divide by {shape.replicas} replicas x micro_batch_size "
                f"{micro_batch_size} = {spread}; choose {' or '.join(map(str, near))}"
            )
        return cls(
            shape=shape,
            sharding=sharding,
            schedule=schedule,
            stages_per_rank=stages,
            micro_batch_size=micro_batch_size,
            num_micro_batches=global_batch // spread,
            checkpointing=checkpointing,
            sequence_parallel=sequence_parallel,
        )

    @classmethod
    def of(cls, training: Training) -> Layout:
        """Return the layout of a recorded training step."""
        return cls(
            shape=MeshShape.parse(training.layout),
            **{field.name: getattr(training, field.name) for field in fields(cls) if field.name != "shape"},
        )

    @property
    def recorded(self) -> dict[str, Any]:
        """Return the fields of a training step with this layout: the reverse of :meth:`of`."""
        return {**{name: value for name, value in vars(self).items() if name != "shape"}, "layout": str(self)}

    def __str__(self) -> str:
        return str(self.shape)

    @property
    def world_size(self) -> int:
        """Devices."""
        return self.shape.world_size

    @property
    def dp(self) -> int:
        """Return the replicas made by data parallelism alone, without ep."""
        return math.prod(self.shape.size(axis) for axis in DATA_PARALLEL)

    @property
    def global_batch(self) -> int:
        """Samples of a step."""
        return self.shape.replicas * self.micro_batch_size * self.num_micro_batches

    @property
    def stages(self) -> int:
        """Return the number of stages over all ranks of a pipeline."""
        return self.shape.size("pp") * self.stages_per_rank

    def most_layers(self, layers: int) -> int:
        """Return the layers of the fullest rank of a model with so many."""
        return math.ceil(layers / self.stages) * self.stages_per_rank

    def groups(self, devices_per_node: int) -> dict[str, Group]:
        """Return the placement of the groups of every axis with several ranks.

        Additional groups: ``data``, all ranks with the same parameters (dp, ep and cp together). ``shard``, the ranks
        of ``data`` that may shard them, without copies along dp_replicate. ``experts``, the ranks of ``shard`` with the
        same experts.
        """
        return _groups(self.shape, devices_per_node)

    def check(self, model: Model, *, world_size: int | None = None) -> None:
        """Raise InvalidParameter with the legal choices if the model cannot be spread so."""
        if world_size is not None and self.world_size != world_size:
            rest = self.world_size // self.dp
            fitting = f"dp{world_size // rest}" if world_size % rest == 0 else f"a world of a multiple of {rest}"
            raise InvalidParameter(
                f"layout {self} has {self.world_size} ranks for a world of {world_size}; choose {fitting}"
            )
        tp, cp, ep, pp = (self.shape.size(axis) for axis in ("tp", "cp", "ep", "pp"))
        if isinstance(model, LanguageModel):
            model.built_for(tp).check_tensor_parallel(tp)
        elif set(self.shape.names) - {"dp", "dp_replicate", "dp_shard"}:
            raise InvalidParameter(f"model {model.name} is spread along dp only; {self} has other axes")
        if self.stages > model.layers:
            legal = [count for count in range(1, model.layers + 1) if model.layers % count == 0]
            near = sorted(legal, key=lambda count: abs(count - self.stages))[:4]
            raise InvalidParameter(
                f"{self.stages} stages (pp{pp} x {self.stages_per_rank}) for layers={model.layers} of model "
                f"{model.name}; every stage has a layer: choose {', '.join(map(str, near))} stages"
            )
        if self.schedule:
            counts = {"num_micro_batches": self.num_micro_batches, "stages_per_rank": self.stages_per_rank}
            check_counts(self.schedule, ranks=pp, **counts)
        if model.tokens_per_sample % (cp * (tp if self.sequence_parallel else 1)):
            raise InvalidParameter(
                f"cp{cp} (and tp under sequence parallelism) does not divide the {model.tokens_per_sample} tokens of a "
                "sample; choose a divisor"
            )
        if model.experts % ep:
            raise InvalidParameter(f"ep{ep} does not divide the {model.experts} experts of model {model.name}")
        if model.experts and tp > 1 and not self.sequence_parallel:
            raise InvalidParameter(
                f"layout {self} without sequence parallelism would send every row of model {model.name} {tp} times; "
                "add --sequence-parallel, or leave tp out"
            )
        if ep > 1 and not model.experts:
            raise InvalidParameter(f"model {model.name} has no experts; leave ep out of {self}")


@functools.lru_cache(maxsize=4096)
def _groups(shape: MeshShape, devices_per_node: int) -> dict[str, Group]:
    groups = {}
    stride = 1
    for axis, size in reversed(shape.axes):
        groups[axis] = _group(size, stride, devices_per_node, shape.world_size)
        stride *= size
    tp = shape.size("tp")
    data = shape.replicas * shape.size("cp")
    groups["data"] = _group(data, tp, devices_per_node, shape.world_size)
    sharded, ep = data // shape.size("dp_replicate"), shape.size("ep")
    groups["shard"] = _group(sharded, tp, devices_per_node, shape.world_size)
    apart = tp if sharded // ep == shape.size("cp") else ep * tp
    groups["experts"] = _group(sharded // ep, apart, devices_per_node, shape.world_size)
    return groups


def _group(ranks: int, stride: int, devices_per_node: int, world_size: int) -> Group:
    on_node = min(devices_per_node, world_size)
    per_node = max(1, min(ranks, on_node // stride))
    return Group(
        ranks=ranks,
        per_node=per_node,
        nodes=math.ceil(ranks / per_node),
        stride=stride,
        concurrent=max(1, on_node // per_node),
    )


_MOST_MICRO_BATCH = 16
_UNEVEN = (2, 4)
"""Stages per rank that are tried if the stages do not divide the layers; the first stages then have one more."""
_CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "selective", "full")
_SHARDING: tuple[Sharding, ...] = ("none", "optimizer", "gradients", "parameters")


@dataclass(kw_only=True)
class Layouts:
    """The choices; ``rejected`` is complete after all layouts were taken."""

    model: Model
    world_size: int
    global_batch: int
    devices_per_node: int
    fused_attention: bool = False
    """Scores are never kept and no product is recomputed selectively: selective recomputation saves little."""
    rejected: Counter[str] = field(default_factory=Counter)

    def legal(self) -> Iterator[Layout]:
        """Yield all layouts that break no rule, also those that do not fit into memory."""
        for shape in self._shapes():
            share = self.global_batch // shape.replicas
            sizes = [size for size in _divisors(share) if size <= _MOST_MICRO_BATCH]
            for micro_batch_size in sizes:
                yield from self._choices(shape, micro_batch_size, share // micro_batch_size)

    def _shapes(self) -> Iterator[MeshShape]:
        """Yield the meshes that divide the model and the batch."""
        for tp in self._along_tp():
            for pp in self._along_pp(self.world_size // tp):
                for cp in self._along_cp(self.world_size // tp // pp, tp):
                    for ep in _divisors(math.gcd(self.world_size // tp // pp // cp, self.model.experts or 1)):
                        dp = self.world_size // tp // pp // cp // ep
                        if self.global_batch % (dp * ep):
                            self.rejected[f"the batch does not divide by {dp * ep} replicas"] += 1
                            continue
                        sizes = {"pp": pp, "dp": dp, "ep": ep, "cp": cp, "tp": tp}
                        yield MeshShape.of(**{axis: size for axis, size in sizes.items() if size > 1 or axis == "dp"})

    def _along_tp(self) -> Iterator[int]:
        for tp in _divisors(self.world_size):
            if tp > 1 and not isinstance(self.model, LanguageModel):
                self.rejected["the model is spread along dp only"] += 1
                return
            if tp > self.devices_per_node:
                self.rejected[f"tp beyond a node of {self.devices_per_node}"] += 1
            elif tp > 1 and not self._splits(tp):
                self.rejected["tp does not divide heads, features or words"] += 1
            else:
                yield tp

    def _splits(self, tp: int) -> bool:
        assert isinstance(self.model, LanguageModel)
        try:
            self.model.built_for(tp).check_tensor_parallel(tp)
        except InvalidParameter:
            return False
        return True

    def _along_pp(self, ranks: int) -> Iterator[int]:
        for pp in _divisors(ranks) if isinstance(self.model, LanguageModel) else [1]:
            if pp > self.model.layers:
                self.rejected[f"pp above {self.model.layers} layers"] += 1
            else:
                yield pp

    def _along_cp(self, ranks: int, tp: int) -> Iterator[int]:
        several = _divisors(min(ranks, self.devices_per_node)) if isinstance(self.model, LanguageModel) else [1]
        for cp in (cp for cp in several if ranks % cp == 0):
            if self.model.tokens_per_sample % (2 * cp * tp) and cp * tp > 1:
                self.rejected["cp and tp do not divide the tokens of a sample"] += 1
            else:
                yield cp

    def _choices(self, shape: MeshShape, micro_batch_size: int, count: int) -> Iterator[Layout]:
        pp, several = shape.size("pp"), shape.replicas * shape.size("cp") > 1
        shardings = _SHARDING if several and pp == 1 else _SHARDING[:3] if several else _SHARDING[:1]
        ways = tuple(way for way in _CHECKPOINTING if way != "selective" or not self.fused_attention)
        for schedule, stages_per_rank in self._orders(pp, count):
            if self.fused_attention:
                self.rejected["selective recomputation is not tried where attention is fused"] += len(shardings)
            for sharding in shardings:
                for checkpointing in ways:
                    yield Layout(
                        shape=shape,
                        sharding=sharding,
                        schedule=schedule,
                        stages_per_rank=stages_per_rank,
                        micro_batch_size=micro_batch_size,
                        num_micro_batches=count,
                        checkpointing=checkpointing,
                        sequence_parallel=shape.size("tp") > 1,
                    )

    def _orders(self, pp: int, count: int) -> Iterator[tuple[str, int]]:
        """Yield (schedule, stages per rank)."""
        if pp == 1:
            yield "", 1
            return
        yield "1f1b", 1
        most, rest = divmod(self.model.layers, pp)
        for stages_per_rank in [size for size in _UNEVEN if size <= most] if rest else _divisors(most)[1:]:
            if count % pp:
                self.rejected["interleaving needs micro-batches in multiples of pp"] += 1
            else:
                yield "interleaved_1f1b", stages_per_rank


def _divisors(count: int) -> list[int]:
    """Return the divisors of a number, smallest first.

    >>> _divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [size for size in range(1, math.isqrt(count) + 1) if count % size == 0]
    return sorted({*small, *(count // size for size in small)})
