"""Step functions that start communication: some wait for it, some return its handle, some forget it."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist

_ELEMENTS = 1 << 20


def returned(rank, how):
    """Return the handle of what was started; record whether any was unfinished as the next iteration began."""
    import torch.distributed._functional_collectives as functional

    x, y = torch.ones(_ELEMENTS), torch.empty(_ELEMENTS)
    works, unfinished = [], 0

    def registered():
        return torch._C._distributed_c10d._get_work_registry_size()

    def run():
        nonlocal unfinished
        unfinished += any(not work.is_completed() for work in works) + (how == "functional" and registered() > 0)
        works.clear()
        rank.record("unfinished", float(unfinished))
        if how == "functional":
            return functional.all_reduce(x, "sum", dist.group.WORLD)
        if how == "isend":
            other = 1 - rank.rank
            works[:] = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, y, other)])
            return {"works": tuple(works)}
        works.append(dist.all_reduce(x, async_op=True))
        return works[0] if how == "work" else [works[0].get_future(), works[0]]

    return run


def dropped(rank):
    """Start a sum and forget it; rank 1 comes late, so that rank 0's is unfinished when its iteration returns."""
    x = torch.ones(_ELEMENTS)

    def run():
        time.sleep(0.1 * rank.rank)
        dist.all_reduce(x, async_op=True)

    return run


def dropped_functional(rank):
    """The same by a functional collective whose result nobody uses."""
    import torch.distributed._functional_collectives as functional

    x = torch.ones(16)

    def run():
        functional.all_reduce(x, "sum", dist.group.WORLD)

    return run


def kept_send(rank):
    """Wait for what is received; of what is sent keep the handles."""
    x, y, kept = torch.ones(16), torch.empty(16), []

    def run():
        kept.append(dist.isend(x, 1 - rank.rank))
        dist.irecv(y, 1 - rank.rank).wait()

    return run


def in_a_thread(rank):
    """A thread that nobody joins."""
    return lambda: threading.Thread(target=time.sleep, args=(0.02,)).start()


def generator(rank):
    """A step function with a yield."""
    yield rank


def ddp(rank):
    """A backward whose sums the reducer waits for in C++."""
    module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    batch = torch.ones(4, 64)
    return lambda: module(batch).sum().backward()


def waited_by_future(rank):
    """A sum that is waited for by its future."""
    x = torch.ones(_ELEMENTS)
    return lambda: dist.all_reduce(x, async_op=True).get_future().wait() and None


def coalesced(rank):
    """Objects and several sums, by calls that wait."""
    parts = [torch.ones(16), torch.ones(16)]

    def run():
        dist.broadcast_object_list([rank.rank], 0)
        dist.all_gather([torch.empty(16), torch.empty(16)], parts[0])
        dist.barrier()

    return run


def one_sided(rank):
    """Return the handle of a sum that only rank 0 starts: it waits for ever for the others."""
    x = torch.ones(16)
    return lambda: dist.all_reduce(x, async_op=True) if rank.rank == 0 else time.sleep(600)


def skipped_between(rank):
    """End the case on all ranks while what they receive is not there yet."""
    x = torch.ones(16)

    def run():
        work = dist.irecv(x, 1 - rank.rank)
        pytest.skip(f"after {work}")

    return run
