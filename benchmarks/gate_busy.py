"""False alarms of the gate on a lone case that was stored on a quiet machine and runs while busy loops take the cores.

    python benchmarks/gate_busy.py [--runs 24] [--loops 2] [--draws 200] [--slower 1] [--cases NAME,NAME]

Each case of gate_mixed.py runs in fresh processes: on the quiet machine and with the loops, with the same and with more
work.  Each draw stores five consecutive runs of the quiet machine and gives the gate consecutive runs of one condition.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import random
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.gate_budget import busy
from benchmarks.gate_mixed import CASES, Bench, forking_driver
from perfsuite.baselines.runs import CaseIdentity, RunSummary
from perfsuite.baselines.summarise import case_of, summarise
from perfsuite.gate.evidence import GateCase
from perfsuite.gate.gate import Gate
from perfsuite.metrics import REGISTRY
from perfsuite.record.verdict import FAILING, GateSettings

STORED = 5


def verdict_of(case: CaseIdentity, stored: Sequence[RunSummary], runs: Sequence[RunSummary], first: int) -> str:
    """Return the verdict on consecutive runs from number ``first``; the first run follows the last one."""
    gate = Gate([GateCase(case=case, specs=REGISTRY, stored=tuple(stored))], GateSettings())
    following = enumerate(itertools.islice(itertools.cycle(runs), first, None))
    wanted = 1
    while wanted:
        for number, run in itertools.islice(following, wanted):
            gate.add(case.node, dataclasses.replace(run, session="now", ordinal=number))
        wanted = len(gate.next_requests())
    return gate.verdict(case.node).name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=24, help="runs of each case in each condition")
    parser.add_argument("--loops", type=int, default=2)
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--slower", type=float, default=1.0, help="how much more work the slower code does")
    parser.add_argument("--cases", default=",".join(CASES))
    options = parser.parse_args()
    conditions = {
        "stored": (0, 0.0),
        "quiet": (0, 0.0),
        "busy": (options.loops, 0.0),
        "quiet, slower": (0, options.slower),
        "busy, slower": (options.loops, options.slower),
    }
    red: Counter[str] = Counter()
    with forking_driver() as driver:
        bench = Bench(driver, one_kind=False)
        for name in options.cases.split(","):
            runs: dict[str, list[RunSummary]] = {}
            for condition, (loops, slower) in conditions.items():
                with busy(loops):
                    results = [bench.result(name, "stored", 1 + slower) for _ in range(options.runs)]
                runs[condition] = [summarise(result, ordinal=number) for number, result in enumerate(results)]
            draw, case = random.Random(0), case_of(results[0])
            stored = runs.pop("stored")
            for condition, now in runs.items():
                names: Counter[str] = Counter()
                for _ in range(options.draws):
                    start = draw.randrange(options.runs - STORED + 1)
                    chosen = stored[start : start + STORED]
                    names[verdict_of(case, chosen, now, draw.randrange(options.runs))] += 1
                red[condition] += sum(count for verdict, count in names.items() if verdict in FAILING)
                print(f"{name}, {condition}: {dict(names.most_common())}", flush=True)
    draws = options.draws * len(options.cases.split(","))
    print("; ".join(f"{condition}: {red[condition]} of {draws} red" for condition in runs))


if __name__ == "__main__":
    main()
