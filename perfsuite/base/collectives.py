"""What each collective sends over the links between hosts: one entry each, from which factor and bound of busbw follow.

An entry is a function of where the ranks are (the host of each, in rank order).  It gives the bytes that the busiest
host must send, or must receive, per byte of the size S (docs metrics has the sizes), whichever algorithm moves
them.  With a host for each rank this is busbw's factor: the busiest rank's traffic.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from types import MappingProxyType

from perfsuite.base.errors import InvalidParameter

Hosts = Sequence[Hashable]
"""The host of each rank."""


def partner(rank: int, ranks: int) -> int:
    """The rank at distance half the world: on another host wherever no host has more than half of the ranks.

    >>> [partner(rank, 4) for rank in range(4)]
    [2, 3, 0, 1]
    """
    return (rank + ranks // 2) % ranks


def receives_first(device: str, rank: int, to: int) -> bool:
    """Whether a rank that sends to rank ``to`` and receives at the same time posts the receive first.

    On a CPU every rank does.  Gloo tells the sender over the same connection that a receive is waiting: behind a send
    this would leave only after the whole message, and the two directions of a link would take turns.  On an accelerator
    a backend that does not batch runs the messages of a pair in the order of posting: somebody has to send first.

    >>> receives_first("cpu", rank=0, to=1), receives_first("gpu", rank=0, to=1), receives_first("gpu", rank=1, to=0)
    (True, False, True)
    """
    return device == "cpu" or rank > to


def _all_reduce(hosts: Hosts) -> float:
    """n - 1 transfers add each byte up and n - 1 more spread the sum; inside a host they cost no link."""
    return 2 * _reduce_scatter(hosts)


def _reduce_scatter(hosts: Hosts) -> float:
    count = len(set(hosts))
    return (count - 1) / count


def _all_gather(hosts: Hosts) -> float:
    """The host with the fewest ranks lacks most."""
    return (len(hosts) - min(Counter(hosts).values())) / len(hosts)


def _rooted_whole(hosts: Hosts) -> float:
    """All of S leaves the root's host, or arrives there."""
    return 1.0 if len(set(hosts)) > 1 else 0.0


def _rooted_parts(hosts: Hosts) -> float:
    """The root, rank 0, exchanges a part with every rank of the other hosts."""
    return sum(host != hosts[0] for host in hosts) / len(hosts)


def _all_to_all(hosts: Hosts) -> float:
    return max(count * (len(hosts) - count) for count in Counter(hosts).values()) / len(hosts)


def _all_to_all_uneven(hosts: Hosts) -> float:
    """Rank d receives the share (d + 1) / n of a part of S / n from each rank."""
    ranks, counts = len(hosts), Counter(hosts)
    shares: Counter[Hashable] = Counter()
    for rank, host in enumerate(hosts):
        shares[host] += rank + 1
    whole = sum(shares.values())
    busiest = max(max((ranks - counts[host]) * shares[host], counts[host] * (whole - shares[host])) for host in counts)
    return busiest / ranks**2


def _messages(hosts: Hosts, pairs: Iterable[tuple[int, int]]) -> float:
    """Messages of S from a rank to another."""
    crossing = [(hosts[source], hosts[target]) for source, target in pairs if hosts[source] != hosts[target]]
    ends = (Counter(source for source, _ in crossing), Counter(target for _, target in crossing))
    return float(max((count for end in ends for count in end.values()), default=0))


def _send_recv(hosts: Hosts) -> float:
    return _messages(hosts, ((rank, partner(rank, len(hosts))) for rank in range(len(hosts))))


def _ring_shift(hosts: Hosts) -> float:
    return _messages(hosts, ((rank, (rank + 1) % len(hosts)) for rank in range(len(hosts))))


def _one_direction(hosts: Hosts) -> float:
    return _messages(hosts, ((rank, partner(rank, len(hosts))) for rank in range(len(hosts) // 2)))


TRAFFIC: Mapping[str, Callable[[Hosts], float]] = MappingProxyType(
    {
        "all_reduce": _all_reduce,
        "all_gather": _all_gather,
        "reduce_scatter": _reduce_scatter,
        "all_to_all": _all_to_all,
        "all_to_all_uneven": _all_to_all_uneven,
        "gather": _rooted_parts,
        "scatter": _rooted_parts,
        "broadcast": _rooted_whole,
        "reduce": _rooted_whole,
        "send_recv": _send_recv,
        "ring_shift": _ring_shift,
        "one_direction": _one_direction,
    }
)
"""By collective: bytes that the busiest host sends or receives at the least, per byte of S."""
WITHOUT_MESSAGE = ("barrier", "pairs")
"""These have a latency and no bandwidth; of pairs each has one (:mod:`perfsuite.metrics.pairs`)."""


def require_known(collective: str) -> None:
    """Raise InvalidParameter for one without an entry, whose figures would be another's; empty is no collective."""
    if collective and collective not in TRAFFIC and collective not in WITHOUT_MESSAGE:
        known = ", ".join(sorted([*TRAFFIC, *WITHOUT_MESSAGE]))
        raise InvalidParameter(
            f"collective {collective!r} has no entry in perfsuite.base.collectives (what it sends); choose {known}"
        )


def traffic(collective: str, hosts: Hosts) -> float:
    """Bytes per byte of S that the busiest host must send or receive; InvalidParameter where nobody knows."""
    require_known(collective)
    if collective not in TRAFFIC:
        raise InvalidParameter(f"{collective or 'no collective'} moves no message that a bandwidth could be taken of")
    return TRAFFIC[collective](hosts)


def busbw_factor(collective: str, ranks: int) -> float:
    """Ratio busbw / algbw of a collective over ``ranks`` ranks; InvalidParameter for one that has no bandwidth.

    This is :func:`traffic` of ranks on hosts of their own, without a list of them.

    >>> busbw_factor("all_reduce", 8), busbw_factor("all_gather", 4), busbw_factor("broadcast", 8)
    (1.75, 0.75, 1.0)
    """
    part, one = (ranks - 1) / ranks, traffic(collective, range(min(ranks, 2)))
    if collective == "all_reduce":
        return 2 * part
    if collective == "all_to_all_uneven":
        return max(part, (ranks * (ranks + 1) / 2 - 1) / ranks**2)
    return part if collective in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter") else one


def link_bound_gb_per_s(link_gb_per_s: float, hosts: Hosts, collective: str) -> float:
    """The most busbw that links of this one-directional rate allow.

    On one host the link is a rank's, and the bound the link itself.  Over several hosts it is a host's, and the bound
    its rate x busbw's factor / what the busiest host must send: for all_reduce B x [(n-1)/n] / [(h-1)/h], for pairs of
    n/h ranks a host B x h/n.  Infinite where nothing has to leave a host.  Source: traffic counted on shaped links.

    >>> link_bound_gb_per_s(25.0, ["a"] * 8 + ["b"] * 8, "all_reduce"), link_bound_gb_per_s(150.0, ["a"] * 8, "reduce")
    (46.875, 150.0)
    """
    if len(set(hosts)) < 2:
        return link_gb_per_s
    crossing = traffic(collective, hosts)
    return link_gb_per_s * busbw_factor(collective, len(hosts)) / crossing if crossing else math.inf
