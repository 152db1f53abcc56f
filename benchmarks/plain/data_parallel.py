"""A plain training loop under DDP or FSDP2, started by torchrun; of perfsuite it has the model and its batches alone.

    torchrun --nproc-per-node=2 benchmarks/plain/data_parallel.py --strategy ddp --steps 40

Prints what the slowest rank's time is over the steps, once for each turn (turns.py).
"""

import argparse
import itertools
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from turns import leave, measure, turns

sys.path.insert(0, str(Path(__file__).parents[2]))

from perfsuite.models import find
from perfsuite.models.build import build
from perfsuite.models.layers import materialize
from perfsuite.models.loading import synthetic_batch

MODEL, BATCH = "gpt2-tiny", 4


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", choices=["ddp", "fsdp"], default="ddp")
    parser.add_argument("--steps", type=int, default=40)
    given = parser.parse_args()
    dist.init_process_group("gloo")
    rank, ranks, config = dist.get_rank(), dist.get_world_size(), find(MODEL)
    with torch.device("meta"):
        module = build(config)
    materialize(module, torch.device("cpu"), seed=0)
    if given.strategy == "ddp":
        module = DistributedDataParallel(module, bucket_cap_mb=25.0, gradient_as_bucket_view=True)
    else:
        from torch.distributed.fsdp import fully_shard

        for block in module.blocks.children():
            fully_shard(block)
        fully_shard(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    first = [BATCH * (rank + ranks * index) for index in range(4)]
    batches = [synthetic_batch(config, list(range(start, start + BATCH))) for start in first]

    numbers = itertools.count()

    def step():
        number = next(numbers)
        start = time.perf_counter()
        module(**batches[number % 4]).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - start

    for turn in turns():
        measure(turn, step, given.steps)
    leave()


if __name__ == "__main__":
    main()
