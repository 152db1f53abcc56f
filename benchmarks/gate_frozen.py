"""The verdicts of the gate in 2,000 simulated cases, as a file of hashes: a rewrite of the gate must not change one.

    python benchmarks/gate_frozen.py           # compare with the stored file; prints each case that differs
    python benchmarks/gate_frozen.py --write   # store the verdicts of this gate, where one is meant to change
    python benchmarks/gate_frozen.py --show 17 # the whole verdicts of one scene

A scene is one session: 1 to 60 cases on a host of gate_simulation.py, with or without a base, an anchor or a budget.
Some cases have few stored runs, unstable runs, exact and own metrics, or nothing to compare with.  A line of the file
names a case and hashes its verdict, all findings, its requests and the outlook; a line per scene hashes what is said
of the suite.  Numbers are rounded to ten digits, so that another C library gives the same file.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import math
import random
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.gate_simulation import HOSTS, Session, traits_of
from perfsuite.baselines.runs import CaseIdentity, MetricMeaning, RunSummary
from perfsuite.gate.budget import Costs, Spending
from perfsuite.gate.evidence import GateCase
from perfsuite.gate.gate import Gate
from perfsuite.gate.shift import UNLIKE
from perfsuite.metrics import REGISTRY
from perfsuite.record.own_metrics import OwnMetric
from perfsuite.record.verdict import GateSettings, Request

FILE = Path(__file__).parent.parent / "test_correctness" / "golden" / "gate-verdicts.txt"
CASES = 2000
SIZES = (1, 1, 2, 3, 7, 12, 30, 60)
OWN = (
    OwnMetric(name="memory", unit="GiB", better="lower"),
    OwnMetric(name="bandwidth", unit="GB/s", better="higher"),
    OwnMetric(name="launches", unit="", better="lower", exact=True),
)
METRICS = {
    "latency_us": MetricMeaning(unit="us", better="lower"),
    "peak_memory_gib": MetricMeaning(unit="GiB", better="lower"),
    "bubble_ratio": MetricMeaning(unit="ratio", better="lower"),
    "sent_bytes": MetricMeaning(unit="bytes", better="lower"),
    "own_score": MetricMeaning(unit="points", better="higher"),
    **{own.name: MetricMeaning(unit=own.unit, better=own.better, own=own) for own in OWN},
}


@dataclasses.dataclass
class Traits:
    """Whatever is unusual in one case, drawn once."""

    slower: float
    kind: str
    control: str
    unstable: float
    """Share of its runs that something disturbs."""
    metrics: bool
    worse_metric: str
    stored: int
    tolerances: dict[str, float]
    out_of_memory: bool
    throttled: float


class Frozen:
    """One scene: its gate, its session, and what becomes of them."""

    def __init__(self, number: int) -> None:
        rng = self.rng = random.Random(f"frozen gate {number}")
        self.number, self.size = number, SIZES[number % len(SIZES)]
        name = ("R1", "R3", "R4", "R4y")[number // len(SIZES) % 4]
        self.host = HOSTS[name]
        self.traits = traits_of(self.host, rng, self.size)
        calm = rng.random() < 0.4
        self.cases = [self._drawn(calm) for _ in range(self.size)]
        sessions = rng.choice((5, 8, 8, 12))
        self.past = [Session(self.host, rng, f"s{index}", self.traits) for index in range(sessions)]
        self.arms = {"base": 0.0, "anchor": 0.0}
        if rng.random() < 0.25:  # the code of all cases, or the host, moved since it was stored
            self.arms = {"base": rng.choice((0.0, 0.08)), "anchor": rng.choice((0.0, 0.0, 0.08))}
        self.shift = self.arms["base"] or self.arms["anchor"]
        self.settings = GateSettings(
            can_run_base=rng.random() < 0.6,
            base_commit=rng.choice(("", "aaaa0000", "bbbb1111")),
            in_place=rng.random() < 0.15,
            remeasure=rng.random() < 0.93,
            yardstick=rng.random() < 0.85,
        )
        self.budget_s = rng.choice((None, None, None, 30.0, 90.0))
        given = [self._given(index) for index in range(self.size)]
        self.index_of = {each.case.node: index for index, each in enumerate(given)}
        self.today = Session(self.host, rng, "now", self.traits)
        self.gate = Gate(given, self.settings)
        self.requests: dict[str, list[Request]] = {node: [] for node in self.index_of}

    def _drawn(self, calm: bool) -> Traits:
        rng = self.rng
        rare = 0.0 if calm else 1.0
        return Traits(
            slower=rng.choice((0.0, 0.0, 0.0, 0.0, 0.04, 0.07, 0.15, -0.12)),
            kind="third" if rng.random() < 0.05 * rare else "shift",
            control=rng.choice(("", "sleep 16 ms", "memory", UNLIKE)),
            unstable=rng.choice((0.0, 0.0, 0.2, 0.8)) * (rng.random() < 0.3 * rare),
            metrics=rng.random() < 0.4,
            worse_metric=rng.choice(("", "", *METRICS)),
            stored=rng.choice((0, 1, 2, 3, 4, 5)) if rng.random() < 0.12 * rare else 99,
            tolerances=rng.choice(({}, {}, {"mean": 0.1}, {"latency_us": 0.05, "own_score": 0.04}, {"p95": 0.4})),
            out_of_memory=rng.random() < 0.02 * rare,
            throttled=rng.choice((0.0, 0.0, 0.0, 0.02)) * rare,
        )

    def _given(self, index: int) -> GateCase:
        rng, case = self.rng, self.cases[index]
        stored = [self._run(past, index, commit=rng.choice(("aaaa0000", "cccc2222"))) for past in self.past]
        stored = [run for run in stored if run.has_clean or rng.random() < 0.5][: case.stored]
        newest = [self._run(past, index, commit=f"dddd000{past.name}", slower=0.03) for past in self.past[-3:]]
        changes = ("torch 2.13.0, stored 2.12.1",) if rng.random() < 0.15 else ()
        refused = rng.random() < 0.02
        return GateCase(
            specs=REGISTRY,
            case=CaseIdentity(
                node=f"test_{index % 4}.py::test_{index % 4}[{index}]",
                world_size=2,
                backend="gloo",
                parameters={"n": index},
                workload="m:W",
                metrics=METRICS if case.metrics else {},
            ),
            stored=() if refused else tuple(stored),
            newest=tuple(newest) if rng.random() < 0.2 and not refused else (),
            stored_metrics=METRICS if case.metrics else {},
            metric_tolerances=case.tolerances,
            tolerance=rng.choice((None, None, None, 0.08)),
            refusal=rng.choice(("not-comparable", "no-baseline")) if refused else None,
            reasons=("instrumented: CUDA_LAUNCH_BLOCKING",) if refused else (),
            flags=("stale baseline",) if rng.random() < 0.05 else (),
            environment_changes=changes,
            soft_differences=changes,
        )

    def _run(self, session: Session, index: int, *, commit: str = "", slower: float = 0.0) -> RunSummary:
        """A run of a session, with whatever is unusual in the case."""
        rng, case = self.rng, self.cases[index]
        now = session.name == "now"
        worse = now and slower != 0.0
        run = session.run(index, slower=slower, kind=case.kind if worse else "shift")
        kept: dict[str, object] = {"commit": commit, "control": case.control if run.yardstick is not None else ""}
        if run.yardstick is not None:
            kept |= {"yardstick_mean": run.yardstick + 0.01, "yardstick_p95": run.yardstick + 0.05}
        if now and rng.random() < case.unstable:
            kept["disturbance"] = rng.choice(("thermal throttling", "unknown"))
        if now:
            kept |= {"process": rng.choice(("fresh", "fresh", "reused")), "throttled": case.throttled}
        if case.metrics:
            kept["metrics"] = self._metrics(run, case, worse)
        if now and case.out_of_memory and rng.random() < 0.5:
            kept |= {"outcome": "out_of_memory", "quantiles_s": (), "location": None, "samples": 0, "clean": 0}
        return dataclasses.replace(run, **kept)  # type: ignore[arg-type]

    def _metrics(self, run: RunSummary, case: Traits, worse: bool) -> dict[str, float]:
        rng = self.rng
        values = {
            "latency_us": 1e6 * run.median_s, "peak_memory_gib": 2.0, "bubble_ratio": 0.2, "sent_bytes": 4096.0,
            "own_score": 50 * math.exp(rng.gauss(0, 0.01)), "memory": 3 * math.exp(rng.gauss(0, 0.005)),
            "bandwidth": 40 * math.exp(rng.gauss(0, 0.01)), "launches": 12.0,
        }  # fmt: skip
        if worse and case.worse_metric in values and case.worse_metric != "latency_us":
            values[case.worse_metric] *= 1.12 if METRICS[case.worse_metric].better == "lower" else 0.85
        return values

    def _new(self, node: str) -> RunSummary:
        index = self.index_of[node]
        slower = (1 + self.shift) * (1 + self.cases[index].slower) - 1
        return self._run(self.today, index, slower=slower)

    def _other(self, node: str, arm: str) -> RunSummary:
        return self._run(self.today, self.index_of[node], slower=self.arms[arm])

    def _carry_out(self, request: Request) -> None:
        node, rng = request.case, self.rng
        self.requests[node].append(request)
        if rng.random() < 0.01:
            self.gate.withdraw(node, "its ranks died")
        elif request.kind == "run":
            self.gate.add(node, self._new(node))
        elif rng.random() < 0.02:
            without = self.gate.without_base if request.kind == "ab_pair" else self.gate.without_anchor
            without(node, "that revision does not run it")
        elif request.kind == "ab_pair":
            self.gate.add_pair(node, base=self._other(node, "base"), new=self._new(node))
        else:
            self.gate.add_anchor_pair(node, anchor=self._other(node, "anchor"), new=self._new(node))

    def _settle(self, node: str | None) -> None:
        spent_s = 0.0
        costs = Costs(start_s=4.0, usual_run_s=1.0)
        while True:
            spending = None
            if self.budget_s is not None:
                spending = Spending(whole_s=self.budget_s, left_s=self.budget_s - spent_s, costs=costs)
            requests = self.gate.next_requests(node, spending)
            if not requests:
                break
            for request in requests:
                spent_s += 1.0 if request.kind == "run" else 2.0
                self._carry_out(request)
        if self.budget_s is not None:
            self.gate.end("the budget ended", node)

    def lines(self, *, whole: bool = False) -> Iterator[str]:
        """A line per case and one of the suite; ``whole``: verdicts in place of hashes."""
        gate = self.gate
        for node in self.index_of:
            if self.rng.random() < 0.01:
                gate.add(node, self._new(node), violations=["faster than its peak"])
            else:
                gate.add(node, self._new(node))
            if self.settings.in_place:
                self._settle(node)
        outlook = gate.outlook()
        before = {node: gate.verdict(node) for node in list(self.index_of)[:3]}
        if not self.settings.in_place:
            self._settle(None)
        after = gate.verdicts()
        for node, verdict in after.items():
            wanted = {kind: counts.get(node, 0) for kind, counts in sorted(outlook.items())}
            told = (verdict, self.requests[node], wanted, before.get(node), gate.suspects(node), gate.anchor_of(node))
            yield f"{self.number}/{self.index_of[node]} {verdict.name} {_told(told, whole=whole)}"
        yield f"{self.number}/suite {_told((gate.suite(), gate.banner(), gate.covered, gate.outlook()), whole=whole)}"


def _told(value: object, *, whole: bool) -> str:
    text = _plain(value)
    return text if whole else hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain(value: object) -> str:
    """A value as text that says all of it, with numbers of ten digits."""
    if isinstance(value, float):
        return f"{value:.10g}"
    if dataclasses.is_dataclass(value):
        return _plain({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_plain(each)}" for name, each in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(_plain, value)) + "]"
    return repr(value)


def numbers() -> list[int]:
    """Numbers of the scenes that hold CASES cases."""
    found, cases = [], 0
    while cases < CASES:
        found.append(len(found))
        cases += SIZES[found[-1] % len(SIZES)]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="store the verdicts of this gate")
    parser.add_argument("--show", type=int, metavar="SCENE", help="print the whole verdicts of one scene")
    options = parser.parse_args()
    if options.show is not None:
        print("\n".join(Frozen(options.show).lines(whole=True)))
        return 0
    now = [line for number in numbers() for line in Frozen(number).lines()]
    if options.write:
        FILE.write_text("\n".join(now) + "\n")
        print(f"stored {len(now)} lines in {FILE}")
        return 0
    stored = FILE.read_text().splitlines()
    changed = [f"{was} -> {is_}" for was, is_ in zip(stored, now, strict=False) if was != is_]
    print("\n".join([*changed, f"{len(changed)} of {len(stored)} lines differ; {len(now)} were made"]))
    return 1 if changed or len(stored) != len(now) else 0


if __name__ == "__main__":
    sys.exit(main())
