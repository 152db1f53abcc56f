"""Long sequences: savings and cost of splitting them, and the methods of attention over a split one (report 004)."""

from __future__ import annotations

import pytest

from perfsuite import sizes, workloads
from perfsuite.base.mesh import MeshShape

TINY = {"model": "gpt2-tiny", "overrides": {"layers": 1, "width": 64, "heads": 4, "words": 128}, "global_batch_size": 4}
# Twenty heads of its width instead of 25, as four ranks divide them; four also divide the padded vocabulary.
XL = {
    "model": "gpt2-xl",
    "overrides": {"heads": 20, "words_multiple": 128},
    "global_batch_size": 16,
    "dtype": "bf16",
    "checkpointing": "full",
}
WAYS = {
    "tensor": ("tp", {"sequence_parallel": False}),
    "sequence": ("tp", {"sequence_parallel": True}),
    "context": ("cp", {"context": "zigzag"}),
}
METHODS = {
    "standard": ("dp", "math", {}),
    "flash": ("dp", "flash", {}),
    "ring": ("cp", "flash", {"context": "ring"}),
    "zigzag": ("cp", "flash", {"context": "zigzag"}),
    "ulysses": ("cp", "flash", {"context": "ulysses"}),
    "torch": ("cp", "flash", {"context": "torch"}),
    "deepspeed": ("cp", "flash", {"context": "deepspeed"}),
}
LONG = [256, 512, 1024, 2048, 4096]


def extended(names, *plain):
    """Return all names; those that are not ``plain`` are extended cases."""
    return [name if name in plain else pytest.param(name, marks=pytest.mark.perf_extended) for name in names]


def step(scale, length, mesh, **case):
    """Return a step of one sample per rank at a time, repeated to the batch; small cases run all at once."""
    model = TINY if scale == "small" else XL
    overrides = {**model["overrides"], "context": length, "sequence_length": length}
    accumulation = 1 if scale == "small" else model["global_batch_size"] // MeshShape.parse(mesh).replicas
    return workloads.TrainStep(
        **{**model, "overrides": overrides, **case}, strategy="hybrid", mesh=mesh, accumulation=accumulation
    )


@sizes(param="length", full=[2048, 4096, 8192, 16384, 32768, 65536, 131072], small=LONG, extended=LONG[1:])
@pytest.mark.parametrize("way", extended(WAYS, "tensor", "sequence"))
def test_long_sequences(perf, length, way, scale, require_fit):
    """Report 004: memory and throughput by length, with and without sequence parallelism, and with context parallelism.
    On the same number of cards: tensor parallel alone, tokens also split between its products, tokens split everywhere.
    """
    axis, options = WAYS[way]
    ranks, batch = (2, {"global_batch_size": 1}) if scale == "small" else (4, {})
    workload = step(scale, length, f"{axis}{ranks}", options=options, builds=("memory",), **batch)
    require_fit(workload, ranks)
    perf(workload, on=ranks)


@sizes(param="length", full=[16384], small=[1024])
@pytest.mark.parametrize("method", extended(METHODS, "zigzag"))
def test_attention(perf, length, method, scale, require_fit):
    """Report 004: one length on four cards, each with whole samples, or all with a part of every sample."""
    axis, attention, options = METHODS[method]
    # The exposed build runs twelve pairs of steps; for the small scale test_tensor_parallel has it.
    builds = ("memory", "traffic") if scale == "small" else ("memory", "exposed", "traffic")
    workload = step(scale, length, f"{axis}4", attention=attention, options=options, builds=builds)
    require_fit(workload, 4)
    perf(workload, on=4)
