"""Step functions that the runtime's tests run on real ranks; each misbehaves in one known way."""

from __future__ import annotations

import os
import signal
import sys
import time

from perfsuite.workload import Step


def add_up(rank, elements=1024):
    """Sum a small buffer over all ranks."""
    import torch
    import torch.distributed as dist

    buffer = torch.ones(elements, device=rank.device)
    return lambda: dist.all_reduce(buffer)


def late_rank(rank, late=1, delay_s=0.02):
    """One rank comes to the collective a known time after the others."""
    import torch
    import torch.distributed as dist

    buffer = torch.ones(16)

    def run():
        if rank.rank == late:
            time.sleep(delay_s)
        dist.all_reduce(buffer)

    return run


def raising(rank, culprit=1, everywhere=False):
    """One rank (or every one) raises instead of coming to the collective."""
    import torch
    import torch.distributed as dist

    buffer = torch.ones(16)

    def run():
        if everywhere or rank.rank == culprit:
            raise ValueError(f"bad luck on purpose, rank {culprit}")
        dist.all_reduce(buffer)

    return run


def hanging(rank, culprit=1):
    """One rank never comes to the collective."""
    import torch
    import torch.distributed as dist

    buffer = torch.ones(16)

    def run():
        if rank.rank == culprit:
            time.sleep(3600)
        dist.all_reduce(buffer)

    return run


def dying(rank, culprit=1, how="kill"):
    """One rank's process ends."""
    import torch
    import torch.distributed as dist

    buffer = torch.ones(16)

    def run():
        if rank.rank == culprit:
            print("last words of the culprit", flush=True)
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif how == "exit":
                os._exit(3)
            else:
                sys.exit("a workload called sys.exit")
        dist.all_reduce(buffer)

    return run


def spans(rank, a_s=0.004, b_s=0.008, rest_s=0.004):
    """Known times in two spans and outside them; spans nest and repeat."""

    def run():
        with rank.span("a"):
            time.sleep(a_s)
        for part in range(2):
            with rank.span("b", part=part), rank.span("inside b"):
                time.sleep(b_s / 2)
        time.sleep(rest_s)
        rank.record("loss", 0.5, unit="nats", reduce="equal")
        rank.record("rank", rank.rank, reduce="max")

    return run


def disagreeing(rank):
    """Ranks record different values of what must be equal."""
    return lambda: rank.record("loss", float(rank.rank), reduce="equal")


def surroundings(rank):
    """Records what the environment of a rank says."""
    import torch
    import torch.distributed as dist

    def run():
        rank.record("world", int(os.environ["WORLD_SIZE"]), reduce="equal")
        rank.record("rank_sum", int(os.environ["RANK"]), reduce="mean")
        rank.record("group", dist.get_world_size(), reduce="equal")
        rank.record("threads", torch.get_num_threads(), reduce="equal")
        leaked = [name for name in os.environ if name.startswith(("TORCHELASTIC", "SLURM", "OMPI"))]
        rank.record("leaked", len(leaked), reduce="max")

    return run


def imported(rank, module):
    """Records whether a module was there before anybody on the rank asked for it."""
    found = module in sys.modules
    return lambda: rank.record("imported", found, reduce="equal")


def grandchild(rank, pid_file):
    """Starts a child of its own that would outlive it."""
    import subprocess

    child = subprocess.Popen(["sleep", "600"])
    with open(f"{pid_file}.{rank.rank}", "w") as file:
        file.write(f"{os.getpid()} {child.pid}")

    def run():
        time.sleep(3600)

    return run


def meshed(rank):
    """Uses a sub-group of a two-axis mesh: sums rank numbers along tp."""
    import torch
    import torch.distributed as dist

    group = rank.group("tp")

    def run():
        mine = torch.tensor([float(rank.rank)])
        dist.all_reduce(mine, group=group)
        rank.record("tp_sum_max", mine, reduce="max")

    return run


class Closing(Step):
    """Says in a file that it was closed."""

    def __init__(self, file):
        self.file = file

    def run(self):
        return None

    def close(self):
        with open(self.file, "a") as file:
            file.write("closed\n")


def closing(rank, file):
    """A Step with a close method."""
    return Closing(file)


def not_a_step(rank):
    """Returns something that is no iteration."""
    return 42


def leaving(rank, token, then="end"):
    """Leaves processes behind that no process group of the rank's names: in sessions of their own, and daemons.

    One of them is a chain: each process in it starts the next and ends.
    """
    import subprocess

    environ = {**os.environ, "PERFSUITE_TEST_TOKEN": token}
    chain = '[ $1 = 0 ] || { sleep 0.02; sh -c "$0" "$0" $(($1 - 1)) & }'
    subprocess.Popen(["sleep", "600"], start_new_session=True, env=environ)
    subprocess.run(["sh", "-c", "setsid sleep 600 &"], env=environ, check=True)
    subprocess.run(["setsid", "sh", "-c", chain, chain, "9999"], env=environ, check=True)
    return (lambda: time.sleep(3600)) if then == "hang" else (lambda: None)
