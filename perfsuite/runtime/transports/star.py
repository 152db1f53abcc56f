"""The driver's links to all agents: one connection each.

A tree can take this class's place without a change elsewhere.  Each inner agent would hold a ``Star`` of its own
children; ``send`` names the ranks a frame is for, so it would travel once per branch, and ``receive`` says which rank a
frame is from, so frames of a whole branch could share a connection.  Rank 0 would then have as many connections as the
tree has branches, instead of one per rank.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from socket import gethostname, socket
from typing import Any

from perfsuite.base.errors import LaunchError
from perfsuite.runtime.ranks.placement import allowed_cores
from perfsuite.runtime.transports.base import Message, Place
from perfsuite.runtime.transports.door import Door, why_unresolved
from perfsuite.runtime.transports.exchange import Arrival, Exchange
from perfsuite.runtime.transports.keys import Meeting
from perfsuite.runtime.transports.launchers import Launch, telling_variables
from perfsuite.runtime.transports.wire import Link, LinkLost

TOLD = "it got "
"""Begins the last word of an agent that a signal told to end: a launcher does so to all when one process has died."""
_TICK_S = 0.2
PATIENCE_S = 3.0
"""Who has waited so long says for whom."""


@dataclass(frozen=True, kw_only=True)
class AgentFacts(Place):
    """What an agent says of itself and of the slot that it serves."""

    pid: int

    def __str__(self) -> str:
        return f"rank {self.slot} on {self.host} (pid {self.pid})"


class Star:
    """Frames to and from the agents, by rank."""

    def __init__(self, links: Mapping[int, Link], facts: Mapping[int, AgentFacts]) -> None:
        """Take over the links; a thread serves them from now on."""
        self.facts = dict(facts)
        """Every agent that came, lost ones included."""
        self._addresses = {rank: link.local_host() for rank, link in links.items()}
        self._exchange = Exchange(links)
        self._told: set[int] = set()
        """Ranks whose loss :meth:`receive` has reported."""
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="perfsuite-agents", daemon=True)
        if links:
            self._thread.start()

    @property
    def ranks(self) -> Collection[int]:
        """Ranks whose agents are there."""
        return [] if self._closed else [rank for rank in self._addresses if rank not in self._exchange.lost]

    @property
    def lost(self) -> dict[int, str]:
        """Why each agent that was given up was, also where a signal interrupted :meth:`receive` before it said so."""
        return dict(self._exchange.lost)

    def address(self) -> str:
        """The driver's address that agents reach it by."""
        return best_address({rank: self._addresses[rank] for rank in self.ranks}, self.facts)

    def send(self, ranks: Iterable[int], frame: Message) -> None:
        """Hand ``frame`` to the agents of ``ranks``; an agent that cannot be reached shows in :meth:`receive`."""
        for rank in list(ranks):
            self._exchange.send(rank, frame)

    def receive(self, timeout_s: float, also: Sequence[Connection | socket] = ()) -> list[Arrival]:
        """What came from agents; waits up to ``timeout_s`` for that or for ``also``."""
        if self._closed:
            return []
        wait([self._exchange.news, *also], 0.0 if self._exchange.has_news else timeout_s)
        arrivals = []
        for arrival in self._exchange.take():
            if arrival.rank in self._told:
                continue
            if arrival.frame is None:
                self._told.add(arrival.rank)
            arrivals.append(arrival)
        return arrivals

    def drop(self, rank: int, reason: str) -> None:
        """Give an agent up: close its connection, which ends it, and report the loss in :meth:`receive`."""
        self._exchange.drop(rank, reason)

    def dismiss(self, deadline_s: float) -> None:
        """Tell all agents to leave and wait until their processes have ended.  Idempotent.

        A launcher ends everybody when rank 0 fails while others run: so rank 0 goes last.
        """
        until = time.monotonic() + deadline_s
        self.send(self.ranks, {"verb": "dismiss"})
        while self.ranks and (left := until - time.monotonic()) > 0:
            self.receive(left)
        self._closed = True
        self._exchange.wake()
        if self._thread.is_alive():
            self._thread.join()
        self._exchange.close()

    def _serve(self) -> None:
        try:
            while not self._closed:
                self._exchange.turn()
                for rank, reason in self._exchange.silent().items():
                    self._exchange.drop(rank, reason)
        except Exception as problem:  # whoever waits for an agent must hear of it
            for rank in self.ranks:
                self._exchange.drop(rank, f"the driver cannot serve its link: {problem!r}")


def best_address(addresses: Mapping[int, str], facts: Mapping[int, AgentFacts]) -> str:
    """Of this host's addresses that agents came to, one that an agent on another host came to, if any did.

    The launcher's name for this host may be a loopback address here.  Where agents came to several addresses it is
    that of the lowest rank.
    """
    here = gethostname()
    ranks = sorted(addresses, key=lambda rank: (facts[rank].host == here, rank))
    return addresses[ranks[0]] if ranks else "127.0.0.1"


def gather(
    launch: Launch, meeting: Meeting, deadline_s: float, welcome: Message, environ: Mapping[str, str] = os.environ
) -> Star:
    """Wait until the agents of all other ranks have come, then send each of them ``welcome``.

    What takes longer than a few seconds is said on stderr; ``environ`` has the launcher's variables.

    Raises LaunchError naming those that did not come in ``deadline_s`` seconds, or that left again.
    """
    _allow_connections(launch.world_size)
    door = Door(launch, meeting)
    links: dict[int, Link] = {}
    facts: dict[int, AgentFacts] = {}
    until = time.monotonic() + deadline_s
    says_at = time.monotonic() + PATIENCE_S
    try:
        while len(links) < launch.world_size - 1:
            arrival = door.next_arrival(_TICK_S)
            if arrival is not None:
                _take_in(launch, *arrival, links, facts)
                continue
            _require_present(links, facts)
            now = time.monotonic()
            if now > until:
                missing = _who_is_missing(launch, facts, deadline_s, door.turned_away)
                raise LaunchError(f"{missing}; {unless_launched(environ)}")
            if now > says_at:
                says_at = float("inf")
                say_waiting(launch, f"rank {_spans(_missing(launch, facts))}", deadline_s, environ)
        star = Star(links, facts)
        star.send(star.ranks, welcome)
        return star
    except BaseException as problem:
        for link in links.values():
            with contextlib.suppress(LinkLost):
                link.send({"over": str(problem) or type(problem).__name__})
            link.close()
        raise
    finally:
        door.close()


def say_waiting(launch: Launch, for_whom: str, deadline_s: float, environ: Mapping[str, str]) -> None:
    """Say on stderr for whom this process waits, for how long, and what to do where nobody launched the others.

    An agent also says where it cannot resolve the name of rank 0's host.
    """
    unresolved = why_unresolved(launch) if launch.rank else ""
    what = unresolved or "each rank must run the same pytest command and collect perf cases"
    print(
        f"perfsuite: rank {launch.rank} of {launch.world_size} ({launch.launcher}) waits for {for_whom}, "
        f"{deadline_s:g} s at most: {what}; "
        f"{unless_launched(environ)}",
        file=sys.stderr,
        flush=True,
    )


def unless_launched(environ: Mapping[str, str]) -> str:
    """What to do where a shell or container has the variables of a launcher and no launcher started this process."""
    return f"if no launcher started it: unset {' '.join(telling_variables(environ))}"


def greeting(launch: Launch, host: str, pid: int, devices: Sequence[str] = ()) -> Message:
    """The first frame of an agent."""
    return {
        "rank": launch.rank,
        "host": host,
        "pid": pid,
        "local_rank": launch.local_rank,
        "local_world_size": launch.local_world_size,
        "cores": list(allowed_cores()),
        "devices": list(devices),
    }


def _take_in(launch: Launch, link: Link, hello: Message, links: dict[int, Link], facts: dict[int, AgentFacts]) -> None:
    refused = _objection(launch, hello, facts)
    if refused:
        with contextlib.suppress(LinkLost):
            link.send({"refused": refused})
        link.close()
        return
    rank = hello.pop("rank")
    links[rank] = link
    lists = {"cores": tuple(hello["cores"]), "devices": tuple(hello["devices"])}
    facts[rank] = AgentFacts(slot=rank, **{**hello, **lists})


def _objection(launch: Launch, hello: Message, facts: Mapping[int, AgentFacts]) -> str:
    """Why this agent is not of this launch; empty when it is."""
    numbers = [hello.get(name) for name in ("rank", "pid", "local_rank", "local_world_size")]
    if not all(type(number) is int for number in numbers) or not 0 < hello["rank"] < launch.world_size:
        return f"rank {hello.get('rank')} is not one of 1 to {launch.world_size - 1}"
    if hello.keys() != greeting(launch, "", 0).keys() or not all(
        isinstance(hello[name], list) for name in ("cores", "devices")
    ):
        return "its greeting is not whole"
    if hello["rank"] in facts:
        return f"rank {hello['rank']} is taken by {facts[hello['rank']]}"
    return ""


def _allow_connections(world_size: int) -> None:
    """Raise this process's own limit of open files: a usual one of 1024 ends at as many ranks."""
    needed = world_size + 768  # strangers in their handshake, and pytest itself
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != hard < needed:
        raise LaunchError(
            f"the limit of open files is {hard}: the driver of {world_size} ranks needs {needed}; "
            f"raise the hard limit on rank 0's host ('ulimit -Hn {needed}', or the LimitNOFILE of what starts it)"
        )
    if resource.RLIM_INFINITY != soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _require_present(links: Mapping[int, Link], facts: Mapping[int, AgentFacts]) -> None:
    """An agent says nothing until it is welcomed: whoever can be read from has left."""
    ranks: dict[Any, int] = {link: rank for rank, link in links.items()}
    for link in wait(list(ranks), 0) if ranks else ():
        raise LaunchError(f"{facts[ranks[link]]} ended before all ranks were there: its output says why; launch again")


def _who_is_missing(
    launch: Launch, facts: Mapping[int, AgentFacts], deadline_s: float, turned_away: Mapping[str, int]
) -> str:
    missing = _missing(launch, facts)
    hosts = sorted({agent.host for agent in facts.values()})
    came = (
        f"ranks came from {', '.join(hosts[:8])}{', ...' if len(hosts) > 8 else ''}" if hosts else "no other rank came"
    )
    strangers = f"; {sum(turned_away.values())} connections were turned away ({', '.join(sorted(turned_away))})"
    return (
        f"rank {_spans(missing)} of {launch.world_size} did not come within {deadline_s:g} s ({came}"
        f"{strangers if turned_away else ''}): every process of the launch must run the same command and reach "
        f"{launch.master_addr}; see the output of the missing ranks"
    )


def _missing(launch: Launch, facts: Mapping[int, AgentFacts]) -> list[int]:
    return [rank for rank in range(1, launch.world_size) if rank not in facts]


def _spans(ranks: Sequence[int]) -> str:
    """``1-3, 7`` for [1, 2, 3, 7]."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
