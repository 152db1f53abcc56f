"""What collecting costs: CPU seconds of the whole pytest process, of many perf cases and of the suite that ships.

    python benchmarks/collection.py [--cases 10000] [--rounds 3]

Many cases are one parametrized test function in a generated file, beside as many plain tests.  The suite is collected
as it is and with every published run, beside a pytest that collects one plain test with the same plugins installed.
Arms alternate; the least of the rounds counts, because nothing makes a process take less CPU than it needs.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PERF = """
import pytest
from perfsuite import world_sizes

def step(rank, size):
    return lambda: None

@world_sizes(2)
@pytest.mark.parametrize("size", range({cases}))
def test_it(perf, ranks, size):
    perf(step, on=ranks, size=size)
"""
PLAIN = """
import pytest

@pytest.mark.parametrize("size", range({cases}))
def test_it(size):
    pass
"""


def collect(text: str, *arguments: str) -> float:
    """CPU seconds of a collection, children included."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "test_many.py").write_text(text)
        (Path(folder) / "pytest.ini").write_text("[pytest]\n")
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *arguments]
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYTEST_ADDOPTS": "",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        }
        subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


ONE = "def test_it():\n    pass\n"


def collect_suite(*arguments: str) -> float:
    """CPU seconds of a collection with the plugins that are installed."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "test_one.py").write_text(ONE)
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *arguments]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        environment = {**os.environ, "PYTEST_ADDOPTS": ""}
        subprocess.run(
            command, cwd=ROOT if arguments else folder, env=environment, stdout=subprocess.DEVNULL, check=True
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


SUITE = {
    "one plain test": (),
    "pytest test_perf": ("test_perf",),
    "pytest test_perf with every published run": ("test_perf", "--perf-platform=cpu", "--perf-scale=full"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; Python {sys.version.split()[0]}")
    plugins = ("-p", "pytest_benchmark.plugin", "-p", "perfsuite.plugin", "--perf-platform=cpu")
    rounds = [
        (collect(PERF.format(cases=options.cases), *plugins), collect(PLAIN.format(cases=options.cases)))
        for _ in range(options.rounds)
    ]
    for name, seconds in zip(("perf cases", "plain tests, bare pytest"), zip(*rounds, strict=True), strict=True):
        print(f"{options.cases} {name}: {min(seconds):.2f} CPU s")
    arms = [{name: collect_suite(*arguments) for name, arguments in SUITE.items()} for _ in range(options.rounds)]
    least = {name: min(arm[name] for arm in arms) for name in SUITE}
    for name, seconds in least.items():
        print(f"{name}: {seconds:.2f} CPU s, {seconds / least['one plain test']:.2f} times one plain test")


if __name__ == "__main__":
    main()
