"""When a plain program measures: once, and again for each line on the standard input of its first rank, until it ends.

A line may have three numbers: how many samples, how many iterations one has, 0 leaves either to the program, and how
many seconds the loop runs before its first sample that counts, at least.  Processes that waited, their threads and
the cores that slept meanwhile need up to three seconds until small messages are as fast as they stay.
"""

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


def turns():
    """What each line says, on every rank; nothing before the first."""
    said = torch.zeros(3, dtype=torch.float64)
    while said[0] >= 0:
        yield Turn(int(said[0]), int(said[1]), float(said[2]))
        if dist.get_rank() == 0:
            line = sys.stdin.readline()
            numbers = [float(word) for word in line.split()]
            said.copy_(torch.tensor([*numbers, 0.0, 0.0, 0.0][:3] if line else [-1.0, 0.0, 0.0]))
        dist.broadcast(said, 0)


def measure(turn, sample, steps):
    """Warm up, take ``steps`` samples, or what the turn says, and print median and first decile in s an iteration.

    ``sample`` gives the seconds of one iteration, of this rank or of the slowest: that of the slowest counts.  The
    decile has hardly anything of what else runs on the machine.
    """
    began, warm_s = time.perf_counter(), torch.zeros(1, dtype=torch.float64)
    while True:
        for _ in range(WARMUP_STEPS):
            sample()
        warm_s[0] = time.perf_counter() - began
        dist.broadcast(warm_s, 0)
        if warm_s >= turn.warmup_s:
            break
    slowest_s = torch.tensor([sample() for _ in range(turn.steps or steps)], dtype=torch.float64)
    dist.all_reduce(slowest_s, dist.ReduceOp.MAX)
    times_s = slowest_s.tolist()
    if dist.get_rank() == 0:
        print(statistics.median(times_s), statistics.quantiles(times_s, n=10)[0], flush=True)
