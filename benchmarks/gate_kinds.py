"""False alarms and power of the gate where a host moves each kind of step in its own way, as seeded simulations.

    python benchmarks/gate_kinds.py                        # the table of perfsuite docs gate-evidence
    python benchmarks/gate_kinds.py --controls compute     # every control is the one for computing, as it once was

A suite has cases that compute, copy, send messages and sleep.  Beside the noise of a host of gate_simulation.py each
session moves every kind by a draw of its own: what a neighbour costs.  A control follows its own kind, each case and
its control a little differently.  ``busier``: today's neighbours cost four times as much as when the runs were stored.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.gate_rows import BASE_COMMIT, Outcome
from benchmarks.gate_simulation import HOSTS, Session, traits_of
from perfsuite.baselines.runs import CaseIdentity, RunSummary
from perfsuite.gate.evidence import GateCase
from perfsuite.gate.gate import Gate
from perfsuite.metrics import REGISTRY
from perfsuite.record.verdict import FAILING, GateSettings

KINDS = {"compute": 0.002, "memory": 0.02, "message": 0.08, "sleep": 0.04}
"""By kind: the mean of what a neighbour costs it in a session, a logarithm."""
SLOWED = ("message", "sleep")
BUSIER = 4.0
UNLIKE = 0.3
"""How differently a case and its control feel the neighbour: a standard deviation, 1 is alike."""
CONTROL_NOISE = 0.01
STORED = 8


class Neighboured:
    """A session on a host whose neighbour costs each kind something else."""

    def __init__(self, session: Session, rng: random.Random, feels: list[float], busier: float, controls: str) -> None:
        self.session, self.rng, self.feels, self.controls = session, rng, feels, controls
        self.cost = {kind: busier * rng.expovariate(1 / mean) for kind, mean in KINDS.items()}

    def run(self, case: int, slower: float = 0.0) -> RunSummary:
        """One run of a case, with its control beside it."""
        kind = kind_of(case)
        run = self.session.run(case, slower=slower)
        by = self.feels[case] * self.cost[kind]
        own = kind if self.controls == "own" else "compute"
        control = math.log(1e-3) + self.session.drift + self.session.wander + self.cost[own]
        control += self.rng.gauss(0, CONTROL_NOISE)
        assert run.location is not None
        assert run.mean is not None
        assert run.clean_p95 is not None
        return dataclasses.replace(
            run,
            quantiles_s=tuple(time_s * math.exp(by) for time_s in run.quantiles_s),
            location=run.location + by,
            mean=run.mean + by,
            clean_mean=run.mean + by,
            clean_p95=run.clean_p95 + by,
            yardstick=control,
            yardstick_mean=control + self.rng.gauss(0, CONTROL_NOISE),
            yardstick_p95=control + self.rng.gauss(0, 5 * CONTROL_NOISE),
            control=own,
        )


def kind_of(case: int) -> str:
    """The kinds take turns."""
    return list(KINDS)[case % len(KINDS)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """One line of the table."""

    host: str
    cases: int
    base: bool
    slower: float
    busier: float
    controls: str

    def slowdown(self, case: int) -> float:
        """How much slower the new code of a case is."""
        return self.slower if kind_of(case) in SLOWED else 0.0


def outcome(plan: Plan, seed: str) -> Outcome:
    """One session of the gate."""
    rng, host = random.Random(seed), HOSTS[plan.host]
    traits = traits_of(host, rng, plan.cases)
    feels = [max(0.0, rng.gauss(1, UNLIKE)) for _ in traits]

    def session(name: str, busier: float) -> Neighboured:
        return Neighboured(Session(host, rng, name, traits), rng, feels, busier, plan.controls)

    past = [session(f"s{number}", 1.0) for number in range(STORED)]
    stored = [[one.run(case) for one in past] for case in range(plan.cases)]
    nodes = [f"test_{kind_of(case)}.py::test[{case}]" for case in range(plan.cases)]
    given = [
        GateCase(
            specs=REGISTRY,
            case=CaseIdentity(node=node, world_size=1, backend="gloo", parameters={"n": case}, workload="m:W"),
            stored=tuple(dataclasses.replace(run, commit=BASE_COMMIT) for run in stored[case]),
        )
        for case, node in enumerate(nodes)
    ]
    settings = GateSettings(can_run_base=plan.base, base_commit=BASE_COMMIT if plan.base else "")
    gate, now = Gate(given, settings), session("now", plan.busier)
    for case, node in enumerate(nodes):
        gate.add(node, now.run(case, plan.slowdown(case)))
    while requests := gate.next_requests():
        for request in requests:
            case = nodes.index(request.case)
            if request.kind == "run":
                gate.add(request.case, now.run(case, plan.slowdown(case)))
                continue
            arms = (0.0, plan.slowdown(case))
            first, second = (now.run(case, slower) for slower in (arms if request.first == "base" else arms[::-1]))
            base, new = (first, second) if request.first == "base" else (second, first)
            gate.add_pair(request.case, base=base, new=new)
    return Outcome(verdicts=tuple(gate.verdicts().values()), suite=gate.suite())


def print_line(plan: Plan, sessions: int) -> None:
    """How many sessions were red or silent, and how many slow cases were found."""
    red = silent = found = passed = slow = 0
    for number in range(sessions):
        ended = outcome(plan, f"{plan.host}-{plan.cases}-{plan.busier}-{number}")
        red += ended.fails
        suite_red = ended.suite is not None and ended.suite.name in FAILING
        for case, verdict in enumerate(ended.verdicts):
            if plan.slowdown(case):
                slow += 1
                found += verdict.fails or suite_red
                passed += verdict.name in ("pass", "improved") and ended.suite is None
        green = [v.name in ("pass", "improved") for case, v in enumerate(ended.verdicts) if plan.slowdown(case)]
        silent += any(green) and not ended.fails and ended.suite is None
    shares = f"{found / slow:>7.1%}  {passed / slow:>7.1%}" if slow else "      -        -"
    print(
        f"{plan.host:<5} {plan.cases:>5}  {'yes' if plan.base else 'no':<4} {plan.busier:>6.0f}  {plan.slower:>6.0%}  "
        f"{red / sessions:>6.1%}  {silent:>6}  {shares}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=200, help="sessions per line")
    parser.add_argument("--hosts", default="R2,R3")
    parser.add_argument("--cases", default="9,24")
    parser.add_argument("--slowdowns", default="0,0.10,0.30")
    parser.add_argument("--busier", default=f"1,{BUSIER:g}")
    parser.add_argument("--controls", choices=("own", "compute"), default="own")
    options = parser.parse_args()
    print("host  cases  base  busier  slower  red     silent    found   passed")
    for host, cases, base, busier, slower in itertools.product(
        options.hosts.split(","), map(int, options.cases.split(",")), (False, True),
        map(float, options.busier.split(",")), map(float, options.slowdowns.split(",")),
    ):  # fmt: skip
        plan = Plan(host=host, cases=cases, base=base, slower=slower, busier=busier, controls=options.controls)
        print_line(plan, options.sessions)


if __name__ == "__main__":
    main()
