"""How the gate judges metrics of one's own while the time stays as it was, as a seeded simulation.

    python benchmarks/gate_own.py                   # the table of perfsuite docs gate-evidence
    python benchmarks/gate_own.py --trials 20

A memory and a bandwidth scatter between runs, half of the variance between sessions; without a change every red verdict
is a false alarm, and with one every verdict that does not name the metric is silence.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from perfsuite.baselines.runs import CaseIdentity, MetricMeaning, RunSummary
from perfsuite.gate.evidence import GateCase
from perfsuite.gate.gate import Gate
from perfsuite.metrics import REGISTRY
from perfsuite.record.own_metrics import OwnMetric
from perfsuite.record.verdict import GateSettings, Verdict

OWN = (
    OwnMetric(name="memory", unit="GiB", better="lower"),
    OwnMetric(name="bandwidth", unit="GB/s", better="higher"),
)
MEANINGS = {metric.name: MetricMeaning(unit=metric.unit, better=metric.better, own=metric) for metric in OWN}
TIME_NOISE = 0.004
STORED = 6
"""Stored runs, each of a session of its own."""


class Host:
    """Draws runs of one case in one session."""

    def __init__(self, rng: random.Random, noise: float) -> None:
        self.rng = rng
        self.inside = noise * math.sqrt(0.5)
        self.session = {name: rng.gauss(0, self.inside) for name in MEANINGS}
        self.time = rng.gauss(0, TIME_NOISE)

    def run(self, session: str, number: int, changes: dict[str, float]) -> RunSummary:
        """One run; ``changes`` are relative, by metric."""
        values = {"memory": 2.1, "bandwidth": 40.1}
        median_s = 0.01 * math.exp(self.time + self.rng.gauss(0, TIME_NOISE))
        return RunSummary(
            session=session,
            time=f"2026-01-01T00:{number // 60 % 60:02d}:{number % 60:02d}+00:00",
            ordinal=number,
            quantiles_s=tuple(median_s * factor for factor in (0.98, 0.99, 1.0, 1.01, 1.02)),
            location=math.log(median_s),
            samples=40,
            clean=40,
            metrics={
                name: value
                * (1 + changes.get(name, 0.0))
                * math.exp(self.session[name] + self.rng.gauss(0, self.inside))
                for name, value in values.items()
            },
        )


def session(seed: str, cases: int, noise: float, changes: dict[str, float], *, base: bool) -> list[Verdict]:
    """The verdicts of one session; the first case is changed."""
    rng = random.Random(seed)
    plain = CaseIdentity(node="", world_size=2, backend="gloo", parameters={}, workload="m:W", metrics=MEANINGS)
    identities = [dataclasses.replace(plain, node=f"t.py::test_{number}[cpu-ws2]") for number in range(cases)]
    given = [
        GateCase(
            specs=REGISTRY,
            case=case,
            stored=tuple(Host(rng, noise).run(f"s{number}", 0, {}) for number in range(STORED)),
            stored_metrics=MEANINGS,
        )
        for case in identities
    ]
    gate, today = Gate(given, GateSettings(can_run_base=base)), {case.node: Host(rng, noise) for case in identities}
    changed = {identities[0].node: changes}
    count = 0

    def new(node: str) -> RunSummary:
        nonlocal count
        count += 1
        return today[node].run("now", count, changed.get(node, {}))

    for case in identities:
        gate.add(case.node, new(case.node))
    while requests := gate.next_requests():
        for request in requests:
            if request.kind == "run":
                gate.add(request.case, new(request.case))
            else:
                older = today[request.case].run("now", count, {})
                gate.add_pair(request.case, base=older, new=new(request.case))
    verdicts = gate.verdicts()
    return [verdicts[case.node] for case in identities]


def line(cases: int, noise: float, changes: dict[str, float], trials: int, *, base: bool) -> str:
    """What came of some sessions."""
    red = silent = alarms = undecided = 0
    for trial in range(trials):
        verdicts = session(f"{cases} {noise} {changes} {base} {trial}", cases, noise, changes, base=base)
        unchanged = verdicts[1:] if changes else verdicts
        alarms += sum(any(one.name == "regressed" for one in verdict.findings) for verdict in unchanged)
        undecided += sum(verdict.name == "inconclusive" for verdict in unchanged)
        named = {one.quantity: one.name for one in verdicts[0].findings}
        red += any(named.get(name) == "regressed" for name in changes)
        silent += not any(name in named for name in changes)
    others = trials * (cases - 1 if changes else cases)
    told = " ".join(f"{name} {100 * change:+.0f} %" for name, change in changes.items()) or "unchanged"
    found = f"red {red}, silent {silent} of {trials}; " if changes else ""
    rest = f"unchanged cases: red {alarms}, inconclusive {undecided} of {others}" if others else ""
    return f"{cases:3d} cases, noise {100 * noise:.1f} %, base {'yes' if base else 'no '}, {told:16s}: {found}{rest}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=200, help="sessions per line; a tenth of it with 10 cases")
    trials = parser.parse_args().trials
    for cases in (1, 10):
        for noise in (0.003, 0.01, 0.02):
            for base in (False, True):
                for changes in ({}, {"memory": 0.12}, {"bandwidth": -0.25}):
                    print(line(cases, noise, changes, trials if cases == 1 else trials // 10, base=base), flush=True)


if __name__ == "__main__":
    main()
