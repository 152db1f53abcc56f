"""The gate's first hour on a busy machine, by real processes: every command, what it printed and its exit code.

    python benchmarks/gate_first_hour.py [--slower 0.10] [--follow]
    python benchmarks/gate_first_hour.py --cases 24

The first goes from an empty repository to the first red regression: a package, a test, five appends, a green gate, a
slower commit, a red gate.  Where a single case stays undecided, the gate is given the base that its output asks for.
The second stores 24 short cases five times, and ends with exit code 1 where a run failed or
fewer than 22 can be gated.  A busy loop runs beside both.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parent.parent
APPENDS = 5
GATED = 22
"""Of 24 cases."""
LEAST_RUNS = 5
STEP = """
import torch

PRODUCTS = {products}

def train(rank):
    torch.set_num_threads(1)  # with more, they wait for each other on the core of the busy loop: 275 ms for 1 ms
    weights = torch.randn(256, 256) / 16
    out = torch.empty_like(weights)

    def step():
        for _ in range(PRODUCTS):
            torch.mm(weights, weights, out=out)

    return step
"""
TEST = """
from trainer import train

def test_step(perf):
    perf(train)
"""
SHORT = """
import time

import pytest
import torch

def short(rank, number):
    ones = torch.ones(1 << 12)

    def step():
        time.sleep(0.002 + 0.0005 * (number % 6))
        for _ in range(20 * (number // 6)):
            ones.add_(0.0)

    return step

@pytest.mark.parametrize("number", range({cases}))
def test_short(perf, number):
    perf(short, number=number)
"""
PRODUCTS = 20


class Shell:
    """A folder that commands are run in, each printed with its output."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "GIT_"))}
        self.environment = {**variables, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}

    def run(self, *command: str) -> tuple[int, str]:
        """Exit code and output."""
        print(f"\n$ {shlex.join(command)}", flush=True)
        began_s = time.perf_counter()
        words = [sys.executable, *command[1:]] if command[0] == "python" else command
        done = subprocess.run(
            words,
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        print(done.stdout.rstrip("\n"))
        print(f"[exit code {done.returncode}, {time.perf_counter() - began_s:.0f} s]", flush=True)
        return done.returncode, done.stdout

    def pytest(self, *options: str) -> tuple[int, str]:
        """A run of all tests."""
        return self.run("python", "-m", "pytest", *options)

    def write(self, name: str, text: str) -> None:
        """A file."""
        (self.folder / name).write_text(text)

    def commit(self, message: str) -> None:
        """Everything that is there."""
        self.run("git", "add", "--all")
        self.run("git", "-c", "user.name=new", "-c", "user.email=new@example.org", "commit", "-q", "-m", message)


@contextmanager
def busy_loop() -> Iterator[None]:
    """A process that computes all the time."""
    beside = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        beside.kill()
        beside.wait()


def first_hour(shell: Shell, slower: float, *, follow: bool) -> int:
    """From nothing to red; 0 where the gate was green, then red."""
    shell.run("git", "init", "-q", ".")
    shell.write("conftest.py", 'pytest_plugins = ["perfsuite.plugin"]\n')
    shell.write(".gitignore", ".perfsuite/\n__pycache__/\n.pytest_cache/\n")
    shell.write("trainer.py", STEP.format(products=PRODUCTS))
    shell.write("test_speed.py", TEST)
    shell.commit("A step and its test")
    shell.pytest()
    shell.pytest("--perf-gate")
    for _ in range(APPENDS):
        shell.pytest("--perf-update=append")
    shell.commit("The baseline")
    green, _ = shell.pytest("--perf-gate")
    shell.write("trainer.py", STEP.format(products=round(PRODUCTS * (1 + slower))))
    shell.commit(f"{slower:.0%} more products")
    red, text = shell.pytest("--perf-gate")
    if "1 case undecided" in " ".join(text.split()):
        red, text = shell.pytest("--perf-gate", "--perf-against=HEAD~1")
    for line in text.splitlines() if follow else ():
        if line.strip().startswith("next: "):
            shell.run("python", "-m", *shlex.split(line.strip().removeprefix("next: ")))
    shell.run("python", "-m", "perfsuite", "show")
    print(f"\nunchanged code: exit code {green}; {slower:.0%} slower: exit code {red}")
    return 0 if (green, red) == (0, 1) else 1


def many_cases(shell: Shell, cases: int) -> int:
    """Short cases appended; 0 where no run failed and nearly all can be gated."""
    shell.write("conftest.py", 'pytest_plugins = ["perfsuite.plugin"]\n')
    shell.write("test_short.py", SHORT.format(cases=cases))
    codes = [shell.pytest("-q", "--benchmark-max-time=0.2", "--perf-update=append")[0] for _ in range(APPENDS)]
    (baseline,) = shell.folder.glob("baselines/*/*.json")
    entries = json.loads(baseline.read_text())["benchmarks"]
    gateable = sum(len(entry["runs"]) >= LEAST_RUNS for entry in entries)
    code, _ = shell.pytest("-q", "--benchmark-max-time=0.2", "--perf-gate")
    print(
        f"\nappends ended with {codes}, the gate with {code}; {gateable} of {cases} cases have {LEAST_RUNS} stored runs"
    )
    return 0 if 1 not in (*codes, code) and gateable >= min(GATED, cases) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slower", type=float, default=0.10)
    parser.add_argument("--cases", type=int, default=0, help="store so many short cases instead")
    parser.add_argument("--follow", action="store_true", help="run the next commands that the red gate prints")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, busy_loop():
        shell = Shell(Path(folder))
        return (
            many_cases(shell, options.cases)
            if options.cases
            else first_hour(shell, options.slower, follow=options.follow)
        )


if __name__ == "__main__":
    sys.exit(main())
