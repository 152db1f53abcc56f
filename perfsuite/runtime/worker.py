"""Rank side: what a worker does with each command.  One Worker lives in one process; torch is imported here."""

from __future__ import annotations

import os
import platform
import resource
import socket
import statistics
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # exported at run time

from perfsuite.errors import InvalidParameter, OutOfMemory, UnsupportedCase, WrongResult
from perfsuite.mesh import MeshShape
from perfsuite.platforms import device_code
from perfsuite.records import ClockFacts, Sample, to_json
from perfsuite.runtime import placement
from perfsuite.runtime.arrival import arrival_times
from perfsuite.runtime.clock_offset import offset_to_rank0_s
from perfsuite.runtime.rank import Membership, WorkerRank
from perfsuite.runtime.reference import resolve
from perfsuite.runtime.spans import SpanRecorder
from perfsuite.runtime.store import serve_store
from perfsuite.runtime.timer import Samples, Timer
from perfsuite.runtime.transport import Message
from perfsuite.units import gib
from perfsuite.workload import Budget, Step, Workload

_ARRIVAL_ITERATIONS = 5
_OWN = Path(__file__).parent


class Worker:
    """Answers commands one after the other; see :mod:`perfsuite.runtime.protocol`."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._phase = "idle"
        self._member: Membership | None = None
        self._utilisation_percent: float | None = None
        self._placement = placement.Placement(threads=1, cores=None)
        self._several_hosts = False
        """Ranks of the group are on several hosts, each with a clock of its own."""
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
        """Carry out one command; whatever goes wrong in it becomes the answer."""
        try:
            return {"done": self._verbs[command["verb"]](command)}
        except Exception as error:
            return {"error": self._describe(error)}
        except SystemExit as error:  # a workload that calls sys.exit must not end the worker without a word
            return {"error": self._describe(error)}

    def _enter(self, phase: str) -> None:
        self._phase = phase
        self._send({"phase": phase})

    def _describe(self, error: BaseException) -> Message:
        kind, message = "exception", f"{type(error).__name__}: {error}"
        member = self._member
        if isinstance(error, OutOfMemory) or (member is not None and member.code.is_out_of_memory(error)):
            kind, message = "out_of_memory", self._out_of_memory(error)
        elif isinstance(error, WrongResult):
            kind, message = "wrong_result", str(error)
        elif isinstance(error, InvalidParameter):
            kind, message = "invalid_parameter", str(error)
        elif isinstance(error, UnsupportedCase):
            kind, message = "unsupported", str(error)
        text = "".join(traceback.format_exception(type(error), error, _own_frames(error.__traceback__)))
        return {"kind": kind, "message": message, "traceback": text, "phase": self._phase}

    def _out_of_memory(self, error: BaseException) -> str:
        assert self._member is not None
        code = self._member.code
        used, space = code.peak_memory_bytes(), code.memory_bytes()
        if space is None:
            return f"OOM: {error}"
        reached = gib(used if used is not None else space[1] - space[0])
        return f"OOM at {reached:.2f} GiB of {gib(space[1]):.2f} GiB"

    # -- process group -------------------------------------------------------------------------------------------

    def _form(self, command: Message) -> Message:
        self._enter("joining the process group")
        self._leave({})
        rank, world_size = command["rank"], command["world_size"]
        local_rank = command["local_rank"]
        self._place(command)
        self._several_hosts = command["local_world_size"] < world_size
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(local_rank),
            WORLD_SIZE=str(world_size),
            LOCAL_WORLD_SIZE=str(command["local_world_size"]),
            MASTER_ADDR=command["store_host"],
            MASTER_PORT=str(command["store_port"]),
        )
        code = device_code(command["family"])
        device = code.open(command["device"])
        limit = timedelta(seconds=command["timeout_s"])
        address = (command["store_host"], command["store_port"])
        if self._store is None or self._store_address != address:
            self._store, self._store_address = TCPStore(*address, timeout=limit), address
        store = PrefixStore(f"generation{command['generation']}", self._store)
        dist.init_process_group(command["backend"], store=store, rank=rank, world_size=world_size, timeout=limit)
        self._member = Membership(
            rank=rank,
            local_rank=local_rank,
            world_size=world_size,
            device=device,
            code=code,
            backend=command["backend"],
            timeout_s=command["timeout_s"],
        )
        return {}

    def _in_group(self) -> Membership:
        assert self._member is not None, "a worker runs a case only inside a process group"
        return self._member

    def _place(self, command: Message) -> None:
        cores = tuple(command["cores"])
        self._placement = placement.divide_cores(cores, command["share"], command["shares"], pin=command["pin"])
        if command["pin"]:
            placement.pin(self._placement.cores or cores)
        torch.set_num_threads(self._placement.threads)

    def _leave(self, _: Message) -> Message:
        self._member = None
        if dist.is_initialized():
            dist.destroy_process_group()
        return {}

    def _serve_store(self, command: Message) -> Message:
        self._store = serve_store(command["host"])
        return {"port": self._store.port}

    def _facts(self, command: Message) -> Message:
        versions: dict[str, Any] = {"torch": torch.__version__, "torch_git": torch.version.git_version}
        versions["python"] = platform.python_version()
        return {**versions, **device_code(command["family"]).versions()}

    # -- one case ------------------------------------------------------------------------------------------------

    def _run(self, command: Message) -> Message:
        member = self._in_group()
        self._enter("loading the workload")
        workload = resolve(command["workload"])
        budget = Budget(**command["budget"])
        shape = MeshShape.parse(command["shape"])
        spans = SpanRecorder(clock=member.code.clock)
        rank = WorkerRank(member, shape, command["purpose"], spans)
        if command["purpose"] == "time":  # other builds of a case come after its timed one
            self._check_twin(workload, rank)
        self._enter("building")
        member.code.reset_peak_memory()
        step = workload.build(rank)
        try:
            return self._time(workload, step, rank, budget, spans)
        finally:
            step.close()
            del step
            member.code.release()

    def _check_twin(self, workload: Workload, rank: WorkerRank) -> None:
        twin = workload.twin()
        if twin is None:
            return
        self._enter("checking a small twin")
        step = twin.build(rank)
        try:
            self._check(twin, step, rank)
        finally:
            step.close()

    def _check(self, workload: Workload, step: Step, rank: WorkerRank) -> float:
        """Run once on fresh inputs and check what came out; seconds of that one iteration."""
        member = self._in_group()
        step.refill()
        member.code.synchronize()
        start = member.code.clock.stamp()
        step.run()
        end = member.code.clock.stamp()
        member.code.clock.wait(end)
        workload.check(rank, step)
        return member.code.clock.elapsed_s(start, end)

    def _time(self, workload: Workload, step: Step, rank: WorkerRank, budget: Budget, spans: SpanRecorder) -> Message:
        member = self._in_group()
        self._utilisation_percent = None
        self._enter("checking before timing")
        first_s = self._check(workload, step, rank)
        if budget.smoke:
            return self._report(rank, _smoke(first_s), spans, [], rank.read_records())
        timer = Timer(member, budget, spans, aligned=workload.aligned)
        self._enter("timing")
        with rank.recording():
            samples = timer.take(step.run, workload.yardstick)
        self._utilisation_percent = member.code.utilisation_percent()  # before anything else runs on the device
        records = rank.read_records()  # of the timed iterations: those that follow are checked and watched
        steps = self._steps(spans, samples)
        self._enter("checking after timing")
        self._check(workload, step, rank)
        arrivals: list[float] = []
        if member.world_size > 1 and workload.arrivals:
            self._enter("watching arrivals")
            arrivals = arrival_times(step.run, timer.align, _ARRIVAL_ITERATIONS, member.code.clock.now_s)
            timer.align()
        return {**self._report(rank, samples, spans, arrivals, records), "steps": steps}

    def _steps(self, spans: SpanRecorder, samples: Samples) -> Message | None:
        """What a pipeline's timeline is made of, on rank 0's clock; None for steps that have none."""
        if spans.keeper is None:
            return None
        member = self._in_group()
        offset_s = offset_to_rank0_s(member.device, now_s=member.code.clock.now_s) if self._several_hosts else 0.0
        return spans.keeper.report(samples.samples, offset_s=offset_s)

    def _report(
        self, rank: WorkerRank, samples: Samples, spans: SpanRecorder, arrivals: list[float], records: dict[str, Any]
    ) -> Message:
        member = self._in_group()
        facts: ClockFacts = member.code.clock.facts()
        return {
            "rank": {
                "rank": member.rank,
                "host": socket.gethostname(),
                "device": str(member.device),
                "threads": self._placement.threads,
                "cores": list(self._placement.cores) if self._placement.cores else None,
                "median_s": statistics.median(samples.own_s),
                "min_s": min(samples.own_s),
                "max_s": max(samples.own_s),
                "cpu_share": samples.cpu_share,
                "max_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                "cache_bytes": member.code.cache_bytes(),
                "utilisation_percent": self._utilisation_percent,
            },
            "samples": to_json(samples.samples) if member.rank == 0 else [],
            "iterations": samples.iterations,
            "warmup_iterations": samples.warmup_iterations,
            "warmup_steady": samples.warmup_steady,
            "warmup_s": samples.warmup_s,
            "clock": to_json(facts),
            "arrivals": arrivals,
            "spans": spans.report(),
            "middle": spans.middle([sample.time_s for sample in samples.samples], samples.own_s),
            "records": records,
            "peak_memory_bytes": member.code.peak_memory_bytes(),
            "made_groups": rank.made_groups,
            "steps": None,
        }


def _own_frames(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from where perfsuite called the workload; all of it when the error is perfsuite's own."""
    inner = trace
    while inner is not None and Path(inner.tb_frame.f_code.co_filename).parent == _OWN:
        inner = inner.tb_next
    return inner or trace


def _smoke(first_s: float) -> Samples:

    return Samples(
        samples=(Sample(time_s=first_s),),
        own_s=(first_s,),
        iterations=1,
        warmup_iterations=0,
        warmup_steady=False,
        warmup_s=0.0,
        cpu_share=0.0,
    )
