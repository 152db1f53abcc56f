"""How often the gate misses a real slowdown: a seeded simulation of each way in which it can.

    python benchmarks/gate_silence.py                      # the table of docs gate-evidence, 2,000 trials per line
    python benchmarks/gate_silence.py --trials 200 --rows drift,suite --cases 24 --slowdowns 0.5
    python benchmarks/gate_silence.py --trials 0 --histories 100   # 1 % per merge, and histories without a change
    python benchmarks/gate_silence.py --trials 0 --bound   # the most that any test of the level could find

A trial is *silent* if it ends with exit code 0 and does not name the case and the change: the verdict of the case is
pass or improved, and the verdict of the suite does not fail.  ``gate_rows.py`` has the rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import random
import statistics
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.gate_rows import ROWS, STORED, Machine, Work
from benchmarks.gate_simulation import HOSTS, Session, traits_of
from perfsuite.gate.shift import CONFIRM_ALPHA, SURELY_ALPHA


@dataclass
class Tally:
    """What came of some trials."""

    trials: int = 0
    failed: int = 0
    silent: int = 0
    stored: int = 0
    """Trials in which an update stored a slower case."""
    names: Counter[str] = dataclasses.field(default_factory=Counter)


def tally(row: str, host: str, cases: int, slower: float, trials: int) -> Tally:
    """Trials of one row on one host; suites of ``cases`` cases."""
    found = Tally()
    machine = dataclasses.replace(HOSTS[host], yardstick=ROWS[row].yardstick or HOSTS[host].yardstick)
    for number in range(trials):
        outcome = ROWS[row].session(Machine(machine, f"{row}-{host}-{cases}-{slower}-{number}", cases), slower)
        found.trials += 1
        found.failed += outcome.fails
        found.silent += outcome.is_silent(ROWS[row].slowed(cases))
        found.stored += outcome.stored
        found.names[outcome.verdicts[0].name] += 1
        if outcome.suite is not None:
            found.names[f"suite {outcome.suite.name}"] += 1
    return found


@dataclass(frozen=True, kw_only=True)
class History:
    """How a history of merges went."""

    reported_at: float | None
    """Accumulated slowdown at which the first merge was red; None when none was."""
    red: int
    """Merges that were red."""


def history(host: str, seed: str, merges: int, step: float, cases: int = 1) -> History:
    """Merge after merge, each ``step`` slower, judged with the merge before as its base; nothing is accepted."""
    machine = Machine(HOSTS[host], f"history-{host}-{seed}", cases)
    first: float | None = None
    red = 0
    for merge in range(1, merges + 1):
        amount = {"new": (1 + step) ** merge - 1, "base": (1 + step) ** (merge - 1) - 1, "anchor": 0.0}

        def slower(case: int, arm: str, amount: Mapping[str, float] = amount) -> float:
            return amount[arm] if case == 0 else 0.0

        outcome = machine.judge(slower, Work())
        red += outcome.fails
        if outcome.fails and first is None:
            first = amount["new"]
    return History(reported_at=first, red=red)


def print_histories(hosts: list[str], count: int, seed: str) -> None:
    """1 % per merge, and nothing at all."""
    print("\nhost  histories  1 % per merge: red by +5 %, median at  unchanged, 50 merges: histories with a red merge")
    for host in hosts:
        slow = [history(host, f"{seed}slow{number}", 8, 0.01) for number in range(count)]
        at = sorted(found.reported_at or 9.0 for found in slow)
        by = sum(found.reported_at is not None and found.reported_at <= 0.0511 for found in slow)
        still = [history(host, f"{seed}still{number}", 50, 0.0) for number in range(count)]
        false = sum(found.red > 0 for found in still)
        print(f"{host:<5} {count:>9}  {by / count:>24.1%}  {at[count // 2]:>9.1%}  {false:>30}", flush=True)


def print_line(name: str, host: str, cases: int, slower: float, trials: int) -> None:
    """One row on one host."""
    found = tally(name, host, cases, slower, trials)
    told = ", ".join(f"{count} {verdict}" for verdict, count in found.names.most_common())
    told += f"; {found.stored} stored" if found.stored else ""
    print(
        f"{name:<13} {ROWS[name].number:>2}  {host:<5} {cases:>4}  {slower:>6.0%}  {found.silent:>6}  "
        f"{found.failed / found.trials:>6.1%}  {told}",
        flush=True,
    )


TODAY_RUNS = 12
BOUND_DRAWS = 20_000
ALPHAS = (SURELY_ALPHA, CONFIRM_ALPHA, 0.05)
"""False alarms of the level where nothing tells why, where another environment does, and where there is no base."""


def print_bounds(hosts: list[str]) -> None:
    """How often 10 % shows in the level of a lone case at a given rate of false alarms, as these hosts scatter.

    The statistic is Student's: today's median against the mean of the stored sessions, in units of their scatter.  For
    normal noise no test that knows neither level nor noise beforehand finds more.  Its threshold is here the one that
    the simulated sessions themselves give, so that their tails are known better than a gate could know them.
    """
    print("\nhost  stored sessions  " + "  ".join(f"found at {alpha:.2%} of false alarms" for alpha in ALPHAS))
    for host, stored in itertools.product(hosts, (STORED, 16, 30)):
        rng = random.Random(f"bound {host} {stored}")
        unchanged, slower = [], []
        for _ in range(BOUND_DRAWS):
            (trait,) = traits_of(HOSTS[host], rng, 1)
            then = [Session(HOSTS[host], rng, "then", [trait]).run(0).location or 0.0 for _ in range(stored)]
            session = Session(HOSTS[host], rng, "now", [trait])
            now = statistics.median([session.run(0).location or 0.0 for _ in range(TODAY_RUNS)])
            away, scatter = now - statistics.fmean(then), statistics.stdev(then)
            unchanged.append(away / scatter)
            slower.append((away + math.log1p(0.10)) / scatter)
        unchanged.sort()
        shares = []
        for alpha in ALPHAS:
            threshold = unchanged[-1 - int(alpha * BOUND_DRAWS)]
            shares.append(sum(value > threshold for value in slower) / BOUND_DRAWS)
        print(f"{host:<5} {stored:>15}  " + "  ".join(f"{share:>31.1%}" for share in shares), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=2000, help="trials per line")
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--hosts", default="R1,R2,R3,R4")
    parser.add_argument("--cases", help="cases of a suite; left out: the row's own")
    parser.add_argument("--slowdowns", help="left out: the row's own")
    parser.add_argument("--histories", type=int, default=0, help="histories of merges per host")
    parser.add_argument("--seed", default="", help="of the histories")
    parser.add_argument("--bound", action="store_true", help="what any test of a lone case's level could find")
    options = parser.parse_args()
    hosts = options.hosts.split(",")
    if options.trials:
        print("row           no  host  cases  slower  silent  failed  verdicts")
    for name in options.rows.split(",") if options.trials else ():
        row = ROWS[name]
        all_cases = map(int, options.cases.split(",")) if options.cases else row.cases
        slowdowns = [float(text) for text in options.slowdowns.split(",")] if options.slowdowns else row.slowdowns
        for cases, host, slower in itertools.product(all_cases, hosts, slowdowns):
            print_line(name, host, cases, slower, options.trials)
    if options.histories:
        print_histories(hosts, options.histories, options.seed)
    if options.bound:
        print_bounds(hosts)


if __name__ == "__main__":
    main()
