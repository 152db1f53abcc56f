"""An unwaited receive makes destroy_process_group wait for ever: torch 2.13.0, gloo, two ranks, no perfsuite.

    python benchmarks/gloo_destroy.py            # "rank 1 still destroys its group after 10 s", exit code 1
    python benchmarks/gloo_destroy.py --eager    # without lazy connections, torch's default: both ranks end, 0

Rank 1 starts a receive and drops it. The message of rank 0 arrives after the receiving tensor is freed. With
TORCH_GLOO_LAZY_INIT=1 the group first ends the thread that reads its sockets, and then closes the sockets. The thread
ends only if no socket has an event (`Loop::run` in gloo's transport/tcp/loop.cc), but the unread message is an event.
"""

import argparse
import contextlib
import multiprocessing
import os
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

LIMIT_S = 10.0


def run(rank, port, barrier):
    store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    if rank == 0:
        dist.isend(torch.ones(16), 1).wait()
    else:
        dist.irecv(torch.ones(16), 0)

    def give_up():
        print(f"rank {rank} still destroys its group after {LIMIT_S:g} s", flush=True)
        os._exit(1)

    timer = threading.Timer(LIMIT_S, give_up)
    timer.start()
    dist.destroy_process_group()
    timer.cancel()
    print(f"rank {rank} destroyed its group", flush=True)
    with contextlib.suppress(threading.BrokenBarrierError):
        barrier.wait(1.5 * LIMIT_S)  # a rank that ends would close its connections
    os._exit(0)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--eager", action="store_true", help="connect all ranks at once (default: lazily)")
    os.environ["TORCH_GLOO_LAZY_INIT"] = "0" if parser.parse_args().eager else "1"
    context = multiprocessing.get_context("fork")
    store, barrier = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), context.Barrier(2)
    ranks = [context.Process(target=run, args=(rank, store.port, barrier)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    raise SystemExit(max(rank.exitcode for rank in ranks))


if __name__ == "__main__":
    main()
