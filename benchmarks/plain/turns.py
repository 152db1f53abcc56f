"""When a plain program measures: once, and again for each line on the standard input of its first rank, until it ends.

A line may have four numbers: how many samples, how many iterations one has, 0 leaves either to the program, how many
seconds the loop runs before its first sample that counts, at least, and 1 where the ranks are to tell each other their
times once at the end, not after each sample.  Processes that waited, their threads and the cores that slept meanwhile
need up to three seconds until small messages are as fast as they stay.
"""

import os
import statistics
import sys
import time
from typing import NamedTuple

import torch
import torch.distributed as dist

WARMUP_STEPS = 5


class Turn(NamedTuple):
    """What a line says."""

    steps: int = 0
    iterations: int = 0
    warmup_s: float = 0.0
    at_end: bool = False


def turns():
    """What each line says, on every rank; nothing before the first."""
    said = torch.zeros(4, dtype=torch.float64)
    while said[0] >= 0:
        yield Turn(int(said[0]), int(said[1]), float(said[2]), bool(said[3]))
        if dist.get_rank() == 0:
            line = sys.stdin.readline()
            numbers = [float(word) for word in line.split()]
            said.copy_(torch.tensor([*numbers, 0.0, 0.0, 0.0, 0.0][:4] if line else [-1.0, 0.0, 0.0, 0.0]))
        dist.broadcast(said, 0)


def measure(turn, sample, steps):
    """Warm up, take ``steps`` samples, or what the turn says, and print median and first decile in s an iteration.

    ``sample`` gives this rank's seconds of one iteration; those of the slowest rank count.  The decile has hardly
    anything of what else runs on the machine.
    """
    began, warm_s = time.perf_counter(), torch.zeros(1, dtype=torch.float64)

    def told():
        return sample() if turn.at_end else slowest([sample()])[0]

    while True:
        for _ in range(WARMUP_STEPS):
            told()
        warm_s[0] = time.perf_counter() - began
        dist.broadcast(warm_s, 0)
        if warm_s >= turn.warmup_s:
            break
    times_s = [told() for _ in range(turn.steps or steps)]
    if turn.at_end:
        times_s = slowest(times_s)
    if dist.get_rank() == 0:
        print(statistics.median(times_s), statistics.quantiles(times_s, n=10)[0], flush=True)


def slowest(times_s):
    """The longest of any rank, one by one."""
    shared = torch.tensor(times_s, dtype=torch.float64)
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    return shared.tolist()


def leave():
    """End this rank; Python's shutdown could abort it, in a thread of gloo (benchmarks/gloo_exit.py)."""
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)
