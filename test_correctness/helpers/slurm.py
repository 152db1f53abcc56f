"""A real Slurm: a controller and two nodes on this host, with files, ports and keys of their own, without systemd."""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "sinfo")
NODES = ("perfnode1", "perfnode2")
"""Not host names: nothing resolves them, as in clusters whose node names are Slurm's own."""
START_S = 60.0
CONF = """
ClusterName=perfsuite
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
"""


def missing() -> list[str]:
    """Programs of Slurm that are not installed; Debian's slurm-wlm and munge have all."""
    return [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]


@contextlib.contextmanager
def cluster() -> Iterator[dict[str, str]]:
    """The variables by which srun finds a cluster that runs as long as this context; its daemons end with it."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as name, contextlib.ExitStack() as daemons:
        folder = Path(name)
        folder.chmod(0o755)
        for part in ("state", *(f"spool.{node}" for node in NODES)):
            (folder / part).mkdir()
        (folder / "munge.key").touch(mode=0o600)
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "cgroup.conf").write_text(_cgroup_conf())
        (folder / "slurm.conf").write_text(_conf(folder))
        environ = {"SLURM_CONF": str(folder / "slurm.conf")}
        munge = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid", "seed-file": "munge.seed"}
        files = (f"--{option}={folder / file}" for option, file in munge.items())
        daemons.enter_context(_daemon(folder, environ, "munge", "munged", "--foreground", "--force", *files))
        _until((folder / "munge.socket").exists, folder, "munged made no socket")
        daemons.enter_context(_daemon(folder, environ, "controller", "slurmctld", "-D"))
        for node in NODES:
            daemons.enter_context(_daemon(folder, environ, node, "slurmd", "-D", "-N", node))
        _until(lambda: _idle(environ) == len(NODES), folder, "not all nodes are idle")
        yield environ


_PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"))


def _conf(folder: Path) -> str:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(1 + len(NODES))]
        controller, *ports = (each.getsockname()[1] for each in sockets)
    host = socket.gethostname().partition(".")[0]
    lines = [CONF.format(host=host, controller_port=controller, user=getpass.getuser(), folder=folder)]
    for node, port in zip(NODES, ports, strict=True):
        lines.append(f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4")
    return "\n".join([*lines, "PartitionName=all Nodes=ALL Default=YES State=UP", ""])


def _cgroup_conf() -> str:
    """No control groups, which a container may not make: Slurm has a word for that since 24.05."""
    said = subprocess.run(["slurmd", "-V"], env=_environ({}), capture_output=True, text=True, check=True).stdout
    version = tuple(map(int, re.findall(r"\d+", said)[:2]))
    return "CgroupPlugin=disabled\n" if version >= (24, 5) else "CgroupPlugin=autodetect\nIgnoreSystemd=yes\n"


def _environ(environ: dict[str, str]) -> dict[str, str]:
    return {**os.environ, "PATH": _PATH, **environ}


@contextlib.contextmanager
def _daemon(folder: Path, environ: dict[str, str], name: str, *command: str) -> Iterator[None]:
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            env=_environ(environ),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _idle(environ: dict[str, str]) -> int:
    command = ["sinfo", "--noheader", "--Node", "--states=idle", "--format=%N"]
    said = subprocess.run(command, env=_environ(environ), capture_output=True, text=True, timeout=30, check=False)
    return len(said.stdout.split())


def _until(done, folder: Path, what: str) -> None:
    until = time.monotonic() + START_S
    while not done():
        logs = "\n".join(f"{log.name}: {log.read_text(errors='replace')[-1500:]}" for log in folder.glob("*.log"))
        assert time.monotonic() < until, f"{what} after {START_S:g} s\n{logs}"
        time.sleep(0.2)
