"""The installed plugin in somebody else's repository, with real ranks: both ways to start pytest, and signals."""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from perfsuite.record.journal import read_journal
from test_correctness.helpers.processes import running, until_there
from test_correctness.helpers.scripted_driver import ROOT, junit

SIBLING = """
import functools

ELEMENTS = 1000

def traced(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)
    return wrapper
"""
TESTS = """
import pathlib, time
from dataclasses import dataclass

import sibling
from perfsuite import CallableStep, Work, Workload, sizes, world_sizes

@sibling.traced
def step(rank, message_bytes):
    import torch
    import torch.distributed as dist
    buffer = torch.ones(message_bytes // 4)
    return lambda: dist.all_reduce(buffer)

@sizes(full=["1MiB"], small=["4KiB"])
@world_sizes(2)
def test_decorated(perf, ranks, message_bytes):
    result = perf(step, on=ranks, message_bytes=message_bytes)
    assert result.world_size == len(result.measurement.ranks) == 2

@dataclass(frozen=True, kw_only=True)
class Ones(Workload):
    elements: int
    metrics = ("gb_per_s",)
    def work(self, shape):
        return Work(bytes_moved=4.0 * self.elements, memory_path="device")
    def build(self, rank):
        import torch
        buffer = torch.empty(self.elements)
        return CallableStep(lambda: buffer.fill_(1.0))
    def check(self, rank, step):
        assert float(step.run().sum()) == self.elements

def test_workload_of_this_file(perf):
    assert perf(Ones(elements=sibling.ELEMENTS)).metric("gb_per_s").value > 0

def stuck(rank, file):
    pathlib.Path(f"{file}{rank.rank}").touch()
    return lambda: time.sleep(3600)

@world_sizes(2)
def test_stuck(perf, ranks):
    perf(stuck, on=ranks, file=str(pathlib.Path(__file__).with_name("stuck")))
"""


@pytest.fixture
def theirs(tmp_path):
    """A repository that knows perfsuite only as an installed package."""
    repository, installed = tmp_path / "theirs", tmp_path / "site"
    tests = repository / "tests"
    tests.mkdir(parents=True)
    (tests / "sibling.py").write_text(SIBLING)
    (tests / "test_theirs.py").write_text(TESTS)
    (repository / "pytest.ini").write_text("[pytest]\naddopts = -p no:cacheprovider --benchmark-max-time=0.05\n")
    # What pip leaves of an installation, beside the code itself.
    info = installed / "perfsuite-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: perfsuite\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[pytest11]\nperfsuite.plugin = perfsuite.plugin\n")
    return repository


def run(theirs, *command):
    """A process in the repository, of which nothing may be left at the end."""
    paths = os.pathsep.join([str(theirs.parent / "site"), str(ROOT)])
    return running(command, theirs, PYTHONPATH=paths, PYTEST_ADDOPTS="", TMPDIR=str(theirs.parent))


CONSOLE = (str(Path(sys.executable).with_name("pytest")),)
MODULE = (sys.executable, "-m", "pytest")


@pytest.mark.extended
def test_an_installed_perfsuite_serves_another_repository(theirs):
    """By the console script; test_installed.py has ``python -m pytest``."""
    with run(theirs, *CONSOLE, "-k", "not stuck", "--benchmark-json=out.json") as process:
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert "2 passed, 1 deselected" in output
    stored = {each["name"]: each for each in json.loads((theirs / "out.json").read_text())["benchmarks"]}
    assert set(stored) == {"test_decorated[cpu-ws2-4KiB]", "test_workload_of_this_file[cpu]"}
    assert stored["test_workload_of_this_file[cpu]"]["extra_info"]["gb_per_s"] > 0
    assert not list(theirs.parent.glob("*perfsuite-*"))


def send(process, numbers):
    """As launchers and impatient people do: within a tenth of a second."""
    for number in numbers:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
        time.sleep(0.03)


def assert_no_traceback(output):
    for word in ("Traceback", "INTERNALERROR", "Exception ignored"):
        assert word not in output, output


@pytest.mark.extended
@pytest.mark.parametrize(
    "numbers",
    [
        (signal.SIGTERM, signal.SIGTERM, signal.SIGINT),
        (signal.SIGINT, signal.SIGINT, signal.SIGINT),
        pytest.param((signal.SIGHUP, signal.SIGTERM), marks=pytest.mark.slow),
        pytest.param((signal.SIGINT, signal.SIGTERM, signal.SIGINT), marks=pytest.mark.slow),
    ],
    ids=lambda numbers: "-".join(number.name for number in numbers),
)
def test_signals_end_a_stuck_run_with_its_reports_and_nothing_left(theirs, numbers):
    arguments = ("-k", "decorated or stuck", "--junitxml=junit.xml", "--benchmark-json=out.json")
    name = numbers[0].name
    with run(theirs, *MODULE, *arguments) as process:
        until_there(*(theirs / f"tests/stuck{rank}" for rank in (0, 1)))
        send(process, numbers)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == pytest.ExitCode.INTERRUPTED, output
    assert_no_traceback(output)
    assert "launch.py" not in output, "where the run was is of interest"
    cases = junit(theirs / "junit.xml")
    assert cases["test_decorated[cpu-ws2-4KiB]"].find("failure") is None
    if name != "SIGINT":
        assert cases["test_stuck[cpu-ws2]"].find("failure").attrib["message"].startswith(f"Failed: stopped by {name}")
    assert "test_decorated" in (theirs / "out.json").read_text()
    assert not list(theirs.parent.glob("*perfsuite-*"))
    (journal,) = theirs.glob(".perfsuite/journal-*.jsonl")
    assert read_journal(journal).interrupted == {"tests/test_theirs.py::test_stuck[cpu-ws2]": name}


@pytest.mark.slow
@pytest.mark.parametrize("numbers", [(signal.SIGINT,) * 3, (signal.SIGTERM,) * 2, (signal.SIGINT, signal.SIGTERM)])
@pytest.mark.parametrize("moment", range(16))
def test_signals_at_any_moment_leave_whole_reports_and_nothing_running(theirs, numbers, moment):
    """From the first collected perf test to the exit of the process, in steps of a sixteenth of the whole."""
    marker = theirs / "collected"
    tests = theirs / "tests/test_theirs.py"
    last = "@world_sizes(2)\ndef test_last(perf, ranks):\n    perf(step, on=ranks, message_bytes=4096)\n"
    tests.write_text(f"{tests.read_text()}\n{last}")
    (theirs / "tests/conftest.py").write_text(
        f"import pathlib\ndef pytest_itemcollected(item): pathlib.Path({str(marker)!r}).touch()\n"
    )
    with run(theirs, *MODULE, "-k", "not stuck", "--junitxml=junit.xml") as process:
        until_there(marker)
        time.sleep(moment * float(os.environ.get("PERFSUITE_TEST_RUN_S", "6")) / 16)
        send(process, numbers)
        output, _ = process.communicate(timeout=90)
    assert process.returncode in (0, pytest.ExitCode.INTERRUPTED, -numbers[0]), output
    assert_no_traceback(output)
    for journal in theirs.glob(".perfsuite/journal-*.jsonl"):
        read_journal(journal)


@pytest.mark.slow
def test_a_reader_that_goes_away_ends_a_run_without_a_traceback_and_leaves_nothing(theirs):
    command = " ".join((*MODULE, "-k", "'not stuck'", "2>errors", "|", "head", "-1"))
    with run(theirs, "sh", "-c", command) as process:
        output, _ = process.communicate(timeout=90)
    assert "test session starts" in output
    assert_no_traceback((theirs / "errors").read_text())
