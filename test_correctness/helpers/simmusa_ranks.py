"""What tests of the simulated device run on its ranks, and the sessions that run it."""

from __future__ import annotations

import dataclasses
import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from perfsuite.base.errors import UnsupportedCase
from perfsuite.platforms import Host, Machine, detect_machine, families, fingerprint, load_catalog
from perfsuite.record.result import Measurement, Work
from perfsuite.record.workload import Budget, CallableStep, FunctionWorkload, Workload
from perfsuite.run.session import Case, PerfSession
from perfsuite.runtime.driver import Driver, Job
from perfsuite.runtime.transports.local import LocalTransport
from simmusa import build
from simmusa.costs import VARIABLE, Costs

ROOT = Path(__file__).parents[2]
FAMILY = "simmusa=simmusa.family:SimMusa"
KERNELS = ("torch", "perfsuite.runtime.ranks.worker")
TRAINING = (*KERNELS, "torch._dynamo", "torch.distributed.fsdp", "deepspeed", "torch._inductor.compile_fx")
"""What the parent of the ranks imports."""
QUICK = Budget(min_rounds=3, max_rounds=3, max_time_s=0.05, warmup_time_s=0.05, timeout_s=300.0)
ONCE = Budget(smoke=True, timeout_s=300.0)
"""For what takes no virtual time: a sample of it would be as many iterations as the clock seems to allow."""


def require_built() -> None:
    """Build the device, or skip with the reason why it cannot be built."""
    try:
        build.ensure_built()
    except UnsupportedCase as reason:
        pytest.skip(str(reason))


def simulated_machine() -> Machine:
    """Eight simulated devices; the family must be named in the environment."""
    return detect_machine(load_catalog(), "simmusa", families=families(Host()))


@contextmanager
def opened(costs: Costs, logs: Path, preload: tuple[str, ...]) -> Iterator[PerfSession]:
    """A session whose ranks run on simulated devices of these costs; skips where the device cannot be built."""
    require_built()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PERFSUITE_FAMILIES", FAMILY)
        patch.setenv(VARIABLE, json.dumps(costs.as_dict()))
        with opened_on(simulated_machine(), "simulated", logs, preload) as session:
            yield session


@contextmanager
def opened_on(machine: Machine, name: str, logs: Path, preload: tuple[str, ...]) -> Iterator[PerfSession]:
    """A session of this name on a machine."""
    # Forks of one parent that imported torch and never saw the device: importing it in every rank took most of the
    # time of these tests.  How the family itself starts its ranks is held by test_simmusa.py.
    transport = LocalTransport(start_method="fork", preload=preload, log_directory=logs)
    driver = Driver(transport=transport, family=machine.family, rootpath=ROOT, device_count=machine.device_count)
    session = PerfSession(
        id=name,
        machine=machine,
        fingerprint=fingerprint(machine).key,
        open_driver=lambda: driver,
        read_environment=lambda worker: {"worker": dict(worker)},
    )
    try:
        yield session
    finally:
        session.close()


def measure_on(session: PerfSession, workload, world_size: int, *, budget: Budget = ONCE, name: str = "it", **case):
    """The result of a case; ``workload`` may be a function, then ``case`` has its arguments."""
    if callable(workload):
        workload, case = FunctionWorkload(function=workload, arguments=case), {}
    return session.run(Case(id=name, workload=workload, world_size=world_size, budget=budget, platform="s4000", **case))


@dataclass(frozen=True, kw_only=True)
class SetCosts(Workload):
    """Changes what things cost in a rank that lives on."""

    costs: dict[str, Any] = field(default_factory=dict)

    def work(self, shape):
        return Work()

    def build(self, rank):
        from simmusa.native import native

        native().set_costs(self.costs)
        torch.set_num_threads(1)  # threads that wait for each other make small kernels slow on a busy machine
        gc.freeze()  # a collection before every case would walk all of torch's objects
        return CallableStep(lambda: None)


class OneProcess:
    """A driver whose ranks live on: virtual time does not depend on the process that it passes in."""

    capacity = None

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.start, self.environment = driver.start, driver.environment
        self.log_tails, self.close = driver.log_tails, driver.close

    def run(self, job: Job) -> Measurement:
        return dataclasses.replace(self.driver.run(dataclasses.replace(job, fresh=False)), process="fresh")


def from_a_barrier_on(rank, work):
    """Return an iteration that records how long ``work`` took on each rank, which all begin it at once."""
    musa = torch.get_device_module("musa")

    def step():
        start, end = (musa.Event(enable_timing=True) for _ in range(2))
        dist.barrier()
        musa.synchronize()
        start.record()
        work()
        end.record()
        end.synchronize()
        rank.record(f"rank{rank.rank}_ms", start.elapsed_time(end), reduce="only")

    return step


def sums_with_a_late_rank(rank, side):
    """Rank 0 multiplies before it comes to an all-reduce; the others come at once."""
    a, x = torch.ones(side, side, device=rank.device), torch.ones(256, device=rank.device)

    def work():
        if rank.rank == 0:
            torch.mm(a, a)
        dist.all_reduce(x)

    return from_a_barrier_on(rank, work)


def sends_to_a_late_rank(rank, side):
    """Rank 1 multiplies before it receives; how long each of the two was at it."""
    a, x = torch.ones(side, side, device=rank.device), torch.ones(256, device=rank.device)

    def work():
        if rank.rank == 0:
            dist.send(x, 1)
        else:
            torch.mm(a, a)
            dist.recv(x, 0)

    return from_a_barrier_on(rank, work)


def both_send_first(rank, batched):
    """Two ranks that post what they send before what they receive; ``batched``: the ranks that make one batch of it."""
    out, into = torch.ones(256, device=rank.device), torch.ones(256, device=rank.device)
    peer = 1 - rank.rank

    def step():
        if rank.rank in batched:
            works = dist.batch_isend_irecv([dist.P2POp(dist.isend, out, peer), dist.P2POp(dist.irecv, into, peer)])
        else:
            works = [dist.isend(out, peer), dist.irecv(into, peer)]
        for work in works:
            work.wait()

    return step


def asks_for_a_kernel_that_faults(rank):
    """A probe of a kernel that reads a row that is not there."""
    from perfsuite.workloads.checks import require_kernel

    table, row = torch.ones(4, 2, device=rank.device), torch.tensor([4], device=rank.device)
    require_kernel("rows", rank.device, lambda: torch.nn.functional.embedding(row, table))
    return lambda: None


def reads_too_early(rank):
    """Uses what an all-reduce gives without waiting for it."""
    x = torch.ones(256, device=rank.device)

    def step():
        work = dist.all_reduce(x, async_op=True)
        x.add_(1)
        work.wait()

    return step


def exchanges_in_a_ring(rank):
    """Sends to the next rank and receives from the one before, both at once."""
    out = torch.full((250_000,), float(rank.rank), device=rank.device)
    into = torch.empty_like(out)
    after, before = (rank.rank + 1) % rank.world_size, (rank.rank - 1) % rank.world_size

    def step():
        operations = [dist.P2POp(dist.isend, out, after), dist.P2POp(dist.irecv, into, before)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        rank.record(f"got{rank.rank}", into[0], reduce="only")

    return step


def sums_what_it_frees(rank):
    """Record the bytes that an iteration leaves allocated: none, unless somebody keeps the work of its sum."""
    musa = torch.get_device_module("musa")
    at_first = musa.memory_allocated()

    def step():
        dist.all_reduce(torch.ones(1 << 18, device=rank.device))
        rank.record("left_bytes", float(musa.memory_allocated() - at_first), reduce="max")

    return step


def takes_memory(rank, mib):
    """Holds so much of its device's memory."""
    block = torch.empty(mib << 20, dtype=torch.uint8, device=rank.device)
    return block.zero_


def waits_first(rank, alone):
    """A barrier in the group of all ranks, or (``alone``) in one that has not communicated."""
    group = dist.new_group(list(range(rank.world_size))) if alone else rank.group()
    return lambda: dist.barrier(group=group)


def reads_a_dataset(rank, folder):
    """Records whether the batches of a loader are pinned."""
    from perfsuite.models import find
    from perfsuite.models.dataset import generate
    from perfsuite.models.loading import Files, numbers_of

    model = find("gpt2-tiny")
    dataset = generate(model, Path(folder), samples=4)
    files = Files(model, dataset, numbers_of(replica=0, replicas=1, micro_batch_size=2), rank.device, num_workers=0)

    def step():
        batch = next(files._batches)
        rank.record("pinned", float(all(values.is_pinned() for values in batch.values())), reduce="max")

    return step


def tells_its_yardstick(rank):
    """Records how many bytes the gate's yardstick takes on this device."""
    from perfsuite.platforms import device_code

    told = float(device_code("simmusa").yardstick_bytes)
    return lambda: rank.record("yardstick_bytes", told, reduce="max")
