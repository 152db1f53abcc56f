"""When a plain program measures: once, and again for each line on the standard input of its first rank, until it ends.

A line may be a number, how many iterations a sample has; 0 leaves that to the program.
"""

import statistics
import sys

import torch
import torch.distributed as dist


def turns():
    """What each line says, on every rank; 0 before the first."""
    said = torch.zeros((), dtype=torch.int64)
    while said >= 0:
        yield int(said)
        if dist.get_rank() == 0:
            line = sys.stdin.readline()
            said.fill_(int(line.strip() or 0) if line else -1)
        dist.broadcast(said, 0)


def report(times_s):
    """Print median and first decile, in seconds: the decile has hardly anything of what else runs on the machine."""
    print(statistics.median(times_s), statistics.quantiles(times_s, n=10)[0], flush=True)
