"""Detect the launcher of this process, with rank and world size.

A launcher is recognised by its own variables, in the order torchrun, Open MPI, Slurm step, ``env://`` variables: the
inner one of nested launchers wins. A contradictory or incomplete environment raises
:class:`~perfsuite.base.errors.LaunchError`: ranks that disagree about their number would hang.

A launch of one process is treated like a run without a launcher: perfsuite starts the rank processes on this host.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from perfsuite.base.errors import LaunchError

Launcher = Literal["torchrun", "openmpi", "slurm", "env"]
Environ = Mapping[str, str]

_PREFIXES = ("TORCHELASTIC_", "PET_", "OMPI_", "OPAL_", "ORTE_", "PRTE_", "PMIX_", "PMI_", "SLURM_", "SRUN_")
_NAMES = frozenset(
    (
        *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "CROSS_RANK", "ROLE_RANK", "ROLE_NAME"),
        *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "GROUP_WORLD_SIZE", "CROSS_SIZE", "ROLE_WORLD_SIZE"),
        *("MASTER_ADDR", "MASTER_PORT", "PERFSUITE_KEY", "PERFSUITE_KEY_FILE"),
    )
)
_FOREIGN = {
    "PMI_RANK": "PMI_SIZE",
    "MV2_COMM_WORLD_RANK": "MV2_COMM_WORLD_SIZE",
    "PALS_RANKID": "PALS_NRANKS",
    "FLUX_TASK_RANK": "FLUX_JOB_SIZE",
    "JSM_NAMESPACE_RANK": "JSM_NAMESPACE_SIZE",
    "PMIX_RANK": "PMIX_SIZE",
}
"""Rank and size variables of unsupported launchers (MPICH, MVAPICH, PALS, Flux, JSM, bare PMIx)."""
_TELLING = (
    *("TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    *("SLURM_STEP_ID", "SLURM_JOB_ID", "SLURM_PROCID", "RANK", "LOCAL_RANK", "WORLD_SIZE", *_FOREIGN),
)
"""Variables that indicate a launch; without them there is none."""
_FIRST_SPECIAL_STEP = 0xFFFFFFF0  # From here on steps are batch scripts and interactive shells, not srun's.


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One process of a launch; :func:`detect_launch` returns launches of at least two processes."""

    launcher: Launcher  # Name of the launcher and of the transport.
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int  # Processes of the launch on this host.
    node_rank: int | None  # Number of this host; None if the launcher does not set it.
    master_addr: str  # Name or address of rank 0's host that the other hosts reach.
    master_port: int | None  # The launcher's own port, which may be in use; it makes the run id unique.
    run_id: str  # Text that all processes of a launch share and that differs between concurrent launches.

    def __post_init__(self) -> None:
        """Raise LaunchError if the numbers contradict each other."""
        for name, value, most, limit in (
            ("rank", self.rank, self.world_size, "world size"),
            ("local rank", self.local_rank, self.local_world_size, "local world size"),
        ):
            if not 0 <= value < most:
                raise LaunchError(
                    f"{self.launcher} gave {name} {value} and {limit} {most}: ranks count from 0 to {most - 1}; "
                    "clear the launcher's variables from your shell or start through torchrun"
                )
        if self.local_world_size > self.world_size:
            raise LaunchError(
                f"{self.launcher} gave local world size {self.local_world_size} and world size {self.world_size}: "
                "one host cannot have more ranks than all hosts; correct LOCAL_WORLD_SIZE or WORLD_SIZE"
            )

    @property
    def single_host(self) -> bool:
        """All processes of the launch are on this host."""
        return self.local_world_size == self.world_size


def detect_launch(environ: Environ) -> Launch | None:
    """Return the launch that ``environ`` describes; None without a launcher and for a launch of one process.

    Raises LaunchError, in one line, for an environment that is unsupported, incomplete or contradictory.
    """
    if "TORCHELASTIC_RUN_ID" in environ:
        launch: Launch | None = _torchrun(environ)
    elif "OMPI_COMM_WORLD_RANK" in environ or "OMPI_COMM_WORLD_SIZE" in environ:
        launch = _open_mpi(environ)
    else:
        launch = _slurm_step(environ) or _env(environ)
    return launch if launch is not None and launch.world_size > 1 else None


def gathering_s(launch: Launch) -> float:
    """Return the seconds that the processes of a launch wait for each other: on one host they start together."""
    return 60.0 if launch.single_host else 300.0


def telling_variables(environ: Environ) -> tuple[str, ...]:
    """Return names in ``environ`` to unset if no launcher started this process: without them there is no launch.

    >>> telling_variables({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
    ('RANK', 'LOCAL_RANK', 'WORLD_SIZE')
    """
    return tuple(name for name in _TELLING if name in environ)


def launcher_variables(environ: Environ) -> frozenset[str]:
    """Return names in ``environ`` that belong to a launcher or to the agents; rank processes must not see them.

    >>> sorted(launcher_variables({"RANK": "0", "SLURM_PROCID": "0", "PATH": "/bin"}))
    ['RANK', 'SLURM_PROCID']
    """
    return frozenset(name for name in environ if name in _NAMES or name.startswith(_PREFIXES))


def _torchrun(environ: Environ) -> Launch:
    how = "torchrun sets it; start through torchrun, or unset TORCHELASTIC_RUN_ID"
    master_port = _integer(environ, "MASTER_PORT", how)
    # "none" is torchrun's default run id: the port identifies the launch, the restart count a generation of it.
    restart = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Launch(
        launcher="torchrun",
        rank=_integer(environ, "RANK", how),
        local_rank=_integer(environ, "LOCAL_RANK", how),
        world_size=_size(environ, "WORLD_SIZE", how),
        local_world_size=_size(environ, "LOCAL_WORLD_SIZE", how),
        node_rank=_integer(environ, "GROUP_RANK", how) if "GROUP_RANK" in environ else None,
        master_addr=_text(environ, "MASTER_ADDR", how),
        master_port=master_port,
        run_id=f"torchrun {environ['TORCHELASTIC_RUN_ID']} {master_port} {restart}",
    )


def _open_mpi(environ: Environ) -> Launch:
    how = "Open MPI's mpirun sets it; start through mpirun, or unset the OMPI_COMM_WORLD_* variables"
    launch = _with_master(
        environ,
        launcher="openmpi",
        rank=_integer(environ, "OMPI_COMM_WORLD_RANK", how),
        local_rank=_integer(environ, "OMPI_COMM_WORLD_LOCAL_RANK", how),
        world_size=_size(environ, "OMPI_COMM_WORLD_SIZE", how),
        local_world_size=_size(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", how),
        node_rank=None,
        job=environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid", ""),
        how="pass it to all processes by 'mpirun -x MASTER_ADDR=<host of rank 0> ...'",
    )
    _require_agreement(environ, launch, prefix="OMPI_COMM_WORLD_")
    return launch


def _slurm_step(environ: Environ) -> Launch | None:
    """Return the launch of an srun step; None outside of one and for a step of one task."""
    how = "srun sets it; start through srun, or unset the SLURM_* variables"
    if not _in_slurm_step(environ):
        return None
    world_size = _size(environ, "SLURM_STEP_NUM_TASKS", how)
    if world_size == 1:
        return None
    node_rank = _integer(environ, "SLURM_NODEID", how)
    tasks = _tasks_per_node(_text(environ, "SLURM_STEP_TASKS_PER_NODE", how))
    if node_rank >= len(tasks) or sum(tasks) != world_size:
        raise LaunchError(
            f"SLURM_NODEID={node_rank}, SLURM_STEP_TASKS_PER_NODE={environ['SLURM_STEP_TASKS_PER_NODE']} and "
            f"SLURM_STEP_NUM_TASKS={world_size} do not describe one step; start again through srun"
        )
    job = _text(environ, "SLURM_JOB_ID", how)
    launch = _with_master(
        environ,
        launcher="slurm",
        rank=_integer(environ, "SLURM_PROCID", how),
        local_rank=_integer(environ, "SLURM_LOCALID", how),
        world_size=world_size,
        local_world_size=tasks[node_rank],
        node_rank=node_rank,
        job=f"{job}.{environ['SLURM_STEP_ID']}.{environ.get('SLURM_RESTART_COUNT', '0')}",
        how="srun sets SLURM_STEP_NODELIST, whose first host is used; start through srun, or set MASTER_ADDR",
        master_addr=first_host(environ.get("SLURM_STEP_NODELIST", "")),
    )
    _require_agreement(environ, launch, prefix="SLURM_")
    return launch


def _in_slurm_step(environ: Environ) -> bool:
    """Return whether srun started this process; batch scripts and interactive shells have no step or a special one."""
    if "SLURM_STEP_ID" not in environ:
        return False
    return _integer(environ, "SLURM_STEP_ID", "srun sets it; start through srun") < _FIRST_SPECIAL_STEP


def _env(environ: Environ) -> Launch | None:
    _refuse_foreign(environ)
    present = [name for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE") if name in environ]
    if not present or (environ.get("WORLD_SIZE") == "1" and environ.get("RANK", "0") == "0"):
        _refuse_allocation(environ)
        return None
    settings = " ".join(f"{name}={environ[name]}" for name in present)
    if "LOCAL_RANK" not in present and (
        "KUBERNETES_SERVICE_HOST" in environ or any(n.startswith("PET_") for n in environ)
    ):
        raise LaunchError(
            f"{settings} without LOCAL_RANK under Kubernetes: there they often count nodes, not processes; "
            "make torchrun the pod's command: 'torchrun --nnodes=... --nproc-per-node=... -m pytest ...'"
        )
    missing = [name for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE") if name not in present]
    if missing:
        raise LaunchError(
            f"{settings} without {' and '.join(missing)}: a launcher sets RANK, LOCAL_RANK and WORLD_SIZE together; "
            "start through torchrun, or unset old variables of your shell"
        )
    local_size = "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in environ else "LOCAL_SIZE"  # DeepSpeed's name
    if local_size not in environ:
        raise LaunchError(
            f"{settings} without LOCAL_WORLD_SIZE: perfsuite cannot find out which ranks share a host; "
            "set it to the number of processes on this host, or start through torchrun"
        )
    how = "the launcher must set it; start through torchrun"
    node = next((name for name in ("NODE_RANK", "GROUP_RANK", "CROSS_RANK") if name in environ), None)
    return _with_master(
        environ,
        launcher="env",
        rank=_integer(environ, "RANK", how),
        local_rank=_integer(environ, "LOCAL_RANK", how),
        world_size=_size(environ, "WORLD_SIZE", how),
        local_world_size=_size(environ, local_size, how),
        node_rank=_integer(environ, node, how) if node else None,
        job="",
        how="set it to the host of rank 0 on every host, or start through torchrun",
    )


def _with_master(
    environ: Environ, *, launcher: Launcher, job: str, how: str, master_addr: str = "", **numbers: Any
) -> Launch:
    """Return a launch of these ``numbers``; the host of rank 0 may be missing unless there are several hosts."""
    master_addr = environ.get("MASTER_ADDR") or master_addr
    world_size, local_world_size = numbers["world_size"], numbers["local_world_size"]
    if not master_addr and local_world_size != world_size:
        raise LaunchError(
            f"{launcher} started {world_size} ranks of which {local_world_size} are on this host, without MASTER_ADDR: "
            f"ranks on several hosts need the address of rank 0; {how}"
        )
    master_port = _integer(environ, "MASTER_PORT", "set a port number or nothing") if "MASTER_PORT" in environ else None
    run_id = f"{launcher} {job or master_port or ''}"
    places: dict[str, Any] = {"master_addr": master_addr or "127.0.0.1", "master_port": master_port}
    return Launch(launcher=launcher, run_id=run_id, **places, **numbers)


def _require_agreement(environ: Environ, launch: Launch, *, prefix: str) -> None:
    for name, value in (("RANK", launch.rank), ("LOCAL_RANK", launch.local_rank), ("WORLD_SIZE", launch.world_size)):
        if environ.get(name, str(value)) != str(value):
            raise LaunchError(
                f"{name}={environ[name]}, but the {prefix}* variables give {value}: two launchers contradict each "
                f"other; unset {name}"
            )


def _refuse_foreign(environ: Environ) -> None:
    for rank, size in _FOREIGN.items():
        if rank == "PMIX_RANK" and _in_slurm_step(environ):
            continue  # srun --mpi=pmix sets it, also for a step of one task
        if rank in environ and environ.get(size) != "1":
            settings = f"{rank}={environ[rank]}" + (f" {size}={environ[size]}" if size in environ else "")
            raise LaunchError(
                f"{settings}: perfsuite does not support this launcher; "
                "use torchrun, Open MPI's mpirun or srun (perfsuite docs clusters)"
            )


def _refuse_allocation(environ: Environ) -> None:
    """Raise LaunchError in a Slurm allocation of several tasks or hosts outside of srun."""
    if not {"SLURM_JOB_ID", "SLURM_PROCID"} & set(environ) or _in_slurm_step(environ):
        return
    hosts = environ.get("SLURM_JOB_NUM_NODES", environ.get("SLURM_NNODES", ""))
    tasks = environ.get("SLURM_NTASKS", "1")
    if hosts == "1" and tasks == "1":
        return
    names = ("SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_NNODES", "SLURM_NTASKS", "SLURM_PROCID")
    settings = " ".join(f"{name}={environ[name]}" for name in names if name in environ)
    raise LaunchError(
        f"{settings} outside of an srun step: this one process would leave the rest of the allocation idle; "
        "start it by 'srun python -m pytest ...', or by 'srun -N1 -n1 python -m pytest ...' for one host alone"
    )


def first_host(node_list: str) -> str:
    """Return the first host of a Slurm node list.

    >>> first_host("rack[03-04,9]n[1-8],login2")
    'rack03n1'
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", node_list)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0]) if first else ""


def _tasks_per_node(text: str) -> list[int]:
    """Return the tasks of each node: [2, 2, 2, 1] for ``2(x3),1``."""
    tasks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not match:
            raise LaunchError(f"SLURM_STEP_TASKS_PER_NODE={text} is not a list such as '2(x3),1'; start through srun")
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def _text(environ: Environ, name: str, how: str) -> str:
    if not environ.get(name):
        raise LaunchError(f"{name} is not set: {how}")
    return environ[name]


def _integer(environ: Environ, name: str, how: str) -> int:
    text = _text(environ, name, how)
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise LaunchError(f"{name}={text} is not a whole number: {how}")
    return int(text)


def _size(environ: Environ, name: str, how: str) -> int:
    size = _integer(environ, name, how)
    if size == 0:
        raise LaunchError(f"{name}=0: a launch has at least one process; {how}")
    return size
