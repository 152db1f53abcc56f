"""A/A: how often the gate errs on this machine when nothing changed, from equal runs of one session.

    pytest test_perf --perf-runs=12 --perf-update=append --perf-baselines=/tmp/aa    # equal runs
    python benchmarks/gate_aa.py /tmp/aa/*/*.json

The runs are split at random into stored and new ones, by rounds of the session: a slow minute of the host is in the
same round of all cases.  The real gate judges the new ones; its requests are answered with the runs that are left.
Splits share runs, so the rates are estimates with fewer independent facts behind them than splits; more runs help, more
splits do not.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from perfsuite.base.units import plural
from perfsuite.baselines import store
from perfsuite.baselines.runs import CaseIdentity, RunSummary
from perfsuite.gate.evidence import GateCase
from perfsuite.gate.gate import Gate
from perfsuite.metrics import REGISTRY
from perfsuite.record.verdict import GateSettings, Verdict

_STORED = 8
"""Runs of a split that play the baseline, where there are twice as many."""
_WORST = 3


@dataclass(frozen=True, kw_only=True)
class AaReport:
    """Error rates of the gate where nothing changed."""

    cases: int
    runs: int
    """Runs of each case."""
    splits: int
    false_alarms: float
    """Share of verdicts that were ``regressed``."""
    per_suite: float
    """Regressed cases per suite run."""
    false_improvements: float
    """Share of verdicts that were ``improved``; equal to the false alarms when the gate is symmetric."""
    inconclusive: float
    median_mde: float
    """Smallest slowdown that would have been found with 95 % probability, the median case."""
    worst_mde: float
    worst_cases: tuple[tuple[str, float], ...]
    """Cases with the most false alarms, and the share of their verdicts."""


def a_a(
    cases: Sequence[CaseIdentity],
    runs: Mapping[str, Sequence[RunSummary]],
    settings: GateSettings,
    *,
    splits: int = 50,
    seed: int = 0,
) -> AaReport:
    """Judge random splits of equal runs; ``runs[node]`` are a case's runs, round by round.

    Every case needs as many runs as two baselines (``settings.min_stored`` each); those with fewer are left out.
    """
    usable = [case for case in cases if len(runs.get(case.node, ())) >= 2 * settings.min_stored]
    count = min((len(runs[case.node]) for case in usable), default=0)
    draw = random.Random(seed)
    verdicts = [
        verdict for _ in range(splits if usable else 0) for verdict in _split(usable, runs, count, settings, draw)
    ]
    names = Counter(verdict.name for verdict in verdicts)
    alarms = Counter(verdict.case for verdict in verdicts if verdict.name == "regressed")
    mdes = [verdict.decisive.mde for verdict in verdicts if verdict.decisive and verdict.decisive.mde is not None]
    total = max(1, len(verdicts))
    return AaReport(
        cases=len(usable),
        runs=count,
        splits=splits,
        false_alarms=names["regressed"] / total,
        per_suite=names["regressed"] / splits,
        false_improvements=names["improved"] / total,
        inconclusive=names["inconclusive"] / total,
        median_mde=statistics.median(mdes) if mdes else float("nan"),
        worst_mde=max(mdes, default=float("nan")),
        worst_cases=tuple((case, alarms[case] / splits) for case, _ in alarms.most_common(_WORST)),
    )


def _split(
    cases: Sequence[CaseIdentity],
    runs: Mapping[str, Sequence[RunSummary]],
    count: int,
    settings: GateSettings,
    draw: random.Random,
) -> Iterator[Verdict]:
    rounds = list(range(count))
    draw.shuffle(rounds)
    stored = rounds[: max(settings.min_stored, min(_STORED, count // 2))]
    given = [
        GateCase(case=case, specs=REGISTRY, stored=tuple(_as_stored(runs[case.node][index]) for index in stored))
        for case in cases
    ]
    gate = Gate(given, dataclasses.replace(settings, remeasure=True, can_run_base=False))
    left = {case.node: [runs[case.node][index] for index in rounds[len(stored) :]] for case in cases}
    for node, new in left.items():
        gate.add(node, new.pop())
    while requests := gate.next_requests():
        for request in requests:
            if left[request.case]:
                gate.add(request.case, left[request.case].pop())
            else:
                gate.withdraw(request.case, "no equal run is left")
    yield from gate.verdicts().values()


def _as_stored(run: RunSummary) -> RunSummary:
    """The run as if a session of its own had stored it."""
    return dataclasses.replace(run, session=f"{run.session}-{run.ordinal}", ordinal=0)


def read_and_judge(path: Path, *, splits: int) -> AaReport:
    """The report of the runs of a baseline file; raises BaselineError where it is damaged."""
    baseline = store.read(path)
    entries = [entry for entries in baseline.by_node.values() for entry in entries] if baseline else []
    runs = {entry.case.node: entry.kept for entry in entries}
    return a_a([entry.case for entry in entries], runs, GateSettings(), splits=splits)


def aa_lines(report: AaReport) -> Iterator[str]:
    """The report as text."""
    runs = f"{plural(report.runs, 'equal run')} of {plural(report.cases, 'case')}"
    yield f"A/A: {runs}, {report.splits} random splits into stored and new runs"
    yield (
        f"  false alarms {report.false_alarms:.2%} of verdicts ({report.per_suite:.2f} per suite run), "
        f"false improvements {report.false_improvements:.2%}, inconclusive {report.inconclusive:.1%}"
    )
    yield f"  smallest slowdown found with 95 %: median {report.median_mde:.1%}, worst {report.worst_mde:.1%}"
    for case, share in report.worst_cases:
        yield f"  most alarms: {case}: {share:.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("baselines", nargs="+", type=Path, metavar="BASELINE.json")
    parser.add_argument("--splits", type=int, default=50)
    options = parser.parse_args()
    for path in options.baselines:
        print(path, *aa_lines(read_and_judge(path, splits=options.splits)), sep="\n")


if __name__ == "__main__":
    main()
