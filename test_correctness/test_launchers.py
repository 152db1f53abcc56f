"""Every launcher's variables, and every environment that must be refused."""

import pytest

from perfsuite.base.errors import LaunchError
from perfsuite.runtime.transports.launchers import detect_launch, first_host, launcher_variables

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "2071920641",
    "PMIX_RANK": "2",
}
SLURM = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "gpu[03-05],big7",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "3",
}
ENV = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "1234",
}
BATCH = {
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}


def but(environ, *without, **changes):
    return {name: value for name, value in {**environ, **changes}.items() if name not in without}


def found(environ):
    launch = detect_launch(environ)
    assert launch is not None
    return launch


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        (TORCHRUN, {"launcher": "torchrun", "rank": 5, "local_rank": 1, "world_size": 8, "local_world_size": 4}),
        (TORCHRUN, {"node_rank": 1, "master_addr": "node0", "master_port": 29500, "single_host": False}),
        (OPENMPI, {"launcher": "openmpi", "rank": 2, "local_rank": 2, "world_size": 4, "local_world_size": 4}),
        (OPENMPI, {"master_addr": "127.0.0.1", "single_host": True}),
        (but(OPENMPI, OMPI_COMM_WORLD_SIZE="8", MASTER_ADDR="node0"), {"master_addr": "node0", "single_host": False}),
        (SLURM, {"launcher": "slurm", "rank": 6, "local_rank": 0, "world_size": 7, "local_world_size": 1}),
        (SLURM, {"node_rank": 3, "master_addr": "gpu03"}),
        (ENV, {"launcher": "env", "rank": 1, "local_rank": 1, "world_size": 2, "local_world_size": 2}),
        (ENV, {"node_rank": None, "master_port": 1234}),
        (  # the words of DeepSpeed's launcher
            but(ENV, "LOCAL_WORLD_SIZE", WORLD_SIZE="4", LOCAL_SIZE="2", CROSS_RANK="0", CROSS_SIZE="2"),
            {"local_world_size": 2, "node_rank": 0},
        ),
    ],
)
def test_a_launch_is_what_the_variables_of_its_launcher_say(environ, told):
    launch = found(environ)
    assert told == {name: getattr(launch, name) for name in told}


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        ({**SLURM, **OPENMPI, **TORCHRUN}, "torchrun"),
        ({**SLURM, **OPENMPI}, "openmpi"),
        ({**BATCH, **OPENMPI}, "openmpi"),
        ({**BATCH, **ENV}, "env"),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "1", **ENV}, "env"),
        ({**SLURM, "PMIX_RANK": "6", "PMI_RANK": "6", "PMI_SIZE": "7"}, "slurm"),
    ],
)
def test_of_nested_launchers_the_inner_one_counts(environ, launcher):
    assert launcher == found(environ).launcher


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"},
        {"WORLD_SIZE": "1", "RANK": "0"},
        {"WORLD_SIZE": "1", "RANK": "0", "KUBERNETES_SERVICE_HOST": "10.0.0.1"},
        but(ENV, WORLD_SIZE="1", RANK="0", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1"),
        but(TORCHRUN, RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1"),
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
        but(SLURM, SLURM_STEP_NUM_TASKS="1", PMIX_RANK="0"),
        but(BATCH, SLURM_JOB_NUM_NODES="1", SLURM_NTASKS="1"),
        but(BATCH, "SLURM_NTASKS", SLURM_JOB_NUM_NODES="1"),
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1"},
    ],
)
def test_one_process_is_no_launch(environ):
    assert detect_launch(environ) is None


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (BATCH, r"SLURM_NTASKS=4 .*outside of an srun step.*srun python -m pytest"),
        ({"SLURM_JOB_ID": "17"}, r"SLURM_JOB_ID=17 outside of an srun step.*srun"),
        (but(BATCH, SLURM_STEP_ID="4294967290", SLURM_STEP_NUM_TASKS="1"), r"outside of an srun step"),
        ({"SLURM_PROCID": "0"}, r"SLURM_PROCID=0 outside of an srun step"),
        (but(SLURM, "SLURM_STEP_NUM_TASKS"), r"SLURM_STEP_NUM_TASKS is not set: srun sets it"),
        (but(SLURM, "SLURM_LOCALID"), r"SLURM_LOCALID is not set"),
        (but(SLURM, "SLURM_STEP_NODELIST"), r"slurm started 7 ranks of which 1 .*without MASTER_ADDR"),
        (but(SLURM, SLURM_STEP_TASKS_PER_NODE="2(y3)"), r"SLURM_STEP_TASKS_PER_NODE=2\(y3\) is not a list"),
        (but(SLURM, SLURM_STEP_TASKS_PER_NODE="2(x3)"), r"do not describe one step"),
        (but(SLURM, SLURM_NODEID="4"), r"do not describe one step"),
        (but(SLURM, SLURM_STEP_ID="batch"), r"SLURM_STEP_ID=batch is not a whole number"),
        (but(SLURM, RANK="0"), r"RANK=0, but the SLURM_\* variables give 6: two launchers contradict"),
        (but(OPENMPI, WORLD_SIZE="8"), r"WORLD_SIZE=8, but the OMPI_COMM_WORLD_\* variables give 4"),
        (but(OPENMPI, OMPI_COMM_WORLD_SIZE="8"), r"openmpi started 8 ranks of which 4 .*-x MASTER_ADDR="),
        (but(OPENMPI, "OMPI_COMM_WORLD_RANK"), r"OMPI_COMM_WORLD_RANK is not set: Open MPI's mpirun sets it"),
        (but(TORCHRUN, "LOCAL_WORLD_SIZE"), r"LOCAL_WORLD_SIZE is not set: torchrun sets it"),
        (but(TORCHRUN, "MASTER_ADDR"), r"MASTER_ADDR is not set"),
        (but(TORCHRUN, RANK="-1"), r"RANK=-1 is not a whole number"),
        (but(TORCHRUN, RANK="8"), r"gave rank 8 and world size 8: ranks count from 0 to 7"),
        (but(TORCHRUN, LOCAL_RANK="4"), r"gave local rank 4 and local world size 4"),
        (but(TORCHRUN, LOCAL_WORLD_SIZE="9"), r"gave local world size 9 and world size 8"),
        (but(TORCHRUN, WORLD_SIZE="0"), r"WORLD_SIZE=0: a launch has at least one process"),
        (but(ENV, "LOCAL_RANK"), r"RANK=1 WORLD_SIZE=2 without LOCAL_RANK: .*start through torchrun"),
        (but(ENV, "WORLD_SIZE"), r"RANK=1 LOCAL_RANK=1 without WORLD_SIZE"),
        ({"LOCAL_RANK": "0"}, r"LOCAL_RANK=0 without RANK and WORLD_SIZE"),
        (but(ENV, "LOCAL_WORLD_SIZE"), r"without LOCAL_WORLD_SIZE: perfsuite cannot find out which ranks share"),
        (but(ENV, "MASTER_ADDR", WORLD_SIZE="4"), r"env started 4 ranks of which 2 .*without MASTER_ADDR"),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "KUBERNETES_SERVICE_HOST": "10.0.0.1"},
            r"RANK=1 WORLD_SIZE=2 without LOCAL_RANK under Kubernetes: there they often count nodes.*torchrun",
        ),
        ({"RANK": "1", "WORLD_SIZE": "2", "PET_NNODES": "2"}, r"under Kubernetes"),
        ({"PMI_RANK": "3", "PMI_SIZE": "4"}, r"PMI_RANK=3 PMI_SIZE=4: perfsuite does not support this launcher"),
        ({"PMIX_RANK": "3"}, r"PMIX_RANK=3: perfsuite does not support"),
        ({"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "2"}, r"FLUX_TASK_RANK=0 FLUX_JOB_SIZE=2"),
    ],
)
def test_contradictory_or_unknown_environments_are_refused_in_one_line(environ, said):
    with pytest.raises(LaunchError, match=said) as refused:
        detect_launch(environ)
    assert "\n" not in str(refused.value)


def test_run_ids_are_equal_on_all_ranks_and_differ_between_launches():
    assert found(TORCHRUN).run_id == found(but(TORCHRUN, RANK="6", LOCAL_RANK="2")).run_id
    others = [
        but(TORCHRUN, MASTER_PORT="29501"),
        but(TORCHRUN, TORCHELASTIC_RUN_ID="x"),
        but(TORCHRUN, TORCHELASTIC_RESTART_COUNT="1"),
        OPENMPI,
        but(OPENMPI, PMIX_NAMESPACE="2071920642"),
        SLURM,
        but(SLURM, SLURM_STEP_ID="4"),
        ENV,
        but(ENV, MASTER_PORT="1235"),
    ]
    run_ids = {found(environ).run_id for environ in [TORCHRUN, *others]}
    assert len(others) + 1 == len(run_ids)


@pytest.mark.parametrize(
    ("node_list", "first"),
    [
        ("login1", "login1"),
        ("a,b", "a"),
        ("node[01-04,07],x", "node01"),
        ("node[7,9-11]", "node7"),
        ("r[0-1]n[3-5]-ib", "r0n3-ib"),
        ("", ""),
    ],
)
def test_first_host(node_list, first):
    assert first == first_host(node_list)


def test_launchers_variables_are_kept_from_rank_processes():
    everyday = {"PATH": "/bin", "GLOO_SOCKET_IFNAME": "eth0", "NCCL_DEBUG": "INFO", "KUBERNETES_SERVICE_HOST": "x"}
    keys = {"PERFSUITE_KEY": "secret", "PERFSUITE_KEY_FILE": "f"}
    for launcher in (TORCHRUN, OPENMPI, SLURM, BATCH, ENV, keys):
        assert set(launcher) == launcher_variables({**everyday, **launcher})
