"""How often a real slowdown ends green: each way in which one once did, as a seeded simulation.

    python benchmarks/gate_silence.py                      # the table of docs/gate.md, 2,000 trials per line
    python benchmarks/gate_silence.py --trials 200 --rows drift,suite
    python benchmarks/gate_silence.py --histories 100      # also 1 % per merge, merge by merge, and unchanged histories

A trial is *silent* when it ends with exit code 0 and does not name the case and the change: its verdict is pass, or
improved, and the suite's is none that fails.  Hosts as in gate_simulation.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.gate_simulation import HOSTS, Host, Session, traits_of
from perfsuite.baselines.runs import CaseIdentity, RunSummary
from perfsuite.gate.evidence import GateCase
from perfsuite.gate.gate import Gate
from perfsuite.gate.suite import SuiteVerdict
from perfsuite.gate.verdict import FAILING, GateSettings, Verdict

STORED = 8
STORED_COMMIT, BASE_COMMIT = "a" * 40, "b" * 40
TORCH = ("packages.torch 2.14.0, stored 2.13.0",)
WITH_BASE = GateSettings(can_run_base=True, base_commit=BASE_COMMIT)
Slower = Callable[[int, str], float]
"""Slowdown of a case (its index) on an arm: ``new``, ``base`` or ``anchor``."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a session ended."""

    verdicts: tuple[Verdict, ...]
    suite: SuiteVerdict | None

    @property
    def fails(self) -> bool:
        """Whether its exit code is 1."""
        return any(verdict.fails for verdict in self.verdicts) or (
            self.suite is not None and self.suite.name in FAILING
        )

    def is_silent(self, index: int) -> bool:
        """Whether nobody was told of the slowdown of this case."""
        return not self.fails and self.verdicts[index].name in ("pass", "improved")


class Machine:
    """One host with the stored runs of some cases; each session on it drifts in its own way."""

    def __init__(self, host: Host, seed: str, cases: int, *, commit: str = STORED_COMMIT) -> None:
        self.host, self.rng, self.cases = host, random.Random(seed), cases
        self.traits = traits_of(host, self.rng, cases)
        self.stored: list[list[RunSummary]] = [[] for _ in range(cases)]
        for number in range(STORED):
            session = self.session(f"s{number}")
            for case in range(cases):
                self.stored[case].append(dataclasses.replace(session.run(case), commit=commit))

    def session(self, name: str) -> Session:
        """A new session on this host."""
        return Session(self.host, self.rng, name, self.traits)

    def judge(self, slower: Slower, settings: GateSettings, *, no_base: bool = False, **given: object) -> Outcome:
        """One session of the gate; ``given`` are fields of every :class:`GateCase`."""
        nodes = [f"test_{case % 20}.py::test[{case}]" for case in range(self.cases)]
        index_of = {node: index for index, node in enumerate(nodes)}
        cases = [
            GateCase(
                case=CaseIdentity(node=node, world_size=1, backend="gloo", parameters={"n": index}, workload="m:W"),
                stored=tuple(self.stored[index]),
                **given,  # type: ignore[arg-type]  # fields of GateCase
            )
            for index, node in enumerate(nodes)
        ]
        now = self.session("now")

        def measure(case: int, arm: str) -> RunSummary:
            return now.run(case, slower=slower(case, arm))

        gate = Gate(cases, settings)

        def carry_out(node: str | None) -> None:
            while requests := gate.next_requests(node):
                for request in requests:
                    index = index_of[request.case]
                    if request.kind == "run":
                        gate.add(request.case, measure(index, "new"))
                    elif request.kind == "anchor_pair":
                        gate.add_anchor_pair(request.case, anchor=measure(index, "anchor"), new=measure(index, "new"))
                    elif no_base:
                        gate.without_base(request.case, "the base has no such case")
                    else:
                        gate.add_pair(request.case, base=measure(index, "base"), new=measure(index, "new"))

        for index, node in enumerate(nodes):
            gate.add(node, measure(index, "new"))
            if settings.in_place:
                carry_out(node)
        if not settings.in_place:
            carry_out(None)
        return Outcome(verdicts=tuple(gate.verdicts().values()), suite=gate.suite())


def drift(machine: Machine, slower: float) -> Outcome:
    """Row 1: it grew over many merges; the base, the last of them, is as slow, the stored commit is not."""
    return machine.judge(lambda case, arm: slower if case == 0 and arm != "anchor" else 0.0, WITH_BASE)


def suite(machine: Machine, slower: float) -> Outcome:
    """Row 2: every case is slower, and there is no base."""
    return machine.judge(lambda case, arm: slower, GateSettings())


def environment(machine: Machine, slower: float) -> Outcome:
    """Row 3: a library was upgraded, so that every arm is slower."""
    return machine.judge(lambda case, arm: slower if case == 0 else 0.0, WITH_BASE, environment_changes=TORCH)


def unnamed(machine: Machine, slower: float) -> Outcome:
    """Row 3 where nothing recorded tells what changed."""
    return machine.judge(lambda case, arm: slower if case == 0 else 0.0, WITH_BASE)


def without_base(machine: Machine, slower: float) -> Outcome:
    """Row 5: the base cannot run the case."""
    return machine.judge(lambda case, arm: slower if case == 0 else 0.0, WITH_BASE, no_base=True)


def in_place(machine: Machine, slower: float) -> Outcome:
    """A case settled when it ends (-x)."""
    settings = dataclasses.replace(GateSettings(), in_place=True)
    return machine.judge(lambda case, arm: slower if case == 0 else 0.0, settings)


ROWS: Mapping[str, Callable[[Machine, float], Outcome]] = {
    "drift": drift,
    "suite": suite,
    "environment": environment,
    "unnamed": unnamed,
    "without-base": without_base,
    "in-place": in_place,
}


@dataclass
class Tally:
    """What came of some trials."""

    trials: int = 0
    failed: int = 0
    silent: int = 0
    names: Counter[str] = dataclasses.field(default_factory=Counter)


def tally(row: str, host: str, cases: int, slower: float, trials: int) -> Tally:
    """Trials of one row on one host; suites of ``cases`` cases."""
    found = Tally()
    for number in range(trials):
        outcome = ROWS[row](Machine(HOSTS[host], f"{row}-{host}-{cases}-{slower}-{number}", cases), slower)
        found.trials += 1
        found.failed += outcome.fails
        found.silent += outcome.is_silent(0)
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

        outcome = machine.judge(slower, WITH_BASE)
        red += outcome.fails
        if outcome.fails and first is None:
            first = amount["new"]
    return History(reported_at=first, red=red)


def print_histories(hosts: list[str], count: int) -> None:
    """1 % per merge, and nothing at all."""
    print("\nhost  histories  1 % per merge: red by +5 %, median at  unchanged, 50 merges: histories with a red merge")
    for host in hosts:
        slow = [history(host, f"slow{number}", 8, 0.01) for number in range(count)]
        at = sorted(found.reported_at or 9.0 for found in slow)
        by = sum(found.reported_at is not None and found.reported_at <= 0.0511 for found in slow)
        still = [history(host, f"still{number}", 50, 0.0) for number in range(count)]
        false = sum(found.red > 0 for found in still)
        print(f"{host:<5} {count:>9}  {by / count:>24.1%}  {at[count // 2]:>9.1%}  {false:>30}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=2000, help="trials per line")
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--hosts", default="R1,R2,R3,R4")
    parser.add_argument("--cases", default="1,24", help="cases of a suite; one is slower, in row suite all are")
    parser.add_argument("--slowdowns", default="0.10")
    parser.add_argument("--histories", type=int, default=0, help="histories of merges per host")
    options = parser.parse_args()
    hosts = options.hosts.split(",")
    print("row           host  cases  slower  silent  failed  verdicts")
    for row in options.rows.split(",") if options.trials else ():
        for host in hosts:
            for cases in map(int, options.cases.split(",")):
                for slower in map(float, options.slowdowns.split(",")):
                    found = tally(row, host, cases, slower, options.trials)
                    told = ", ".join(f"{count} {name}" for name, count in found.names.most_common())
                    print(
                        f"{row:<13} {host:<5} {cases:>5}  {slower:>6.0%}  {found.silent:>6}  "
                        f"{found.failed / found.trials:>6.1%}  {told}",
                        flush=True,
                    )
    if options.histories:
        print_histories(hosts, options.histories)


if __name__ == "__main__":
    main()
