"""The ways in which a slowdown once ended green, as seeded sessions on simulated hosts; hosts of gate_simulation.py.

Rows have numbers: 1 drift over many merges, 2 the whole suite, 3 every arm,
4 an arm that imports the new code, 5 a base that cannot run, 6 an update, 7 some iterations, 8 settled in place.
"""

from __future__ import annotations

import dataclasses
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gate_imports import base_import
from benchmarks.gate_simulation import Host, Session, traits_of
from perfsuite.baselines import store
from perfsuite.baselines.baseline import Baseline, Entry, Hardware
from perfsuite.baselines.document import dumps
from perfsuite.baselines.draft import NewRuns, offered
from perfsuite.baselines.runs import CaseIdentity, RunSummary
from perfsuite.gate.evidence import GateCase
from perfsuite.gate.gate import Gate
from perfsuite.metrics import REGISTRY
from perfsuite.record.verdict import FAILING, GateSettings, SuiteVerdict, Verdict

STORED = 8
STORED_COMMIT, BASE_COMMIT = "a" * 40, "b" * 40
TORCH = ("packages.torch 2.14.0, stored 2.13.0",)
WITH_BASE = GateSettings(can_run_base=True, base_commit=BASE_COMMIT)
IN_PLACE = GateSettings(in_place=True)
HARDWARE = Hardware(platform="cpu", fingerprint="cpu-example", key={"cpu_model": "Example", "cores": 8})
Slower = Callable[[int, str], float]
"""Slowdown of a case (its index) on an arm: ``new``, ``base`` or ``anchor``."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a session ended."""

    verdicts: tuple[Verdict, ...]
    suite: SuiteVerdict | None = None
    refused: frozenset[int] = frozenset()
    """Cases that an update did not store, so that the run fails."""

    @property
    def fails(self) -> bool:
        """Whether its exit code is 1."""
        return (
            any(verdict.fails for verdict in self.verdicts)
            or bool(self.refused)
            or (self.suite is not None and self.suite.name in FAILING)
        )

    stored: bool = False
    """Whether an update stored a case that is slower."""

    def is_silent(self, slowed: int) -> bool:
        """Whether nobody was told of the slowdown of one of the first so many cases, nor that of the suite."""
        passed = any(verdict.name in ("pass", "improved") for verdict in self.verdicts[:slowed])
        return passed and not self.fails and self.suite is None


@dataclass(kw_only=True)
class Work:
    """What a session of the gate is about."""

    settings: GateSettings = WITH_BASE
    kind: str = "shift"
    """What is slower in a slowed case: all of it, or every so manieth iteration."""
    no_base: str = ""
    """Why the base cannot run any case."""
    environment: tuple[str, ...] = ()
    """What differs from the stored runs."""
    unclean: bool = False
    """Whether ranks are switched out in nearly every sample of this session."""


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

    def identities(self) -> list[CaseIdentity]:
        """The cases, of twenty kinds."""
        return [
            CaseIdentity(
                node=f"test_{case % 20}.py::test[{case}]",
                world_size=1,
                backend="gloo",
                parameters={"n": case},
                workload="m:W",
            )
            for case in range(self.cases)
        ]

    def judge(self, slower: Slower, work: Work) -> Outcome:
        """One session of the gate."""
        return self.session_runs(slower, work)[0]

    def session_runs(self, slower: Slower, work: Work) -> tuple[Outcome, Sequence[Sequence[RunSummary]]]:
        """One session of the gate, and the runs that an update would be offered: the fresh ones of a suspect."""
        identities = self.identities()
        index_of = {identity.node: index for index, identity in enumerate(identities)}
        gate = Gate(
            [
                GateCase(case=identity, specs=REGISTRY, stored=tuple(stored), environment_changes=work.environment)
                for identity, stored in zip(identities, self.stored, strict=True)
            ],
            work.settings,
        )
        now = self.session("now")
        runs: list[tuple[list[RunSummary], list[RunSummary]]] = [([], []) for _ in identities]

        def measure(case: int, arm: str) -> RunSummary:
            amount = slower(case, arm)
            run = now.run(case, slower=amount) if work.kind == "shift" or not amount else now.run(case, kind=work.kind)
            return dataclasses.replace(run, clean=2) if work.unclean else run

        def add(node: str) -> None:
            run = measure(index_of[node], "new")
            gate.add(node, run)
            runs[index_of[node]][gate.suspects(node)].append(run)

        def carry_out(node: str | None) -> None:
            while requests := gate.next_requests(node):
                for request in requests:
                    index = index_of[request.case]
                    if request.kind == "run":
                        add(request.case)
                    elif request.kind == "ab_pair" and work.no_base:
                        gate.without_base(request.case, work.no_base)
                    else:
                        older = "base" if request.kind == "ab_pair" else "anchor"
                        arms = (older, "new") if request.first == "base" else ("new", older)
                        pair = {arm: measure(index, arm) for arm in arms}
                        if older == "base":
                            gate.add_pair(request.case, base=pair[older], new=pair["new"])
                        else:
                            gate.add_anchor_pair(request.case, anchor=pair[older], new=pair["new"])

        for identity in identities:
            add(identity.node)
            if work.settings.in_place:
                carry_out(identity.node)
        if not work.settings.in_place:
            carry_out(None)
        outcome = Outcome(verdicts=tuple(gate.verdicts().values()), suite=gate.suite())
        return outcome, [again or first for first, again in runs]


def of_some(machine: Machine, slower: float, *faster_arms: str) -> Slower:
    """One case alone, or two of many, slower on every arm but these."""
    return lambda case, arm: slower if case < min(2, machine.cases) and arm not in faster_arms else 0.0


def drift(machine: Machine, slower: float) -> Outcome:
    """Row 1: it grew over many merges; the base, the last of them, is as slow, the stored commit is not."""
    return machine.judge(of_some(machine, slower, "anchor"), Work())


def suite(machine: Machine, slower: float) -> Outcome:
    """Row 2: every case is slower, and there is no base."""
    return machine.judge(lambda case, arm: slower, Work(settings=GateSettings()))


def environment(machine: Machine, slower: float) -> Outcome:
    """Row 3: a library was upgraded, so that every arm is slower."""
    return machine.judge(of_some(machine, slower), Work(environment=TORCH))


def unnamed(machine: Machine, slower: float) -> Outcome:
    """Row 3 where nothing recorded tells what changed."""
    return machine.judge(of_some(machine, slower), Work())


def imports(machine: Machine, slower: float) -> Outcome:
    """Row 4: the base arm imports what its layout and install make it import; the new code is slower."""
    base = base_import(machine.rng)
    fast_arms = ("base", "anchor") if base.own else ()
    why = "module shop was imported from outside of the tree of the revision" if base.refused else ""
    return machine.judge(of_some(machine, slower, *fast_arms), Work(no_base=why))


def without_base(machine: Machine, slower: float) -> Outcome:
    """Row 5: the base cannot run the case."""
    return machine.judge(of_some(machine, slower), Work(no_base="the base has no such case"))


def append(machine: Machine, slower: float) -> Outcome:
    """Row 6: runs of a slower case are offered to the baseline."""
    outcome, runs = machine.session_runs(of_some(machine, slower), Work(settings=GateSettings()))
    return _updated(machine, outcome, runs, min(2, machine.cases))


def append_all(machine: Machine, slower: float) -> Outcome:
    """Row 6 where every case is slower."""
    outcome, runs = machine.session_runs(lambda case, arm: slower, Work(settings=GateSettings()))
    return _updated(machine, outcome, runs, machine.cases)


def _updated(machine: Machine, outcome: Outcome, runs: Sequence[Sequence[RunSummary]], slowed: int) -> Outcome:
    """The session after ``--perf-update=append`` with these runs: only what the update refuses fails it."""
    identities = machine.identities()
    entries = {
        identity.key: Entry(case=identity, runs=tuple(_dated(run, 1 + number) for number, run in enumerate(stored)))
        for identity, stored in zip(identities, machine.stored, strict=True)
    }
    new = [
        offered(NewRuns(case=identity, runs=tuple(_dated(run, 20) for run in own)), verdict, outcome.suite)
        for identity, own, verdict in zip(identities, runs, outcome.verdicts, strict=True)
    ]
    with tempfile.TemporaryDirectory() as directory:
        path = store.path_of(Path(directory), HARDWARE)
        path.parent.mkdir()
        path.write_text(dumps(Baseline(hardware=HARDWARE, entries=entries)))
        report = store.update(Path(directory), HARDWARE, new, mode="append")
    refused = {index for index, identity in enumerate(identities) if identity.node in report.alarming}
    told = tuple(
        verdict if index in refused or not verdict.fails else dataclasses.replace(verdict, name="pass")
        for index, verdict in enumerate(outcome.verdicts)
    )
    suite = None if outcome.suite is None or outcome.suite.name in FAILING else outcome.suite
    return Outcome(verdicts=told, suite=suite, refused=frozenset(refused), stored=not refused.issuperset(range(slowed)))


def _dated(run: RunSummary, day: int) -> RunSummary:
    """The run at a time of its own: a simulated session counts its runs."""
    seconds = int(run.time)
    time = f"2026-01-{day:02d}T{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}+00:00"
    return dataclasses.replace(run, time=time)


def third(machine: Machine, slower: float) -> Outcome:
    """Row 7: every third iteration is twice as slow, whatever is asked for; no base."""
    return machine.judge(of_some(machine, slower), Work(settings=GateSettings(), kind="third"))


def tenth(machine: Machine, slower: float) -> Outcome:
    """Row 7: every tenth iteration takes ten times as long."""
    return machine.judge(of_some(machine, slower), Work(settings=GateSettings(), kind="tenth"))


def in_place(machine: Machine, slower: float) -> Outcome:
    """Row 8: a case settled when it ends (-x)."""
    return machine.judge(of_some(machine, slower), Work(settings=IN_PLACE))


def unclean(machine: Machine, slower: float) -> Outcome:
    """Row 8 where ranks are switched out in nearly every sample."""
    return machine.judge(of_some(machine, slower), Work(settings=IN_PLACE, unclean=True))


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way of being slower."""

    number: int
    """Its number in the list."""
    session: Callable[[Machine, float], Outcome]
    cases: tuple[int, ...] = (1,)
    """Sizes of the suite; two of many are slower where not all are."""
    slowdowns: tuple[float, ...] = (0.10,)
    all_slower: bool = False
    yardstick: float = 0.0
    """Share of a run's variance that its yardstick shows too; 0: none is timed."""

    def slowed(self, cases: int) -> int:
        """How many of a suite's cases are slower: the first."""
        return cases if self.all_slower else min(2, cases)


ROWS: Mapping[str, Row] = {
    "drift": Row(number=1, session=drift, cases=(1, 24)),
    "suite": Row(number=2, session=suite, cases=(1, 24), slowdowns=(0.10, 0.50, 4.0), all_slower=True),
    "environment": Row(number=3, session=environment),
    "unnamed": Row(number=3, session=unnamed),
    "imports": Row(number=4, session=imports),
    "without-base": Row(number=5, session=without_base),
    "append": Row(number=6, session=append, slowdowns=(0.10, 1.04)),
    "append-all": Row(number=6, session=append_all, cases=(24,), slowdowns=(0.10, 1.04), all_slower=True),
    "third": Row(number=7, session=third, slowdowns=(0.33,)),
    "tenth": Row(number=7, session=tenth, slowdowns=(0.90,)),
    "in-place": Row(number=8, session=in_place, slowdowns=(0.10, 1.0)),
    "unclean": Row(number=8, session=unclean, slowdowns=(1.0,)),
    "unclean-yard": Row(number=8, session=unclean, slowdowns=(1.0,), yardstick=0.3),
}
