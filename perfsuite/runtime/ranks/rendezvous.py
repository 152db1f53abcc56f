"""Rank side: the store through which the ranks of a process group find each other, and how long they wait.

torch repeats an attempt to connect until its time-out, whatever the reason: so that a rank tells at once, and in words,
what is wrong with the network, plain sockets try it first.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore, distributed_c10d  # type: ignore[attr-defined]  # exported at run time

from perfsuite.base.errors import CaseError

GROUP_TIMEOUT = timedelta(days=20)
"""Of every process group and store: no rank gives up before the driver, which at the deadline of a case sees where each
of them is.  20 days are the most that torch's store can wait, in milliseconds of 32 bits."""
_BACKLOG = 4096
"""Ranks that may connect at once."""
_OWN_HOST = "127.0.0.1"
_OWN_HOST_S = 5.0


def wait_as_long_in_every_group() -> None:
    """Give GROUP_TIMEOUT to the groups that are made without one: by a DeviceMesh, by DeepSpeed, by the workload."""
    distributed_c10d.default_pg_timeout = GROUP_TIMEOUT
    distributed_c10d.default_pg_nccl_timeout = GROUP_TIMEOUT  # type: ignore[attr-defined]


def require_loopback() -> None:
    """Raise CaseError when this host cannot connect to itself, on which every store and every backend relies."""
    try:
        with socket.create_server((_OWN_HOST, 0)) as listener:
            socket.create_connection(listener.getsockname(), _OWN_HOST_S).close()
    except OSError as problem:
        raise CaseError(
            f"{socket.gethostname()} cannot connect to itself at {_OWN_HOST}: {problem.strerror or problem}; "
            "see that its loopback interface is up ('ip link set lo up') and not behind a firewall"
        ) from None


def reach_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """A client of the store there; CaseError when ``timeout_s`` seconds are not enough to connect."""
    try:
        socket.create_connection((host, port), timeout_s).close()
    except OSError as problem:
        raise CaseError(
            f"{socket.gethostname()} cannot reach the rendezvous store at {host}:{port}, on the driver's host: "
            f"{problem.strerror or problem}; see the route, the firewall and the address that the launcher gave"
        ) from None
    store = TCPStore(host, port, timeout=timedelta(seconds=timeout_s))
    store.set_timeout(GROUP_TIMEOUT)
    return store


def serve_store(host: str) -> TCPStore:
    """A store that listens on a free port of the address ``host`` alone.

    The store has no key: whoever reaches it reads and writes all of it.  torch's server listens on every interface,
    whatever host it is told, unless it is handed a socket that listens already.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
    port = listener.getsockname()[1]
    options: dict[str, Any] = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listener.detach()}
    try:
        return TCPStore(host, port, **options)
    except NotImplementedError:  # before torch 2.8 its newer server, the default, takes no socket; the older one does
        return TCPStore(host, port, use_libuv=False, **options)
