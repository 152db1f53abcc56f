"""Forkservers for tests in milliseconds: copies of one process that has imported torch, which takes three seconds.

Some hundred test processes start a forkserver.  :func:`offered` puts this file before the interpreter of each of them
(``PERFSUITE_WRAPPER``): what then runs is a *stand-in*, which has the *template* fork the forkserver and stays, ends
when that ends and takes it along when it is killed.  What a fork cannot give (another interpreter, another perfsuite,
limits or namespaces of its own, settings that libraries read when they are loaded) is started as it would be
without.  Tests of how processes start and end do without by the fixture ``cold``.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import traceback

ADDRESS = "PERFSUITE_TEST_TEMPLATE"
"""Variable with the abstract name of the template's socket."""
_SPACE = "PERFSUITE_TEST_SPACE"
"""Variable of the template alone, so long that a copy's environment has space in its place."""
_READ_AT_LOAD = ("LD_", "OMP_", "KMP_", "GOMP_", "MKL_", "TORCH", "PYTHON", "GLIBC_", "MALLOC_")
_TAKEN_OVER = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "TORCH_GLOO_", "TORCH_NCCL_", "TORCHINDUCTOR_")
"""But these: the import path is sent, a group reads its settings when it is formed, a compiler when it is used."""
_FROM_HERE = 400
"""Descriptors from here on are seldom anybody's."""


def surroundings() -> dict[str, object]:
    """What a copy has from the template and an interpreter from whoever starts it; the two must be the same."""
    settings = [name for name in os.environ if name.startswith(_READ_AT_LOAD) and not name.startswith(_TAKEN_OVER)]
    mask = os.umask(0o077)
    os.umask(mask)
    spaces = {name: os.readlink(f"/proc/self/ns/{name}") for name in sorted(os.listdir("/proc/self/ns"))}
    return {
        "environment": {name: os.environ[name] for name in settings},
        "limits": {name: list(resource.getrlimit(getattr(resource, name))) for name in _limits()},
        "namespaces": spaces,
        "process": [mask, os.nice(0), *os.getresuid(), *os.getresgid()],
    }


def _limits() -> list[str]:
    return sorted(name for name in dir(resource) if name.startswith("RLIMIT_"))


def stand_in(command: list[str]) -> None:
    """Be the process that ``command`` would have been; it is what ``boot_command`` made for a forkserver."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as template:
        template.connect("\0" + os.environ[ADDRESS])
        arguments = json.loads(command[-1])
        request = {
            "command": command,
            "surroundings": surroundings(),
            "environment": dict(os.environ),
            "directory": os.getcwd(),
            "cores": sorted(os.sched_getaffinity(0)),
            "descriptors": [0, 1, 2, arguments["control_fd"], arguments["life_fd"]],
        }
        template.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        socket.send_fds(template, [json.dumps(request).encode()], request["descriptors"])
        if template.recv(16) == b"copied":
            for descriptor in request["descriptors"]:
                os.close(descriptor)
            status = int(template.recv(16) or signal.SIGKILL)
            if os.WIFSIGNALED(status):
                signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
                os.kill(os.getpid(), os.WTERMSIG(status))
            os._exit(os.waitstatus_to_exitcode(status))
    os.execv(command[0], command)


def serve(listener: socket.socket, root: str, preload: list[str]) -> None:
    """Import at the first request, copy this process for each; until standard input ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the keepers
    loaded = False
    while select.select([listener, 0], [], [])[0] == [listener]:
        with listener.accept()[0] as stand_in_:
            peer = struct.unpack("3i", stand_in_.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            data, descriptors, _, _ = socket.recv_fds(stand_in_, 1 << 20, 8)
            if peer[1] == os.getuid() and data and _can_copy(request := json.loads(data), root):
                if not loaded:
                    from perfsuite.runtime.transports import forkserver

                    forkserver._import(preload)
                    loaded = True
                if os.fork() == 0:
                    listener.close()
                    _keep(stand_in_, request, descriptors)
            for descriptor in descriptors:
                os.close(descriptor)


def _can_copy(request: dict, root: str) -> bool:
    """Whether a copy of this process is what the command would have become."""
    path = json.loads(request["command"][-1])["sys_path"]
    own = all(os.path.samefile(entry, root) for entry in path if os.path.exists(f"{entry}/perfsuite/__init__.py"))
    start, end = _place_of_environment()
    fits = len(_block(request["environment"])) <= end - start
    same = request["surroundings"] == json.loads(json.dumps(surroundings()))
    return own and fits and same and request["command"][0] == sys.executable


def _keep(stand_in_: socket.socket, request: dict, descriptors: list[int]) -> None:
    """A copy's keeper: tells the stand-in how the copy ended, ends the copy when the stand-in does."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    keeper = os.getpid()
    if (copy := os.fork()) == 0:
        stand_in_.close()
        _become(request, descriptors, keeper)
    try:
        for descriptor in descriptors:
            os.close(descriptor)
        stand_in_.send(b"copied")
        pidfd = os.pidfd_open(copy)
        if pidfd not in select.select([stand_in_, pidfd], [], [])[0]:
            os.kill(copy, signal.SIGKILL)
        _, status = os.waitpid(copy, 0)
        stand_in_.send(str(status).encode())
    finally:
        os._exit(0)


def _become(request: dict, descriptors: list[int], keeper: int) -> None:
    """The forkserver that was asked for."""
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != keeper:
            os._exit(0)
        above = max(_FROM_HERE, *request["descriptors"]) + 1
        high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, above) for descriptor in descriptors]
        os.closerange(0, above)
        for source, target in zip(high, request["descriptors"], strict=True):
            os.dup2(source, target)
            os.close(source)
        os.chdir(request["directory"])
        os.sched_setaffinity(0, request["cores"])
        _take_environment(request["environment"])
        arguments = json.loads(request["command"][-1])
        sys.path[:] = arguments.pop("sys_path")
        sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in request["environment"]
        from perfsuite.runtime.transports import forkserver

        forkserver.main(**arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(70)


def _take_environment(environment: dict[str, str]) -> None:
    """Also where the kernel shows it: whoever looks for processes by a variable finds this one and its children."""
    os.environ.clear()
    os.environ.update(environment)  # to other places than they had: those are overwritten now
    start, end = _place_of_environment()
    ctypes.memset(start, 0, end - start)
    block = _block(environment)
    ctypes.memmove(start, block, len(block))


def _place_of_environment() -> tuple[int, int]:
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return int(fields[47]), int(fields[48])  # env_start and env_end are fields 50 and 51, these begin at the third


def _block(environment: dict[str, str]) -> bytes:
    return b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())


@contextlib.contextmanager
def offered(root: str, preload: tuple[str, ...]):
    """A template for as long as this lasts: the variables that have forkservers copied from it."""
    import secrets
    import subprocess

    from perfsuite.runtime.transports.base import WRAPPER
    from perfsuite.runtime.transports.parents import worker_environment

    address = f"perfsuite-test-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("\0" + address)
        listener.listen(64)
        template = subprocess.Popen(
            [sys.executable, __file__, "serve", str(listener.fileno()), root, *preload],
            cwd=root,
            pass_fds=[listener.fileno()],
            env={**worker_environment(), "PYTHONPATH": root, _SPACE: "." * 100_000},
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
    try:
        yield {ADDRESS: address, WRAPPER: f"{sys.executable} -S -E {__file__} stand-in"}
    finally:
        assert template.stdin is not None
        template.stdin.close()
        template.wait()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(socket.socket(fileno=int(sys.argv[2])), sys.argv[3], sys.argv[4:])
    else:
        stand_in(sys.argv[2:])
