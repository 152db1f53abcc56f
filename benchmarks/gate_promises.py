"""Whether what the gate prints is true, on the hosts of gate_simulation.py.

    python benchmarks/gate_promises.py power                 # is the smallest change that would show found in 95 %?
    python benchmarks/gate_promises.py coverage --today R4   # do 95 % intervals hold the truth, on a noisier day?

Power: an unchanged session prints the smallest change of each case; in another session against the same stored runs,
cases are slower by exactly that.  With ``--session same`` they were slower in the session that prints it: the host
drifts alike, and what a session prints is said of itself.  Coverage: every printed interval of the time against the
injected change.  Seeded.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.gate_simulation import CASES, HOSTS, Host, Plan, Scene, verdicts
from perfsuite.record.verdict import TIME, Finding, Verdict

BASES = {"yes": (True,), "no": (False,), "both": (True, False)}


def power(
    host: Host, suites: int, *, share: float, plan: Plan, seed: int, same: bool = False
) -> tuple[int, int, float]:
    """Cases found and slowed, each by the smallest change that an unchanged session printed; the median of these."""
    found, changes = 0, []
    for number in range(suites):
        seed_of_suite = seed * 100_003 + number
        printed = verdicts(Scene(host, seed_of_suite, slowed={}, plan=plan, later=same), plan)
        findings = [_time(each) for each in printed]
        shown = {index: each.mde for index, each in enumerate(findings) if each is not None and each.mde is not None}
        chosen = random.Random(f"{seed}-{number}").sample(sorted(shown), max(1, round(share * plan.cases)))
        slowed = {index: shown[index] for index in chosen}
        told = verdicts(Scene(host, seed_of_suite, slowed=slowed, plan=plan, later=True), plan)
        found += sum(told[index].name == "regressed" for index in chosen)
        changes += slowed.values()
    return found, len(changes), statistics.median(changes)


def _time(verdict: Verdict) -> Finding | None:
    return next((finding for finding in verdict.findings if finding.quantity == TIME), None)


def coverage(
    host: Host, suites: int, *, slowdown: float, share: float, plan: Plan, seed: int
) -> dict[str, tuple[int, int, float]]:
    """By verdict and evidence: intervals of the time that held the injected truth, all, and their median width."""
    held: dict[str, list[tuple[bool, float]]] = {}
    for number in range(suites):
        rng = random.Random(f"{seed}-{number}")
        slowed = {case: slowdown for case in range(plan.cases) if rng.random() < share}
        scene = Scene(host, seed * 100_003 + number, slowed=slowed, plan=plan)
        for index, verdict in enumerate(verdicts(scene, plan)):
            finding = _time(verdict)
            if finding is None or finding.interval is None:
                continue
            low, high = finding.interval
            how = "A/B" if verdict.pairs >= 3 else "again" if verdict.runs > 4 else "first"
            holds = low <= slowed.get(index, 0.0) <= high
            for key in ("all", how):
                held.setdefault(key, []).append((holds, high - low))
    return {
        key: (sum(holds for holds, _ in known), len(known), statistics.median([width for _, width in known]))
        for key, known in held.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("check", choices=("power", "coverage"))
    parser.add_argument("--suites", type=int, default=60, help="suite runs per line")
    parser.add_argument("--hosts", default="R1,R2,R3,R4", help="hosts of the baseline")
    parser.add_argument("--today", choices=tuple(HOSTS), help="host of this session, where it is not the baseline's")
    parser.add_argument("--slowdowns", default="0,0.05,0.20", help="coverage: injected changes")
    parser.add_argument("--share", type=float, default=0.05, help="share of the cases that are slowed down")
    parser.add_argument("--cases", type=int, default=CASES)
    parser.add_argument("--base", choices=tuple(BASES), default="both", help="whether an A/B can be run")
    parser.add_argument("--session", choices=("other", "same"), default="other", help="power: where cases are slower")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    today = HOSTS[options.today] if options.today else None
    for name in options.hosts.split(","):
        for base in BASES[options.base]:
            plan = Plan(cases=options.cases, base=base, today=today)
            line = f"{name:<8} base {'yes' if base else 'no':<3}"
            if options.check == "power":
                found, of, change = power(
                    HOSTS[name],
                    options.suites,
                    share=options.share,
                    plan=plan,
                    seed=options.seed,
                    same=options.session == "same",
                )
                print(f"{line} printed {change:.2%}: {found} of {of} found, {found / of:.1%}", flush=True)
                continue
            for slowdown in map(float, options.slowdowns.split(",")):
                seen = coverage(
                    HOSTS[name], options.suites, slowdown=slowdown, share=options.share, plan=plan, seed=options.seed
                )
                told = [f"{key} {hit / of:.1%} of {of}, width {wide:.1%}" for key, (hit, of, wide) in seen.items()]
                print(f"{line} {slowdown:>4.0%}  {'; '.join(told)}", flush=True)


if __name__ == "__main__":
    main()
