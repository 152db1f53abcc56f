"""Driver side: forms the ranks of a case, hands them the workload, waits within a deadline, assembles what comes back.

Never imports torch, never enters a collective, and knows nothing of how the workers were started.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfsuite.base.errors import AgentLost, InvalidParameter, RanksFailed
from perfsuite.base.mesh import MeshShape
from perfsuite.base.units import format_seconds
from perfsuite.platforms.base import Family
from perfsuite.platforms.telemetry import Telemetry
from perfsuite.record.own_metrics import OwnMetric
from perfsuite.record.result import Measurement
from perfsuite.record.step import DeviceLook
from perfsuite.record.workload import Budget, Pin, Process, Purpose, Workload
from perfsuite.runtime import protocol
from perfsuite.runtime.assembly import assemble
from perfsuite.runtime.failures import RankFailure, exception_of, judge
from perfsuite.runtime.transports.base import Message, Place, Transport, share_devices
from perfsuite.runtime.values import refer
from perfsuite.runtime.watch import Deadline, DeviceWatch

START_TIMEOUT_S = 120.0
"""For workers to come up: the first import of torch from a cold disk can take most of a minute."""
JOIN_S = 10.0
"""For ranks to join their process group, where the deadline of the case is shorter still: devices are opened in it."""
GRACE_S = 2.0
"""After one rank failed, the others get this long to finish or fail by themselves."""
DUMP_S = 2.0
BETWEEN_LOOKS_S = 0.2
"""A rank that is at work has moved on by then, one that hangs or waits has not."""
LEAVE_S = 30.0
"""That the ranks of a group may take to leave it."""
_POLL_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Job:
    """One workload to run once."""

    workload: Workload
    world_size: int
    budget: Budget
    shape: MeshShape | None = None
    """Mesh of the case; all ranks on one ``dp`` axis when None."""
    fresh: bool = False
    """Start rank processes for this run alone."""
    continues: bool = False
    """A further build of the case that ran last: it may have that one's processes and groups while they are whole."""
    purpose: Purpose = "time"
    test_module: str = ""
    """Name of the test's module, where a decorated function may be held."""


@dataclass(kw_only=True)
class _Wait:
    """What is known so far about the ranks that were sent a command."""

    slots: frozenset[int]
    """Slots that have to answer; what idle workers do is no concern of this command."""
    done: dict[int, Message] = dataclasses.field(default_factory=dict)
    errors: dict[int, Message] = dataclasses.field(default_factory=dict)
    exits: dict[int, str] = dataclasses.field(default_factory=dict)
    phases: dict[int, str] = dataclasses.field(default_factory=dict)
    lost: str = ""

    @property
    def begun(self) -> set[int]:
        """Slots that have said anything."""
        return {*self.phases, *self.answered}

    @property
    def answered(self) -> set[int]:
        return {*self.done, *self.errors, *self.exits}


class Driver:
    """Runs jobs one at a time on a transport's slots."""

    def __init__(
        self,
        *,
        transport: Transport,
        family: Family,
        rootpath: Path,
        device_count: int,
        pin: Pin = "none",
        backend: str | None = None,
        metrics: Callable[[], Sequence[OwnMetric]] = tuple,
    ) -> None:
        """``device_count``: on each host.  ``backend``: None is the family's.  ``metrics``: gives registered ones."""
        self._metrics = metrics
        self._pin = pin
        self._backend = backend or family.backend
        self._transport = transport
        self._family = family
        self._rootpath = rootpath
        self._device_count = max(1, device_count)
        self._generation = 0
        self._formed = 0
        """World size of the group that is whole; 0 when there is none."""
        self._subdivided = False
        """The ranks have made groups besides: another case gets a new one."""
        self._opened: dict[int, int] = {}
        """Devices that workers of this host have opened, by slot."""
        self._dying: set[int] = set()
        """Slots whose workers were killed: the driver of a device lists them until they have ended."""
        self._members = 0
        """Ranks that are in a process group, whether or not it can be used again: 0 to this number - 1."""
        self._tainted: set[str] = set()
        """What workers ran or changed that forbids their reuse."""
        self._tails: dict[int, str] = {}
        self._telemetry: Telemetry | None = None
        self._watch: DeviceWatch | None = None
        """Looks at the devices while the ranks of this job are timing."""
        self._checked: set[str] = set()
        """Twins that passed: cases that differ in size alone have the same one."""

    @property
    def capacity(self) -> int | None:
        """Ranks that the launcher gave; None when as many as asked for can be started."""
        return self._transport.capacity

    def start(self) -> None:
        """Begin to start workers in the background; returns at once."""
        self._transport.start()

    def close(self) -> None:
        """End every process of the run.  Idempotent."""
        if self._telemetry is not None:
            self._telemetry.close()
        self._transport.close()

    def log_tails(self) -> dict[int, str]:
        """Rank -> last lines of its log, of the last failed job."""
        return dict(self._tails)

    def environment(self) -> dict[str, Any]:
        """torch and library versions as a worker sees them."""
        self._acquire(1, fresh=False, env=self._environment_of(None, 1))
        answers = self._command({0: {"verb": "facts", "family": self._family.name}}, START_TIMEOUT_S)
        return dict(answers[0])

    def contexts(self) -> Mapping[int, int]:
        """Return how many rank processes use each device of this host; those of earlier, larger cases count."""
        return Counter(self._opened.values())

    def run(self, job: Job) -> Measurement:
        """Run ``job`` once and return what its ranks measured.

        Raises RanksFailed when a rank died, raised or hung; WrongResult, InvalidParameter, UnsupportedCase,
        ExpectedFailure and OutOfMemory as the ranks raised them; AgentLost when the run cannot go on.  The deadline
        of the job's budget holds for the joining of the process group (at least JOIN_S) and again for the rest.
        """
        shape = job.shape or MeshShape.of(dp=job.world_size)
        if shape.world_size != job.world_size:
            raise InvalidParameter(
                f"mesh {shape} has {shape.world_size} ranks, the case {job.world_size}; make them equal"
            )
        self._tails = {}
        process = job.workload.process
        twin = job.workload.twin() if job.purpose == "time" else None  # other builds come after the timed one
        checked = f"{type(twin).__module__}.{twin!r} on {shape} with {process}"
        fresh = job.fresh or process is not None
        command: Message = {
            "verb": "run",
            "workload": refer(job.workload, self._rootpath, job.test_module),
            "shape": str(shape),
            "budget": dataclasses.asdict(job.budget),
            "purpose": job.purpose,
            "checks_twin": twin is not None and checked not in self._checked,
            "metrics": [dataclasses.asdict(metric) for metric in self._metrics()],
        }
        env = self._environment_of(process, job.world_size)
        if self._family.preloads and not env:
            self._transport.preload(job.workload.preload)
        whole = self._formed == job.world_size
        goes_on = job.continues and whole and protocol.PROFILER not in self._tainted
        if not goes_on and (fresh or self._tainted or self._subdivided or not whole):
            self._disband(replaced=job.world_size if fresh else 0)
        self._acquire(job.world_size, fresh=fresh and not goes_on, env=env)
        self._form(job.world_size, job.budget.timeout_s)
        reports, looks = self._time(job, command, shape)
        self._checked.add(checked)
        self._tainted |= {name for report in reports.values() for name in report["stale"]}
        self._tainted |= {"a process of its own"} if process is not None else set()
        self._subdivided = any(report["made_groups"] for report in reports.values())
        return assemble(
            [reports[rank] for rank in range(job.world_size)],
            aligned=job.workload.aligned,
            backend=self._backend,
            fresh=fresh,
            transport=self._transport.name,
            smoke=job.budget.smoke,
            looks=looks,
        )

    def _time(self, job: Job, command: Message, shape: MeshShape) -> tuple[dict[int, Message], Sequence[DeviceLook]]:
        """What each rank reports, and what was seen of the devices while they took samples."""
        self._watch = self._watch_for(job)
        timeout_s = job.budget.timeout_s + job.budget.asked_s
        try:
            reports = self._command(dict.fromkeys(range(job.world_size), command), timeout_s, shape=shape)
        finally:
            watch, self._watch = self._watch, None
        return reports, watch.looks if watch else ()

    def _watch_for(self, job: Job) -> DeviceWatch | None:
        """A watch on the devices; on a CPU, whose cores the ranks compute on, only where a sustained run asks."""
        if job.budget.smoke or (self._family.shareable and job.budget.sustain_s is None):
            return None
        self._telemetry = self._telemetry or self._family.telemetry()
        return DeviceWatch(self._telemetry)

    def _environment_of(self, process: Process | None, world_size: int) -> dict[str, str]:
        """Variables of rank processes beside the driver's own: the family's where nobody set them, the workload's."""
        set_here = self._family.host.environ
        places = [self._transport.place(rank) for rank in range(world_size)]
        sharing = self._family.sharing_variables if share_devices(places, self._device_count) else {}
        default = {
            name: value for name, value in {**self._family.rank_variables, **sharing}.items() if name not in set_here
        }
        return {**default, **(process.env if process else {})}

    # -- the steps of a run --------------------------------------------------------------------------------------

    def _acquire(self, count: int, *, fresh: bool, env: Mapping[str, str]) -> None:
        replaced = self._transport.acquire(count, fresh=fresh, env=env, deadline_s=START_TIMEOUT_S)
        self._opened = {slot: device for slot, device in self._opened.items() if slot not in self._dying}
        self._dying.clear()
        if replaced and self._members:  # one of a group had died: the others can neither use it nor leave it
            self._discard(list(range(self._members)))
            self._transport.acquire(count, fresh=fresh, env=env, deadline_s=START_TIMEOUT_S)

    def _form(self, world_size: int, timeout_s: float) -> None:
        """Put ranks 0 to ``world_size`` - 1 into a process group of their own, unless they are in it already."""
        if self._formed == world_size:
            return
        self._generation += 1
        limit_s = max(timeout_s, JOIN_S)
        store = self._transport.open_store(START_TIMEOUT_S)
        places = [self._transport.place(rank) for rank in range(world_size)]
        on_host = {place.host: sum(other.host == place.host for other in places) for place in places}
        # A launcher that binds its ranks gives each, or each few, cores of their own.
        beside = {at.slot: [one for one in places if (one.host, one.cores) == (at.host, at.cores)] for at in places}
        shares = share_devices(places, self._device_count)
        commands = {
            place.slot: {
                "verb": "form",
                "rank": place.slot,
                "local_rank": place.local_rank,
                "world_size": world_size,
                "local_world_size": on_host[place.host],
                "family": self._family.name,
                "backend": self._backend,
                "binds": self._backend == self._family.backend,
                "device": self._device(place),
                "store_host": store[0],
                "store_port": store[1],
                "generation": self._generation,
                "timeout_s": limit_s,
                "cores": list(place.cores),
                "share": beside[place.slot].index(place),
                "beside": [other.slot for other in beside[place.slot]],
                "shares": shares,
                "pin": self._pin,
            }
            for place in places
        }
        self._members = world_size
        self._opened |= {place.slot: self._device(place) for place in places if place.host == places[0].host}
        self._command(commands, limit_s, start_s=START_TIMEOUT_S)
        self._formed = world_size

    def _disband(self, *, replaced: int) -> None:
        """Have all ranks leave their process group together; end those that cannot or that may not be used again.

        Communicators of devices are destroyed by all of their ranks: one that leaves while another stays, or is
        replaced, waits for ever.  Ranks 0 to ``replaced`` - 1 are about to be replaced: all of them need not leave.
        """
        count, tainted = self._members, self._tainted
        self._members, self._formed, self._tainted, self._subdivided = 0, 0, set(), False
        if tainted:
            self._discard(list(range(count)))
        elif count > replaced:
            with contextlib.suppress(RanksFailed):  # one died since, or waits for one that did: all were ended
                self._command({rank: {"verb": "leave"} for rank in range(count)}, LEAVE_S)
            self._tails = {}

    def _device(self, place: Place) -> int:
        return place.device(self._device_count)[0]

    def _command(
        self,
        commands: Mapping[int, Message],
        timeout_s: float,
        *,
        start_s: float = 0.0,
        shape: MeshShape | None = None,
    ) -> dict[int, Message]:
        """Send each slot its command and return the answers; any failure ends in an exception and a usable driver.

        With ``start_s`` the workers may be new: they get so long to import torch and to say that they have begun, and
        ``timeout_s`` from then.  ``shape``: failures say where in this mesh a rank stands.
        """
        for slot, command in commands.items():
            self._transport.send(slot, command)
        wait = _Wait(slots=frozenset(commands))
        limit_s = start_s or timeout_s
        deadline = Deadline(limit_s)
        try:
            while wait.answered != wait.slots and not wait.lost and (left := deadline.left_s()) > 0:
                self._take_events(wait, min(left, _POLL_S))
                if wait.errors or wait.exits:
                    deadline.shorten(GRACE_S)
                elif start_s and wait.begun == wait.slots:
                    start_s, limit_s, deadline = 0.0, timeout_s, Deadline(timeout_s)
        except BaseException:  # Ctrl-C or SIGTERM while ranks are at work: nothing of them can be used again
            self._discard(commands)
            raise
        if wait.lost:
            raise AgentLost(wait.lost)
        if wait.errors or wait.exits or wait.answered != wait.slots:
            self._fail(wait, sorted(commands), limit_s, shape)
        return wait.done

    def _take_events(self, wait: _Wait, timeout_s: float) -> None:
        for event in self._transport.poll(timeout_s):
            if event.kind == "agent_lost":
                wait.lost = wait.lost or event.text  # what follows is a consequence
            elif event.slot not in wait.slots:
                continue
            elif event.kind == "exit":
                wait.exits[event.slot] = event.text
            elif event.message is not None and "phase" in event.message:
                wait.phases[event.slot] = event.message["phase"]
            elif event.message is not None and "done" in event.message:
                wait.done[event.slot] = event.message["done"]
            elif event.message is not None:
                wait.errors[event.slot] = event.message["error"]
        if self._watch is not None:
            self._watch.tick(wait.phases.values())

    def _discard(self, slots: Mapping[int, Any] | list[int]) -> None:
        self._transport.kill(list(slots))
        self._dying.update(slots)
        self._members = self._formed = 0

    def _fail(self, wait: _Wait, slots: list[int], limit_s: float, shape: MeshShape | None) -> None:
        """Name what went wrong, make the driver usable again, raise."""
        stuck = [slot for slot in slots if slot not in wait.answered]
        late = not (wait.errors or wait.exits)
        looks = self._look_at(stuck, twice=late)
        self._tails = {slot: tail for slot in slots if (tail := self._transport.log_tail(slot))}
        in_order = dict.fromkeys([*wait.exits, *slots])  # of several that died the first is the cause
        failures = [self._judge(slot, wait, looks) for slot in in_order]
        if shape is not None:
            failures = [dataclasses.replace(failure, place=shape.place(failure.rank)) for failure in failures]
        clean = all(error["kind"] in protocol.CLEAN_ERRORS and not error["stale"] for error in wait.errors.values())
        self._formed = 0
        if wait.exits or stuck or not clean:
            self._discard(slots)
        raise exception_of(len(slots), failures, f", limit {format_seconds(limit_s)}" if late else "")

    def _look_at(self, stuck: list[int], *, twice: bool) -> dict[int, tuple[str, str]]:
        """Stack dumps by slot, an earlier and a later one; the earlier is empty unless ``twice``."""
        if not stuck:
            return {}
        earlier = self._transport.dump(stuck, DUMP_S) if twice else {}
        if twice:
            time.sleep(BETWEEN_LOOKS_S)
        later = self._transport.dump(stuck, DUMP_S)
        return {slot: (earlier.get(slot, ""), later.get(slot, "")) for slot in stuck}

    def _judge(self, slot: int, wait: _Wait, looks: Mapping[int, tuple[str, str]]) -> RankFailure:
        host, phase = self._transport.place(slot).host, wait.phases.get(slot, "starting")
        if slot in wait.exits:
            return RankFailure(rank=slot, host=host, state="died", what=wait.exits[slot], phase=phase)
        if slot in wait.errors:
            error = wait.errors[slot]
            told = {"what": error["message"], "detail": error["traceback"], "types": error.get("types", ())}
            return RankFailure(rank=slot, host=host, state="raised", phase=error["phase"], kind=error["kind"], **told)
        if slot in wait.done:
            return RankFailure(rank=slot, host=host, state="finished", what="", phase=phase)
        look = judge(*looks[slot])
        return RankFailure(rank=slot, host=host, state=look.state, what=look.where, phase=phase, detail=look.stack)
