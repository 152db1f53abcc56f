"""CPU time of projecting and ranking layouts: the least of a few turns.

    python benchmarks/projection_speed.py [--turns 5]

Ranks the layouts of jobs that have 10,000 layouts and more; every turn starts with empty caches.  Then it starts
``perfsuite project`` with compiled modules.  Other load changes CPU time less than wall time, but it does change it.
The aims on a quiet machine: 1 s for 10,000 layouts and 0.3 s for a start.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from perfsuite.platforms import load_catalog
from perfsuite.projection.advisor import advise
from perfsuite.projection.calibration import Calibration
from perfsuite.projection.job import TrainingJob
from perfsuite.record.step import Training

JOBS = (("llama2-70b", "h100", 1024, 4096), ("llama2-70b", "h100", 2304, 9216), ("llama2-70b", "h100", 1920, 15360))
"""(model, platform, devices, global batch)."""
PROJECT = "project --model llama2-7b --platform s4000 --world 64 --layout dp8-tp4-pp2 --global-batch 512"


def ranked(model: str, platform: str, world: int, batch: int) -> tuple[int, float]:
    """(legal layouts, CPU seconds) of one advice."""
    device = load_catalog().find(platform)
    training = Training(model=model, strategy="hybrid", dtype="bf16", narrow=True, gradient_dtype="bf16")
    base, calibration = TrainingJob.of(training, device), Calibration.from_platform(device)
    start_s = time.process_time()
    advice = advise(training, base=base, calibration=calibration, world_size=world, global_batch=batch)
    return advice.legal, time.process_time() - start_s


def started(compiled: str) -> float:
    """CPU seconds of one ``perfsuite project``."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": compiled, "PYTHONDONTWRITEBYTECODE": ""}
    command = [sys.executable, "-c", "from perfsuite.cli.main import main; main()", *PROJECT.split()]
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    turns = parser.parse_args().turns
    for job in JOBS:
        # A process of its own each time: schedules and operations are kept as long as a process lives.
        source = f"from benchmarks.projection_speed import ranked; print(*ranked{job!r})"
        answers = [
            subprocess.run(
                [sys.executable, "-c", source],
                cwd=Path(__file__).parent.parent,
                capture_output=True,
                text=True,
                check=True,
            ).stdout.split()
            for _ in range(turns)
        ]
        legal, least_s = int(answers[0][0]), min(float(answer[1]) for answer in answers)
        print(
            f"{' '.join(map(str, job)):32} {legal:6} layouts {least_s:6.2f} s, {1e4 * least_s / legal:.2f} s per 10,000"
        )
    with tempfile.TemporaryDirectory() as compiled:
        started(compiled)
        print(f"perfsuite project {min(started(compiled) for _ in range(turns)):.2f} s")
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
