"""Rank side: execute the driver's commands. Each process has one Worker; torch is imported here."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import resource
import socket
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # exported at run time

from perfsuite.base.errors import CaseError
from perfsuite.base.mesh import MeshShape
from perfsuite.base.units import seconds_to_us
from perfsuite.metrics.spec import HOST_BOUND
from perfsuite.platforms import device_code
from perfsuite.platforms.accelerator import captured_kernel_s
from perfsuite.platforms.base import DeviceCode
from perfsuite.platforms.host import Host, read_throttling, throttled_share
from perfsuite.platforms.quiet import instruments
from perfsuite.record.codec import to_json
from perfsuite.record.own_metrics import OwnMetric
from perfsuite.record.result import ClockFacts
from perfsuite.record.workload import Budget, Step, Workload, as_step
from perfsuite.runtime.own_tree import own_modules, require_own_modules
from perfsuite.runtime.protocol import TIMING
from perfsuite.runtime.ranks import placement
from perfsuite.runtime.ranks.arrival import (
    GROUP_TIMEOUT,
    ArrivalWatch,
    iterations_within,
    offset_to_rank0_s,
    reach_store,
    require_loopback,
    serve_store,
    wait_as_long_in_every_group,
)
from perfsuite.runtime.ranks.placement import read_cores
from perfsuite.runtime.ranks.process_state import ProcessState, compiled_frames
from perfsuite.runtime.ranks.rank import Membership, Meshes, RecordKeeper, WorkerRank
from perfsuite.runtime.ranks.returned import DESTROYED, Iteration, describe
from perfsuite.runtime.ranks.spans import SpanRecorder
from perfsuite.runtime.ranks.timer import Samples, Timer
from perfsuite.runtime.transports.base import WRAPPER, Message
from perfsuite.runtime.values import resolve


class Worker:
    """Executes commands one after the other; see :mod:`perfsuite.runtime.protocol`."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._phase = "idle"
        self._member: Membership | None = None
        self._utilisation_percent: float | None = None
        self._seen: Message = {}
        self._host = Host()
        self._throttled: float | None = None
        self._placement = placement.Placement(threads=1, cores=None)
        self._several_hosts = False  # Whether ranks of the group are on several hosts, which have different clocks.
        self._state: ProcessState | None = None  # State of the process before the current case.
        self._settings: Message = {}  # Settings of the process after the last sample of that case.
        self._stale: list[str] = []  # Settings that the previous case changed and that could not be restored.
        self._watch: ArrivalWatch | None = (
            None  # Observations of the current case; None if its iterations are not watched.
        )
        self._held_bytes = 0  # Memory of the device that the process had allocated before the build.
        self._meshes: Meshes | None = None  # Meshes of the current case in this process group.
        self._group: dist.ProcessGroup | None = None  # Process group of :attr:`_member`.
        self._store: TCPStore | None = None
        self._store_address = ("", 0)
        self._verbs: dict[str, Callable[[Message], Message]] = {
            "form": self._form,
            "run": self._run,
            "facts": self._facts,
            "store": self._serve_store,
            "leave": self._leave,
        }

    def answer(self, command: Message) -> Message:
        """Execute one command; any exception becomes the answer."""
        try:
            return {"done": self._verbs[command["verb"]](command)}
        except BaseException as error:  # sys.exit, pytest.skip and KeyboardInterrupt must not end it silently
            code = self._member.code if self._member else None
            description = describe(error, phase=self._phase, code=code, destroyed=self._has_lost_group())
            return {"error": {**description, "stale": self._stale}}

    def _enter(self, phase: str) -> None:
        self._phase = phase
        self._send({"phase": phase})

    def _form(self, command: Message) -> Message:
        self._enter("joining the process group")
        self._leave({})
        rank, world_size = command["rank"], command["world_size"]
        local_rank = command["local_rank"]
        code = device_code(command["family"])
        self._several_hosts = command["local_world_size"] < world_size
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(local_rank),
            WORLD_SIZE=str(world_size),
            LOCAL_WORLD_SIZE=str(command["local_world_size"]),
            MASTER_ADDR=command["store_host"],
            MASTER_PORT=str(command["store_port"]),
        )
        address = (command["store_host"], command["store_port"])
        if self._store is None or self._store_address != address:
            # Half of the time limit: the rank's own message must come before the driver reports a hang.
            self._store, self._store_address = reach_store(*address, command["timeout_s"] / 2), address
        store = PrefixStore(f"generation{command['generation']}", self._store)
        self._place(command, code, store)
        device = code.open(command["device"])
        if command["shares"] and command["binds"]:
            code.require_sharing()
        wait_as_long_in_every_group()
        dist.init_process_group(
            command["backend"],
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=GROUP_TIMEOUT,
            device_id=device if code.binds_groups and command["binds"] else None,
        )
        self._group = dist.group.WORLD
        self._member = Membership(
            rank=rank,
            local_rank=local_rank,
            world_size=world_size,
            device=device,
            code=code,
            backend=command["backend"],
        )
        if world_size > 1 and command["binds"] and device.type != "cpu" and not code.binds_groups:
            # A barrier as the first communication would guess the device as rank % devices: wrong on several hosts.
            dist.all_reduce(torch.zeros(1, device=device))
        return {}

    def _in_group(self) -> Membership:
        assert self._member is not None, "a worker runs a case only inside a process group"
        return self._member

    def _has_lost_group(self) -> bool:
        """Return whether the workload destroyed or replaced the process group of its case."""
        return self._member is not None and dist.group.WORLD is not self._group

    def _require_group(self) -> None:
        if self._has_lost_group():
            raise CaseError(DESTROYED)

    def _place(self, command: Message, code: DeviceCode, store: Store) -> None:
        allowed, share, beside, pin = tuple(command["cores"]), command["share"], command["beside"], command["pin"]
        if pin == "numa":
            host = Host()
            cores = read_cores(host, allowed)
            # Each rank sends its own address: the same device may have another number for another rank.
            store.set(f"address{command['rank']}", json.dumps(code.pci_address(command["device"])))
            addresses = {rank: json.loads(store.get(f"address{rank}")) for rank in beside}
            nodes = placement.nodes_of_devices(host, cores, addresses)
            self._placement = placement.place_by_node(cores, nodes, share)
        else:
            self._placement = placement.divide_cores(allowed, share, len(beside), pin=pin == "cores")
        if pin != "none":
            placement.pin(self._placement.cores or allowed)
        torch.set_num_threads(self._placement.threads)

    def _leave(self, _: Message) -> Message:
        self._member = self._group = self._meshes = None
        if dist.is_initialized():
            dist.destroy_process_group()
        return {}

    def _serve_store(self, command: Message) -> Message:
        require_loopback()
        self._store = serve_store(command["host"])
        return {"port": self._store.port}

    def _facts(self, command: Message) -> Message:
        versions: dict[str, Any] = {"torch": torch.__version__, "torch_git": torch.version.git_version}
        versions["python"] = platform.python_version()
        if WRAPPER in os.environ:
            versions["wrapper"] = os.environ[WRAPPER]
        code = device_code(command["family"])
        if slowed := instruments(code, os.environ.get(WRAPPER, "")):
            versions["instruments"] = slowed
        return {**versions, **code.versions()}

    def _run(self, command: Message) -> Message:
        self._enter("loading the workload")
        with contextlib.suppress(OSError):  # sets the largest resident set to the present one
            Path("/proc/self/clear_refs").write_text("5")
        self._stale = []
        self._state = ProcessState.read(self._in_group().code)
        try:
            workload = resolve(command["workload"])
            self._stale += self._state.changed(by_loading=True)
            self._state = self._state.loaded()
            report = self._build_and_time(workload, command)
        finally:
            self._stale += self._state.put_back()
            if self._watch is not None and self._watch.unfinished:  # to destroy the group, gloo could wait for ever
                self._stale.append("unfinished communication")
        return {**report, "stale": self._stale}

    def _build_and_time(self, workload: Workload, command: Message) -> Message:
        member, self._watch = self._in_group(), None
        budget = Budget(**command["budget"])
        spans = SpanRecorder(clock=member.code.clock)
        if command["purpose"] == "memory":  # the memory of the mesh has to be part of the measurement
            self._meshes = None
        records = RecordKeeper(workload, [OwnMetric(**fields) for fields in command["metrics"]])
        shape = MeshShape.parse(command["shape"])
        if self._meshes is None or self._meshes.shape != shape:
            self._meshes = Meshes(shape, device_type=member.device.type)
        rank = WorkerRank(member, self._meshes, command["purpose"], spans, records)
        if command["checks_twin"]:
            self._check_twin(workload, rank)
        self._enter("building")
        timer = Timer(member, budget, spans, aligned=workload.aligned)
        timer.prepare(workload.yardstick, always=workload.fills_memory)
        member.code.reset_peak_memory()
        self._held_bytes = member.code.peak_memory_bytes() or 0
        step = as_step(workload.build(rank), f"{type(workload).__name__}.build")
        try:
            require_own_modules()
            report = self._time(workload, step, rank, budget, timer)
        finally:
            step.close()
            del step, timer
            member.code.release()
        self._require_group()
        return report

    def _check_twin(self, workload: Workload, rank: WorkerRank) -> None:
        twin = workload.twin()
        if twin is None:
            return
        self._enter("checking a small twin")
        step = as_step(twin.build(rank), f"{type(twin).__name__}.build")
        try:
            self._check(twin, Iteration(step.run, _name_of(twin)), step, rank)
        finally:
            step.close()

    def _check(self, workload: Workload, iterate: Callable[[], Any], step: Step, rank: WorkerRank) -> float:
        """Run once on fresh inputs and check the result; return the seconds of that iteration."""
        member = self._in_group()
        step.refill()
        member.code.synchronize()
        start = member.code.clock.stamp()
        iterate()
        end = member.code.clock.stamp()
        member.code.clock.wait(end)
        self._require_group()  # now: in the next communication all ranks would fail with another error
        workload.check(rank, step)
        return member.code.clock.elapsed_s(start, end)

    def _time(self, workload: Workload, step: Step, rank: WorkerRank, budget: Budget, timer: Timer) -> Message:
        member, spans = self._in_group(), rank.spans
        self._utilisation_percent, self._throttled, self._seen = None, None, {}
        self._enter("checking before timing")
        # Builds that are not timed run the same step; noted and watched works would hold memory that they measure.
        is_timed = rank.purpose == "time"
        iteration = Iteration(step.run, _name_of(workload), is_timed=is_timed)
        watches = is_timed and (member.world_size > 1 or member.code.clock.queues)
        watch = self._watch = ArrivalWatch(member.code, _name_of(workload)) if watches else None
        # Watch at once, before lost messages could block the ranks; but torch.compile would compile again for it.
        watched = watch is not None and "torch._dynamo" not in sys.modules
        look = watch and (watch.once if watched else watch.count)
        first_s = self._check(workload, partial(look, iteration) if look else iteration, step, rank)
        if budget.smoke:
            self._look_at_settings()
            return self._report(rank, _smoke(first_s), spans, [], rank.read_records())
        if watch and member.world_size > 1 and budget.yardstick:
            counted, compiled = timer.on_any_rank(not watched, compiled_frames() > 0)
            if counted and not compiled:  # else torch would compile it once more
                watch.once(iteration)
        self._enter(TIMING)
        before = read_throttling(self._host)
        with rank.recording():
            samples = timer.take(iteration, watch.message_bytes if watch else 0.0)
        self._throttled = throttled_share(before, read_throttling(self._host))
        self._utilisation_percent = member.code.utilisation_percent()  # before other work on the device
        self._seen = placement.identity(self._host, member.code, member.device.index, first=member.local_rank == 0)
        self._look_at_settings()
        records = rank.read_records()  # of the timed iterations only
        steps = self._steps(spans, samples)
        self._enter("checking after timing")
        self._check(workload, iteration, step, rank)
        if workload.captured and samples.launch_s > HOST_BOUND * statistics.median(samples.own_s):
            kernel_s = captured_kernel_s(member.device, step.run)
            records |= {} if kernel_s is None else {"kernel_us": (seconds_to_us(kernel_s), "us", "max", None)}
        arrivals: list[float] = []
        if watch is not None:
            self._enter("watching arrivals")
            for _ in range(iterations_within(budget.max_time_s, samples.times_s)):
                timer.align()
                arrived_s = watch.once(iteration)
                arrivals += [arrived_s] if workload.arrivals and arrived_s is not None else []
            timer.align()
            if workload.aligned:  # free-running steps may overlap with the next one
                watch.require_idle()
        return {**self._report(rank, samples, spans, arrivals, records), "steps": steps}

    def _steps(self, spans: SpanRecorder, samples: Samples) -> Message | None:
        """Return the data of a pipeline's timeline, on rank 0's clock; None for steps without one."""
        if spans.keeper is None:
            return None
        member = self._in_group()
        offset_s = offset_to_rank0_s(member.device, now_s=member.code.clock.now_s) if self._several_hosts else 0.0
        return spans.keeper.report(samples.times_s, offset_s=offset_s)

    def _look_at_settings(self) -> None:
        assert self._state is not None, "a case runs"
        self._settings = {
            "threads": torch.get_num_threads(),
            "settings": self._state.recorded(),
            "instruments": instruments(self._in_group().code, os.environ.get(WRAPPER, "")),
        }

    def _report(
        self, rank: WorkerRank, samples: Samples, spans: SpanRecorder, arrivals: list[float], records: dict[str, Any]
    ) -> Message:
        member = self._in_group()
        facts: ClockFacts = member.code.clock.facts()
        peak_bytes = member.code.peak_memory_bytes()
        return {
            "rank": {
                "rank": member.rank,
                "host": socket.gethostname(),
                "device": str(member.device),
                **self._settings,
                "cores": list(self._placement.cores) if self._placement.cores else None,
                "median_s": statistics.median(samples.own_s),
                "min_s": min(samples.own_s),
                "max_s": max(samples.own_s),
                "cpu_share": samples.cpu_share,
                "waited": samples.waited,
                "launch_s": samples.launch_s,
                "max_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                "cache_bytes": member.code.cache_bytes(),
                "utilisation_percent": self._utilisation_percent,
                **self._seen,
                "throttled": self._throttled,
            },
            "times_s": samples.times_s if member.rank == 0 else (),
            "involuntary_switches": samples.involuntary_switches if member.rank == 0 else (),
            "yardsticks_s": samples.yardsticks_s if member.rank == 0 else (),
            "iterations": samples.iterations,
            "control": samples.control,
            "warmup_iterations": samples.warmup_iterations,
            "warmup_steady": samples.warmup_steady,
            "warmup_s": samples.warmup_s,
            "clock": to_json(facts),
            "arrivals": arrivals,
            "spans": spans.report(),
            "middle": spans.middle(samples.times_s, samples.own_s),
            "records": records,
            "traffic": rank.traffic,
            "peak_memory_bytes": None if peak_bytes is None else peak_bytes - self._held_bytes,
            "made_groups": rank.made_groups,
            "imports": own_modules(),
            "steps": None,
        }


def _name_of(workload: Workload) -> str:
    return getattr(workload, "function", type(workload)).__qualname__


def _smoke(first_s: float) -> Samples:
    return Samples(
        times_s=(first_s,),
        own_s=(first_s,),
        iterations=1,
        warmup_iterations=0,
        warmup_steady=False,
        warmup_s=0.0,
        cpu_share=0.0,
        launch_s=first_s,
    )
