"""False alarms and detections of the gate on simulated hosts.

    python benchmarks/gate_simulation.py                   # the table of docs gate-evidence, ten minutes on one core
    python benchmarks/gate_simulation.py --plain           # the same runs judged by the gate of gate_reference.py
    python benchmarks/gate_simulation.py --suites 20 --hosts R4 --base no --sessions 3 --replicates 4
    python benchmarks/gate_simulation.py --kind third      # every third iteration twice as slow (tenth: ten times)
    python benchmarks/gate_simulation.py --cases 9 --budget 180 --run-seconds 1.5   # as --perf-gate-budget

A suite has 200 cases in 20 kinds and a baseline of 8 runs from 8 sessions, unless options say otherwise.  The logarithm
of a run is

    case + drift of the session + case x session + wander + run noise (Student t) + spike + episode

with one parameter set per host.  Mean and quantiles come from 40 samples around this value.  Seeded: the same command
prints the same table.
"""

from __future__ import annotations

import argparse
import functools
import math
import random
import statistics
import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.gate_reference import judge_suite
from perfsuite.baselines.runs import QUANTILES, CaseIdentity, RunSummary, quantile
from perfsuite.gate.budget import Costs, Spending
from perfsuite.gate.evidence import GateCase
from perfsuite.gate.gate import Gate
from perfsuite.metrics import REGISTRY
from perfsuite.record.verdict import GateSettings, Request, Verdict
from perfsuite.run.settling import rounds

CASES = 200
KINDS = 20


@dataclass(frozen=True, kw_only=True)
class Host:
    """A noise model; all figures are relative."""

    run: float
    """Standard deviation of a run."""
    tails: int
    """Degrees of freedom of its Student t; small is heavy-tailed."""
    session: float
    """Drift that all cases of a session share."""
    case_session: float
    """What a case does differently in every session: placement, alignment."""
    wander: float
    """Slow drift inside a session, first-order autoregressive over runs."""
    spike_rate: float
    """Share of runs that are hit by something else."""
    spike: float
    """Mean slowdown of such a run, exponential."""
    episode_rate: float = 0.0
    """Probability per run that a bad time of about 8 runs begins."""
    episode: float = 0.0
    """Slowdown during it."""
    seen: float = 0.0
    """Share of spikes and bad times that show as too few clean samples."""
    yardstick: float = 0.0
    """Share of the variance of a run that its yardstick shows too; 0: no yardstick is timed."""
    unlike: float = 0.3
    """How much cases differ: in noise (standard deviation of its logarithm) and in how they feel a drift."""
    sample: float = 3.0
    """Standard deviation of a sample inside a run over that of a run."""
    stragglers: float = 0.02
    """Share of samples that are slower, by three times as much in the mean."""
    tail_drift: float = 0.2
    """How much sessions differ in the spread of their samples (standard deviation of its logarithm)."""


QUIET = Host(run=0.003, tails=6, session=0.003, case_session=0.001, wander=0.001, spike_rate=0.005, spike=0.03)
HOSTED = Host(
    run=0.020,
    tails=4,
    session=0.025,
    case_session=0.005,
    wander=0.008,
    spike_rate=0.04,
    spike=0.12,
    episode_rate=0.003,
    episode=0.08,
    seen=0.4,
)
HOSTS = {
    "R1": QUIET,
    "R2": replace(
        QUIET, run=0.006, tails=5, session=0.006, case_session=0.002, wander=0.002, spike_rate=0.01, spike=0.05
    ),
    "R3": replace(
        QUIET, run=0.008, tails=4, session=0.010, case_session=0.0025, wander=0.003, spike_rate=0.02, spike=0.08
    ),
    "R4": HOSTED,
    "R4y": replace(HOSTED, yardstick=0.7),
    "hostile": replace(
        HOSTED,
        run=0.08,
        tails=3,
        session=0.06,
        case_session=0.03,
        wander=0.04,
        spike_rate=0.15,
        spike=0.4,
        episode_rate=0.02,
        episode=0.3,
    ),
}
"""R1 bare metal, R2 dedicated, R3 ordinary box, R4 hosted VM, R4y the same with a yardstick, hostile."""


SAMPLES = 40
DRAWN_RUNS = 500
RED = ("regressed", "drifted")
"""Verdicts that fail a case here: found where it is slower, a false alarm where it is not."""
PERIODIC = {"third": (3, 2.0), "tenth": (10, 10.0)}
"""Kinds of slowdown beside ``shift``: every how manieth iteration takes how many times as long."""


@dataclass(frozen=True, kw_only=True)
class Inside:
    """What the samples of one run look like, logarithms from the median that they have without a slowdown."""

    quantiles: tuple[float, ...]
    mean: float


@functools.cache
def insides(host: Host, kind: str) -> tuple[Inside, ...]:
    """Samples of some runs of a host; a run of a session takes one of them."""
    rng = random.Random(f"samples of {kind}")
    every, factor = PERIODIC.get(kind, (1, 1.0))
    scale = host.sample * host.run
    found = []
    for _ in range(DRAWN_RUNS):
        away = [student(rng, host.tails) * scale for _ in range(SAMPLES)]
        away = [one + rng.expovariate(1 / (3 * scale)) if rng.random() < host.stragglers else one for one in away]
        middle = statistics.median(away)
        times = [math.exp(one - middle) * (factor if place % every == 0 else 1.0) for place, one in enumerate(away)]
        ordered = sorted(map(math.log, times))
        quantiles = tuple(quantile(ordered, share) for share in QUANTILES)
        found.append(Inside(quantiles=quantiles, mean=math.log(statistics.fmean(times))))
    return tuple(found)


class Session:
    """One session on a host: what it does to runs, in the order in which they are made."""

    def __init__(self, host: Host, rng: random.Random, name: str, traits: list[tuple[float, float]]) -> None:
        self.host, self.rng, self.name, self.traits = host, rng, name, traits
        self.drift = rng.gauss(0, host.session)
        self.wander = rng.gauss(0, host.wander)
        self.own = [rng.gauss(0, host.case_session) for _ in traits]
        self.bad_runs = 0
        self.count = 0
        self.draws = random.Random(f"{name} {self.drift}")
        self.widening = math.exp(self.draws.gauss(0, host.tail_drift))

    def run(self, case: int, *, slower: float = 0.0, kind: str = "shift") -> RunSummary:
        host, rng = self.host, self.rng
        self.wander = 0.9 * self.wander + math.sqrt(1 - 0.81) * rng.gauss(0, host.wander)
        if self.bad_runs:
            self.bad_runs -= 1
        elif rng.random() < host.episode_rate:
            self.bad_runs = 1 + int(rng.expovariate(1 / 8))
        disturbance = host.episode if self.bad_runs else 0.0
        if rng.random() < host.spike_rate:
            disturbance += rng.expovariate(1 / host.spike)
        noise = student(rng, host.tails) * host.run
        shared = math.sqrt(host.yardstick)
        common = student(rng, host.tails) * host.run * shared
        noise = common + math.sqrt(1 - host.yardstick) * noise
        clean = 4 if disturbance and rng.random() < host.seen else 30
        noisiness, feels = self.traits[case]
        moved = feels * (self.drift + self.wander)
        value = math.log(1e-3) + 0.01 * case + moved + noisiness * (self.own[case] + noise) + disturbance
        value += math.log1p(slower)
        yardstick = math.log(1e-3) + self.drift + self.wander + common if host.yardstick else None
        self.count += 1
        inside = self.draws.choice(insides(host, kind))
        wide = noisiness * self.widening if kind == "shift" else 1.0
        quantiles = [value + wide * each for each in inside.quantiles]
        mean = value + wide * inside.mean
        return RunSummary(
            session=self.name,
            time=f"{self.count:06d}",
            quantiles_s=tuple(math.exp(each) for each in quantiles),
            location=quantiles[2],
            mean=mean,
            clean_mean=mean,
            clean_p95=quantiles[-1],
            yardstick=yardstick,
            samples=SAMPLES,
            clean=clean,
        )


def traits_of(host: Host, rng: random.Random, cases: int) -> list[tuple[float, float]]:
    """Of each case how noisy it is, and how much it feels of a drift; 1 is usual."""
    return [(math.exp(rng.gauss(0, host.unlike)), max(0.0, rng.gauss(1, host.unlike))) for _ in range(cases)]


def student(rng: random.Random, dof: int) -> float:
    """Student's t scaled to variance 1."""
    t = rng.gauss(0, 1) / math.sqrt(rng.gammavariate(dof / 2, 2) / dof)
    return t / math.sqrt(dof / (dof - 2))


@dataclass
class Tally:
    """What came out of some suites."""

    suites: int = 0
    runs: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    unchanged: Counter[str] = field(default_factory=Counter)

    @property
    def slowed(self) -> int:
        return sum(self.outcomes.values())

    def __str__(self) -> str:
        false = sum(self.unchanged[name] for name in RED) / self.suites
        said = f"{false:>11.3f}  {self.unchanged['improved'] / self.suites:>8.2f}"
        if not self.slowed:
            return f"{said}       -       -  {self.runs:>9.2f}  (unchanged: {dict(self.unchanged.most_common())})"
        found, passed = sum(self.outcomes[name] for name in RED) / self.slowed, self.outcomes["pass"] / self.slowed
        return f"{said}  {found:>6.1%}  {passed:>6.2%}  {self.runs:>9.2f}  {dict(self.outcomes.most_common())}"


class Scene:
    """Stored runs of a suite, and a session that can run each case with the base or the new code."""

    def __init__(self, host: Host, seed: int, *, slowed: dict[int, float], plan: Plan, later: bool = False) -> None:
        """``later``: another session of the same host, against the same stored runs."""
        rng = random.Random(seed)
        traits = traits_of(host, rng, plan.cases)
        self.slowed, self.kind = slowed, plan.kind
        self.stored: list[list[RunSummary]] = [[] for _ in range(plan.cases)]
        for number in range(plan.sessions):
            past = Session(host, rng, f"s{number}", traits)
            for _ in range(plan.replicates):
                for case in range(plan.cases):
                    run = past.run(case)
                    if run.has_clean:
                        self.stored[case].append(run)
        rng = random.Random(f"{seed} later") if later else rng
        self.session = Session(plan.today or host, rng, "now", traits)
        self.runs = 0
        self.spent_s = 0.0
        """What a settling within a budget took."""

    def measure(self, case: int, arm: str) -> RunSummary:
        self.runs += 1
        if arm == "base" or case not in self.slowed:
            return self.session.run(case)
        return self.session.run(case, slower=self.slowed[case], kind=self.kind)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How the baseline came about and which gate judges."""

    cases: int = CASES
    sessions: int = 8
    replicates: int = 1
    in_place: bool = False
    base: bool = True
    yardstick: bool = True
    plain: bool = False
    today: Host | None = None
    """The host of this session, where it is not that of the baseline."""
    budget_s: float | None = None
    """What the gate may spend beyond the first runs, on a clock that only runs and starts of arms move."""
    run_s: float = 1.0
    start_s: float = 8.0
    kind: str = "shift"
    """What is slower in a slowed case; a periodic kind is as much slower as it is, whatever is asked for."""


def plain_verdicts(scene: Scene, plan: Plan) -> list[str]:
    """Names of the verdicts of the plain gate."""
    stored = [[run.location or 0.0 for run in runs] for runs in scene.stored]
    kinds = [case % KINDS for case in range(plan.cases)]
    return judge_suite(stored, kinds, scene.measure, base=plan.base)


def verdicts(scene: Scene, plan: Plan) -> list[Verdict]:
    """Verdicts of perfsuite's gate, by case."""
    nodes = [f"test_{case % KINDS}.py::test_{case % KINDS}[{case}]" for case in range(plan.cases)]
    index_of = {node: index for index, node in enumerate(nodes)}
    cases = [
        GateCase(
            specs=REGISTRY,
            case=CaseIdentity(node=node, world_size=1, backend="gloo", parameters={"n": index}, workload="m:W"),
            stored=tuple(scene.stored[index]),
        )
        for index, node in enumerate(nodes)
    ]
    settings = GateSettings(can_run_base=plan.base, yardstick=plan.yardstick, in_place=plan.in_place)
    gate = Gate(cases, settings)
    for index, node in enumerate(nodes):
        gate.add(node, scene.measure(index, "new"))
        if plan.in_place:
            settle(gate, node, scene, index_of)
    if plan.budget_s is not None:
        settle_within(gate, scene, index_of, plan)
    elif not plan.in_place:
        settle(gate, None, scene, index_of)
    return list(gate.verdicts().values())


def settle(gate: Gate, node: str | None, scene: Scene, index_of: dict[str, int]) -> None:
    """Carry out what the gate asks for."""
    while requests := gate.next_requests(node):
        for request in requests:
            carry_out(gate, request, scene, index_of[request.case])


def carry_out(gate: Gate, request: Request, scene: Scene, index: int) -> None:
    """Carry out one request."""
    if request.kind == "run":
        gate.add(request.case, scene.measure(index, "new"))
        return
    arms = ("base", "new") if request.first == "base" else ("new", "base")
    pair = {arm: scene.measure(index, arm) for arm in arms}
    gate.add_pair(request.case, base=pair["base"], new=pair["new"])


def settle_within(gate: Gate, scene: Scene, index_of: dict[str, int], plan: Plan) -> None:
    """Carry out what the gate asks for until the budget ends; a round of pairs that has begun is finished."""
    assert plan.budget_s is not None
    costs = Costs(start_s=plan.start_s, usual_run_s=plan.run_s)
    spent_s = 0.0
    while requests := gate.next_requests(
        None, Spending(whole_s=plan.budget_s, left_s=plan.budget_s - spent_s, costs=costs)
    ):
        for turn in rounds(requests):
            if spent_s < plan.budget_s:
                kind, nodes = turn[0].kind, [request.case for request in turn]
                spent_s += costs.of({kind: dict.fromkeys(nodes, 1)})
                costs = costs if kind == "run" else replace(costs, starts={})  # arms stay alive
                for request in turn:
                    carry_out(gate, request, scene, index_of[request.case])
    scene.spent_s = spent_s
    gate.end("the budget ended")


def tally(host: Host, suites: int, *, slowdown: float, share: float, plan: Plan, seed: int) -> Tally:
    """Several suites with ``share`` of their cases slower by ``slowdown``."""
    found = Tally()
    for number in range(suites):
        rng = random.Random(f"{seed}-{number}")
        slowed = dict.fromkeys(rng.sample(range(plan.cases), round(share * plan.cases)), slowdown) if slowdown else {}
        scene = Scene(host, seed * 100_003 + number, slowed=slowed, plan=plan)
        names = plain_verdicts(scene, plan) if plan.plain else [verdict.name for verdict in verdicts(scene, plan)]
        found.suites += 1
        found.runs += scene.runs / plan.cases / suites
        for index, name in enumerate(names):
            if index in slowed:
                found.outcomes[name] += 1
            else:
                found.unchanged[name] += 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suites", type=int, default=60, help="suite runs per line")
    parser.add_argument("--hosts", default=",".join(HOSTS))
    parser.add_argument("--slowdowns", default="0,0.05,0.10")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--share", type=float, default=0.05, help="share of the cases that are slowed down")
    parser.add_argument("--cases", type=int, default=CASES)
    parser.add_argument("--in-place", action="store_true", help="settle each case right after it ran")
    parser.add_argument("--sessions", type=int, default=8, help="sessions of the baseline")
    parser.add_argument("--replicates", type=int, default=1, help="runs per session of the baseline")
    parser.add_argument("--base", choices=("yes", "no", "both"), default="both", help="whether an A/B can be run")
    parser.add_argument("--today", choices=tuple(HOSTS), help="host of this session, where it is not the baseline's")
    parser.add_argument("--kind", choices=("shift", *PERIODIC), default="shift", help="what is slower")
    parser.add_argument("--no-yardstick", action="store_true", help="do not use the yardstick where a host has one")
    parser.add_argument("--budget", type=float, help="seconds that the gate may spend; without it there is no limit")
    parser.add_argument("--run-seconds", type=float, default=1.0, help="what a run takes")
    parser.add_argument("--start-seconds", type=float, default=8.0, help="what starting an arm takes")
    parser.add_argument("--plain", action="store_true", help="the plain gate of gate_reference.py instead")
    options = parser.parse_args()
    print("host       A/B  slower  false/suite  improved   found  passed  runs/case  verdicts of the slowed cases")
    for name in options.hosts.split(","):
        for base in {"yes": (True,), "no": (False,), "both": (True, False)}[options.base]:
            plan = Plan(
                cases=options.cases, in_place=options.in_place,
                sessions=options.sessions, replicates=options.replicates, base=base,
                yardstick=not options.no_yardstick, plain=options.plain, kind=options.kind,
                today=HOSTS[options.today] if options.today else None,
                budget_s=options.budget, run_s=options.run_seconds, start_s=options.start_seconds,
            )  # fmt: skip
            for slowdown in map(float, options.slowdowns.split(",")):
                found = tally(
                    HOSTS[name], options.suites, slowdown=slowdown, share=options.share, plan=plan, seed=options.seed
                )
                print(f"{name:<10} {'yes' if base else 'no':<4} {slowdown:>5.0%}  {found}", flush=True)


if __name__ == "__main__":
    main()
