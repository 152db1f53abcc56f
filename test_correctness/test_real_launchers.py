"""Four ranks under a real Slurm controller and a real Open MPI, with and without the loss of an agent.

Slow.  Debian's packages: ``slurm-wlm munge openmpi-bin``.  ``tox -e launchers`` fails where one of them is missing.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest

from test_correctness.helpers import slurm
from test_correctness.helpers.processes import processes_with, unlaunched
from test_correctness.test_cluster_pytest import PATIENT_MPIRUN, ROOT, project, until_stuck, verdicts
from test_correctness.test_cluster_pytest import PROJECT as OF_TWO_RANKS

pytestmark = pytest.mark.slow
RANKS = 4
PROJECT = OF_TWO_RANKS.replace("(1, 2, 3)", "(2, 5)").replace("@world_sizes(2)", "@world_sizes(4)")
PYTEST = (sys.executable, "-m", "pytest")
SRUN = ("srun", "-n", str(RANKS), "--kill-on-bad-exit=0", "--wait=60")
"""As docs/how-to/clusters.md has it."""


def require(*programs):
    """Skip, and under ``tox -e launchers`` fail, where programs are not installed."""
    if programs:
        what = f"not installed: {', '.join(programs)} (Debian: slurm-wlm munge openmpi-bin)"
        pytest.fail(what) if os.environ.get("PERFSUITE_TEST_LAUNCHERS") else pytest.skip(what)


@pytest.fixture(scope="module")
def controller():
    require(*slurm.missing())
    with slurm.cluster() as environ:
        yield environ


@pytest.fixture
def srun(controller):
    return lambda *options: ((*SRUN, *options, *PYTEST), controller)


@pytest.fixture
def mpirun():
    require(*(name for name in ("mpirun",) if shutil.which(name) is None))
    return lambda *options: (("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(RANKS), *PYTEST), {})


def journal(directory):
    (file,) = directory.glob(".perfsuite/journal-*.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return re.findall(r"test_project\.py::(\w+)", json.dumps(lines))


@pytest.mark.parametrize(("launcher", "name"), [("srun", "slurm"), ("mpirun", "openmpi")])
def test_four_ranks_measure(tmp_path, request, launcher, name):
    command, environ = request.getfixturevalue(launcher)("-N1")
    with project(command, tmp_path, "-k", "first or last", source=PROJECT, environ=environ) as run:
        output, _ = run.communicate(timeout=300)
    assert run.returncode == 0, output
    assert f"transport {name} with 4 ranks" in output
    assert output.count("test session starts") == 1
    assert "2 passed, 1 skipped" in output
    messages = verdicts(tmp_path)
    assert list(messages) == ["test_first[cpu-ws4]", "test_last[cpu-ws2]", "test_last[cpu-ws5]"]
    assert f"5 ranks, but {name} gave 4" in messages["test_last[cpu-ws5]"]


def test_two_nodes_of_slurm_measure(tmp_path, srun):
    """Three ranks on the first node and one on the second, which meet by the network and by a key."""
    command, environ = srun("-N2", "--distribution=block")
    environ = {**environ, "MASTER_ADDR": "127.0.0.1", "PERFSUITE_KEY": "a key for tests alone"}
    with project(command, tmp_path, "-k", "first", source=PROJECT, environ=environ) as run:
        output, _ = run.communicate(timeout=300)
    assert run.returncode == 0, output
    assert "transport slurm with 4 ranks" in output
    assert verdicts(tmp_path) == {"test_first[cpu-ws4]": ""}


def test_the_job_script_of_the_examples(tmp_path, controller):
    """Two nodes by sbatch; the script makes the key.  No GPUs: this Slurm has none to give."""
    (tmp_path / "test_project.py").write_text(PROJECT)
    (tmp_path / "python3").symlink_to(sys.executable)
    environ = {
        **unlaunched(),
        **controller,
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join((str(ROOT), *filter(None, sys.path))),
        "MASTER_ADDR": "127.0.0.1",
        "PERFSUITE_KEY_FILE": str(tmp_path / "key"),
    }
    script = str(ROOT / "examples" / "cluster" / "slurm.sbatch")
    sbatch = ["sbatch", "--wait", "--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=0", "--output=output", script]
    options = ["-p", "perfsuite.plugin", "-p", "no:cacheprovider", "-k", "first", "test_project.py"]
    run = subprocess.run(
        [*sbatch, *options], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300, check=False
    )
    output = (tmp_path / "output").read_text() if (tmp_path / "output").exists() else ""
    assert run.returncode == 0, run.stderr + output
    assert "transport slurm with 4 ranks" in output
    (file,) = tmp_path.glob("perf-*.xml")
    assert '<testcase classname="test_project" name="test_first[cpu-ws4]"' in file.read_text()


def test_a_node_name_that_no_host_has_is_named(tmp_path, srun):
    command, environ = srun("-N2")
    environ = {**environ, "PERFSUITE_KEY": "a key for tests alone"}
    with project(command, tmp_path, "-k", "first", source=PROJECT, environ=environ) as run:
        for line in run.stdout:
            if "cannot resolve" in line:
                break
        assert re.search(rf"rank [123] of 4 \(slurm\) waits .* cannot resolve {slurm.NODES[0]}, .*MASTER_ADDR", line)
        run.send_signal(signal.SIGTERM)
        run.communicate(timeout=120)


@pytest.mark.parametrize(
    ("launcher", "options", "variable"),
    [
        pytest.param("srun", ("-N1",), "SLURM_PROCID=2", id="srun"),
        pytest.param("srun", ("-N1", "--kill-on-bad-exit=1"), "SLURM_PROCID=2", id="srun --kill-on-bad-exit"),
        pytest.param("mpirun", (), "OMPI_COMM_WORLD_RANK=2", id="mpirun"),
    ],
)
def test_a_killed_agent_fails_the_running_case(tmp_path, request, launcher, options, variable):
    command, environ = request.getfixturevalue(launcher)(*options)
    if launcher == "mpirun":  # its second until SIGKILL is too short to hang a test on
        command = (*PATIENT_MPIRUN[:4], *command[1:])
    with project(command, tmp_path, "-k", "first or stuck or last", source=PROJECT, environ=environ) as run:
        until_stuck(tmp_path, RANKS)
        (agent,) = processes_with(f"PERFSUITE_TEST_TOKEN={tmp_path}", variable)  # workers do not see that
        os.kill(agent, signal.SIGKILL)
        output, _ = run.communicate(timeout=300)
    assert run.returncode != 0, output
    messages = verdicts(tmp_path)
    assert list(messages) == ["test_first[cpu-ws4]", "test_stuck[cpu-ws4]"]
    assert messages["test_first[cpu-ws4]"] == ""
    assert re.search(rf"the agent of rank 2 on \S+ \(pid {agent}\) is lost", messages["test_stuck[cpu-ws4]"])
    assert "more are lost" not in messages["test_stuck[cpu-ws4]"]
    assert "test_first" in journal(tmp_path)
    if launcher == "srun":  # mpirun does not read what the driver prints while it waits
        assert "1 failed, 1 passed" in output
        assert "the driver exits with" in output
