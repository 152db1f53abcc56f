"""The suite's step over a plain program's: other processes, started by torchrun as a user would, alternating.

    python benchmarks/plain_program.py [--pairs 8] [--threads 1]

The plain program is benchmarks/plain/tensor_parallel.py, the same LLaMA on the same mesh tp2.  Prints the ratio of
the step times with its 95 % interval; a pair is a run of each, in turn first.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from perfsuite.mesh import MeshShape
from perfsuite.platforms import families
from perfsuite.runtime.driver import Driver, Job
from perfsuite.runtime.transports.local import LocalTransport
from perfsuite.statistics.student import ratio_interval
from perfsuite.workload import Budget
from perfsuite.workloads.training.train_step import TrainStep

ROOT = Path(__file__).parent.parent
RANKS, STEPS = 2, 40
CASE = TrainStep(model="llama2-tiny", strategy="hybrid", mesh="tp2", micro_batch_size=4)


def plain(threads: int) -> float:
    """Seconds of the plain program's step."""
    program = ROOT / "benchmarks" / "plain" / "tensor_parallel.py"
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", "--standalone"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(
        [*command, str(program), f"--steps={STEPS}"], env=environment, capture_output=True, text=True, check=True
    )
    return float(done.stdout.split()[-1])


def suite(driver: Driver) -> float:
    """Seconds of the suite's step, in processes of its own."""
    budget = Budget(min_rounds=STEPS, max_rounds=STEPS, max_time_s=0.0, warmup_min_iterations=5)
    shape = MeshShape.parse("tp2")
    return driver.run(Job(workload=CASE, world_size=RANKS, shape=shape, budget=budget, fresh=True)).median_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    transport = LocalTransport(
        start_method="fork",
        preload=("torch", *CASE.preload),
        log_directory=Path(tempfile.mkdtemp()),
    )
    driver = Driver(transport=transport, family=families()["cpu"], rootpath=ROOT, device_count=1)
    ratios = []
    try:
        for pair in range(options.pairs):
            if pair % 2:
                mine, other = suite(driver), plain(options.threads)
            else:
                other, mine = plain(options.threads), suite(driver)
            ratios.append(mine / other)
            print(f"pair {pair + 1}: suite {1e3 * mine:.1f} ms, plain program {1e3 * other:.1f} ms", flush=True)
    finally:
        driver.close()
    mean, low, high = ratio_interval(ratios)
    print(f"suite over plain program: {mean:.3f}, 95 % interval {low:.3f} to {high:.3f}, {len(ratios)} pairs")


if __name__ == "__main__":
    main()
