"""Every process of a launch collects; only where there are perf cases do they share one run."""

import os
import re
import signal

import pytest

from perfsuite.base.errors import LaunchError
from perfsuite.runtime.transports import agent, star
from perfsuite.runtime.transports.cluster import ClusterTransport
from perfsuite.runtime.transports.launchers import detect_launch, launcher_variables, telling_variables
from test_correctness.helpers.agents import environ_of
from test_correctness.helpers.processes import run_python
from test_correctness.helpers.scripted_driver import ROOT, repository
from test_correctness.test_launchers import ENV, OPENMPI, SLURM, TORCHRUN

PERF = "def test_perf(perf):\n    perf(step)\n"
PLAIN = "def test_plain(record_property):\n    record_property('seen', 'yes')\n"
FILES = ("--junitxml=junit.xml", "--benchmark-json=out.json", "--perf-report=report.md")


@pytest.fixture
def launched(pytester, monkeypatch):
    """Makes this process rank 0 or 1 of a launch; what it would do there is kept instead of done."""
    done = []

    def become(rank, tests=PERF, launcher=ENV):
        for name in launcher_variables(os.environ):
            monkeypatch.delenv(name)
        for name, value in {**launcher, "RANK": str(rank), "LOCAL_RANK": str(rank)}.items():
            monkeypatch.setenv(name, value)
        return repository(pytester, monkeypatch, tests)

    def serve(launch, **others):
        done.append(f"served {launch.rank} of {launch.world_size}")
        return 0

    monkeypatch.setattr(agent, "serve_agent", serve)
    monkeypatch.setattr(ClusterTransport, "gather", lambda transport: done.append("gathered"))
    monkeypatch.setattr(ClusterTransport, "start", lambda transport: None)
    monkeypatch.setattr("perfsuite.plugin.launch.start_early", lambda config, machine: None)
    become.done = done
    return become


def without_times(lines):
    return [re.sub(r"\d+\.\d+s", "", line) for line in lines]


@pytest.mark.parametrize("arguments", ["", "--collect-only", "-k nothing", "nowhere.py", "--markers"])
def test_without_perf_cases_a_rank_runs_its_own_pytest(launched, pytester, arguments, monkeypatch):
    repo = launched(1, PLAIN + "def test_bad():\n    assert False\n")
    junit = pytester.path / "junit.xml"

    def run():
        found = repo.run(*arguments.split(), "--junitxml=junit.xml")
        cases = re.sub(r' (time|timestamp)="[^"]*"', "", junit.read_text()) if junit.exists() else ""
        junit.unlink(missing_ok=True)
        return found.ret, without_times(found.outlines), found.errlines, cases

    on_rank_1 = run()
    for name in ENV:
        monkeypatch.delenv(name)
    assert on_rank_1 == run()
    assert launched.done == []


@pytest.mark.parametrize("tests", [PERF, PLAIN + PERF + "def test_broken():\n    assert False\n"])
def test_with_perf_cases_another_rank_serves_and_writes_nothing(launched, pytester, tests):
    repo = launched(1, tests)
    finished = []

    class Reporter:
        def pytest_sessionfinish(self):
            finished.append("a plugin's report")

        @pytest.hookimpl(wrapper=True, tryfirst=True)
        def pytest_runtestloop(self):
            finished.append("a plugin's loop")
            return (yield)

    run = pytester.inline_run("-p", "no:cacheprovider", *FILES, plugins=[Reporter()])
    assert (run.ret, launched.done) == (0, ["served 1 of 2"])
    assert "a plugin's report" not in finished
    found = repo.run(*FILES)
    assert (found.ret, found.outlines, found.errlines) == (0, [], [])
    written = {path.name for path in pytester.path.iterdir()}
    assert not written & {"junit.xml", "report.md", ".perfsuite", ".pytest_cache"}
    assert not (pytester.path / "out.json").exists() or not (pytester.path / "out.json").read_bytes()


def test_the_caller_of_pytest_gets_the_status_of_an_agent(launched, pytester, monkeypatch):
    repo = launched(1)
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(agent, "serve_agent", lambda launch, stays, **others: 7 if stays else 0)
    assert repo.run().ret == 7
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_goes_wrong_in_an_agent_is_shown(launched, monkeypatch):
    repo = launched(1)
    monkeypatch.setattr(agent, "serve_agent", lambda launch, **others: 1 / 0)
    found = repo.run()
    assert found.ret == pytest.ExitCode.INTERNAL_ERROR
    found.stdout.fnmatch_lines(["INTERNALERROR> ZeroDivisionError: *"])


@pytest.mark.parametrize(("rank", "options"), [(0, []), (1, []), (1, ["-x"])])
def test_where_collection_fails_nobody_waits_and_every_rank_says_why(launched, pytester, rank, options):
    repo = launched(rank)
    pytester.makepyfile(test_broken="import nothing_of_that_name\n")
    found = repo.run(*options)
    assert found.ret == (pytest.ExitCode.TESTS_FAILED if options else pytest.ExitCode.INTERRUPTED)
    found.stdout.fnmatch_lines(["*No module named 'nothing_of_that_name'"])
    assert launched.done == []


def test_who_goes_on_after_errors_takes_part(launched, pytester):
    pytester.makepyfile(test_broken="import nothing_of_that_name\n")
    launched(1).run("--continue-on-collection-errors")
    launched(0).run("--continue-on-collection-errors")
    assert launched.done == ["served 1 of 2", "gathered"]


@pytest.mark.parametrize("option", ["--collect-only", "--setup-plan"])
def test_where_nothing_runs_rank_0_alone_tells_what_there_is(launched, option):
    told = launched(0).run("-q", option)
    assert "test_perf" in told.stdout.str()
    silent = launched(1).run("-q", option)
    assert (silent.ret, silent.outlines) == (told.ret, [])
    assert launched.done == []


@pytest.mark.parametrize(("rank", "options"), [(0, ["-m", "not platform"]), (1, ["--benchmark-skip"])])
def test_perf_cases_that_will_not_run_gather_nobody(launched, rank, options):
    found = launched(rank, PLAIN + PERF).run(*options)
    found.assert_outcomes(passed=1, deselected=int("-m" in options), skipped=int("-m" not in options))
    assert "the driver exits" not in found.stdout.str()
    assert launched.done == []


def test_a_worker_of_xdist_belongs_to_no_launch(launched, pytester):
    class Worker:
        @pytest.hookimpl(tryfirst=True)
        def pytest_load_initial_conftests(self, early_config):
            early_config.workerinput, early_config.workeroutput = {"workerid": "gw0"}, {}

    launched(1)
    run = pytester.inline_run("--benchmark-disable", plugins=[Worker()])
    run.assertoutcome(passed=1)
    assert launched.done == []


def test_the_driver_gathers_before_it_opens_anything(launched, pytester, monkeypatch):
    repo = launched(0)

    def gather(transport):
        launched.done.append((pytester.path / ".perfsuite").exists())
        raise LaunchError("rank 1 of 2 did not come")

    monkeypatch.setattr(ClusterTransport, "gather", gather)
    found = repo.run()
    assert (found.ret, launched.done) == (pytest.ExitCode.USAGE_ERROR, [False])
    found.stderr.fnmatch_lines(["ERROR: rank 1 of 2 did not come"])
    assert not list(pytester.path.glob(".perfsuite/*"))


MIXED = """
import os

def test_alone():
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & set(os.environ)

def test_perf(perf):
    assert os.environ["WORLD_SIZE"] == "2"
    perf(step)

def test_its_own(monkeypatch):
    monkeypatch.setenv("RANK", "7")
"""


def test_other_tests_beside_perf_cases_run_as_if_nobody_had_launched_them(launched):
    found = launched(0, MIXED).run("-q")
    found.assert_outcomes(passed=3)
    found.stdout.fnmatch_lines(
        [
            "perfsuite: 2 other tests run on rank 0 only, without the variables of env; *perf'",
            "perfsuite: the driver exits with 0; env may exit with another code",
        ]
    )
    assert {name: os.environ[name] for name in ENV} == {**ENV, "RANK": "0", "LOCAL_RANK": "0"}


def test_ctrl_c_during_collection_gathers_nobody(launched, pytester):
    repo = launched(0)
    pytester.makepyfile(test_late="raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        repo.run()
    assert launched.done == []
    assert not list(pytester.path.glob(".perfsuite/*"))


LEFT_OVER = {
    "torchrun": TORCHRUN,
    "open mpi": OPENMPI,
    "srun": SLURM,
    "env": ENV,
    "torchrun inside srun": {**SLURM, **TORCHRUN},
    "mpirun inside srun": {**SLURM, **OPENMPI},
    "srun --mpi=pmi2": {**SLURM, "PMI_RANK": "6", "PMI_SIZE": "7"},
    "deepspeed": {**ENV, "LOCAL_SIZE": "2", "CROSS_RANK": "0"},
}


@pytest.mark.parametrize("environ", LEFT_OVER.values(), ids=LEFT_OVER)
def test_the_variables_that_are_named_are_all_that_has_to_be_unset(environ):
    names = telling_variables(environ)
    assert detect_launch(environ) is not None
    assert detect_launch({name: value for name, value in environ.items() if name not in names}) is None


def cluster(environ, logs, **limits):
    how = {"start_method": "fork", "preload": (), "log_directory": logs}
    return ClusterTransport(detect_launch(environ), environ=environ, **how, **limits)


def test_who_waits_says_for_whom_how_long_and_what_to_unset(tmp_path, monkeypatch, capsys):
    environ = environ_of(0, 4, tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(star, "PATIENCE_S", 0.0)
    transport = cluster(environ, tmp_path, deadline_s=1.0)
    unset = "unset RANK LOCAL_RANK WORLD_SIZE"
    told = r"rank 1-3 of 4 did not come within 1 s \(no other rank came\).*"
    with pytest.raises(LaunchError, match=f"{told}{unset}$"):
        transport.gather()
    transport.close()
    assert list((tmp_path / f"perfsuite-{os.getuid()}").iterdir()) == []
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("perfsuite: rank 0 of 4 (env) waits for rank 1-3, 1 s at most: ")
    assert line.endswith(f"if no launcher started it: {unset}")
    monkeypatch.setattr(agent, "PATIENCE_S", 0.0)
    other = {**environ, "RANK": "2", "LOCAL_RANK": "2"}
    assert agent.serve_agent(detect_launch(other), environ=other, deadline_s=0.5, stays=True) == 1
    line, last = capsys.readouterr().err.splitlines()
    assert line.startswith("perfsuite: rank 2 of 4 (env) waits for rank 0 and all other ranks, 0.5 s at most: ")
    assert last.startswith("perfsuite: rank 2 found no driver on this host within 0.5 s (")


@pytest.mark.parametrize("launch", [ENV, SLURM], ids=["one host", "several"])
def test_the_silence_is_shorter_than_five_seconds_and_the_wait_ends(launch):
    transport = cluster(launch, ROOT)
    assert star.PATIENCE_S < 5
    assert transport._deadline_s == (60.0 if launch is ENV else 300.0)


DISTRIBUTED = """
import datetime
import torch
import torch.distributed as dist

def test_all_reduce():
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    x = torch.ones(4)
    dist.all_reduce(x)
    assert x[0].item() == dist.get_world_size() == 2
    dist.destroy_process_group()
"""
PROGRAM = """
import os, signal, sys, pytest
before = signal.getsignal(signal.SIGTERM)
status = pytest.main(["-q", "-p", "no:cacheprovider", "--benchmark-max-time=0.05", sys.argv[1]])
assert signal.getsignal(signal.SIGTERM) == before
os.write(1, f"rank {os.environ['RANK']} goes on after {int(status)}\\n".encode())
"""
ALL_REDUCE = """
import torch
import torch.distributed as dist
from perfsuite import world_sizes

def add_up(rank):
    buffer = torch.ones(1024)
    return lambda: dist.all_reduce(buffer)

@world_sizes(2)
def test_add_up(perf, ranks):
    perf(add_up, on=ranks)
"""


def torchrun(directory, *command):
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node=2")
    return run_python(*launcher, *command, cwd=directory, PYTHONPATH=str(ROOT), TMPDIR=str(directory))


@pytest.mark.extended
def test_a_suite_of_distributed_tests_runs_under_torchrun_as_it_did(tmp_path):
    (tmp_path / "test_it.py").write_text(DISTRIBUTED)
    found = torchrun(tmp_path, "-m", "pytest", "-p", "perfsuite.plugin", "-p", "no:cacheprovider", "test_it.py")
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.count("test session starts") == 2
    assert len(re.findall("1 passed", found.stdout)) == 2


@pytest.mark.slow
def test_a_program_that_calls_pytest_goes_on_on_every_rank(tmp_path):
    (tmp_path / "test_it.py").write_text(ALL_REDUCE)
    (tmp_path / "program.py").write_text(PROGRAM)
    found = torchrun(tmp_path, "program.py", "test_it.py")
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.count("1 passed") == 1
    for rank in (0, 1):
        assert f"rank {rank} goes on after 0" in found.stdout
