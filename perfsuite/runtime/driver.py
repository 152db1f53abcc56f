"""Driver side: form the ranks of a case, send them the workload, wait within a deadline, assemble their reports.

The driver never imports torch, never enters a collective, and does not know how the workers were started.
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
from perfsuite.runtime.assembly import Deadline, DeviceWatch, assemble
from perfsuite.runtime.failures import RankFailure, exception_of, judge
from perfsuite.runtime.transports.base import Message, Transport, share_devices
from perfsuite.runtime.values import refer

START_TIMEOUT_S = 120.0  # Time limit for workers to start: torch from a cold disk can take most of a minute.
JOIN_S = 10.0  # Least time limit for joining a process group, in which devices are opened.
GRACE_S = 2.0  # After one rank failed, the others have this long to finish or fail.
DUMP_S = 2.0
BETWEEN_LOOKS_S = 0.2  # Time between two stack dumps: a rank that works has moved by then.
LEAVE_S = 30.0  # Time limit for the ranks of a group to leave it.
_POLL_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run of a workload."""

    workload: Workload
    world_size: int
    budget: Budget
    shape: MeshShape | None = None  # Mesh of the case; None: all ranks on one ``dp`` axis.
    fresh: bool = False  # Start rank processes for this run alone.
    continues: bool = False  # A further build of the last case: it may use its intact processes and groups.
    purpose: Purpose = "time"
    test_module: str = ""  # Name of the test's module, which may hold a decorated function.


@dataclass(kw_only=True)
class _Wait:
    """Answers so far of the ranks that were sent a command."""

    slots: frozenset[int]  # Slots that have to answer; messages of other slots are ignored.
    done: dict[int, Message] = dataclasses.field(default_factory=dict)
    errors: dict[int, Message] = dataclasses.field(default_factory=dict)
    exits: dict[int, str] = dataclasses.field(default_factory=dict)
    phases: dict[int, str] = dataclasses.field(default_factory=dict)
    lost: str = ""

    @property
    def begun(self) -> set[int]:
        """Slots that sent any message."""
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
        """``device_count``: per host. ``backend``: None selects the family's. ``metrics``: returns registered ones."""
        self._metrics = metrics
        self._pin = pin
        self._backend = backend or family.backend
        self._transport = transport
        self._family = family
        self._rootpath = rootpath
        self._device_count = max(1, device_count)
        self._generation = 0
        self._formed = 0  # World size of the usable process group; 0 when there is none.
        self._subdivided = False  # The ranks created further groups: another case needs a new process group.
        self._opened: dict[int, int] = {}  # Devices that workers of this host opened, by slot.
        self._dying: set[int] = set()  # Slots of killed workers, which the device lists until they have ended.
        self._members = 0  # Number of ranks in a process group, usable or not: ranks 0 to this number - 1.
        self._tainted: set[str] = set()  # Reasons against reuse: workloads that ran, changed settings.
        self._tails: dict[int, str] = {}
        self._telemetry: Telemetry | None = None
        self._watch: DeviceWatch | None = None  # Reads the devices while the ranks of this job sample.
        self._checked: set[str] = set()  # Twins that passed; cases that differ only in size share one.

    @property
    def capacity(self) -> int | None:
        """Number of ranks that the launcher gave; None if any number can be started."""
        return self._transport.capacity

    def start(self) -> None:
        """Begin to start workers in the background; return at once."""
        self._transport.start()

    def close(self) -> None:
        """End every process of the run. Idempotent."""
        if self._telemetry is not None:
            self._telemetry.close()
        self._transport.close()

    def log_tails(self) -> dict[int, str]:
        """Return the last lines of each rank's log of the last failed job, by rank."""
        return dict(self._tails)

    def environment(self) -> dict[str, Any]:
        """Return the versions of torch and libraries that a worker uses."""
        self._acquire(1, fresh=False, env=self._environment_of(None, 1))
        answers = self._command({0: {"verb": "facts", "family": self._family.name}}, START_TIMEOUT_S)
        return dict(answers[0])

    def contexts(self) -> Mapping[int, int]:
        """Return how many rank processes use each device of this host, those of earlier, larger cases included."""
        return Counter(self._opened.values())

    def run(self, job: Job) -> Measurement:
        """Run ``job`` once and return the measurement of its ranks.

        Raises RanksFailed when a rank died, raised or hung; WrongResult, InvalidParameter, UnsupportedCase,
        ExpectedFailure and OutOfMemory as the ranks raised them; AgentLost when the run cannot go on. The deadline of
        the job's budget applies to joining the process group (at least JOIN_S), and again to the rest.
        """
        shape = job.shape or MeshShape.of(dp=job.world_size)
        if shape.world_size != job.world_size:
            raise InvalidParameter(
                f"mesh {shape} has {shape.world_size} ranks, the case {job.world_size}; make them equal"
            )
        self._tails = {}
        process = job.workload.process
        twin = job.workload.twin() if job.purpose == "time" else None  # the timed build is the first one
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
        if not job.budget.smoke and not (self._family.shareable and job.budget.sustain_s is None):
            self._telemetry = self._telemetry or self._family.telemetry()
            self._watch = DeviceWatch(self._telemetry)
        timeout_s = job.budget.timeout_s + job.budget.asked_s
        try:
            reports = self._command(dict.fromkeys(range(job.world_size), command), timeout_s, shape=shape)
        finally:
            watch, self._watch = self._watch, None
        return reports, watch.looks if watch else ()

    def _environment_of(self, process: Process | None, world_size: int) -> dict[str, str]:
        """Return the variables that rank processes get in addition: the family's if unset, and the workload's."""
        set_here = self._family.host.environ
        places = [self._transport.place(rank) for rank in range(world_size)]
        sharing = self._family.sharing_variables if share_devices(places, self._device_count) else {}
        default = {
            name: value for name, value in {**self._family.rank_variables, **sharing}.items() if name not in set_here
        }
        return {**default, **(process.env if process else {})}

    def _acquire(self, count: int, *, fresh: bool, env: Mapping[str, str]) -> None:
        replaced = self._transport.acquire(count, fresh=fresh, env=env, deadline_s=START_TIMEOUT_S)
        self._opened = {slot: device for slot, device in self._opened.items() if slot not in self._dying}
        self._dying.clear()
        if replaced and self._members:  # a member of the group had died: the others cannot use or leave the group
            self._discard(list(range(self._members)))
            self._transport.acquire(count, fresh=fresh, env=env, deadline_s=START_TIMEOUT_S)

    def _form(self, world_size: int, timeout_s: float) -> None:
        """Put ranks 0 to ``world_size`` - 1 into one process group, unless they form one already."""
        if self._formed == world_size:
            return
        self._generation += 1
        limit_s = max(timeout_s, JOIN_S)
        store = self._transport.open_store(START_TIMEOUT_S)
        places = [self._transport.place(rank) for rank in range(world_size)]
        on_host = {place.host: sum(other.host == place.host for other in places) for place in places}
        # A launcher that binds its ranks assigns cores to each rank, or to a few ranks together.
        beside = {at.slot: [one for one in places if (one.host, one.cores) == (at.host, at.cores)] for at in places}
        devices = {place.slot: place.device(self._device_count)[0] for place in places}
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
                "device": devices[place.slot],
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
        self._opened |= {place.slot: devices[place.slot] for place in places if place.host == places[0].host}
        self._command(commands, limit_s, start_s=START_TIMEOUT_S)
        self._formed = world_size

    def _disband(self, *, replaced: int) -> None:
        """Make all ranks leave their process group together; end those that cannot or that must not be used again.

        All ranks of a device communicator must destroy it: a rank that leaves alone waits for ever. If all ranks
        are about to be replaced (0 to ``replaced`` - 1), they need not leave.
        """
        count, tainted = self._members, self._tainted
        self._members, self._formed, self._tainted, self._subdivided = 0, 0, set(), False
        if tainted:
            self._discard(list(range(count)))
        elif count > replaced:
            with contextlib.suppress(RanksFailed):  # a rank died or waits for a dead one: all of them were ended
                self._command({rank: {"verb": "leave"} for rank in range(count)}, LEAVE_S)
            self._tails = {}

    def _command(
        self, commands: Mapping[int, Message], timeout_s: float, *, start_s: float = 0.0, shape: MeshShape | None = None
    ) -> dict[int, Message]:
        """Send each slot its command and return the answers; a failure raises and leaves the driver usable.

        With ``start_s`` the workers may be new: ``start_s`` limits the import of torch, and ``timeout_s`` the time
        after the first messages of all. ``shape`` adds a rank's place in this mesh to messages of failures.
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
        except BaseException:  # Ctrl-C or SIGTERM while ranks are at work: the ranks cannot be used again
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
                wait.lost = wait.lost or event.text  # later losses are consequences of the first
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
        """Name the failure, make the driver usable again, and raise."""
        stuck = [slot for slot in slots if slot not in wait.answered]
        late = not (wait.errors or wait.exits)
        looks = self._look_at(stuck, twice=late)
        self._tails = {slot: tail for slot in slots if (tail := self._transport.log_tail(slot))}
        in_order = dict.fromkeys([*wait.exits, *slots])  # the rank that died first is the cause
        failures = [self._judge(slot, wait, looks) for slot in in_order]
        if shape is not None:
            failures = [dataclasses.replace(failure, place=shape.place(failure.rank)) for failure in failures]
        clean = all(error["kind"] in protocol.CLEAN_ERRORS and not error["stale"] for error in wait.errors.values())
        self._formed = 0
        if wait.exits or stuck or not clean:
            self._discard(slots)
        raise exception_of(len(slots), failures, f", limit {format_seconds(limit_s)}" if late else "")

    def _look_at(self, stuck: list[int], *, twice: bool) -> dict[int, tuple[str, str]]:
        """Return an earlier and a later stack dump by slot; the earlier one is empty unless ``twice``."""
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
            kind, what, detail = error["kind"], error["message"], error["traceback"]
            return RankFailure(
                rank=slot, host=host, state="raised", what=what, phase=error["phase"], detail=detail, kind=kind,
                types=error.get("types", ()),
            )  # fmt: skip
        if slot in wait.done:
            return RankFailure(rank=slot, host=host, state="finished", what="", phase=phase)
        look = judge(*looks[slot])
        return RankFailure(rank=slot, host=host, state=look.state, what=look.where, phase=phase, detail=look.stack)
