"""Is the time of a step's parts true?  A sleep in one layer's attention or experts must show in that part alone.

    python benchmarks/component_truth.py [--sleep-ms 1000] [--turns 3] [--mesh tp2 --model moe-tiny]

Prints, for each part that sleeps on all ranks, what its compute time grew by over a step without the sleep, as a share
of the sleep, and what the other parts grew by.  The aim is 5 %.  A sleep takes no core: load from elsewhere shows in
both arms, which take turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from perfsuite.base.mesh import MeshShape
from perfsuite.platforms import families
from perfsuite.record.workload import Budget, FunctionWorkload
from perfsuite.runtime.driver import Driver, Job
from perfsuite.runtime.transports.local import LocalTransport
from perfsuite.workloads.training.train_step import TrainStep

AIM = 0.05
SLEEPS = {"attention.core": "attention", "mlp.experts": "mlp"}
"""Module of the last layer that sleeps -> the part that has the time."""


def traffic_with_sleep(rank, model, where, sleep_s):
    """The build ``traffic`` of a step in which ``where`` of the last layer sleeps in its forward."""
    from contextlib import contextmanager

    from perfsuite.workloads.training.builds import TrafficStep

    class Sleepy(TrafficStep):
        @contextmanager
        def training(self, rank=None):
            with super().training(rank) as step:
                modules = [module for name, module in step.trainer.module.named_modules() if name.endswith(where)]
                modules[-1].register_forward_pre_hook(lambda *_: time.sleep(sleep_s))
                yield step

    workload = TrainStep(model=model, strategy="hybrid", mesh=str(rank.shape), builds=("traffic",))
    return Sleepy(workload, rank)


def components(driver: Driver, shape: MeshShape, model: str, where: str, sleep_s: float) -> dict[str, float]:
    """Compute seconds of each part, the most of any rank."""
    arguments = {"model": model, "where": where, "sleep_s": sleep_s}
    workload = FunctionWorkload(function=traffic_with_sleep, arguments=arguments)
    budget = Budget(smoke=True, timeout_s=300.0)
    job = Job(workload=workload, world_size=shape.world_size, shape=shape, budget=budget, fresh=True)
    return {part.name: part.compute_s for part in driver.run(job).components}


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sleep-ms", type=float, default=1000.0)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--mesh", default="tp2")
    parser.add_argument("--model", default="moe-tiny")
    given = parser.parse_args()
    sleep_s, shape = given.sleep_ms / 1000, MeshShape.parse(given.mesh)
    root = Path(__file__).parent.parent
    with tempfile.TemporaryDirectory() as logs:
        transport = LocalTransport(start_method="fork", preload=("torch",), log_directory=Path(logs))
        driver = Driver(transport=transport, family=families()["cpu"], rootpath=root, device_count=1)
        try:
            for where, part in SLEEPS.items():
                turns = [
                    [components(driver, shape, given.model, where, seconds) for seconds in (0.0, sleep_s)]
                    for _ in range(given.turns)
                ]
                grown = {
                    name: statistics.median((slow[name] - plain[name]) / sleep_s for plain, slow in turns)
                    for name in turns[0][0]
                }
                others = ", ".join(f"{name} {share:+.1%}" for name, share in grown.items() if name != part)
                verdict = "within" if abs(grown[part] - 1) <= AIM else "NOT within"
                print(
                    f"{where} of the last layer sleeps {given.sleep_ms:g} ms on {shape}: {part} grew by "
                    f"{grown[part]:.1%} of it, {verdict} {AIM:.0%}; {others}"
                )
        finally:
            driver.close()


if __name__ == "__main__":
    main()
