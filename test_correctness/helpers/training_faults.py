"""Training steps with one known fault each, which the checks must find."""

from __future__ import annotations

import os
import signal
import time

import torch
import torch.distributed as dist

from perfsuite.record.workload import Step
from perfsuite.workloads.training.on_rank import TrainingStep
from perfsuite.workloads.training.train_step import TrainStep


class Checked(Step):
    """A step that runs its own check in every iteration: functions of test files have none."""

    def __init__(self, workload, rank, step):
        self.workload, self.rank, self.step = workload, rank, step

    def run(self):
        self.step.run()
        self.workload.check(self.rank, self.step)

    def close(self):
        self.step.close()


def drifting(rank):
    """One rank's copy of a parameter is not that of the others."""
    workload = TrainStep(model="gpt2-tiny", strategy="ddp")
    step = workload.build(rank)
    with torch.no_grad():
        step.trainer.module.norm.bias[0] += rank.rank * 1e-3
    return Checked(workload, rank, step)


def slow_forward(rank, late, delay_s):
    """One rank takes longer over its forward."""
    step = TrainStep(model="gpt2-tiny", strategy="ddp").build(rank)
    forward = step.trainer.forward

    def slowed(batch):
        if rank.rank == late:
            time.sleep(delay_s)
        return forward(batch)

    step.trainer.forward = slowed
    return step


def dying_reader(rank, folder):
    """A rank with two loader processes is killed."""
    step = TrainStep(model="gpt2-tiny", data="generated", dataset_samples=8, num_workers=2).build(rank)
    assert isinstance(step, TrainingStep)

    def run():
        step.run()
        with open(f"/proc/self/task/{os.getpid()}/children") as children, open(f"{folder}/pids", "w") as pids:
            pids.write(children.read())
        os.kill(os.getpid(), signal.SIGKILL)

    return run


def faulty_part(rank, model, part, culprit, fault):
    """On one rank the part of a model whose name ends so gives NaN, in its backward alone, dies or hangs."""
    workload = TrainStep(model=model, strategy="hybrid", mesh=str(rank.shape))
    step = workload.build(rank)
    for name, module in step.trainer.module.named_modules():
        if name.endswith(part) and rank.rank == culprit:
            right = module.forward

            def wrong(*inputs, right=right):
                if fault == "die":
                    os._exit(7)
                time.sleep(3600 if fault == "hang" else 0)
                if fault == "nan":
                    return right(*inputs) * torch.nan
                output = right(*inputs)
                output.register_hook(lambda gradient: gradient * torch.nan)
                return output

            module.forward = wrong
    return Checked(workload, rank, step)


def greedy(rank, culprit=1, others="wait"):
    """One rank asks for more memory than there is, the others wait for it in a collective or fail of it."""
    buffer = torch.ones(16)

    def run():
        if rank.rank == culprit:
            torch.empty(1 << 60, dtype=torch.uint8)
        if others == "fail":
            raise RuntimeError("connection closed by peer")
        dist.all_reduce(buffer)

    return run


def told_by_kernels(rank, blind=None):
    """Asks the kernels of a small step for its exposed communication; rank ``blind`` sees none of its library."""
    from perfsuite.workloads.training import exposed
    from perfsuite.workloads.training.train_step import TrainStep

    steps = range(0, 240, 80)  # the three that are recorded, all alike
    products = [(0, at, at + 60, "gemm") for at in steps]
    messages = [(1, at + 40, at + 80, "gloo_AllReduce") for at in steps]

    def record_kernels(run, wait):
        run()
        return products if rank.rank == blind else products + messages

    def run():
        exposed.record_kernels, real = record_kernels, exposed.record_kernels
        try:
            told = exposed.ExposedStep(TrainStep(model="gpt2-tiny", strategy="ddp"), rank)._measure_by_kernels()
        finally:
            exposed.record_kernels = real
        rank.record("told", told, reduce="equal")

    return run


CLIP = 1e-3
CLIPPED = (
    {"strategy": "ddp", "dtype": "fp16"},
    {"strategy": "ddp"},
    {"strategy": "zero_redundancy"},
    {"strategy": "fsdp"},
    {"strategy": "fsdp", "dtype": "bf16"},
    {"strategy": "zero1"},
    {"strategy": "zero2", "dtype": "bf16"},
    {"strategy": "zero3"},
)


def norm_after_clipping(rank, strategy, dtype="fp32"):
    """The L2 norm of what the optimizer is given, over all ranks, with clipping and without."""
    from perfsuite.models.layers import local

    norms = {}
    for name, clip in (("before", None), ("after", CLIP)):
        program = {} if clip is None else {"clip": clip}
        workload = TrainStep(model="gpt2-tiny", strategy=strategy, dtype=dtype, program=program)
        step = workload.build(rank)
        optimizer = step.trainer.optimizer
        stepped = optimizer.step

        def watched(*arguments, stepped=stepped, optimizer=optimizer, name=name, **named):
            given = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            total = torch.stack([local(gradient).double().square().sum() for gradient in given]).sum()
            if strategy.startswith(("fsdp", "zero1", "zero2", "zero3")):
                dist.all_reduce(total)
            norms[name] = float(total.sqrt())
            return stepped(*arguments, **named)

        optimizer.step = watched
        step.run()
        step.close()

    def run():
        for name, norm in norms.items():
            rank.record(f"norm_{name}", norm, reduce="max")

    return run


def average_after_steps(rank):
    """The largest difference between the average after three steps and what its formula gives for their weights."""

    step = TrainStep(model="gpt2-tiny", learning_rate=0.1, program={"ema": "fp32"}).build(rank)
    expected = [weight.detach().clone() for weight in step.trainer.weights()]
    for _ in range(3):
        step.run()
        for average, weight in zip(expected, step.trainer.weights(), strict=True):
            average.copy_(0.9999 * average + 0.0001 * weight.detach())
    pairs = list(zip(expected, step.tensors()["ema"], strict=True))
    error = max(float((average - own).abs().max()) for average, own in pairs)
    moved = max(
        float((own - weight).abs().max()) for (_, own), weight in zip(pairs, step.trainer.weights(), strict=True)
    )
    assert moved > 1e-2, "the weights moved away from their average"
    step.close()

    def run():
        rank.record("largest_error", error, reduce="max")

    return run
