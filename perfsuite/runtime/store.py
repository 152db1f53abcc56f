"""The rendezvous store of a run: torch's TCPStore, bound to one address."""

from __future__ import annotations

import socket
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported at run time

_BACKLOG = 4096
"""Ranks that may connect at once."""


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
