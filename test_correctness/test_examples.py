"""The examples run: one session of the third-party repository, started by the Slurm script, has the other cases too."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from torch.distributed.run import get_args_parser

from test_correctness.helpers.processes import unlaunched
from test_correctness.helpers.scripted_driver import ROOT
from test_correctness.test_ci_recipe import THIS_PYTHON, program

EXAMPLES = ROOT / "examples"
SRUN = """
# One task on this host: srun's options, then the program.
while [ "${1#-}" != "$1" ]; do shift; done
export SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=1 SLURM_STEP_NUM_TASKS=1
export SLURM_STEP_NODELIST=$(hostname) SLURM_STEP_TASKS_PER_NODE=1 SLURM_NODEID=0 SLURM_STEP_NUM_NODES=1
exec "$@"
"""
TORCHRUN = 'for word in "$@"; do echo "$word"; done'


def document_files():
    """Examples of docs/how-to/add-a-workload.md by file name, and the README's."""
    text, readme = (
        (ROOT / page).read_text(encoding="utf-8") for page in ("docs/how-to/add-a-workload.md", "README.md")
    )
    own = re.search(r"^## Your own performance test.*?```python\n(.*?)```", readme, re.MULTILINE | re.DOTALL)
    assert own
    files = dict(re.findall(r"^```python\n# file: (\S+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    return {**files, "test_readme.py": own[1]}


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A checkout of the third-party repository; beside its own cases those of the other examples and documents."""
    top = tmp_path_factory.mktemp("examples")
    checkout = top / "averaging"
    shutil.copytree(EXAMPLES / "third_party", checkout)
    shutil.copytree(EXAMPLES / "workload", checkout / "perf", dirs_exist_ok=True)
    files = document_files()
    assert {"conftest.py", "test_mine.py", "shift.py", "test_shift.py", "test_readme.py"} == set(files)
    for name, text in files.items():
        (checkout / "perf" / name).write_text(text)
    for name, script in (("srun", SRUN), ("torchrun", TORCHRUN), ("python3", THIS_PYTHON)):
        program(top / "bin" / name, script)
    return checkout


def shell(repository, *command, **environ):
    """Output of a command that ends well, in the checkout, where python3 is this one and the launchers stand-ins."""
    own = {
        **unlaunched(),
        "HOME": str(repository.parent),
        "PATH": os.pathsep.join([str(repository.parent / "bin"), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(repository / "perf")]),
        "PYTEST_ADDOPTS": "-p no:hypothesispytest -p no:cacheprovider",
        "PYTEST_PLUGINS": "perfsuite.plugin",
    }
    environ = {**own, **environ}
    done = subprocess.run(
        command, cwd=repository, env=environ, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_every_case_runs_and_is_recorded_as_the_workflow_records_it_under_the_slurm_script(repository):
    workflow = (EXAMPLES / "third_party" / ".github" / "workflows" / "performance.yml").read_text()
    record, gate, _ = (shlex.split(command) for command in re.findall(r"- run: \S+python -m pytest (.*)", workflow))
    assert ("--perf-update=append" in record, "--perf-gate" in gate) == (True, True)
    output = shell(
        repository,
        *("bash", str(EXAMPLES / "cluster" / "slurm.sbatch"), *record, "tests"),
        *("--benchmark-max-time=0.02", "--benchmark-min-rounds=2", "--perf-platform=cpu"),
        SLURM_JOB_ID="7",
    )
    assert "8 passed" in output, output
    key = repository.parent / ".perfsuite-key"
    assert (64, 0o600) == (len(key.read_text().strip()), key.stat().st_mode & 0o777)
    (baseline,) = (repository / "baselines" / "cpu").glob("*.json")
    assert {entry["name"] for entry in json.loads(baseline.read_text())["benchmarks"]} == {
        "test_whole[cpu-ws2-64KiB]",
        "test_bucketed[cpu-ws2-2]",
        "test_bucketed[cpu-ws2-8]",
        "test_add_up[cpu-ws2]",
        "test_mine[cpu-ws2]",
        "test_shift[cpu-ws3-64KiB-fp32]",
        "test_softmax[cpu-256x1024]",
    }
    assert (repository / "perf-7.xml").exists()


def test_the_torchrun_script_starts_pytest_on_every_node(repository):
    script = str(EXAMPLES / "cluster" / "torchrun.sh")
    words = shell(
        repository, "bash", script, "perf", "-k", "two words", HEAD="node0", NODES="2", RANKS="4"
    ).splitlines()
    expected = {"module": True, "training_script": "pytest", "training_script_args": ["perf", "-k", "two words"]}
    expected |= {"nnodes": "2", "nproc_per_node": "4", "rdzv_endpoint": "node0:29500", "rdzv_backend": "c10d"}
    assert expected.items() <= vars(get_args_parser().parse_args(words)).items()
    assert shell(repository, "bash", script, HEAD="node0").splitlines()[-1] == "test_perf"


@pytest.mark.slow
def test_the_torchrun_script_measures_on_two_ranks(repository):
    program(repository.parent / "bin" / "torchrun", f'exec {sys.executable} -m torch.distributed.run "$@"')
    arguments = ("perf/test_speed.py", "-k", "whole", "--benchmark-max-time=0.02", "--perf-platform=cpu")
    output = shell(
        repository,
        *("bash", str(EXAMPLES / "cluster" / "torchrun.sh"), *arguments),
        **{"HEAD": "localhost", "NODES": "1", "RANKS": "2", "PORT": "0"},
    )
    assert "transport torchrun with 2 ranks" in output
    assert "1 passed" in output


@pytest.mark.parametrize("script", sorted((EXAMPLES / "cluster").iterdir()), ids=lambda path: path.name)
def test_a_job_script_is_one(script):
    subprocess.run(["bash", "-n", script], check=True)
    assert "test_perf" in script.read_text()


@pytest.mark.parametrize("name", ["all_reduce", "data_parallel", "tensor_parallel"])
def test_a_plain_program_ends_without_python_s_shutdown(name):
    """A thread of gloo may abort it there: docs/contributing/processes.md."""
    program = (ROOT / "benchmarks" / "plain" / f"{name}.py").read_text(encoding="utf-8")
    assert program.count("    leave()\n") == 1
    assert "destroy_process_group" not in program


@pytest.mark.slow
def test_a_thread_of_gloo_aborts_no_program_that_leaves_python_as_it_is():
    program = [sys.executable, str(ROOT / "benchmarks" / "gloo_exit.py"), "--leave"]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert (0, "") == (ended.returncode, "".join(re.findall("terminate called.*", ended.stderr)))
    assert "a thread of gloo frees the tensor" in ended.stdout
