"""The life of a rank worker's process: its files, its end with the driver, its stack dumps, its command loop.

What the commands do is in :mod:`.worker`, which is imported (with torch) only once a process is one.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from perfsuite.runtime import protocol


@dataclass(frozen=True, kw_only=True)
class WorkerFiles:
    """What a worker is given at its start."""

    command_fd: int
    """Socket on which commands come and answers go."""
    life_fd: int
    """Read end of the life pipe: it closes when the driver or agent is gone."""
    log: str
    """File that stdout and stderr are appended to."""
    stacks: str
    """File that stack dumps are appended to."""

    def as_arguments(self) -> dict[str, Any]:
        """Keyword arguments of :func:`main` in a new interpreter."""
        return asdict(self)


def main(*, command_fd: int, life_fd: int, log: str, stacks: str) -> NoReturn:
    """Entry of a worker that was started as a new interpreter."""
    become_worker(WorkerFiles(command_fd=command_fd, life_fd=life_fd, log=log, stacks=stacks))


def become_worker(files: WorkerFiles) -> NoReturn:
    """Serve commands until the driver is gone; never returns."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_driver, args=(files.life_fd,), daemon=True).start()
    _redirect_output(files.log)
    stacks = open(files.stacks, "a")  # noqa: SIM115 - faulthandler writes to it until the process ends
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    link = Connection(files.command_fd)
    from perfsuite.runtime.ranks.worker import Worker

    worker = Worker(send=lambda message: link.send_bytes(protocol.encode(message)))
    while True:
        try:
            command = protocol.decode(link.recv_bytes())
        except (EOFError, OSError):
            sys.stdout.flush()
            os._exit(0)  # no interpreter shutdown: a group left open must not hold the process back
        link.send_bytes(protocol.encode(worker.answer(command)))


def _end_with_driver(life_fd: int) -> None:
    os.read(life_fd, 1)  # nobody writes: returns at end of file
    os.killpg(0, signal.SIGKILL)  # this worker and its own children


def _redirect_output(log: str) -> None:
    fd = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(null, 0)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    os.close(null)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
