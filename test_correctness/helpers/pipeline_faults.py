"""Pipelines with one known fault each, which must be named, and steps that look into a pipeline from inside a rank."""

from __future__ import annotations

import time
from dataclasses import dataclass

from perfsuite.record.workload import Step
from perfsuite.workloads.training.emulated_pipeline import EmulatedPipeline
from perfsuite.workloads.training.parity import TrainParity


@dataclass(frozen=True, kw_only=True)
class FaultyStage(EmulatedPipeline):
    """One stage raises, runs out of memory, hangs, or computes something else, from its third forward on."""

    culprit: int
    fault: str

    def build(self, rank):
        step = super().build(rank)
        for stage in step.pipeline.stages:
            if stage.stage_index == self.culprit:
                stage.submod.register_forward_hook(self.misbehave())
        return step

    def misbehave(self):
        seen = []

        def hook(module, inputs, output):
            seen.append(1)
            if len(seen) < 3:
                return None
            if self.fault == "raise":
                raise ValueError("bad luck on purpose")
            if self.fault == "memory":
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory, on purpose")
            if self.fault == "hang":
                time.sleep(3600)
            return output * 1.001

        return hook


@dataclass(frozen=True, kw_only=True)
class ForgetfulParity(TrainParity):
    """The gradients of the two copies of the embedding are not added up."""

    def build(self, rank):
        step = super().build(rank)
        step.trainer._add_up_tied = lambda pipeline: None
        return step


def detached(rank):
    """Takes the watch off and puts it on again, and counts the spans that a step then leaves."""
    workload = EmulatedPipeline(mesh="pp2", schedule="zbv", num_micro_batches=4, action_ms=0)
    step = workload.build(rank)
    pipeline = step.pipeline
    spans = []
    span = rank.span
    rank.span = lambda name, **attributes: (spans.append(name), span(name, **attributes))[1]

    def run():
        pipeline.watch.detach()
        spans.clear()
        step.run()
        rank.record("spans_detached", len(spans), reduce="equal")
        wrapped = [name for name in vars(pipeline.stages[0]) if name.endswith("_one_chunk")]
        rank.record("wrapped_methods", len(wrapped), reduce="equal")
        pipeline.watch.attach(pipeline.stages)
        spans.clear()
        step.run()
        rank.record("spans_attached", len(spans), reduce="max")
        workload.check(rank, step)

    return run


class ClockStep(Step):
    """Measures how far each rank's clock is from rank 0's; rank r's is made 1000 r seconds fast."""

    def __init__(self, rank):
        self.rank = rank

    def run(self):
        from perfsuite.runtime.ranks.arrival import offset_to_rank0_s

        def now_s():
            return time.perf_counter() + 1000 * self.rank.rank

        offset_s = offset_to_rank0_s(self.rank.device, now_s=now_s)
        self.rank.record(f"offset_s_{self.rank.rank}", offset_s, unit="s", reduce="only")


def clock(rank):
    return ClockStep(rank)
