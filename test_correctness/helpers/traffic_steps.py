"""What tests of traffic run on ranks: known collectives under the count, and strategies that are told wrong."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist

from perfsuite.base.errors import UnsupportedCase
from perfsuite.strategies.data_parallel import Ddp

ROWS = 12


def known_collectives(rank):
    """Every kind of collective along tp of dp2-tp2, once as torch.distributed has it, once as DTensor uses it."""
    from perfsuite.platforms.cpu import PerfCounterClock
    from perfsuite.strategies.traffic_count import Counting, TrafficReplay
    from perfsuite.workloads.training.builds import Parts, traffic_of

    parts = Parts(PerfCounterClock())

    def step():
        with Counting(rank.shape, rank.rank, lambda: parts.part) as counting:
            with parts.inside("attention"):
                for post in (_plain, _functional):
                    post(rank)
            _elsewhere(rank)
        uneven = frozenset(each.key for each in counting.posted if each.collective == "all_to_all")
        seconds = TrafficReplay(rank.device, PerfCounterClock(), uneven).seconds(counting.posted)
        rank.keep_traffic(traffic_of(counting.posted, seconds, uneven), [], place=str(rank.rank))

    return step


def _splits(rank):
    """Rows to each rank of tp: 1 and 11 from the first, 5 and 7 from the second."""
    sent = ([1, 11], [5, 7])
    mine = rank.shape.coordinates(rank.rank)["tp"]
    return [each[mine] for each in sent], sent[mine]


def _plain(rank):
    group, peers = rank.group("tp"), dist.get_process_group_ranks(rank.group("tp"))
    rows, half = torch.ones(ROWS, 5), torch.ones(ROWS // 2, 5)
    dist.all_reduce(rows, group=group)
    dist.all_gather_into_tensor(rows, half, group=group)
    dist.reduce_scatter_tensor(half, rows, group=group)
    received, sent = _splits(rank)
    dist.all_to_all_single(torch.empty(sum(received), 5), rows, received, sent, group=group)
    dist.broadcast(rows.bfloat16(), peers[1], group=group)
    _all_to_all_of_lists(rows, group)
    pieces = list(rows.chunk(2)) if peers[0] == rank.rank else None
    dist.scatter(half, pieces, peers[0], group=group)
    dist.gather(half, pieces, peers[0], group=group)
    dist.reduce(rows, peers[1], group=group)
    other = next(peer for peer in peers if peer != rank.rank)
    operations = [
        dist.P2POp(dist.isend, rows, other, group),
        dist.P2POp(dist.irecv, torch.empty(ROWS, 5), other, group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _all_to_all_of_lists(rows, group):
    try:
        dist.all_to_all([torch.empty(ROWS // 2, 5) for _ in range(2)], list(rows.chunk(2)), group=group)
    except RuntimeError as error:
        if "does not support alltoall" not in str(error):
            raise
        raise UnsupportedCase(f"gloo of torch {torch.__version__} knows no all_to_all of lists") from None


def _functional(rank):
    import torch.distributed._functional_collectives as functional
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    group, mesh, rows = rank.group("tp"), rank.mesh["tp"], torch.ones(ROWS, 5)
    partial = DTensor.from_local(rows, mesh, [Partial()], run_check=False)
    partial.redistribute(placements=[Replicate()]).to_local().sum()
    scattered = partial.redistribute(placements=[Shard(0)])
    scattered.redistribute(placements=[Replicate()]).to_local().sum()
    received, sent = _splits(rank)
    functional.wait_tensor(functional.all_to_all_single(rows, received, sent, group))
    functional.wait_tensor(functional.broadcast(rows.bfloat16(), 1, group))


def _elsewhere(rank):
    """Outside of any part: along dp, which is data parallelism, along both axes, and on a group that sends nothing."""
    import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"

    dist.all_reduce(torch.ones(3), group=rank.group("dp"))
    dist.all_reduce(torch.ones(3, dtype=torch.float64), group=rank.group())
    dist.all_reduce(torch.ones(3), group=dist.new_group(backend="cpu:fake"))
    dist.barrier(group=rank.group("tp"))


@dataclass(frozen=True, kw_only=True)
class Misjudged(Ddp):
    """DDP whose closed form says one call too many."""

    name: ClassVar[str] = "misjudged"

    def traffic(self, plan, shape, rank):
        return tuple(dataclasses.replace(call, calls=call.calls + 1) for call in super().traffic(plan, shape, rank))


@dataclass(frozen=True, kw_only=True)
class Loud(Ddp):
    """DDP that sums a number over all ranks on a group of its own making."""

    name: ClassVar[str] = "loud"

    def build(self, rank, plan):
        trainer = super().build(rank, plan)
        steps = trainer.step

        def step():
            dist.all_reduce(torch.ones(2))
            steps()

        trainer.step = step
        return trainer
