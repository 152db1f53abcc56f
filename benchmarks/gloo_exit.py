"""A thread of gloo aborts a plain program that ends: torch 2.13.0, one process, no perfsuite.

    python benchmarks/gloo_exit.py            # "terminate called without an active exception", exit code 134
    python benchmarks/gloo_exit.py --leave    # as ranks of perfsuite and the programs of benchmarks/plain end: 0

A thread of gloo can be the last that holds a tensor: it then frees the tensor's Python object, and needs Python's lock.
Newer torch asks for the lock whenever it drops a tensor that Python still knows (pytorch/pytorch#167564).  Python
before 3.14 ends a thread that asks for the lock during shutdown; C++ cannot unwind that thread and aborts the process.
torch's mend by an exit handler was given up (pytorch/pytorch#179291).  Here the thread is held in a finalizer until the
program ends, so that it happens every time; without that it is up to chance.  ``destroy_process_group`` before the end
waits for the threads, but not for those of a group that something else still holds: a mesh, DTensor's caches.
"""

import argparse
import os
import threading
import time
import weakref

import torch
import torch.distributed as dist


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leave", action="store_true", help="end without the shutdown of Python")
    leave = parser.parse_args().leave
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    own, count = threading.get_ident(), 0
    held = threading.Event()

    def freed():
        if threading.get_ident() != own:
            held.set()
            time.sleep(0.5)

    while not held.is_set():
        count += 1
        tensor = torch.ones(10)
        weakref.finalize(tensor, freed)
        work = dist.all_reduce(tensor, async_op=True)
        del tensor
        work.wait()
        del work
    print(f"after {count} all-reduces a thread of gloo frees the tensor", flush=True)
    if leave:
        os._exit(0)


if __name__ == "__main__":
    main()
