"""Bytes that a rank holds between steps, by closed form: weights, optimizer state, encoders, EMA, other copies.

Bytes of a parameter that every rank holds whole, and of one spread over the data axes, as the memory build finds them
for each strategy (test_held.py).  DeepSpeed's wide copy of 16-bit weights counts as optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from perfsuite.base.mesh import MeshShape
from perfsuite.base.units import GIB
from perfsuite.strategies.deepspeed.ds_config import BUCKET
from perfsuite.workloads.training.train_step import TrainStep

PARTS = ("weights", "optimizer", "kept beside", "encoders", "EMA")


@dataclass(frozen=True, kw_only=True)
class PerParameter:
    """Bytes of one parameter."""

    whole: float = 0.0
    spread: float = 0.0
    narrows: bool = False  # Half the bytes in 16 bits

    def on(self, ranks: int, *, narrow: bool) -> float:
        """Return the bytes on one of this many ranks."""
        return (self.whole + self.spread / ranks) / (2 if self.narrows and narrow else 1)


_WHOLE, _SPREAD = PerParameter(whole=4.0), PerParameter(spread=4.0)
_MOMENTS, _SPREAD_MOMENTS = PerParameter(whole=8.0), PerParameter(spread=8.0)
_NARROWS, _SPREAD_NARROWS = PerParameter(whole=4.0, narrows=True), PerParameter(spread=4.0, narrows=True)
_COPY_AND_MOMENTS = PerParameter(spread=12.0)
_NONE = PerParameter()
_STATE: Mapping[str, tuple[PerParameter, PerParameter, PerParameter]] = MappingProxyType(
    {
        "single": (_WHOLE, _MOMENTS, _NONE),
        "ddp": (_WHOLE, _MOMENTS, _WHOLE),  # gradients stay in buckets
        "zero_redundancy": (_WHOLE, _SPREAD_MOMENTS, _WHOLE),
        "fsdp": (_SPREAD, _SPREAD_MOMENTS, _NONE),
        "hybrid": (_SPREAD, _SPREAD_MOMENTS, _NONE),
        "hybrid, replicated": (_WHOLE, _MOMENTS, _NONE),
        "zero0": (_NARROWS, _MOMENTS, _NONE),
        "zero1": (_NARROWS, _COPY_AND_MOMENTS, _NONE),
        "zero2": (_NARROWS, _COPY_AND_MOMENTS, _NONE),
        "zero3": (_SPREAD_NARROWS, _COPY_AND_MOMENTS, _SPREAD_NARROWS),
    }
)
"""Weights, optimizer and other copies, by strategy."""


def held(step: TrainStep, world_size: int) -> Mapping[str, float] | None:
    """Return the bytes of each part on one rank's device after a step; None if the strategy or its options have no
    closed form.

    >>> step = TrainStep(model="opensora", strategy="zero2", dtype="bf16",
    ...                  program={"encoders": "t5xxl-sdvae", "ema": "fp32"})
    >>> parts = held(step, 8)
    >>> {part: round(size / GIB, 3) for part, size in parts.items()}, round(sum(parts.values()) / GIB, 2)
    ({'weights': 1.415, 'optimizer': 1.061, 'kept beside': 0.0, 'encoders': 8.934, 'EMA': 2.83}, 14.24)
    """
    options, model, program = step.options, step.find_model(), step.find_program()
    shape = MeshShape.on(world_size, step.mesh)
    offloaded = any(name.startswith("offload") and on for name, on in options.items())
    if offloaded or options.get("config") or any(shape.size(axis) > 1 for axis in ("pp", "tp", "cp", "ep")):
        return None
    state = _STATE.get(f"{step.strategy}, replicated" if options.get("data") == "replicate" else step.strategy)
    if state is None:
        return None
    narrow, parameters = step.dtype in ("bf16", "fp16"), model.parameters
    ranks = shape.size("dp_shard") if "dp_shard" in shape.names else shape.replicas
    parts = dict(zip(PARTS, (parameters * part.on(ranks, narrow=narrow) for part in state), strict=False))
    if step.strategy == "zero3":  # the bucket of gathered gradients stays
        parts["kept beside"] += (2 if narrow else 4) * min(parameters, BUCKET)
    if step.strategy == "zero0" and narrow:  # the wide copy
        parts["kept beside"] += 4 * parameters
    parts["encoders"] = float(program.encoders_bytes(model, step.dtype))
    parts["EMA"] = program.ema_bytes * parameters / (1 if state[0].whole else ranks)
    return parts


def total_gib(parts: Mapping[str, float]) -> float:
    """Return the sum of all parts in GiB."""
    return sum(parts.values()) / GIB
