"""Training steps with one known fault each, which the checks must find."""

from __future__ import annotations

import os
import signal
import time

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
    import torch

    workload = TrainStep(model="gpt2-tiny", strategy="ddp")
    step = workload.build(rank)
    with torch.no_grad():
        step.trainer.module.norm.bias[0] += rank.rank * 1e-3
    return Checked(workload, rank, step)


def deaf_parity(rank):
    """Gradients are never averaged."""
    twin = TrainStep(model="gpt2-tiny", strategy="ddp").twin()
    step = twin.build(rank)
    step.trainer.unit.require_backward_grad_sync = False
    return Checked(twin, rank, step)


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
    import torch

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
    import torch
    import torch.distributed as dist

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
    from perfsuite.workloads.training.exposed import Kernel
    from perfsuite.workloads.training.train_step import TrainStep

    steps = range(0, 240, 80)  # the three that are recorded, all alike
    products = [Kernel(name="gemm", start_ns=at, end_ns=at + 60) for at in steps]
    messages = [Kernel(name="gloo_AllReduce", start_ns=at + 40, end_ns=at + 80, stream=1) for at in steps]

    def record_kernels(run, wait):
        run()
        return products if rank.rank == blind else products + messages

    def run():
        exposed.record_kernels, real = record_kernels, exposed.record_kernels
        try:
            told = exposed.ExposedStep(TrainStep(model="gpt2-tiny", strategy="ddp"), rank)._tell_by_kernels()
        finally:
            exposed.record_kernels = real
        rank.record("told", told, reduce="equal")

    return run
