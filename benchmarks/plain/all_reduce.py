"""A plain loop of all-reduces of one message; it knows nothing of perfsuite.

    torchrun --nproc-per-node=2 benchmarks/plain/all_reduce.py --bytes 1024 --steps 40 [--in-a-row 1]

A step is a barrier and so many all-reduces, or as many as the turn says (turns.py).  Prints what the slowest rank's
time of one all-reduce is over the steps, median and first decile in seconds, once for each turn.
"""

import argparse
import functools
import time

import torch
import torch.distributed as dist
from turns import leave, measure, turns


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--in-a-row", type=int, default=1)
    given = parser.parse_args()
    dist.init_process_group("gloo")
    buffer = torch.ones(given.bytes // 4)

    def seconds(count):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(count):
            dist.all_reduce(buffer)
        return (time.perf_counter() - start) / count

    for turn in turns():
        measure(turn, functools.partial(seconds, turn.iterations or given.in_a_row), given.steps)
    leave()


if __name__ == "__main__":
    main()
