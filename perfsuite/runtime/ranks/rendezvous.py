"""Rank side: the store through which the ranks of a process group find each other, and their time limits.

torch repeats a failed connection until its time-out. Plain sockets try first, so that a rank reports a network problem
at once.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore, distributed_c10d  # type: ignore[attr-defined]  # exported at run time

from perfsuite.base.errors import CaseError

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
