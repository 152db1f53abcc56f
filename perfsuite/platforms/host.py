"""The host as detection sees it: files below a root, tools of vendors, the environment.

All reading of the machine goes through a Host, so that a test can describe one with a directory and a function.
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
"""A vendor's tool that has not answered by then never will: its driver hangs.  Without its persistence daemon a driver
of eight devices is loaded for every question, which can take half of that."""
_PATIENCE_S = 5.0
"""Who waits for longer says for whom."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a tool printed, or why it printed nothing."""

    text: str = ""
    problem: str = ""
    """One line: ``not installed``, ``exit 9: ...``, ``no answer in 10 s``; empty when the tool succeeded."""
    hung: bool = False
    """It had to be killed; its driver will not answer another question either."""


ToolRunner = Callable[[Sequence[str]], Answer]


def run_tool(command: Sequence[str], timeout_s: float = TOOL_TIMEOUT_S) -> Answer:
    """Run a tool in the C locale, killed after ``timeout_s`` seconds.

    A process stuck in the driver survives even SIGKILL; it is then left behind instead of waited for.
    """
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
    text = output.decode("utf-8", errors="replace")
    if process.returncode != 0:
        said = " ".join(text.split())
        return Answer(problem=f"exit {process.returncode}: {said:.160}".rstrip(": "))
    return Answer(text=text)


class Host:
    """Files, tools and environment of one machine; a tool is run once and its answer kept."""

    def __init__(
        self,
        *,
        root: Path = Path("/"),
        environ: Mapping[str, str] | None = None,
        run: ToolRunner = run_tool,
        cores: int | None = None,
    ) -> None:
        self.root = root
        """Where /dev, /proc and /sys are."""
        self.environ: Mapping[str, str] = os.environ if environ is None else environ
        self._run = run
        self._cores = cores
        self._answers: dict[tuple[str, ...], Answer] = {}

    def read(self, path: str) -> str | None:
        """Text of a file below the root without surrounding white space; None when it cannot be read."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None

    def has(self, path: str) -> bool:
        """Whether there is such a file or folder below the root, or may be one in a folder that cannot be entered."""
        try:
            return (self.root / path).exists()
        except OSError:
            return True

    def glob(self, pattern: str) -> list[Path]:
        """Files below the root that match, sorted by name with numbers in order: mtgpu.2 before mtgpu.10."""
        with contextlib.suppress(OSError):
            return sorted(self.root.glob(pattern), key=lambda path: (len(path.name), path.name))
        return []

    def tool(self, *command: str) -> Answer:
        """Answer of a vendor's tool; asked once per host object, and not again once it hung."""
        if command not in self._answers:
            hung = [said for asked, said in self._answers.items() if said.hung and asked[0] == command[0]]
            self._answers[command] = hung[0] if hung else self._run(command)
        return self._answers[command]

    def hung(self) -> str:
        """The tool that gave no answer, and for how long; empty where each one did."""
        return next((f"{asked[0]}: {said.problem}" for asked, said in self._answers.items() if said.hung), "")

    def cores(self) -> int:
        """Logical cores that ranks may use here: all that the container or the batch system grants.

        What this process happens to be bound to does not count: mpirun binds a rank to one core, the ranks of a case
        are placed anew.
        """
        return self._cores if self._cores is not None else len(self.granted())

    def granted(self) -> frozenset[int]:
        """Numbers of those cores."""
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
    """Short identifier of the boot that the machine runs since, twelve hex digits; empty where Linux does not tell."""
    return (host.read("proc/sys/kernel/random/boot_id") or "").replace("-", "")[:12]


def active_ports(host: Host) -> tuple[str, ...]:
    """``mlx5_0 port 1: 200 Gb/sec (4X HDR) InfiniBand`` for every active port."""
    ports = []
    for port in host.glob("sys/class/infiniband/*/ports/*"):
        path = str(port.relative_to(host.root))
        if "ACTIVE" in (host.read(f"{path}/state") or ""):
            rate, layer = host.read(f"{path}/rate") or "unknown", host.read(f"{path}/link_layer") or ""
            ports.append(f"{port.parent.parent.name} port {port.name}: {rate} {layer}".strip())
    return tuple(sorted(ports))
