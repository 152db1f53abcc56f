"""Accuracy of the intervals and verdicts of ``perfsuite ab`` on simulated hosts.

    python benchmarks/ab_coverage.py                    # the table of docs ab-evidence, some minutes on one core
    python benchmarks/ab_coverage.py --trials 200 --hosts R4,hostile --pairs 3,6

The hosts come from ``gate_simulation.py``: run noise with heavy tails, drift, spikes, slow periods of about eight
runs.  A trial is one case: pairs of runs of two arms that alternate in one session.  Printed:

covers  share of the 95 % intervals that hold the true change (0 in half of the trials, 5 % in the others)
found   how often a case that is slower by the printed smallest change is called slower in another comparison
false   how often an unchanged case is called slower or faster
width   median half width of the interval
finds   median smallest change
decides share of the trials that are decided with the number of pairs that an undecided comparison named
until   with --until-decided: share of the trials whose last interval holds the truth, false calls, mean pairs

Seeded: the same command prints the same table.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.gate_simulation import HOSTS, Host, Session
from perfsuite.cli.ab import looks
from perfsuite.statistics.comparison import MOST_PAIRS, Comparison, compare

TOLERANCE = 0.03
SLOWER = 0.05
MAX_PAIRS = 48


class Bench:
    """One case on one host, for as many comparisons as are wanted; each is a session of its own."""

    def __init__(self, host: Host, rng: random.Random) -> None:
        self.host, self.rng = host, rng
        self.traits = [(math.exp(rng.gauss(0, host.unlike)), max(0.0, rng.gauss(1, host.unlike)))]

    def times(self, pairs: int, slower: float) -> tuple[list[float], list[float]]:
        """Seconds of arm a and of arm b, which is slower; the order alternates."""
        session = Session(self.host, self.rng, "now", self.traits)
        arms: tuple[list[float], list[float]] = ([], [])
        for pair in range(pairs):
            for which in (0, 1) if pair % 2 == 0 else (1, 0):
                run = session.run(0, slower=slower if which else 0.0)
                arms[which].append(math.exp(run.location or 0.0))
        return arms

    def compare(self, pairs: int, slower: float) -> Comparison:
        return compare("case", *self.times(pairs, slower), TOLERANCE)

    def until_decided(self, pairs: int, slower: float) -> Comparison:
        """As ``perfsuite ab --until-decided``: looks with a share of the 5 % each."""
        a_s, b_s = self.times(MAX_PAIRS, slower)
        planned = looks(pairs, MAX_PAIRS)
        for count in planned:
            found = compare("case", a_s[:count], b_s[:count], TOLERANCE, alpha=0.05 / len(planned))
            if found.outcome != "undecided" or (found.pairs_needed or MOST_PAIRS) > MAX_PAIRS:
                break
        return found


@dataclass
class Tally:
    """Counts of some trials."""

    trials: int = 0
    covers: int = 0
    found: int = 0
    false: int = 0
    unchanged: int = 0
    decided: list[bool] = field(default_factory=list)
    widths: list[float] = field(default_factory=list)
    finds: list[float] = field(default_factory=list)
    until_covers: int = 0
    until_false: int = 0
    until_pairs: float = 0.0

    def __str__(self) -> str:
        decided = f"{statistics.fmean(self.decided):>8.0%}" if self.decided else f"{'-':>8}"
        return (
            f"{self.covers / self.trials:>7.1%}  {self.found / self.trials:>6.1%}  {self.false / self.unchanged:>6.2%}"
            f"  {statistics.median(self.widths):>6.2%}  {statistics.median(self.finds):>7.2%}  {decided}"
            f"  {self.until_covers / self.trials:>7.1%}  {self.until_false / self.unchanged:>6.2%}"
            f"  {self.until_pairs / self.trials:>6.1f}"
        )


def covers(found: Comparison, truth: float) -> bool:
    return found.low <= truth <= found.high


def tally(host: Host, pairs: int, trials: int, seed: str) -> Tally:
    """Trials of ``pairs`` pairs each, half of them with a case that is slower by SLOWER."""
    counts = Tally(trials=trials)
    for number in range(trials):
        bench = Bench(host, random.Random(f"{seed}-{number}"))
        truth = SLOWER if number % 2 else 0.0
        found = bench.compare(pairs, truth)
        counts.covers += covers(found, truth)
        counts.widths.append((found.high - found.low) / 2)
        counts.finds.append(found.smallest)
        counts.found += bench.compare(pairs, found.smallest).outcome == "slower"
        until = bench.until_decided(pairs, truth)
        counts.until_covers += covers(until, truth)
        counts.until_pairs += until.pairs
        if truth:
            continue
        counts.unchanged += 1
        counts.false += found.outcome in ("slower", "faster")
        counts.until_false += until.outcome in ("slower", "faster")
        if found.outcome == "undecided" and found.pairs_needed and found.pairs_needed > pairs:
            counts.decided.append(bench.compare(found.pairs_needed, 0.0).outcome != "undecided")
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=2000, help="comparisons per line")
    parser.add_argument("--hosts", default=",".join(HOSTS))
    parser.add_argument("--pairs", default="3,4,6,12,24")
    parser.add_argument("--seed", default="1")
    options = parser.parse_args()
    print("host     pairs   covers   found   false   width    finds   decides    until   false   pairs")
    for name in options.hosts.split(","):
        for pairs in map(int, options.pairs.split(",")):
            counts = tally(HOSTS[name], pairs, options.trials, f"{options.seed}-{name}-{pairs}")
            print(f"{name:<8} {pairs:>5}  {counts}", flush=True)


if __name__ == "__main__":
    main()
