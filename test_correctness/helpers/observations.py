"""Observations of a device whose constants are known, as its cases would report them."""

from __future__ import annotations

import dataclasses

from perfsuite.platforms import load_catalog
from perfsuite.projection.calibration import Constant
from perfsuite.projection.job import TrainingJob
from perfsuite.projection.observation import Observation
from perfsuite.projection.step import project
from perfsuite.record.step import Training

TFLOPS, GB_PER_S, KERNEL_US, ALPHA_US, BUSBW = 80.0, 600.0, 2.0, 21.0, 100.0
"""Of the device: products, memory, a kernel beside its work, a ring of 8 ranks, and what it approaches."""


def seen(kind, time_s, case="", **changes):
    plain = Observation(
        case=case or f"test_it[{kind}]",
        kind=kind,
        parameters={},
        platform="s4000",
        world_size=1,
        time_s=time_s,
        software="torch 2.7.1",
    )
    return dataclasses.replace(plain, **changes)


def product(side, **changes):
    time_s = 2 * side**3 / (TFLOPS * 1e12) + KERNEL_US * 1e-6
    sizes = {"m": side, "k": side, "n": side, "dtype": "bf16"}
    return seen("Matmul", time_s, f"test_matmul[{side}]", parameters=sizes, **changes)


def copied(size, **changes):
    time_s = 2 * size / (GB_PER_S * 1e9) + KERNEL_US * 1e-6
    return seen("MemoryCopy", time_s, f"test_memory_copy[{size}]", parameters={"buffer_bytes": size}, **changes)


def reduced(size, ranks=8, **changes):
    time_s = ALPHA_US * 1e-6 + 2 * (ranks - 1) / ranks * size / (BUSBW * 1e9)
    name = f"test_all_reduce[ws{ranks}-{size}]"
    return seen("AllReduce", time_s, name, world_size=ranks, parameters={"message_bytes": size}, **changes)


def beside(part, time_s):
    given = {"part": part, "side": 8192, "products": 16, "message_bytes": 1 << 28}
    return seen("MatmulBesideAllReduce", time_s, f"test_contention[{part}]", world_size=8, parameters=given)


def kernels(**changes):
    """Cases that tell every constant of one node's device."""
    return [
        *(product(side, **changes) for side in (1024, 4096, 8192)),
        *(copied(size, **changes) for size in (1 << 20, 1 << 28, 1 << 30)),
        *(reduced(size, **changes) for size in (1 << 10, 1 << 20, 1 << 30)),
    ]


def steps(calibration, *, ratio=1.0, optimizer=1.0, host_s=0.0, layers=(1, 2, 4), batch=2, **changes):
    """Steps of a device with these constants, whose blocks take ``ratio`` times their kernels, and their optimizer."""
    known = {
        "in_situ_ratio": Constant(value=ratio, unit="ratio", source="chosen"),
        "optimizer_ratio": Constant(value=optimizer, unit="ratio", source="chosen"),
    }
    changed = dataclasses.replace(calibration, traits={**calibration.traits, **known})
    device = load_catalog().find("s4000")
    made = []
    for count in layers:
        training = Training(
            model="llama2-7b", overrides={"layers": count}, micro_batch_size=batch, dtype="bf16", strategy="single"
        )
        took = project(TrainingJob.of(training, device), changed, simulated=changed.simulated).step_time_s + host_s
        made.append(seen("TrainStep", took, f"test_depth[l{count}]", training=training, **changes))
    return made
