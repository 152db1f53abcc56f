"""The gate on real rank processes of this machine: A/A trials, and a compute-bound case made slower by a known amount.

    python benchmarks/gate_real.py [--trials 60] [--slow-trials 30] [--slower 0.10]

The case is a row of matrix products; its slow sibling does the given share more of them.  Eight fresh runs are stored
first.  Each trial is a gate of its own against these, with A/B confirmation by fresh runs of both siblings.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from perfsuite.baselines.runs import RunSummary
from perfsuite.baselines.summarise import case_of, summarise
from perfsuite.gate.evidence import GateCase
from perfsuite.gate.gate import Gate
from perfsuite.metrics import REGISTRY
from perfsuite.platforms import families
from perfsuite.record.result import Result, Work
from perfsuite.record.verdict import GateSettings
from perfsuite.record.workload import Budget, FunctionWorkload
from perfsuite.runtime.driver import Driver, Job
from perfsuite.runtime.transports.local import LocalTransport

PRODUCTS = 20
NODE = "benchmarks/gate_real.py::products"
BUDGET = Budget(min_rounds=10, max_time_s=0.4, warmup_time_s=0.1, yardstick=True)


def products(rank, count=PRODUCTS):
    """``count`` matrix products of 256 x 256 on one thread.

    One thread, because two on two cores wait for each other as soon as anything else wants a core: then the trials
    would tell about the neighbours and not about the gate.
    """
    import torch

    torch.set_num_threads(1)
    a = torch.randn(256, 256, device=rank.device) / 16
    out = torch.empty_like(a)

    def step():
        for _ in range(count):
            torch.mm(a, a, out=out)

    return step


class Bench:
    """Runs the case and its slow sibling in fresh processes and counts the runs."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.runs = 0

    def result(self, count: int, session: str) -> Result:
        self.runs += 1
        job = Job(
            workload=FunctionWorkload(function=products, arguments={"count": count}),
            world_size=1,
            budget=BUDGET,
            fresh=True,
        )
        return Result(
            case=NODE,
            workload="gate_real:products",
            parameters={},
            platform="cpu",
            world_size=1,
            outcome="measured",
            work=Work(),
            measurement=self.driver.run(job),
            session=session,
            started_at=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        )

    def run(self, count: int, session: str, ordinal: int = 0) -> RunSummary:
        return summarise(self.result(count, session), ordinal=ordinal)


def trial(bench: Bench, case: GateCase, count: int, name: str) -> str:
    """The verdict of one gate on a case that now does ``count`` products."""
    gate = Gate([case], GateSettings(can_run_base=True))
    gate.add(NODE, bench.run(count, name))
    ordinal = 1
    while requests := gate.next_requests():
        for request in requests:
            if request.kind == "run":
                gate.add(NODE, bench.run(count, name, ordinal))
            else:
                order = (PRODUCTS, count) if request.first == "base" else (count, PRODUCTS)
                first, second = (bench.run(each, name, ordinal) for each in order)
                base, new = (first, second) if request.first == "base" else (second, first)
                gate.add_pair(NODE, base=base, new=new)
            ordinal += 1
    return gate.verdict(NODE).name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--slow-trials", type=int, default=30)
    parser.add_argument("--slower", type=float, default=0.10)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as logs:
        preload = ("torch", "torch.distributed", "perfsuite.runtime.ranks.worker")
        transport = LocalTransport(start_method="fork", preload=preload, log_directory=Path(logs))
        driver = Driver(transport=transport, family=families()["cpu"], rootpath=Path(__file__).parent, device_count=1)
        try:
            bench = Bench(driver)
            stored = tuple(bench.run(PRODUCTS, f"stored{index}") for index in range(8))
            case = GateCase(case=case_of(bench.result(PRODUCTS, "identity")), specs=REGISTRY, stored=stored)
            slow = round(PRODUCTS * (1 + arguments.slower))
            for name, count, trials in (
                ("A/A", PRODUCTS, arguments.trials),
                (f"{slow / PRODUCTS - 1:.0%} slower", slow, arguments.slow_trials),
            ):
                bench.runs, started = 0, time.perf_counter()
                verdicts = Counter(trial(bench, case, count, f"{name}{index}") for index in range(trials))
                told = ", ".join(f"{number} {verdict}" for verdict, number in verdicts.most_common())
                print(
                    f"{name}: {told} of {trials} trials; {bench.runs / trials:.1f} runs per trial, "
                    f"{time.perf_counter() - started:.0f} s",
                    flush=True,
                )
        finally:
            driver.close()


if __name__ == "__main__":
    main()
