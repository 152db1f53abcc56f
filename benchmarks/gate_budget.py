"""How long a gated session with a base takes on a busy host, by real processes: nine short cases and two busy loops.

    python benchmarks/gate_budget.py [--busy 2] [--slower 0.15] [--sessions 1] [--budget SECONDS] [--limit SECONDS]

A repository with nine cases (seven that sleep, products, messages between two ranks) is made in a temporary directory,
and a baseline of five sessions is stored.  Its last commit makes the shorter four of the sleeping cases slower.  Then
busy loops start, and a plain run and ``--perf-gate --perf-against=HEAD~1 -q`` are timed.  Printed are the time of each,
the gate's own lines with the second at which each came, the verdicts, and the work trees that are left.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from perfsuite.base.git import without_git

ROOT = Path(__file__).parent.parent
FILES = {
    "conftest.py": 'pytest_plugins = ["perfsuite.plugin"]\n',
    "pytest.ini": "[pytest]\naddopts = -p no:cacheprovider --benchmark-max-time=0.3\n",
    ".gitignore": ".perfsuite/\n__pycache__/\nbaselines/\n",
    "test_steps.py": """
import time

import pytest
from perfsuite import world_sizes


SLOWER = 1.0


def products(rank, count):
    import torch

    torch.set_num_threads(1)
    a = torch.randn(192, 192)
    return lambda: [torch.mm(a, a) for _ in range(count)]


def sleeps(rank, milliseconds):
    return lambda: time.sleep((SLOWER if milliseconds < 5 else 1.0) * milliseconds / 1000)


def messages(rank, kibibytes):
    import torch
    import torch.distributed as dist

    buffer = torch.ones(kibibytes << 8)
    return lambda: dist.all_reduce(buffer)


@pytest.mark.parametrize("count", (4,))
def test_products(perf, count):
    perf(products, count=count)


@pytest.mark.parametrize("milliseconds", (1, 2, 3, 4, 5, 7, 10))
def test_sleeps(perf, milliseconds):
    perf(sleeps, milliseconds=milliseconds)


@world_sizes(2)
@pytest.mark.parametrize("kibibytes", (4,))
def test_messages(perf, ranks, kibibytes):
    perf(messages, on=ranks, kibibytes=kibibytes)
""",
}


class Repository:
    """The repository, and what is done to it."""

    def __init__(self, root: Path, slower: float) -> None:
        self.root = root
        for name, text in FILES.items():
            (root / name).write_text(text)
        for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "first"]):
            self.git(*arguments)
        self.slower = slower

    def slow(self) -> None:
        """The commit after which the sleeping cases are slower."""
        test = self.root / "test_steps.py"
        test.write_text(test.read_text().replace("SLOWER = 1.0", f"SLOWER = {1 + self.slower}"))
        self.git("commit", "-q", "--allow-empty", "-am", "slower")

    def git(self, *arguments: str) -> str:
        """A git command by somebody; what it printed."""
        who = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.org")
        command = ["git", *who, *arguments]
        return subprocess.run(
            command, cwd=self.root, check=True, env=without_git(os.environ), capture_output=True, text=True
        ).stdout

    def pytest(self, *arguments: str, limit_s: float) -> tuple[float, int | None, list[tuple[float, str]]]:
        """Seconds, exit code (None after the limit) and lines with the second at which each was printed."""
        began_s = time.monotonic()
        child = subprocess.Popen(
            [sys.executable, "-u", "-m", "pytest", *arguments],
            cwd=self.root,
            env={**without_git(os.environ), "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert child.stdout is not None
        limit = threading.Timer(limit_s, child.terminate)
        limit.start()
        lines = [(time.monotonic() - began_s, line.rstrip()) for line in child.stdout]
        code = child.wait()
        ended = limit.finished.is_set() and time.monotonic() - began_s >= limit_s
        limit.cancel()
        return time.monotonic() - began_s, None if ended else code, lines


@contextmanager
def busy(loops: int) -> Iterator[None]:
    """So many processes that do nothing but take a core."""
    children = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        yield
    finally:
        for child in children:
            child.kill()
            child.wait()


def session(repository: Repository, options: Sequence[str], limit_s: float) -> None:
    """One gated session, printed."""
    took_s, code, lines = repository.pytest("--perf-gate", "--perf-against=HEAD~1", *options, limit_s=limit_s)
    told = f"exit code {code}" if code is not None else f"no verdict, ended by SIGTERM after {limit_s:.0f} s"
    print(f"gate with a base: {took_s:.0f} s, {told}", flush=True)
    for at_s, line in lines:
        if line.startswith(("perfsuite: ", "gated ", "not decided", "gate")):
            print(f"  {at_s:5.1f} s  {line[:160]}")
    print(f"  {len(repository.git('worktree', 'list').splitlines()) - 1} work trees left", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", type=int, default=2, help="busy loops beside")
    parser.add_argument("--slower", type=float, default=0.15, help="slowdown of four of the sleeping cases")
    parser.add_argument("--sessions", type=int, default=1, help="gated sessions")
    parser.add_argument("--budget", help="--perf-gate-budget of the sessions (default: its own default)")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds after which a session gets SIGTERM")
    arguments = parser.parse_args()
    budget = [f"--perf-gate-budget={arguments.budget}"] if arguments.budget else []
    with tempfile.TemporaryDirectory() as directory:
        repository = Repository(Path(directory), arguments.slower)
        for _ in range(5):
            repository.pytest("-q", "--perf-update=append", limit_s=600)
        repository.slow()
        with busy(arguments.busy):
            print(f"plain run: {repository.pytest('-q', limit_s=600)[0]:.0f} s", flush=True)
            for _ in range(arguments.sessions):
                session(repository, ["-q", *budget], arguments.limit)


if __name__ == "__main__":
    main()
