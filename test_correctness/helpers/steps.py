"""Step functions that the runtime's tests run on real ranks; each misbehaves in one known way."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from perfsuite.base.errors import UnsupportedCase
from perfsuite.record.result import Work
from perfsuite.record.workload import Step, Workload


def add_up(rank, elements=1024):
    """Sum a small buffer over all ranks."""
    buffer = torch.ones(elements, device=rank.device)
    return lambda: dist.all_reduce(buffer)


def held(rank, axes="", groups=0):
    """A sum over all ranks of ``axes`` or of the first of ``groups`` own groups; what each process holds."""
    kept = [dist.new_group() for _ in range(groups)]
    buffer = torch.ones(16, device=rank.device)
    dist.all_reduce(buffer, group=rank.mesh.get_group(axes) if axes else None)

    def run():
        dist.all_reduce(buffer, group=kept[0] if kept else None)
        rank.record(f"descriptors{rank.rank}", float(len(os.listdir("/proc/self/fd"))), reduce="only")
        rank.record(f"process{rank.rank}", float(os.getpid()), reduce="only")

    return run


def queue_of_messages(rank):
    """Which stream of a simulated device has the group's messages."""
    from simmusa.native import native

    buffer = torch.ones(16, device=rank.device)

    def run():
        native().trace(True)
        dist.all_reduce(buffer)
        torch.get_device_module(rank.device).synchronize()
        streams = {stream for name, stream, *_ in native().traced() if name.startswith("mccl::")}
        native().trace(False)
        rank.record(f"stream{rank.rank}", float(max(streams)), reduce="only")

    return run


def allowed(rank):
    """Nothing, and how many cores each rank may use."""
    rank.record(f"cores{rank.rank}", float(len(os.sched_getaffinity(0))), unit="cores", reduce="only")
    return lambda: None


def sum_after(rank, culprit, misbehave):
    """A sum of a small buffer over all ranks, before which rank ``culprit`` calls ``misbehave``."""
    buffer = torch.ones(16)

    def run():
        if rank.rank == culprit:
            misbehave()
        dist.all_reduce(buffer)

    return run


def late_rank(rank, late=1, delay_s=0.02):
    """One rank comes to the collective a known time after the others."""
    return sum_after(rank, late, lambda: time.sleep(delay_s))


def raising(rank, culprit=1, everywhere=False):
    """One rank (or every one) raises instead of coming to the collective."""

    def misbehave():
        raise ValueError(f"bad luck on purpose, rank {culprit}")

    return sum_after(rank, rank.rank if everywhere else culprit, misbehave)


def computing(rank):
    """Compute in one call for longer than any limit, as a slow product does."""
    return lambda: pow(3, 3**16)


def hanging(rank, culprit=1):
    """One rank never comes to the collective."""
    return sum_after(rank, culprit, lambda: time.sleep(3600))


def dying(rank, culprit=1, how="kill"):
    """One rank's process ends, or is stopped by a signal."""
    ways = {
        "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
        "exit": lambda: os._exit(3),
        "sys.exit": lambda: sys.exit("a workload called sys.exit"),
    }

    def misbehave():
        print("last words of the culprit", flush=True)
        ways[how]()

    return sum_after(rank, culprit, misbehave)


def filling_its_group(rank, group, culprit=1):
    """One rank's process joins a control group and allocates more than the group may have."""

    def fill():
        Path(group, "cgroup.procs").write_text(str(os.getpid()))
        held = []
        while True:
            held.append(bytearray(os.urandom(1 << 20)))

    return sum_after(rank, culprit, fill)


def waiting_beside_a_compiler(rank, compiles=False):
    """Messages of 1 KiB in a process that has torch's compiler, as all have after a training case."""
    import torch._dynamo

    from perfsuite.runtime.ranks.yardstick import Effort

    Effort.own_share = 0.1  # whatever the load of this machine makes of it
    buffer, double = torch.ones(256, device=rank.device), lambda values: values * 2
    if compiles:
        double = torch.compile(double, backend="eager")

    def run():
        double(buffer)
        dist.all_reduce(buffer, dist.ReduceOp.MAX)

    return run


def dying_in_its_control(rank, culprit=1):
    """One rank kills itself where the message that is the control of a waiting step begins."""
    from perfsuite.runtime.ranks.yardstick import Effort

    Effort.own_share = 0.1  # whatever the load of this machine makes of it
    buffer, real = torch.ones(64, device=rank.device), dist.all_reduce

    def all_reduce(values, *arguments, **named):
        if rank.rank == culprit and values.dtype == torch.float32 and values.numel() == 256:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(values, *arguments, **named)

    dist.all_reduce = all_reduce
    return lambda: real(buffer)


def spans(rank):
    """Known times in two spans and outside them; spans nest and repeat."""

    def run():
        with rank.span("a"):
            time.sleep(0.004)
        for part in range(2):
            with rank.span("b", part=part), rank.span("inside b"):
                time.sleep(0.004)
        time.sleep(0.004)
        rank.record("loss", 0.5, unit="nats", reduce="equal")
        rank.record("rank", rank.rank, reduce="max")

    return run


def disagreeing(rank):
    """Ranks record different values of what must be equal."""
    return lambda: rank.record("loss", float(rank.rank), reduce="equal")


def surroundings(rank):
    """Records what the environment of a rank says."""

    def run():
        rank.record("world", int(os.environ["WORLD_SIZE"]), reduce="equal")
        rank.record("rank_sum", int(os.environ["RANK"]), reduce="mean")
        rank.record("group", dist.get_world_size(), reduce="equal")
        rank.record("threads", torch.get_num_threads(), reduce="equal")
        leaked = [name for name in os.environ if name.startswith(("TORCHELASTIC", "SLURM", "OMPI"))]
        rank.record("leaked", len(leaked), reduce="max")
        rank.record(f"process_of_{rank.rank}", os.getpid(), reduce="only")

    return run


def imported(rank, module):
    """Records whether a module was there before anybody on the rank asked for it."""
    found = module in sys.modules
    return lambda: rank.record("imported", found, reduce="equal")


def meshed(rank):
    """Uses a sub-group of a two-axis mesh: sums rank numbers along tp."""
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


@dataclass(frozen=True, kw_only=True)
class Plain(Workload):
    """Its build returns what is no Step."""

    made: str | None

    def work(self, shape):
        return Work()

    def build(self, rank):
        return None if self.made is None else {"list": list}[self.made]


def not_a_step(rank):
    """Returns something that is no iteration."""
    return 42


class Unheard(BaseException):
    """No Exception: no ``except Exception`` takes it."""


def leaving(rank, how, culprits=(0,), phase="run"):
    """The culprits leave in a way that is no Exception, in this phase; the others wait for them in a collective."""
    ways = {
        "skip": lambda: pytest.skip("no luck today"),
        "fail": lambda: pytest.fail("not today"),
        "xfail": lambda: pytest.xfail("known since long"),
        "exit": lambda: pytest.exit("enough"),
        "error": lambda: 1 / 0,
    }
    exceptions = {each.__name__: each for each in (KeyboardInterrupt, GeneratorExit, Unheard)}

    def leave(how):
        if how in exceptions:
            raise exceptions[how]
        ways[how]()

    def run():
        if rank.rank in culprits:
            leave(how[rank.rank] if isinstance(how, (list, tuple)) else how)
        dist.all_reduce(torch.ones(16))

    if phase == "build":
        run()
    return run


def shouting(rank, characters):
    """Writes one line of this length and raises an exception with as long a message."""

    def run():
        print("last words " + "y" * characters, flush=True)
        raise ValueError("begin " + "x" * characters + " end")

    return run


class Destroying(Step):
    """Ends the process group in one of its iterations or when it is closed."""

    def __init__(self, when):
        self.when = when
        self.iterations = 0

    def run(self):
        dist.all_reduce(torch.ones(1024))
        self.iterations += 1
        if self.when == self.iterations:
            dist.destroy_process_group()

    def close(self):
        if self.when == "close":
            dist.destroy_process_group()


def destroying(rank, culprit, when):
    """One rank ends the process group that is perfsuite's."""
    return Destroying(when) if rank.rank == culprit else add_up(rank)


def patience(rank):
    """Records how long the groups of this rank wait: the world's, a mesh's, one that somebody makes (DeepSpeed)."""
    groups = {"world": rank.group(), "mesh": rank.group("tp"), "own": dist.new_group()}
    if not hasattr(groups["world"]._get_backend(torch.device("cpu")), "options"):
        raise UnsupportedCase("this torch does not tell how long a group waits")

    def run():
        for name, group in groups.items():
            limit = group._get_backend(torch.device("cpu")).options._timeout
            rank.record(name, limit.total_seconds(), unit="s", reduce="equal")

    return run


def unplugged(rank):
    """Asks for the loopback interface where it is down: in a network of this rank's own."""
    from perfsuite.runtime.ranks.arrival import require_loopback

    require_loopback()
    if ctypes.CDLL(None).unshare(0x40000000):
        pytest.skip("no network of its own for this user")
    require_loopback()
    return lambda: None


def own_numbers(rank, unit=""):
    """Records a registered metric, and one that tells the first iteration from the timed ones."""
    said = {"unit": unit} if unit else {}
    rank.record("memory", 1.0 + rank.rank, **said)
    iterations = []

    def run():
        iterations.append(1)
        rank.record("seen", 7.0 if len(iterations) > 1 else 0.0, better="lower", over="min")

    return run
