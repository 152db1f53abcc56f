"""The gate on nine mixed real cases of this machine beside a neighbour that works in bursts.

    python benchmarks/gate_mixed.py --sessions 40                        # A/A: nothing changed; without a base
    python benchmarks/gate_mixed.py --sessions 20 --base                 # the same with a base to run
    python benchmarks/gate_mixed.py --sessions 10 --slower 0.3 --slow sleep,message      # these are slower
    python benchmarks/gate_mixed.py --sessions 40 --one-kind             # every control is the one for computing

The cases compute, copy, send messages between two ranks, and sleep, for 10 to 20 ms each.  Eight sessions are stored
first, half of them beside the neighbour; then the gate judges session after session.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import ClassVar

sys.path.insert(0, str(Path(__file__).parent.parent))

from perfsuite.baselines.runs import CaseIdentity, RunSummary
from perfsuite.baselines.summarise import case_of, summarise
from perfsuite.gate.evidence import GateCase
from perfsuite.gate.gate import Gate
from perfsuite.metrics import REGISTRY
from perfsuite.platforms import families
from perfsuite.record.describe import headline
from perfsuite.record.result import Result, Work
from perfsuite.record.verdict import FAILING, GateSettings
from perfsuite.record.workload import Budget, FunctionWorkload, Yardstick
from perfsuite.runtime.driver import Driver, Job
from perfsuite.runtime.transports.local import LocalTransport

BUDGET = Budget(min_rounds=10, max_time_s=0.1, warmup_time_s=0.05, yardstick=True)
STORED = 8
NEIGHBOUR = (
    "import os, random, sys, time\n"
    "rng = random.Random(int(sys.argv[1]))\n"
    "parent = os.getppid()\n"
    "while os.getppid() == parent:\n"
    "    ends = time.monotonic() + rng.expovariate(1 / 1.5)\n"
    "    while time.monotonic() < ends: pass\n"
    "    time.sleep(rng.expovariate(1 / 1.5))\n"
)
"""Bursts of 1.5 s on one core, 1.5 s apart, in the mean."""


def compute(rank, amount=1.0):
    """Matrix products on one thread."""
    import torch

    torch.set_num_threads(1)
    a = torch.randn(256, 256) / 16
    out = torch.empty_like(a)
    count = round(20 * amount)

    def step():
        for _ in range(count):
            torch.mm(a, a, out=out)

    return step


def memory(rank, amount=1.0):
    """Copies of 16 MiB."""
    import torch

    torch.set_num_threads(1)
    source = torch.ones(4 << 20)
    target = torch.empty_like(source)
    parts = [(source[at : at + (1 << 18)], target[at : at + (1 << 18)]) for at in range(0, 4 << 20, 1 << 18)]
    parts = (parts * 4)[: round(24 * amount)]

    def step():
        for one, other in parts:
            other.copy_(one)

    return step


def message(rank, amount=1.0, kibibytes=32):
    """All-reduces between the ranks."""
    import torch
    import torch.distributed as dist

    buffer = torch.ones(kibibytes << 8)
    count = round({1: 40, 32: 30, 1024: 6}[kibibytes] * amount)

    def step():
        for _ in range(count):
            dist.all_reduce(buffer, dist.ReduceOp.MAX)

    return step


def sleep(rank, amount=1.0, pieces=1):
    """Sleeps of 12 ms together."""
    length = 0.012 * amount / pieces

    def step():
        for _ in range(pieces):
            time.sleep(length)

    return step


CASES = {
    "compute-1": (compute, 1, {}),
    "compute-2": (compute, 2, {}),
    "memory-1": (memory, 1, {}),
    "memory-2": (memory, 2, {}),
    "message-1": (message, 2, {"kibibytes": 1}),
    "message-32": (message, 2, {"kibibytes": 32}),
    "message-1024": (message, 2, {"kibibytes": 1024}),
    "sleep": (sleep, 1, {}),
    "sleep-4": (sleep, 1, {"pieces": 4}),
}
"""Function, ranks and arguments by name; the name begins with the kind."""


@dataclass(frozen=True, kw_only=True)
class Copies(FunctionWorkload):
    """A function that moves bytes while it works."""

    yardstick: ClassVar[Yardstick] = "memory"


class Bench:
    """Runs the cases in fresh processes and counts the runs."""

    def __init__(self, driver: Driver, *, one_kind: bool) -> None:
        self.driver, self.one_kind, self.runs = driver, one_kind, 0
        self.kinds: dict[str, Counter[str]] = {name: Counter() for name in CASES}
        self.log: list[str] = []

    def result(self, name: str, session: str, amount: float) -> Result:
        function, ranks, arguments = CASES[name]
        made = Copies if function is memory else FunctionWorkload
        workload = made(function=function, arguments={"amount": amount, **arguments})
        measurement = self.driver.run(Job(workload=workload, world_size=ranks, budget=BUDGET, fresh=True))
        self.runs += 1
        self.kinds[name][measurement.control] += 1
        if self.one_kind:
            measurement = dataclasses.replace(measurement, control="")
        return Result(
            case=f"gate_mixed.py::{name}",
            workload=f"gate_mixed:{function.__name__}",
            parameters={},
            platform="cpu",
            world_size=ranks,
            outcome="measured",
            work=Work(),
            measurement=measurement,
            session=session,
            started_at=datetime.now(timezone.utc).isoformat(timespec="microseconds"),
        )

    def run(self, name: str, session: str, ordinal: int = 0, amount: float = 1.0) -> RunSummary:
        run = summarise(self.result(name, session, amount), ordinal=ordinal)
        plain = dataclasses.asdict(run) | {"case": name, "amount": amount, "environment": {}}
        self.log.append(json.dumps(plain))
        return run


def name_of(node: str) -> str:
    return node.partition("::")[2]


def session(bench: Bench, given: list[GateCase], name: str, settings: GateSettings, slow: dict[str, float]) -> Gate:
    """One session of the gate; ``slow`` has how much more a case does than when it was stored."""
    gate, ordinals = Gate(given, settings), Counter[str]()

    def measure(node: str, amount: float) -> RunSummary:
        ordinals[node] += 1
        return bench.run(name_of(node), name, ordinals[node], amount)

    def new(node: str) -> RunSummary:
        return measure(node, 1 + slow.get(name_of(node), 0.0))

    for case in given:
        gate.add(case.case.node, new(case.case.node))
    while requests := gate.next_requests():
        for request in requests:
            node = request.case
            if request.kind == "run":
                gate.add(node, new(node))
            elif request.first == "base":
                base = measure(node, 1.0)
                gate.add_pair(node, base=base, new=new(node))
            else:
                fresh = new(node)
                gate.add_pair(node, base=measure(node, 1.0), new=fresh)
    return gate


def stored_cases(bench: Bench, neighbour: Neighbour) -> list[GateCase]:
    """The cases with their stored runs."""
    runs: dict[str, list[RunSummary]] = {name: [] for name in CASES}
    identities: dict[str, CaseIdentity] = {}
    for number in range(STORED):
        neighbour.work(number % 2 == 1)
        for name in CASES:
            result = bench.result(name, f"stored{number}", 1.0)
            identities[name] = case_of(result)
            runs[name].append(dataclasses.replace(summarise(result), commit="a" * 40))
    return [GateCase(case=identities[name], specs=REGISTRY, stored=tuple(runs[name])) for name in CASES]


@contextmanager
def forking_driver() -> Iterator[Driver]:
    """A driver whose ranks are new processes of this machine, with torch loaded before."""
    with tempfile.TemporaryDirectory() as logs:
        preload = ("torch", "torch.distributed", "perfsuite.runtime.ranks.worker")
        transport = LocalTransport(start_method="fork", preload=preload, log_directory=Path(logs))
        driver = Driver(transport=transport, family=families()["cpu"], rootpath=Path(__file__).parent, device_count=2)
        try:
            yield driver
        finally:
            driver.close()


class Neighbour:
    """A process that takes a core in bursts, or none."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.seed = 0

    def work(self, on: bool) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
        self.seed += 1
        if on:
            self.process = subprocess.Popen([sys.executable, "-c", NEIGHBOUR, str(self.seed)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=40)
    parser.add_argument("--base", action="store_true", help="a base can be run, which does what was stored")
    parser.add_argument("--slower", type=float, default=0.0, help="how much more the slow cases do")
    parser.add_argument("--slow", default="sleep,message", help="the slow cases, by the beginnings of their names")
    parser.add_argument("--one-kind", action="store_true", help="the gate does not know the kinds of controls")
    parser.add_argument("--log", help="file for every run, a line of JSON each")
    options = parser.parse_args()
    chosen = [name for name in CASES if name.startswith(tuple(options.slow.split(",")))]
    slow = dict.fromkeys(chosen, options.slower) if options.slower else {}
    settings = GateSettings(can_run_base=options.base, base_commit="a" * 40 if options.base else "")
    neighbour, red, silent = Neighbour(), 0, 0
    verdicts: Counter[str] = Counter()
    with forking_driver() as driver:
        try:
            bench = Bench(driver, one_kind=options.one_kind)
            given = stored_cases(bench, neighbour)
            neighbour.work(True)
            for number in range(options.sessions):
                bench.runs, started = 0, time.perf_counter()
                gate = session(bench, given, f"session{number}", settings, slow)
                told, suite = gate.verdicts(), gate.suite()
                failing = [verdict for verdict in told.values() if verdict.name in FAILING]
                fails = bool(failing) or (suite is not None and suite.name in FAILING)
                red += fails
                passed = [node for node, verdict in told.items() if verdict.name in ("pass", "improved")]
                silent += not fails and suite is None and any(name_of(node) in slow for node in passed)
                verdicts.update(verdict.name for verdict in told.values())
                names = Counter(verdict.name for verdict in told.values())
                print(
                    f"session {number}: {'RED' if fails else 'not red'}; {dict(names)}; "
                    f"suite {suite.name if suite else '-'}; {bench.runs} runs, {time.perf_counter() - started:.0f} s, "
                    f"load {os.getloadavg()[0]:.1f}",
                    flush=True,
                )
                for verdict in failing:
                    print(f"  {name_of(verdict.case)}: {headline(verdict)}; {'; '.join(verdict.reasons)}", flush=True)
                if suite is not None:
                    print(f"  suite {suite.name}: {suite.line}", flush=True)
            print(f"{red} of {options.sessions} sessions red; {dict(verdicts)}; slow cases passed in {silent} sessions")
            for name, kinds in bench.kinds.items():
                print(f"  {name}: {dict(kinds)}")
            if options.log:
                Path(options.log).write_text("\n".join(bench.log) + "\n")
        finally:
            neighbour.work(False)


if __name__ == "__main__":
    main()
