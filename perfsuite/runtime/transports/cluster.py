"""The driver's side of a launch by torchrun, mpirun or srun: agents serve the slots on this and other hosts.

Slot 0 is a local transport of the driver; every other slot is one agent (:mod:`.agent`). The driver has no thread for
its messages: the methods here read messages of the agents while they wait.
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Literal

from perfsuite.base.errors import AgentLost, RanksFailed
from perfsuite.runtime.ranks.placement import allowed_cores
from perfsuite.runtime.transports.base import Event, Message, Place, Transport
from perfsuite.runtime.transports.exchange import Incoming
from perfsuite.runtime.transports.keys import offer_meeting
from perfsuite.runtime.transports.launchers import Launch, gathering_s
from perfsuite.runtime.transports.local import OneSlot
from perfsuite.runtime.transports.star import GOT_SIGNAL, Star, gather

_ANSWER_S = 10.0  # After this time beyond the deadline an agent is stopped or unreachable.
_FAREWELL_S = 15.0  # Time limit for agents to end their workers and themselves.
_WATCH_S = 1.0
_CAUSE_S = 0.2  # Wait for a loss without a signal after one with a signal: reports come in any order.


_Loss = tuple[str, bool]
"""Text on a lost agent, and whether it got SIGTERM or SIGHUP: usually from a launcher, because another process died."""


class ClusterTransport(Transport):
    """One slot per process of the launch."""

    def __init__(
        self,
        launch: Launch,
        *,
        start_method: Literal["fork", "exec"],
        preload: tuple[str, ...],
        log_directory: Path,
        deadline_s: float | None = None,
        environ: Mapping[str, str] = os.environ,
        devices: tuple[str, ...] = (),
    ) -> None:
        """``deadline_s`` limits the wait for the agents, ``devices`` are visible to this process.

        The other arguments are a LocalTransport's. Agents on the driver's host write their logs to ``log_directory``,
        agents on other hosts to directories of their own.
        """
        self.name = launch.launcher
        self.capacity = launch.world_size
        self._launch = launch
        self._deadline_s = gathering_s(launch) if deadline_s is None else deadline_s
        self._environ = environ
        self._devices = devices
        self._welcome: Message = {
            "start_method": start_method,
            "preload": list(preload),
            "log_directory": str(log_directory.absolute()) if launch.single_host else "",
        }
        self._local = OneSlot(start_method=start_method, preload=preload, log_directory=log_directory)
        self._star = Star({}, {})
        self._events: list[Event] = []
        self._replies: dict[int, dict[int, Message]] = {}  # Replies to waiting callers, by request and rank.
        self._requests = itertools.count()
        self._epochs = dict.fromkeys(range(launch.world_size), 0)
        self._lost: dict[int, _Loss] = {}

    def gather(self) -> None:
        """Wait until every agent of the launch has come. Call it once; only :meth:`start` may come before.

        Raises LaunchError if several hosts have no key, if all ports are in use, and for agents that did not come.
        """
        threading.Thread(target=_end_with_parent, args=(os.getppid(),), name="perfsuite-parent", daemon=True).start()
        offer = offer_meeting(self._launch, self._environ)
        self._star.dismiss(0.0)
        try:
            self._star = gather(self._launch, offer.meeting, self._deadline_s, self._welcome, self._environ)
        finally:
            offer.discard()  # no agent will use it any more

    def start(self) -> None:
        """See :meth:`Transport.start`; agents that come later start their workers by themselves."""
        self._star.send(self._star.ranks, {"verb": "start"})
        self._local.start()

    def place(self, slot: int) -> Place:
        """See :meth:`Transport.place`."""
        if slot == 0:
            here = self._launch
            return Place(
                slot=0,
                host=socket.gethostname(),
                local_rank=here.local_rank,
                local_world_size=here.local_world_size,
                cores=allowed_cores(),
                devices=self._devices,
            )
        return self._star.facts[slot]

    def devices_here(self, count: int) -> int | None:
        """Return the devices of the driver's host, ``count`` for a rank without a list; None before all agents came."""
        if len(self._star.facts) < self._launch.world_size - 1:
            return None
        places = [self.place(slot) for slot in range(self._launch.world_size)]
        return len({place.device(count)[1] for place in places if place.host == places[0].host})

    def agents_here(self) -> frozenset[int]:
        """Return the processes of the agents on this host, lost ones included."""
        here = socket.gethostname()
        return frozenset(facts.pid for facts in self._star.facts.values() if facts.host == here)

    def acquire(self, count: int, *, fresh: bool, env: Mapping[str, str], deadline_s: float) -> bool:
        """See :meth:`Transport.acquire`."""
        assert count <= self._launch.world_size, f"{count} ranks of {self._launch.world_size}"
        self._take_in(0.0)
        self._require_agents()
        ranks = range(1, count)
        request = self._ask(ranks, {"verb": "acquire", "fresh": fresh, "env": dict(env), "deadline_s": deadline_s})
        failures = []
        replaced = False
        try:
            replaced = self._local.acquire(1, fresh=fresh, env=env, deadline_s=deadline_s)
        except RanksFailed as failure:
            failures.append(f"{failure} (on {socket.gethostname()})")
        replies = self._await_replies(request, ranks, deadline_s + _ANSWER_S)
        for rank in ranks:
            if rank not in replies and rank in self._star.ranks:
                self._star.drop(rank, f"it sent no answer within {deadline_s + _ANSWER_S:g} s")
                self._take_in(0.0)
            elif "error" in replies.get(rank, {}):
                failures.append(f"{replies[rank]['error']} (on {self.place(rank).host})")
        self._require_agents()
        if failures:
            raise RanksFailed("\n".join(failures))
        return replaced or any(reply["value"] for reply in replies.values())

    def open_store(self, deadline_s: float) -> tuple[str, int]:
        """See :meth:`Transport.open_store`; the driver's host serves it on the address that the agents use."""
        return self._local.open_store(deadline_s, self._star.address())

    def send(self, slot: int, command: Message) -> None:
        """See :meth:`Transport.send`; raises AgentLost."""
        if slot == 0:
            self._local.send(0, command)
            return
        self._require_agents([slot])
        self._star.send([slot], {"verb": "send", "command": command})

    def poll(self, timeout_s: float) -> list[Event]:
        """See :meth:`Transport.poll`; a lost agent is reported once, as an ``agent_lost`` event."""
        self._take_in(0.0 if self._events else timeout_s)
        events, self._events = self._events, []
        return events + self._local.poll(0.0)

    def dump(self, slots: Iterable[int], deadline_s: float) -> dict[int, str]:
        """See :meth:`Transport.dump`; the result lacks slots whose agents are lost."""
        slots = list(slots)
        ranks = [slot for slot in slots if slot in self._star.ranks]
        request = self._ask(ranks, {"verb": "dump", "deadline_s": deadline_s})
        dumps = self._local.dump([0], deadline_s) if 0 in slots else {}
        replies = self._await_replies(request, ranks, deadline_s + _ANSWER_S)
        return {**dumps, **{rank: reply["value"] for rank, reply in replies.items() if reply.get("value")}}

    def kill(self, slots: Iterable[int]) -> None:
        """See :meth:`Transport.kill`; earlier messages of these workers are dropped."""
        slots = set(slots)
        if 0 in slots:
            self._local.kill([0])
        for slot in slots - {0}:
            self._epochs[slot] += 1
            self._star.send([slot], {"verb": "kill", "epoch": self._epochs[slot]})
        self._events = [event for event in self._events if event.slot not in slots or event.kind == "agent_lost"]

    def log_tail(self, slot: int, lines: int = 20) -> str:
        """See :meth:`Transport.log_tail`; empty if the agent is lost."""
        if slot == 0:
            return self._local.log_tail(0, lines)
        ranks = [slot] if slot in self._star.ranks else []
        replies = self._await_replies(self._ask(ranks, {"verb": "log_tail", "lines": lines}), ranks, _ANSWER_S)
        return str(replies[slot].get("value", "")) if slot in replies else ""

    def await_loss(self, timeout_s: float) -> str:
        """Return a message about the lost agents; wait for one that did not end by a signal. Empty if none is lost."""
        until = time.monotonic() + timeout_s
        for rank, reason in self._star.lost.items():  # a signal may have interrupted us before this loss was recorded
            if rank not in self._lost:
                self._note_loss(Incoming(rank=rank, frame=None, reason=reason))
        while all(by_signal for _, by_signal in self._lost.values()) and (left := until - time.monotonic()) > 0:
            self._take_in(left, local=False)
            if self._lost:
                until = min(until, time.monotonic() + _CAUSE_S)
        return _headline(self._lost.values()) if self._lost else ""

    def close(self) -> None:
        """See :meth:`Transport.close`. A signal handler may call it again during a first call."""
        try:
            self._star.send(self._star.ranks, {"verb": "dismiss"})
            self._local.close()
        finally:
            self._star.dismiss(_FAREWELL_S)

    def _ask(self, ranks: Iterable[int], frame: Message) -> int:
        request = next(self._requests)
        self._replies[request] = {}
        self._star.send(ranks, {**frame, "id": request})
        return request

    def _await_replies(self, request: int, ranks: Iterable[int], timeout_s: float) -> dict[int, Message]:
        """Return the answers by rank, without those of agents that are lost or did not answer in time."""
        until = time.monotonic() + timeout_s
        try:
            while (left := until - time.monotonic()) > 0:
                if all(rank in self._replies[request] or rank in self._lost for rank in ranks):
                    break
                self._take_in(left, local=False)
            return self._replies[request]
        finally:
            del self._replies[request]

    def _take_in(self, timeout_s: float, *, local: bool = True) -> None:
        for arrival in self._star.receive(timeout_s, self._local.waitables() if local else ()):
            if arrival.frame is None:
                self._note_loss(arrival)
            elif "event" in arrival.frame:
                if arrival.frame["epoch"] == self._epochs[arrival.rank]:
                    fields = {name: arrival.frame[name] for name in ("message", "text")}
                    self._events.append(Event(slot=arrival.rank, kind=arrival.frame["event"], **fields))
            elif arrival.frame["reply"] in self._replies:
                self._replies[arrival.frame["reply"]][arrival.rank] = arrival.frame

    def _note_loss(self, arrival: Incoming) -> None:
        facts = self._star.facts[arrival.rank]
        text = (
            f"the agent of {facts} is lost: {arrival.reason}; the run ends, because a launcher does not replace it: "
            "see its output and that of the launcher"
        )
        self._lost[arrival.rank] = (text, arrival.reason.startswith(GOT_SIGNAL))
        self._events.append(Event(slot=arrival.rank, kind="agent_lost", text=text))

    def _require_agents(self, ranks: Iterable[int] | None = None) -> None:
        """Raise AgentLost if the agent of one of ``ranks`` (default: of any) is lost."""
        lost = [loss for rank, loss in self._lost.items() if ranks is None or rank in set(ranks)]
        if lost:
            raise AgentLost(_headline(lost))


def _headline(losses: Collection[_Loss]) -> str:
    """Return the text of the first loss that no signal caused (else of the first), with the number of the others."""
    causes = [text for text, by_signal in losses if not by_signal] or [text for text, _ in losses]
    return causes[0] + (f" ({len(causes) - 1} more are lost)" if len(causes) > 1 else "")


def _end_with_parent(parent: int) -> None:
    """In a thread: send SIGTERM to this process when its launcher was killed, as a launcher would have done."""
    while os.getppid() == parent:
        time.sleep(_WATCH_S)
    os.kill(os.getpid(), signal.SIGTERM)
