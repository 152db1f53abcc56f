"""Enumerate the legal layouts of a model on a number of devices, and count the others by broken rule."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from perfsuite.base.errors import InvalidParameter
from perfsuite.base.mesh import MeshShape
from perfsuite.models import Model
from perfsuite.models.base import Checkpointing
from perfsuite.models.language import LanguageModel
from perfsuite.projection.layout import Layout, Sharding

_MOST_MICRO_BATCH = 16
_UNEVEN = (2, 4)
"""Stages per rank that are tried if the stages do not divide the layers; the first stages then have one more."""
_CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "selective", "full")
_SAME = "selective recomputation is none where attention is fused"
_SHARDING: tuple[Sharding, ...] = ("none", "optimizer", "gradients", "parameters")


@dataclass(kw_only=True)
class Layouts:
    """The choices; ``rejected`` is complete after all layouts were taken."""

    model: Model
    world_size: int
    global_batch: int
    devices_per_node: int
    across_nodes: bool = False
    """Tensor parallelism may span several nodes."""
    fused_attention: bool = False
    """Scores are never kept and nothing else is recomputed selectively: selective recomputation changes nothing."""
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
            if tp > self.devices_per_node and not self.across_nodes:
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
        for pp in _divisors(ranks):
            if pp > 1 and not isinstance(self.model, LanguageModel):
                return
            if pp > self.model.layers:
                self.rejected[f"pp above {self.model.layers} layers"] += 1
            else:
                yield pp

    def _along_cp(self, ranks: int, tp: int) -> Iterator[int]:
        if not isinstance(self.model, LanguageModel):
            yield 1
            return
        for cp in _divisors(min(ranks, self.devices_per_node)):
            if ranks % cp:
                continue
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
                self.rejected[_SAME] += len(shardings)
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
