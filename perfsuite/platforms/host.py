"""The host for detection: files below a root, vendors' tools, the environment.

All code that reads the machine uses a Host, so that a test can describe one with a directory and a function.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TOOL_TIMEOUT_S = 60.0
"""A vendor's tool without an answer after this time has a driver that hangs. Without its persistence daemon the driver
of eight devices is loaded for every query, which can take half of this time."""
_PATIENCE_S = 5.0  # A longer wait is reported on stderr.


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Output of a tool, or the reason why there is none."""

    text: str = ""
    problem: str = ""  # One line: ``not installed``, ``exit 9: ...``, ``no answer in 10 s``; empty without one.
    hung: bool = False  # Whether it had to be killed; its driver will not answer further queries.


ToolRunner = Callable[[Sequence[str]], Answer]


def run_tool(command: Sequence[str], timeout_s: float = TOOL_TIMEOUT_S) -> Answer:
    """Run a tool in the C locale; kill it after ``timeout_s`` seconds, without waiting if its driver hangs."""
    try:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "LC_ALL": "C"},
        )
    except OSError as error:
        return Answer(problem="not installed" if isinstance(error, FileNotFoundError) else str(error))
    try:
        try:
            output, _ = process.communicate(timeout=min(timeout_s, _PATIENCE_S))
        except subprocess.TimeoutExpired:
            if timeout_s > _PATIENCE_S:
                print(f"perfsuite: waits for {command[0]}, {timeout_s:g} s at most", file=sys.stderr, flush=True)
            output, _ = process.communicate(timeout=max(0.0, timeout_s - _PATIENCE_S))
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=1.0)
        if process.stdout:
            process.stdout.close()
        return Answer(problem=f"no answer in {timeout_s:g} s", hung=True)
    except BaseException:  # Ctrl-C or SIGTERM during the wait
        process.kill()
        raise
    text = output.decode("utf-8", errors="replace")
    if process.returncode != 0:
        message = " ".join(text.split())
        return Answer(problem=f"exit {process.returncode}: {message:.160}".rstrip(": "))
    return Answer(text=text)


class Host:
    """Files, tools and environment of one machine; each tool runs once."""

    def __init__(
        self,
        *,
        root: Path = Path("/"),
        environ: Mapping[str, str] | None = None,
        run: ToolRunner = run_tool,
        cores: int | None = None,
    ) -> None:
        self.root = root  # Folder of /dev, /proc and /sys.
        self.environ: Mapping[str, str] = os.environ if environ is None else environ
        self._run = run
        self._cores = cores
        self._answers: dict[tuple[str, ...], Answer] = {}

    def read(self, path: str) -> str | None:
        """Return the text of a file below the root without surrounding white space; None if unreadable."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None

    def has(self, path: str) -> bool:
        """Return whether a file or folder exists below the root, or may exist in a folder without access."""
        try:
            return (self.root / path).exists()
        except OSError:
            return True

    def glob(self, pattern: str) -> list[Path]:
        """Return matching files below the root, sorted with numbers in order: mtgpu.2 before mtgpu.10."""
        with contextlib.suppress(OSError):
            return sorted(self.root.glob(pattern), key=lambda path: (len(path.name), path.name))
        return []

    def tool(self, *command: str) -> Answer:
        """Return the answer of a vendor's tool; each command runs once, and none after one that hung."""
        if command not in self._answers:
            hung = [answer for asked, answer in self._answers.items() if answer.hung and asked[0] == command[0]]
            self._answers[command] = hung[0] if hung else self._run(command)
        return self._answers[command]

    def hung(self) -> str:
        """Return the tool that gave no answer, and its time limit; empty if all answered."""
        return next((f"{asked[0]}: {answer.problem}" for asked, answer in self._answers.items() if answer.hung), "")

    def cores(self) -> int:
        """Return how many logical cores container or batch system grant to ranks; its own binding does not count."""
        return self._cores if self._cores is not None else len(self.granted())

    def granted(self) -> frozenset[int]:
        """Return the numbers of those cores."""
        if not hasattr(os, "sched_setaffinity"):
            return frozenset(range(os.cpu_count() or 1))
        bound_to = os.sched_getaffinity(0)
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
        granted = os.sched_getaffinity(0)
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, bound_to)
        return frozenset(granted)


def boot_of(host: Host) -> str:
    """Return the first twelve hex digits of the boot's identifier; empty if Linux does not show it."""
    return (host.read("proc/sys/kernel/random/boot_id") or "").replace("-", "")[:12]


def active_ports(host: Host) -> tuple[str, ...]:
    """Return ``mlx5_0 port 1: 200 Gb/sec (4X HDR) InfiniBand`` for every active port."""
    ports = []
    for port in host.glob("sys/class/infiniband/*/ports/*"):
        path = str(port.relative_to(host.root))
        if "ACTIVE" in (host.read(f"{path}/state") or ""):
            rate, layer = host.read(f"{path}/rate") or "unknown", host.read(f"{path}/link_layer") or ""
            ports.append(f"{port.parent.parent.name} port {port.name}: {rate} {layer}".strip())
    return tuple(sorted(ports))
