"""The suite's figure over a plain program's: other processes, started by torchrun as a user would, alternating.

    python benchmarks/plain_program.py [--cases all] [--pairs 24] [--starts 3] [--threads 1] [--steps 40]
                                       [--warmup 3] [--pause 0] [--launcher torchrun|none] [--start fork|exec]
                                       [--agree each|end]

Cases: tp (a LLaMA on mesh tp2), ddp and fsdp (a GPT-2), all-reduces of 1 KiB to 16 MiB.  The plain programs are in
benchmarks/plain.  Prints for each case the ratio of the median times with its 95 % interval, and of the first deciles,
which have hardly anything of what else runs on the machine.  A pair is a turn of each, moments apart, so that both feel
the same load, the program first in every other round.  Both take as many samples, as many iterations in one, after a
warm-up as long as the suite's ranks were busy before theirs (building, checking, warming up): both wait while the
other has its turn, and small messages of a loop that waited get faster for two to three seconds; ``--warmup`` lets
both loops run for at least so many seconds before what counts (the suite's own ``--perf-warmup``).  ``--pause`` lets
both wait so many seconds before each turn.  They are started --starts times, and the interval is told over starts as
well, which differ more than pairs of one.  ``--launcher none`` starts the program's ranks without torchrun's agent
beside them, as srun and mpirun do; ``--start exec`` starts the suite's as new interpreters, as a program's are.
The program's ranks tell each other the time of each step, or with ``--agree end`` of all of them at the end.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean, quantiles

sys.path.insert(0, str(Path(__file__).parent.parent))

from perfsuite.base.mesh import MeshShape
from perfsuite.base.units import KIB, MIB, format_bytes, format_seconds
from perfsuite.platforms import families
from perfsuite.record.result import Measurement
from perfsuite.record.workload import Budget, Workload
from perfsuite.runtime.driver import Driver, Job
from perfsuite.runtime.transports.local import LocalTransport
from perfsuite.statistics.robust import ratio_interval
from perfsuite.workloads.collective import AllReduce
from perfsuite.workloads.training.train_step import TrainStep

ROOT = Path(__file__).parent.parent
RANKS = 2


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One case and the plain program that does the same."""

    workload: Workload
    program: tuple[str, ...]
    """File of benchmarks/plain and its arguments."""


CASES: Mapping[str, Compared] = {
    "tp": Compared(
        workload=TrainStep(model="llama2-tiny", strategy="hybrid", mesh="tp2", micro_batch_size=4),
        program=("tensor_parallel.py",),
    ),
    **{
        strategy: Compared(
            workload=TrainStep(model="gpt2-tiny", strategy=strategy, micro_batch_size=4),
            program=("data_parallel.py", f"--strategy={strategy}"),
        )
        for strategy in ("ddp", "fsdp")
    },
    **{
        f"all_reduce-{format_bytes(size)}": Compared(
            workload=AllReduce(message_bytes=size), program=("all_reduce.py", f"--bytes={size}")
        )
        for size in (KIB, 64 * KIB, MIB, 16 * MIB)
    },
}


@contextmanager
def plain(case: Compared, options: argparse.Namespace) -> Iterator[Callable[[Measurement, float], tuple[float, float]]]:
    """The plain program, started: median and first decile of a turn like the suite's, warmed up for so many seconds."""
    program, *arguments = case.program
    script = [str(ROOT / "benchmarks" / "plain" / program), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    others: list[subprocess.Popen[str]] = []
    if options.launcher == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", "--standalone", *script]
    else:
        command = [sys.executable, *script]
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(RANKS)}
        environment |= {"RANK": "0", "LOCAL_RANK": "0"}
        for rank in range(1, RANKS):
            own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            others.append(subprocess.Popen(command, env=own, stdin=subprocess.DEVNULL, text=True))
    started = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert started.stdin
    assert started.stdout
    said, asked = started.stdout, started.stdin

    def turn(like: Measurement, warmup_s: float) -> tuple[float, float]:
        asked.write(f"{len(like.times_s)} {like.iterations} {warmup_s} {int(options.agree == 'end')}\n")
        asked.flush()
        middle, low = said.readline().split()
        return float(middle), float(low)

    try:
        said.readline()  # its warm-up
        yield turn
    finally:
        asked.close()
        for process in (started, *others):
            process.wait()


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
    return port


def suite(driver: Driver, case: Compared, options: argparse.Namespace, *, fresh: bool) -> tuple[Measurement, float]:
    """The suite's case, in processes of its own, and for how many seconds it was busy beside its samples."""
    steps = options.steps
    budget = Budget(min_rounds=steps, max_rounds=steps, warmup_min_iterations=5, warmup_min_s=options.warmup)
    shape = MeshShape.parse(case.workload.layout()) if case.workload.layout() else None
    job = Job(workload=case.workload, world_size=RANKS, shape=shape, budget=budget, fresh=fresh)
    start = time.perf_counter()
    measured = driver.run(job)
    timed_s = measured.iterations * sum(measured.times_s)
    return measured, time.perf_counter() - start - timed_s


def compare(driver: Driver, name: str, options: argparse.Namespace) -> None:
    """Print the pairs of one case and the interval of their ratio."""
    case = CASES[name]
    ratios: list[float] = []
    low_ratios: list[float] = []
    firsts = []
    for start in range(options.starts):
        firsts.append(len(ratios))
        with plain(case, options) as turn:
            like, busy_s = suite(driver, case, options, fresh=True)  # its warm-up, like the program's
            for pair in range(start, options.pairs, options.starts):
                # Whoever comes second has waited longer, or less long, for the other: each does, in turn.
                program_first = pair // options.starts % 2 == 1
                if program_first:
                    time.sleep(options.pause)
                    other, other_low = turn(like, busy_s)
                time.sleep(options.pause)
                like, busy_s = suite(driver, case, options, fresh=False)
                if not program_first:
                    time.sleep(options.pause)
                    other, other_low = turn(like, busy_s)  # a longer sample has more of what else runs here
                ratios.append(like.median_s / other)
                low_ratios.append(quantiles(like.times_s, n=10)[0] / other_low)
                told = f"suite {format_seconds(like.median_s, 3)}, plain program {format_seconds(other, 3)}"
                print(f"{name}, pair {len(ratios)}: {told}, {like.iterations} iterations in a sample", flush=True)
    for what, some in (("medians", ratios), ("first deciles", low_ratios)):
        mean, low, high = ratio_interval(some)
        found = f"{mean:.3f}, 95 % interval {low:.3f} to {high:.3f}, {len(some)} pairs"
        if len(firsts) > 1:
            ends = [*firsts[1:], len(some)]
            each = [geometric_mean(some[begin:end]) for begin, end in zip(firsts, ends, strict=True)]
            mean, low, high = ratio_interval(each)
            found += f", over {len(each)} starts {mean:.3f}, {low:.3f} to {high:.3f}"
        print(f"{name}: suite over plain program, {what}: {found}; load {os.getloadavg()[0]:.0f}", flush=True)


def main() -> None:
    """Compare the cases that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="tp", help=f"all, or some of {', '.join(CASES)}; default: %(default)s")
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warmup", type=float, help="seconds for which both loops run before what counts, at least")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds before each turn (default: %(default)s)")
    parser.add_argument("--launcher", choices=("torchrun", "none"), default="torchrun", help="of the plain program")
    parser.add_argument(
        "--start", choices=("fork", "exec"), default="fork", help="the suite's ranks; default: %(default)s"
    )
    parser.add_argument("--agree", choices=("each", "end"), default="each", help="of the plain program's ranks")
    options = parser.parse_args()
    names = list(CASES) if options.cases == "all" else options.cases.split(",")
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"--cases: {unknown[0]!r} is none of {', '.join(CASES)}")
    if not 1 <= options.starts <= options.pairs or options.pairs < 2:
        parser.error(f"--pairs={options.pairs} --starts={options.starts}: an interval needs 2 pairs, a start one")
    preload = {module: None for name in names for module in CASES[name].workload.preload}
    logs = Path(tempfile.mkdtemp())
    transport = LocalTransport(start_method=options.start, preload=("torch", *preload), log_directory=logs)
    driver = Driver(transport=transport, family=families()["cpu"], rootpath=ROOT, device_count=1)
    try:
        for name in names:
            compare(driver, name, options)
    finally:
        driver.close()


if __name__ == "__main__":
    main()
