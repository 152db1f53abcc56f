"""Errors of projections on simulated devices, whose costs are set, after a calibration by kernels and depth.

    python benchmarks/projection_truth.py [--model gpt2-tiny] [--dtype fp32] [--here | --world 64 | --mesh cp2,cp4]

``--here`` takes the cores of this machine instead: their costs are unknown, and other load adds to the errors.
Calibrates by products, copies, attention, all-reduces and steps of 1, 2 and 4 layers at two batches, then projects
other depths, batches, widths and layouts and runs them.  ``--world`` projects data parallelism on so many simulated
devices of one node from what up to 8 of them measured, and runs it on as many ranks.  ``--mesh`` projects steps of
strategy hybrid on those meshes in place of the other cases.  Prints the errors of time and
memory, the band and the parts of the projected step; gates nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from perfsuite.base.mesh import MeshShape
from perfsuite.base.units import GIB
from perfsuite.platforms import detect_machine, load_catalog
from perfsuite.projection.calibration import Calibration
from perfsuite.projection.calibration_of import calibrate
from perfsuite.projection.job import Node, TrainingJob
from perfsuite.projection.observation import Observation
from perfsuite.projection.operations import end_parameters
from perfsuite.projection.step import Projection, project
from perfsuite.record.workload import Budget, Workload
from perfsuite.run.session import Case, PerfSession
from perfsuite.workloads.attention import Attention
from perfsuite.workloads.collective import AllGather, AllReduce, ReduceScatter
from perfsuite.workloads.matmul import Matmul
from perfsuite.workloads.memory_bandwidth import MemoryCopy
from perfsuite.workloads.training.train_step import TrainStep
from simmusa.costs import S4000
from simmusa.device_module import DEVICES
from test_correctness.helpers.simmusa_ranks import QUICK, TRAINING, opened, opened_on, require_built

SLOW = dataclasses.replace(
    S4000,
    flops_per_s={"fp64": 1e10, "fp32": 1e11, "tf32": 1e11, "bf16": 2e11, "fp16": 2e11},
    bytes_per_s=5e9,
    link_bytes_per_s=1e9,
)
"""So slow that the kernels of a small model, and not their launches, take the time."""


HERE = Budget(min_rounds=10, max_rounds=200, max_time_s=1.0, warmup_time_s=0.2, timeout_s=300.0)
"""On this machine, whose clock is no virtual one."""


def observed(session: PerfSession, workload: Workload, ranks: int = 1) -> Observation:
    """One case."""
    platform, budget = ("cpu", HERE) if session.id == "here" else ("s4000", QUICK)
    case = Case(
        id=f"test_it[{platform}-ws{ranks}-{workload}]",
        workload=workload,
        world_size=ranks,
        budget=budget,
        platform=platform,
    )
    found = Observation.of(session.run(case))
    assert found is not None, f"{case.id} has times"
    return found


def kernels(dtype: str, groups: tuple[int, ...] = (2,)) -> Iterator[tuple[Workload, int]]:
    """(workload, ranks) of what a calibration rests on; collectives of ``groups`` of ranks."""
    for side in (64, 128, 256, 384, 512):
        yield Matmul(m=side, k=side, n=side, dtype=dtype), 1
    for size in (1 << 16, 1 << 20, 1 << 23):
        yield MemoryCopy(buffer_bytes=size), 1
    for batch, features in ((2, 32), (8, 32), (2, 64)):
        for direction in ("forward", "backward"):
            yield (
                Attention(
                    batch_size=batch,
                    sequence_length=64,
                    heads=4,
                    kv_heads=4,
                    head_width=features,
                    direction=direction,
                    dtype=dtype,
                ),
                1,
            )
    for ranks in groups:
        for size in (1 << 10, 1 << 16, 1 << 20):
            for kind in (AllReduce, AllGather, ReduceScatter):
                yield kind(message_bytes=size), ranks


def projected_cases(world: int = 0, meshes: Sequence[str] = ()) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """(name, ranks, what differs from a step of 2 layers); on ``world`` ranks or ``meshes`` alone if they are given."""
    for mesh in meshes:
        ranks = MeshShape.parse(mesh).world_size
        for size in (2, 4):
            hybrid = {"strategy": "hybrid", "mesh": mesh, "micro_batch_size": size}
            yield f"{mesh}, micro-batch of {size}", ranks, hybrid
    if meshes:
        return
    if world:
        for strategy in ("ddp", "fsdp"):
            yield f"{strategy} on {world}", world, {"strategy": strategy, "mesh": f"dp{world}"}
        return
    yield "6 layers", 1, {"overrides": {"layers": 6}}
    yield "micro-batch of 8", 1, {"micro_batch_size": 8}
    yield "width 256", 1, {"overrides": {"layers": 2, "width": 256}}
    yield "ddp on 2", 2, {"strategy": "ddp", "mesh": "dp2"}
    yield "ddp on 2, 3 micro-batches", 2, {"strategy": "ddp", "mesh": "dp2", "accumulation": 3}
    yield "fsdp on 2", 2, {"strategy": "fsdp", "mesh": "dp2"}
    yield "fsdp on 2, 3 micro-batches", 2, {"strategy": "fsdp", "mesh": "dp2", "accumulation": 3}
    yield "fsdp on 2, width 256", 2, {"strategy": "fsdp", "mesh": "dp2", "overrides": {"layers": 2, "width": 256}}
    yield "recomputed", 1, {"checkpointing": "full"}
    yield "recomputed selectively", 1, {"checkpointing": "selective"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compared:
    """One step that was projected and run."""

    name: str
    truth: Observation
    found: Projection
    gathered: float
    """Bytes of the ends of the model, which a forward leaves whole where parameters are sharded."""

    @property
    def time_error(self) -> float:
        """Projected over measured step time, less 1."""
        return self.found.step_time_s / self.truth.time_s - 1

    @property
    def memory_errors(self) -> dict[str, float]:
        """The same of allocated memory by component, of those that were measured."""
        found, measured = self.found.memory, self.truth.values
        projected = {
            "weights_gib": found.parameters,
            "gradients_gib": found.gradients,
            "optimizer_gib": found.optimizer,
            "activations_gib": found.activations + found.logits + self.gathered,
            "peak_gib": found.total,
        }
        return {name: size / (measured[name] * GIB) - 1 for name, size in projected.items() if measured.get(name)}


def compared(
    model: str = "gpt2-tiny", dtype: str = "fp32", *, here: bool = False, world: int = 0, meshes: Sequence[str] = ()
) -> tuple[Calibration, list[Compared]]:
    """What simulated devices (or this machine) give for a calibration, and every case that is projected by it.

    ``world``: so many simulated devices are one node, of which 8 at most calibrate.  ``meshes``: of strategy hybrid.
    """
    catalog = load_catalog()

    def step(**changes: Any) -> TrainStep:
        plain = {"model": model, "dtype": dtype, "micro_batch_size": 2, "overrides": {"layers": 2}, "attention": "math"}
        return TrainStep(builds=("memory",), **{**plain, **changes})

    with tempfile.TemporaryDirectory() as logs, ExitStack() as stack:
        if world:
            os.environ[DEVICES] = str(world)
            stack.callback(os.environ.pop, DEVICES)
        machine = detect_machine(catalog, "cpu")
        session = stack.enter_context(
            opened_on(machine, "here", Path(logs), TRAINING) if here else opened(SLOW, Path(logs), TRAINING)
        )
        depths = [
            step(overrides={"layers": layers}, micro_batch_size=batch) for batch in (2, 4) for layers in (1, 2, 4)
        ]
        groups = (2, 8) if world else (2,)
        seen = [observed(session, workload, ranks) for workload, ranks in kernels(dtype, groups)]
        (made,) = calibrate([*seen, *(observed(session, depth) for depth in depths)], catalog)
        found = []
        node = Node(devices=world) if world else None
        for name, ranks, changes in projected_cases(world, meshes):
            truth = observed(session, step(**changes), ranks)
            assert truth.training is not None, "a training step says what it trains"
            job = TrainingJob.of(truth.training, catalog.find("cpu" if here else "s4000"), node=node)
            ends = end_parameters(job.architecture, job.layout, first=True, last=True)
            sharded = job.layout.sharding == "parameters"
            found.append(
                Compared(
                    name=name,
                    truth=truth,
                    found=project(job, made.calibration, simulated=not here),
                    gathered=ends * job.implementation.compute_bytes if sharded else 0.0,
                )
            )
    return made.calibration, found


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="gpt2-tiny")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--here", action="store_true", help="on this machine's cores")
    parser.add_argument("--world", type=int, default=0, help="project data parallelism on so many, and run it")
    parser.add_argument("--mesh", default="", help="project strategy hybrid on these meshes, such as cp2,cp4")
    given = parser.parse_args()
    if given.world and (given.here or given.world < 8):
        parser.error(f"--world={given.world}: give 8 or more simulated devices, without --here")
    if not given.here:
        require_built()
    calibration, cases = compared(
        given.model, given.dtype, here=given.here, world=given.world, meshes=[*filter(None, given.mesh.split(","))]
    )
    for name, one in {**calibration.constants, **calibration.traits}.items():
        print(f"{name:32} {one.value:.4g} {one.unit}")
    for case in cases:
        parts = ", ".join(f"{one.name} {one.resource} {one.seconds * 1e3:.2f}" for one in case.found.parts)
        print(
            f"{case.name:18} {case.truth.time_s * 1e3:8.2f} ms, projected {case.found.step_time_s * 1e3:8.2f} ms "
            f"({case.found.low_s * 1e3:.2f} to {case.found.high_s * 1e3:.2f}) "
            f"{100 * case.time_error:+6.1f} %: {parts}; memory "
            + ", ".join(f"{name} {100 * error:+.1f} %" for name, error in case.memory_errors.items())
        )


if __name__ == "__main__":
    main()
