"""Traffic of each collective over the links between hosts, which gives the factor and the bound of busbw.

An entry is a function of the hosts of the ranks, in rank order. It returns the bytes that the busiest host must send or
receive, by any algorithm, per byte of the size S (docs metrics has the sizes). With a host for each rank this is
busbw's factor: the busiest rank's traffic.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType

from perfsuite.base.errors import InvalidParameter

Hosts = Sequence[Hashable]  # The host of each rank.


def partner(rank: int, ranks: int) -> int:
    """Return the rank at distance half the world: on another host unless a host has more than half of the ranks.

    >>> [partner(rank, 4) for rank in range(4)]
    [2, 3, 0, 1]
    """
    return (rank + ranks // 2) % ranks


def receives_first(device: str, rank: int, to: int) -> bool:
    """Return whether a rank that sends to rank ``to`` and receives at the same time posts the receive first.

    On a CPU every rank does. Gloo announces a receive over the same connection: after a send the announcement would
    wait for the whole message, and the two directions of a link would take turns. On an accelerator a backend without
    batches runs the messages of a pair in the order of posting, so one of the two must send first.

    >>> receives_first("cpu", rank=0, to=1), receives_first("gpu", rank=0, to=1), receives_first("gpu", rank=1, to=0)
    (True, False, True)
    """
    return device == "cpu" or rank > to


def _reduce_scatter(hosts: Hosts) -> float:
    count = len(set(hosts))
    return (count - 1) / count


def _all_to_all_uneven(hosts: Hosts) -> float:
    """Return the share for parts of unequal size: rank d receives (d + 1) / n of S / n from each rank."""
    ranks, counts = len(hosts), Counter(hosts)
    shares: Counter[Hashable] = Counter()
    for rank, host in enumerate(hosts):
        shares[host] += rank + 1
    whole = sum(shares.values())
    busiest = max(max((ranks - counts[host]) * shares[host], counts[host] * (whole - shares[host])) for host in counts)
    return busiest / ranks**2


def _messages(hosts: Hosts, senders: int, distance: int) -> float:
    pairs = [(hosts[rank], hosts[(rank + distance) % len(hosts)]) for rank in range(senders)]
    crossing = [pair for pair in pairs if pair[0] != pair[1]]
    ends = (Counter(source for source, _ in crossing), Counter(target for _, target in crossing))
    return float(max((count for end in ends for count in end.values()), default=0))


TRAFFIC: Mapping[str, Callable[[Hosts], float]] = MappingProxyType(
    {
        # all hosts but one send a sum, and all but one receive it; links inside a host are free
        "all_reduce": lambda hosts: 2 * _reduce_scatter(hosts),
        # the host with the fewest ranks receives most
        "all_gather": lambda hosts: (len(hosts) - min(Counter(hosts).values())) / len(hosts),
        "reduce_scatter": _reduce_scatter,
        "all_to_all": lambda hosts: max(count * (len(hosts) - count) for count in Counter(hosts).values()) / len(hosts),
        "all_to_all_uneven": _all_to_all_uneven,
        **dict.fromkeys(("gather", "scatter"), lambda hosts: sum(host != hosts[0] for host in hosts) / len(hosts)),
        **dict.fromkeys(("broadcast", "reduce"), lambda hosts: 1.0 if len(set(hosts)) > 1 else 0.0),
        "send_recv": lambda hosts: _messages(hosts, len(hosts), len(hosts) // 2),
        "ring_shift": lambda hosts: _messages(hosts, len(hosts), 1),
        "one_direction": lambda hosts: _messages(hosts, len(hosts) // 2, len(hosts) // 2),
    }
)
"""By collective: least bytes that the busiest host sends or receives, per byte of S."""
WITHOUT_MESSAGE = ("barrier", "pairs")  # No bandwidth of their own (perfsuite.metrics.pairs has one per pair).


def require_known(collective: str) -> None:
    """Raise InvalidParameter for a collective without an entry; an empty name is allowed."""
    if collective and collective not in TRAFFIC and collective not in WITHOUT_MESSAGE:
        names = ", ".join(sorted([*TRAFFIC, *WITHOUT_MESSAGE]))
        raise InvalidParameter(
            f"collective {collective!r} has no entry in perfsuite.base.collectives (its traffic); choose {names}"
        )


def traffic(collective: str, hosts: Hosts) -> float:
    """Return the bytes per byte of S that the busiest host must send or receive; raise InvalidParameter if unknown."""
    require_known(collective)
    if collective not in TRAFFIC:
        raise InvalidParameter(f"{collective or 'no collective'} moves no message, so it has no bandwidth")
    return TRAFFIC[collective](hosts)


def busbw_factor(collective: str, ranks: int) -> float:
    """Return busbw / algbw of a collective over ``ranks`` ranks; raise InvalidParameter if it has no bandwidth.

    This is :func:`traffic` with a host for each rank.

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
    """Return the largest busbw that links of this one-directional rate allow.

    On one host a link belongs to a rank and is itself the bound. Over several hosts it belongs to a host, and the bound
    is its rate x busbw's factor / traffic of the busiest host: for all_reduce B x [(n-1)/n] / [(h-1)/h], for pairs of
    n/h ranks per host B x h/n. Infinite without traffic between hosts. Source: traffic counted on shaped links.

    >>> link_bound_gb_per_s(25.0, ["a"] * 8 + ["b"] * 8, "all_reduce"), link_bound_gb_per_s(150.0, ["a"] * 8, "reduce")
    (46.875, 150.0)
    """
    if len(set(hosts)) < 2:
        return link_gb_per_s
    crossing = traffic(collective, hosts)
    return link_gb_per_s * busbw_factor(collective, len(hosts)) / crossing if crossing else math.inf
