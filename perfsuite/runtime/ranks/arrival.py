"""The store through which ranks find each other; which rank comes late; work that an iteration leaves unfinished.

Ranks that wait for each other show the same step time, which hides the slowest one. But the slowest rank enters the
communication last. torch sends every collective through its dispatcher, also those of DDP and of functional
collectives, so a dispatch mode sees them without changes of the workload.

The same mode keeps the works that an iteration starts, until they are waited for or found finished: a work holds its
buffers.  A work that is not finished after the iteration was not waited for, and its time is in no sample.
"""

from __future__ import annotations

import math
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore, distributed_c10d  # type: ignore[attr-defined]  # exported at run time
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from perfsuite.base.errors import CaseError, InvalidParameter
from perfsuite.platforms.base import DeviceCode
from perfsuite.runtime.ranks.started import Noted, replaced

GROUP_TIMEOUT = timedelta(days=20)
"""Time limit of every process group and store: no rank gives up before the driver, which finds the cause at the
deadline of a case. 20 days are the most that torch's store can wait, in milliseconds of 32 bits."""
_BACKLOG = 4096  # Concurrent connections of ranks.
_OWN_HOST = "127.0.0.1"
_OWN_HOST_S = 5.0


def wait_as_long_in_every_group() -> None:
    """Set GROUP_TIMEOUT for groups that are made without one: by a DeviceMesh, by DeepSpeed, by the workload."""
    distributed_c10d.default_pg_timeout = GROUP_TIMEOUT
    distributed_c10d.default_pg_nccl_timeout = GROUP_TIMEOUT  # type: ignore[attr-defined]


def require_loopback() -> None:
    """Raise CaseError if this host cannot connect to itself, which every store and every backend needs."""
    try:
        with socket.create_server((_OWN_HOST, 0)) as listener:
            socket.create_connection(listener.getsockname(), _OWN_HOST_S).close()
    except OSError as problem:
        raise CaseError(
            f"{socket.gethostname()} cannot connect to itself at {_OWN_HOST}: {problem.strerror or problem}; "
            "check that its loopback interface is up ('ip link set lo up') and not behind a firewall"
        ) from None


def reach_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """Return a client of the store; raise CaseError if it cannot connect within ``timeout_s``."""
    try:
        socket.create_connection((host, port), timeout_s).close()
    except OSError as problem:
        raise CaseError(
            f"{socket.gethostname()} cannot reach the rendezvous store at {host}:{port}, on the driver's host: "
            f"{problem.strerror or problem}; check the route, the firewall and the address that the launcher set"
        ) from None
    store = TCPStore(host, port, timeout=timedelta(seconds=timeout_s))
    store.set_timeout(GROUP_TIMEOUT)
    return store


def serve_store(host: str) -> TCPStore:
    """Return a store that listens on a free port of the address ``host`` alone.

    The store has no key: any process that reaches it can read and write it. torch's server listens on every interface
    unless it gets a listening socket.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
    port = listener.getsockname()[1]
    options: dict[str, Any] = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listener.detach()}
    try:
        return TCPStore(host, port, **options)
    except NotImplementedError:  # before torch 2.8 the default server accepts no socket; the older server does
        return TCPStore(host, port, use_libuv=False, **options)


_EXCHANGES = 16


def offset_to_rank0_s(device: torch.device, *, now_s: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds to add to this rank's clock to get rank 0's; 0 on rank 0. A collective.

    The ranks of one host share a clock. Across hosts rank 0 asks every other rank for its time. The midpoint between
    question and answer is wrong by at most half the round trip; the shortest one counts.
    """
    rank, offset_s = dist.get_rank(), 0.0
    for other in range(1, dist.get_world_size()):
        if rank == 0:
            _answer_with_offset(other, device, now_s)
        elif rank == other:
            offset_s = _ask(device, now_s)
    return offset_s


def _answer_with_offset(other: int, device: torch.device, now_s: Callable[[], float]) -> None:
    """Rank 0's part: ask for the other's time, and send the offset of the fastest exchange."""
    box = torch.zeros(1, dtype=torch.float64, device=device)
    exchanges = []
    for _ in range(_EXCHANGES):
        asked_s = now_s()
        dist.send(box, other)
        dist.recv(box, other)
        other_s = float(box.item())  # waits for the device
        came_s = now_s()
        exchanges.append((came_s - asked_s, (asked_s + came_s) / 2 - other_s))
    box.fill_(min(exchanges)[1])
    dist.send(box, other)


def _ask(device: torch.device, now_s: Callable[[], float]) -> float:
    """The other rank's part: answer with its time, and return the offset."""
    box = torch.zeros(1, dtype=torch.float64, device=device)
    for _ in range(_EXCHANGES):
        dist.recv(box, 0)
        box.item()
        box.fill_(now_s())
        dist.send(box, 0)
    dist.recv(box, 0)
    return float(box.item())


_FEWEST, _MOST = 3, 5  # Number of watched iterations: a median needs three, and more than five show nothing more.
_NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional")
_LEAST_BUSY_S, _LEAST_BUSY = 1e-4, 0.05
"""Least wait for all streams, in seconds and as share of the iteration, that shows work after the iteration's end. A
wait for an idle device takes some microseconds."""


class _Communication(TorchDispatchMode):
    """Notes the time of the first communication operation, and keeps the works that are not finished."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch would wrap this mode for its compiler, whose import takes over a second in every fresh worker."""
        return False

    def __init__(self, now_s: Callable[[], float], open_: dict[int, tuple[str, dist.Work]], queues: bool) -> None:
        """``open_`` keeps name and work by id, until the work is finished or Python code waits for it."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self._now_s = now_s
        self._open, self._queues = open_, queues
        self.entered_s: float | None = None
        self.sizes: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace not in _NAMESPACES:
            return func(*args, **(kwargs or {}))
        if self.entered_s is None:
            self.entered_s = self._now_s()
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        self.sizes.append(sum(each.numel() * each.element_size() for each in tensors))
        self.unfinished()
        made = func(*args, **(kwargs or {}))
        if func.namespace == "c10d" and hasattr(dist.Work, "unbox"):  # some vendors' builds are older
            several = made if isinstance(made, (tuple, list)) else (made,)
            name = func.overloadpacket.__name__.strip("_")
            # As long as it is kept, the unboxed object is the same one for which the program waits.
            works = [dist.Work.unbox(each) for each in several if isinstance(each, torch.ScriptObject)]
            self._open.update({id(work): (name, work) for work in works})
        return made

    def unfinished(self) -> set[str]:
        """Return the names of the works that are not finished; let go of the others."""
        for key, (_, work) in list(self._open.items()):
            if _is_finished(work, self._queues):
                del self._open[key]
        return {name for name, _ in self._open.values()}


class ArrivalWatch:
    """Runs iterations that are not timed, on all ranks together, and keeps its observations."""

    def __init__(self, code: DeviceCode, name: str) -> None:
        """``name`` names the workload in errors."""
        self._code = code
        self._name = name
        self.unfinished: set[str] = set()  # Operations that the last iteration started and left unfinished.
        self._busy_s: list[float] = []  # Seconds that the device worked after the end of each iteration; 0 if short.
        self.message_bytes: float | None = 0.0
        """Median bytes of the communication calls of the last iteration: 0 without calls, infinite for counted calls,
        None if unknown."""

    def once(self, run: Callable[[], Any]) -> float | None:
        """Return the seconds to the first communication; raise InvalidParameter if the iteration did not wait."""
        clock, registered = self._code.clock, _registered()
        start, start_s = clock.stamp(), clock.now_s()
        open_: dict[int, tuple[str, dist.Work]] = {}
        wait = Noted(vars(dist.Work)["wait"], lambda work: open_.pop(id(work), None))
        with replaced(dist.Work, "wait", wait), _Communication(clock.now_s, open_, clock.queues) as seen:
            try:
                run()
            except BaseException:
                self.unfinished = seen.unfinished()
                raise
        end = clock.stamp()
        clock.wait(end)
        ended_s = clock.now_s()
        self.message_bytes = max(1.0, statistics.median(seen.sizes)) if seen.sizes else 0.0
        self.unfinished = seen.unfinished()
        if _registered() > registered:
            self.unfinished.add("a functional collective")
        if self.unfinished:
            raise InvalidParameter(
                f"an iteration of {self._name} started {', '.join(sorted(self.unfinished))} and did not wait for it: "
                "its samples would not include that work; return the handle from the iteration, or call its wait()"
            )
        self._code.synchronize()
        busy_s = clock.now_s() - ended_s
        least_s = max(_LEAST_BUSY_S, _LEAST_BUSY * clock.elapsed_s(start, end))
        self._busy_s.append(busy_s if busy_s > least_s else 0.0)
        return None if seen.entered_s is None else seen.entered_s - start_s

    def count(self, run: Callable[[], Any]) -> None:
        """Run an iteration that a mode must not inspect, and find out whether it communicates."""
        before = _calls()
        try:
            run()
        except BaseException:
            self.unfinished |= {"communication"} if _calls() != before else set()
            raise
        now = _calls()
        self.message_bytes = None if before is None or now is None else math.inf if now > before else 0.0

    def require_idle(self) -> None:
        """Raise InvalidParameter if the device worked after the end of every iteration."""
        if self._code.clock.queues and min(self._busy_s) > 0:
            raise InvalidParameter(
                f"an iteration of {self._name} left {1e3 * min(self._busy_s):.3g} ms of work in a stream that the "
                "current stream does not wait for: its samples do not include that work; let the current stream wait "
                "for that stream at the end of the iteration (wait_stream)"
            )


def _is_finished(work: dist.Work, queues: bool) -> bool:
    """Return whether a work for which C++ code may have waited is finished."""
    if work.is_completed() or queues:
        return work.is_completed()
    try:  # host backends set the future first
        return bool(work.get_future().done())
    except RuntimeError:  # sends and receives have no future
        return False


def _registered() -> int:
    """Return how many functional collectives of this process lack a wait; 0 if this torch does not count them."""
    size = getattr(torch._C._distributed_c10d, "_get_work_registry_size", None)
    return int(size()) if size else 0


def _calls() -> int | None:
    """Return how many calls this process has made in all its groups; None if a backend does not count them."""
    try:
        groups: list[Any] = list(distributed_c10d._world.pg_map)  # torch does not type them
        return sum(int(group._get_sequence_number_for_group()) for group in groups)
    except (AttributeError, RuntimeError):
        return None


def iterations_within(time_s: float, times_s: Sequence[float]) -> int:
    """Return how many iterations to watch: as many as fit into ``time_s``, 3 to 5; the same on all ranks."""
    median_s = statistics.median(times_s)
    return int(min(_MOST, max(_FEWEST, time_s / median_s))) if median_s > 0 else _MOST
