"""Replay of counted collectives without computation: each is posted again on its group, with buffers of its size.

Ranks of a group posted the same collectives in the same order, so their replays match.  The sizes of an uneven
all_to_all depend on the data, so these are replayed one by one.  Messages are replayed in both directions at once.
Imported on ranks only.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from perfsuite.base.collectives import receives_first
from perfsuite.platforms.base import Clock
from perfsuite.strategies.traffic_count import Key, Posted, find_group

_BACK_TO_BACK = 5  # Calls between two readings of the clock
_ROUNDS = 3  # Repeats, of which the median counts
MESSAGES = ("send", "receive")


class Replay:
    """Replays the collectives of one rank's step."""

    def __init__(self, device: torch.device, clock: Clock, uneven: frozenset[Key]) -> None:
        """``uneven``: collectives that some rank of the world posted with unequal splits."""
        self._device = device
        self._clock = clock
        self._uneven = uneven

    def seconds(self, posted: Sequence[Posted]) -> Mapping[Posted, float]:
        """Return the seconds of one call of each collective; all ranks of a group replay the same ones.  A sent and a
        received message go at once: the time counts for the sent one, or for the received one on a rank that sends none
        of that size.
        """
        posted_s: dict[Posted, float] = {}
        for axis in sorted({post.axis for post in posted}):
            along = [post for post in posted if post.axis == axis]
            posted_s.update(self._collectives([post for post in along if post.collective not in MESSAGES]))
            posted_s.update(self._messages([post for post in along if post.collective in MESSAGES]))
        return posted_s

    def _collectives(self, posted: Sequence[Posted]) -> Mapping[Posted, float]:
        samples: dict[Posted, list[float]] = {}
        for post in posted:
            if post in samples and post.key not in self._uneven:
                continue
            call = self._call(post)
            if post.key in self._uneven:
                call()
                samples.setdefault(post, []).append(self._round(call))
            else:
                samples[post] = [self._time(call)]
        return {post: statistics.fmean(times) for post, times in samples.items()}

    def _time(self, call: Callable[[], None]) -> float:
        call()  # the other ranks have arrived
        return statistics.median(self._round(call) for _ in range(_ROUNDS))

    def _round(self, call: Callable[[], None]) -> float:
        start = self._clock.stamp()
        for _ in range(_BACK_TO_BACK):
            call()
        end = self._clock.stamp()
        self._clock.wait(end)
        return self._clock.elapsed_s(start, end) / _BACK_TO_BACK

    def _call(self, posted: Posted) -> Callable[[], None]:
        group = find_group(posted.group)
        whole, part = self._buffer(posted, posted.elements), self._buffer(posted, posted.elements // posted.ranks)
        root = dist.get_global_rank(group, max(posted.peer, 0))
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        received, sent = posted.splits
        target = self._buffer(posted, sum(received))
        calls: Mapping[str, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(whole, group=group),
            "all_gather": lambda: gather(whole, part, group=group),
            "reduce_scatter": lambda: scatter(part, whole, group=group),
            "all_to_all": lambda: dist.all_to_all_single(target, whole, list(received), list(sent), group=group),
            "broadcast": lambda: dist.broadcast(whole, root, group=group),
            "reduce": lambda: dist.reduce(whole, root, group=group),
            "gather": lambda: dist.gather(part, _pieces(whole, posted, root), root, group=group),
            "scatter": lambda: dist.scatter(part, _pieces(whole, posted, root), root, group=group),
        }
        call = calls[posted.collective]
        return lambda: (call(), None)[1]

    def _buffer(self, posted: Posted, elements: int) -> torch.Tensor:
        return torch.zeros(elements, dtype=posted.dtype, device=self._device)

    def _messages(self, posted: Sequence[Posted]) -> Mapping[Posted, float]:
        """Exchange all messages of one size at once, one per direction and peer."""
        posted_s: dict[Posted, float] = {}
        sizes = sorted({(post.message_bytes, str(post.dtype)) for post in posted})
        for size in sizes:
            same = list(dict.fromkeys(post for post in posted if (post.message_bytes, str(post.dtype)) == size))
            pairs = list({(post.collective, post.peer): post for post in same}.values())
            time_s = self._time(self._exchange(pairs))
            sent = [post for post in same if post.collective == "send"] or same
            posted_s.update(dict.fromkeys(same, 0.0))
            posted_s.update(dict.fromkeys(sent, time_s / len({post.peer for post in sent})))
        return posted_s

    def _exchange(self, posted: Sequence[Posted]) -> Callable[[], None]:
        group = find_group(posted[0].group)
        buffers = [self._buffer(post, post.elements) for post in posted]
        peers = [dist.get_global_rank(group, post.peer) for post in posted]
        own_rank = dist.get_rank()

        def order(index: int) -> tuple[int, bool]:
            receives = posted[index].collective == "receive"
            return peers[index], receives != receives_first(self._device.type, own_rank, peers[index])

        ways = {"send": dist.isend, "receive": dist.irecv}
        operations = [
            dist.P2POp(ways[posted[index].collective], buffers[index], peers[index], group)
            for index in sorted(range(len(posted)), key=order)
        ]

        def exchange() -> None:
            for work in dist.batch_isend_irecv(operations):
                work.wait()

        return exchange


def _pieces(whole: torch.Tensor, posted: Posted, root: int) -> list[torch.Tensor] | None:
    return list(whole.chunk(posted.ranks)) if dist.get_rank() == root else None
