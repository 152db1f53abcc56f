"""The driver's links to all agents: one connection each.

A tree could replace this class without other changes: ``send`` names the ranks of a frame, and ``receive`` its sender,
so an inner agent could relay the frames of a branch over one connection.
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
from perfsuite.base.text import spans
from perfsuite.runtime.ranks.placement import allowed_cores
from perfsuite.runtime.transports.base import Message, Place
from perfsuite.runtime.transports.door import Door, why_unresolved
from perfsuite.runtime.transports.exchange import Exchange, Incoming
from perfsuite.runtime.transports.keys import Meeting
from perfsuite.runtime.transports.launchers import Launch, telling_variables
from perfsuite.runtime.transports.wire import Link, LinkLost

GOT_SIGNAL = "it got "  # Begins the last message of an agent that ends by a signal.
_TICK_S = 0.2
PATIENCE_S = 3.0  # Seconds after which a waiting process prints for whom it waits.


@dataclass(frozen=True, kw_only=True)
class AgentFacts(Place):
    """Facts that an agent sends about itself and its slot."""

    pid: int

    def __str__(self) -> str:
        return f"rank {self.slot} on {self.host} (pid {self.pid})"


class Star:
    """Frames to and from the agents, by rank."""

    def __init__(self, links: Mapping[int, Link], facts: Mapping[int, AgentFacts]) -> None:
        """Take ownership of the links; a thread serves them from now on."""
        self.facts = dict(facts)  # Facts of every agent that came, lost ones included.
        self._addresses = {rank: link.local_host() for rank, link in links.items()}
        self._exchange = Exchange(links)
        self._reported: set[int] = set()  # Ranks whose loss :meth:`receive` has reported.
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="perfsuite-agents", daemon=True)
        if links:
            self._thread.start()

    @property
    def ranks(self) -> Collection[int]:
        """Ranks whose agents are connected."""
        return [] if self._closed else [rank for rank in self._addresses if rank not in self._exchange.lost]

    @property
    def lost(self) -> dict[int, str]:
        """Reason for each lost agent, also if a signal interrupted :meth:`receive` before it reported the loss."""
        return dict(self._exchange.lost)

    def address(self) -> str:
        """Return the driver's address that agents use."""
        return best_address({rank: self._addresses[rank] for rank in self.ranks}, self.facts)

    def send(self, ranks: Iterable[int], frame: Message) -> None:
        """Send ``frame`` to the agents of ``ranks``; :meth:`receive` reports an agent that cannot be reached."""
        for rank in list(ranks):
            self._exchange.send(rank, frame)

    def receive(self, timeout_s: float, also: Sequence[Connection | socket] = ()) -> list[Incoming]:
        """Return the frames and losses of agents; wait up to ``timeout_s`` for one, or for ``also``."""
        if self._closed:
            return []
        wait([self._exchange.news, *also], 0.0 if self._exchange.has_news else timeout_s)
        arrivals = []
        for arrival in self._exchange.take():
            if arrival.rank in self._reported:
                continue
            if arrival.frame is None:
                self._reported.add(arrival.rank)
            arrivals.append(arrival)
        return arrivals

    def drop(self, rank: int, reason: str) -> None:
        """Close the connection of an agent, which ends the agent; :meth:`receive` reports the loss."""
        self._exchange.drop(rank, reason)

    def dismiss(self, deadline_s: float) -> None:
        """Make all agents leave and wait: rank 0 must end last, or the launcher kills others. Idempotent."""
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
        except Exception as problem:  # callers that wait for an agent need the report
            for rank in self.ranks:
                self._exchange.drop(rank, f"the driver cannot serve its link: {problem!r}")


def best_address(addresses: Mapping[int, str], facts: Mapping[int, AgentFacts]) -> str:
    """Return an address of this host that agents on other hosts use, or one that agents here use.

    The launcher's name for this host may resolve to a loopback address here. Of several addresses the lowest rank's
    is used.
    """
    here = gethostname()
    ranks = sorted(addresses, key=lambda rank: (facts[rank].host == here, rank))
    return addresses[ranks[0]] if ranks else "127.0.0.1"


def gather(
    launch: Launch, meeting: Meeting, deadline_s: float, welcome: Message, environ: Mapping[str, str] = os.environ
) -> Star:
    """Wait until the agents of all other ranks have come, then send each of them ``welcome``.

    A wait of more than a few seconds is reported on stderr; ``environ`` has the launcher's variables. Raises
    LaunchError with the ranks that did not come in ``deadline_s`` seconds, or that ended before.
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
                say_waiting(launch, f"rank {spans(_missing(launch, facts), ', ')}", deadline_s, environ)
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
    """Print on stderr for whom and how long this process waits, and the remedy if no launcher started the others.

    On an agent the message also says if the name of rank 0's host cannot be resolved.
    """
    unresolved = why_unresolved(launch) if launch.rank else ""
    cause = unresolved or "each rank must run the same pytest command and collect perf cases"
    print(
        f"perfsuite: rank {launch.rank} of {launch.world_size} ({launch.launcher}) waits for {for_whom}, "
        f"{deadline_s:g} s at most: {cause}; {unless_launched(environ)}",
        file=sys.stderr,
        flush=True,
    )


def unless_launched(environ: Mapping[str, str]) -> str:
    """Return the remedy for variables of a launcher in a shell or container where no launcher started this process."""
    return f"if no launcher started it: unset {' '.join(telling_variables(environ))}"


def greeting(launch: Launch, host: str, pid: int, devices: Sequence[str] = ()) -> Message:
    """Return the first frame of an agent."""
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
    """Return why this agent does not belong to the launch; empty if it does."""
    numbers = [hello.get(name) for name in ("rank", "pid", "local_rank", "local_world_size")]
    if not all(type(number) is int for number in numbers) or not 0 < hello["rank"] < launch.world_size:
        return f"rank {hello.get('rank')} is not one of 1 to {launch.world_size - 1}"
    if hello.keys() != greeting(launch, "", 0).keys() or not all(
        isinstance(hello[name], list) for name in ("cores", "devices")
    ):
        return "its greeting is incomplete"
    if hello["rank"] in facts:
        return f"rank {hello['rank']} is taken by {facts[hello['rank']]}"
    return ""


def _allow_connections(world_size: int) -> None:
    """Raise this process's limit of open files, which is often 1024, to the number of ranks and a reserve."""
    needed = world_size + 768  # for connections in their handshake, and for pytest itself
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != hard < needed:
        raise LaunchError(
            f"the limit of open files is {hard}: the driver of {world_size} ranks needs {needed}; "
            f"raise the hard limit on rank 0's host ('ulimit -Hn {needed}', or LimitNOFILE of its service)"
        )
    if resource.RLIM_INFINITY != soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _require_present(links: Mapping[int, Link], facts: Mapping[int, AgentFacts]) -> None:
    """Raise LaunchError if an agent has ended: before the welcome agents send nothing, so only its end is readable."""
    ranks: dict[Any, int] = {link: rank for rank, link in links.items()}
    for link in wait(list(ranks), 0) if ranks else ():
        raise LaunchError(f"{facts[ranks[link]]} ended before all ranks were there: see its output; launch again")


def _who_is_missing(
    launch: Launch, facts: Mapping[int, AgentFacts], deadline_s: float, turned_away: Mapping[str, int]
) -> str:
    missing = _missing(launch, facts)
    hosts = sorted({agent.host for agent in facts.values()})
    came = (
        f"ranks came from {', '.join(hosts[:8])}{', ...' if len(hosts) > 8 else ''}" if hosts else "no other rank came"
    )
    strangers = f"; {sum(turned_away.values())} connections were rejected ({', '.join(sorted(turned_away))})"
    return (
        f"rank {spans(missing, ', ')} of {launch.world_size} did not come within {deadline_s:g} s ({came}"
        f"{strangers if turned_away else ''}): every process of the launch must run the same command and reach "
        f"{launch.master_addr}; see the output of the missing ranks"
    )


def _missing(launch: Launch, facts: Mapping[int, AgentFacts]) -> list[int]:
    return [rank for rank in range(1, launch.world_size) if rank not in facts]
