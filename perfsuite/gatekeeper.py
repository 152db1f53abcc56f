"""Carries out what the gate asks for: fresh runs of a case, and A/B pairs with a base revision.

The gate decides and never measures, the session measures and never decides; this is what stands between them, without
pytest.  Stored runs come from the baseline file of this hardware.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from perfsuite.arms import Arm, ArmFailed, run_arm
from perfsuite.baselines import store
from perfsuite.baselines.baseline import Baseline, Entry, Hardware
from perfsuite.baselines.draft import NewRuns, UpdateMode
from perfsuite.baselines.runs import CaseIdentity, RunSummary
from perfsuite.baselines.summarise import case_of, changed_settings, summarise
from perfsuite.errors import PerfsuiteError, first_line
from perfsuite.gate.aa import AaReport, a_a
from perfsuite.gate.comparable import gate_case
from perfsuite.gate.evidence import GateCase
from perfsuite.gate.gate import Gate
from perfsuite.gate.offer import offered
from perfsuite.gate.physics import violations
from perfsuite.gate.suite import SuiteVerdict
from perfsuite.gate.verdict import INSTRUMENTED, GateSettings, Request, Verdict
from perfsuite.records import Result
from perfsuite.units import plural

_OLDER = {"ab_pair": "base", "anchor_pair": "stored commit"}
_ARM_SPARE_S = 120.0
"""What an arm may take beyond its cases: starting pytest, importing torch."""


class Rerunner(Protocol):
    """What the keeper needs of :class:`perfsuite.session.PerfSession`."""

    def rerun(self, case_id: str, *, fresh: bool = True) -> Result:
        """Run a case of this session once more."""


@dataclass(frozen=True, kw_only=True)
class Base:
    """How to run the base and the new code side by side."""

    base: Arm
    new: Arm
    arguments: tuple[str, ...] = ()
    """Options of this run that the arms share: scale, platform, time per case."""
    case_deadline_s: Callable[[str], float]
    commit: str = ""
    """Revision of the base; empty where it is not known."""
    anchor: Callable[[str], Arm] | None = None
    """Makes the arm of a commit; raises PerfsuiteError where this repository does not have it."""


@dataclass(frozen=True, kw_only=True)
class Tolerances:
    """What a case's own marker accepts."""

    time: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(kw_only=True)
class _Taken:
    """What the keeper has of one case."""

    identity: CaseIdentity
    first: Result
    """The first run's result."""
    tolerances: Tolerances
    runs: list[RunSummary] = field(default_factory=list)
    """Every usable run of this session."""
    again: list[RunSummary] = field(default_factory=list)
    """Those of them that came after a suspicion: they alone decide, and are stored."""
    broken: list[str] = field(default_factory=list)
    """Why a run is impossible or no measurement."""

    @property
    def instrumented(self) -> str:
        """Why its times cannot be compared or stored; empty where its ranks ran as usual."""
        return f"{INSTRUMENTED}{', '.join(self.first.instruments)}" if self.first.instruments else ""


class Gatekeeper:
    """One session's gate: takes every result, settles the verdicts, offers the runs to the baseline."""

    def __init__(
        self,
        *,
        session: Rerunner,
        settings: GateSettings,
        hardware: Hardware,
        folder: Path,
        backend: str = "",
        base: Base | None = None,
        commit: str = "",
        boot: str = "",
        links: bool = False,
        disturbance: Callable[[], str] = str,
    ) -> None:
        """``backend`` stands in for cases that ran out of memory before their group was made.

        ``commit`` and ``boot`` tell which sessions are one session of the machine; empty where they are not known.
        ``links`` allows a baseline file that is a symbolic link out of ``folder``.
        ``disturbance`` is asked after every run what telemetry saw on the devices; empty when nothing.

        Raises BaselineError when the file of this hardware is damaged.
        """
        self.settings = dataclasses.replace(
            settings, can_run_base=base is not None, base_commit=base.commit if base else ""
        )
        self.hardware = hardware
        self.folder = folder
        self.baseline: Baseline | None = store.load(folder, hardware, links=links)
        self._session = session
        self._base = base
        self._backend = backend
        self._disturbance = disturbance
        self._commit = commit
        self._boot = boot
        self._links = links
        self._taken: dict[str, _Taken] = {}
        self.verdicts: dict[str, Verdict] = {}
        self.covered: set[str] = set()
        """Cases with enough stored runs to be compared with."""
        self.banner: tuple[str, ...] = ()
        """What a reader must know about the session as a whole."""
        self.suite: SuiteVerdict | None = None
        """The verdict on the session as a whole, where its cases are slower together."""
        self._anchors: dict[str, Arm | str] = {}
        """By commit: its arm, or why there is none."""

    def stored(self, nodes: Iterable[str]) -> list[Entry]:
        """The entries of these node ids on this hardware, before anything is measured."""
        known = self.baseline.by_node if self.baseline else {}
        return [entry for node in nodes for entry in known.get(node, ())]

    def take(self, result: Result, tolerances: Tolerances) -> None:
        """Take in the first run of a case."""
        if result.case not in self._taken:
            identity = case_of(result, backend=self._backend)
            self._taken[result.case] = _Taken(identity=identity, first=result, tolerances=tolerances)
        self._add_run(result)

    @property
    def instrumented(self) -> Mapping[str, str]:
        """Cases that are not compared because tools or debug settings slowed their ranks, with the reason."""
        return {node: taken.instrumented for node, taken in self._taken.items() if taken.instrumented}

    @property
    def taken(self) -> Collection[str]:
        """Node ids of the cases that were taken in, in order."""
        return self._taken.keys()

    def take_again(self, result: Result) -> None:
        """Take in one more run of a case that was taken in before."""
        self._add_run(result)

    def settle(self, say: Callable[[str], None]) -> Mapping[str, Verdict]:
        """Run what the gate asks for until every verdict stands; ``say`` is told what is being run."""
        gate = self._gate(self._taken.values(), self.settings)
        self._carry_out(gate, None, say)
        self.verdicts = gate.verdicts()
        self.covered = set(gate.covered)
        self.banner = gate.banner()
        self.suite = gate.suite()
        return self.verdicts

    def settle_one(self, node: str, planned: int, say: Callable[[str], None]) -> Verdict:
        """Settle one case right after it ran, without what the rest of the suite would tell (-x, --maxfail, --pdb)."""
        settings = dataclasses.replace(self.settings, in_place=True, planned_cases=planned)
        gate = self._gate([self._taken[node]], settings)
        self._carry_out(gate, node, say)
        self.verdicts[node] = gate.verdict(node)
        self.covered |= set(gate.covered)
        return self.verdicts[node]

    def a_a(self) -> AaReport:
        """What the gate says of this session's own equal runs."""
        runs = {node: taken.runs for node, taken in self._taken.items()}
        return a_a([taken.identity for taken in self._taken.values()], runs, self.settings)

    def offered(self, *, accepted: bool = False) -> list[NewRuns]:
        """Every fresh run of this session, for :func:`perfsuite.baselines.store.update`.

        Of a case that was measured again only the later runs: the first were suspected because they stood out.  Where
        the change is ``accepted`` nothing stands out, and fewer runs would be too few to compare the next session with.
        """
        measured = [(node, taken) for node, taken in self._taken.items() if taken.runs or taken.broken]
        return [self._offer(node, taken, accepted) for node, taken in measured]

    def _offer(self, node: str, taken: _Taken, accepted: bool) -> NewRuns:
        verdict = self.verdicts.get(node)
        new = NewRuns(
            case=taken.identity,
            runs=tuple(taken.runs if accepted else taken.again or taken.runs),
            verdict="impossible" if taken.broken else None,
            seen=f"impossible: {taken.broken[0]}" if taken.broken else "",
            tolerance=taken.tolerances.time or self.settings.tolerance,
            instrumented=taken.instrumented,
        )
        if verdict is None or taken.broken:
            return new
        return offered(new, verdict, self.suite)

    def update(self, mode: UpdateMode, reason: str, session_runs: int) -> store.UpdateReport:
        """Add this session's runs to the baseline file."""
        return store.update(
            self.folder,
            self.hardware,
            self.offered(accepted=mode in ("accept", "environment")),
            mode=mode,
            reason=reason,
            session_runs=session_runs,
            commit_info={"id": self._commit} if self._commit else None,
            links=self._links,
        )

    # -- between gate and session --------------------------------------------------------------------------------

    def _gate(self, cases: Collection[_Taken], settings: GateSettings) -> Gate:
        given = [
            gate_case(
                taken.identity,
                environment=taken.first.environment,
                baseline=self.baseline,
                hardware=self.hardware,
                folder=self.folder,
                tolerance=taken.tolerances.time,
                metric_tolerances=taken.tolerances.metrics,
            )
            if not taken.instrumented
            else GateCase(case=taken.identity, refusal="not-comparable", reasons=(taken.instrumented,))
            for taken in cases
        ]
        gate = Gate(given, settings)
        for taken in cases:
            for run in taken.runs:
                gate.add(taken.identity.node, run)
            gate.add_impossible(taken.identity.node, taken.broken)
        return gate

    def _add_run(self, result: Result) -> RunSummary | None:
        taken = self._taken[result.case]
        taken.broken.extend(str(violation) for violation in violations(result))
        if result.instruments and not taken.instrumented:
            taken.broken.append(f"a later run was instrumented: {', '.join(result.instruments)}")
        ordinal = len(taken.runs)
        try:
            run = summarise(
                result, ordinal=ordinal, commit=self._commit, boot=self._boot, disturbance=self._disturbance()
            )
        except ValueError as unusable:
            taken.broken.append(str(unusable))
            return None
        taken.runs.append(run)
        return run

    def _carry_out(self, gate: Gate, node: str | None, say: Callable[[str], None]) -> None:
        while requests := gate.next_requests(node):
            rest = list(requests)
            while rest:
                kind = rest[0].kind
                same = [request for request in rest if request.kind == kind]
                rest = [request for request in rest if request.kind != kind]
                if kind == "run":
                    self._run_again(gate, same, say)
                else:
                    self._run_pairs(gate, same, say)

    def _run_again(self, gate: Gate, requests: Sequence[Request], say: Callable[[str], None]) -> None:
        for number, request in enumerate(requests, start=1):
            say(f"{request.why}: run {number} of {len(requests)}: {request.case}")
            try:
                result = self._session.rerun(request.case, fresh=True)
            except PerfsuiteError as error:  # a skip on a rank is none of CaseError
                gate.withdraw(request.case, f"it failed when it was run again: {first_line(error)}")
                continue
            run = self._add_run(result)
            broken = self._taken[request.case].broken
            if broken:
                gate.add_impossible(request.case, broken)
            elif run is not None:
                gate.add(request.case, run)
                if gate.suspects(request.case):
                    self._taken[request.case].again.append(run)

    def _run_pairs(self, gate: Gate, requests: Sequence[Request], say: Callable[[str], None]) -> None:
        gone: set[str] = set()  # cases that an arm did not measure: their further pairs are not run
        for number, asked in enumerate(rounds(requests), start=1):
            turn = [request for request in asked if request.case not in gone]
            if not turn:
                break
            say(f"{turn[0].why}: pair {number}: {plural(len(turn), 'case')} on {_OLDER[turn[0].kind]} and new code")
            gone.update(request.case for request in turn)
            for older, group in self._older_arms(gate, turn):
                gone.difference_update(self._run_pair(gate, older, group))

    def _older_arms(self, gate: Gate, turn: Sequence[Request]) -> Iterator[tuple[Arm, list[Request]]]:
        """The arms that the requests of a turn want beside the new code, each with its requests."""
        assert self._base is not None, "the gate asks for pairs only where a base can run"
        if turn[0].kind == "ab_pair":
            yield self._base.base, list(turn)
            return
        groups: dict[str, list[Request]] = {}
        for request in turn:
            groups.setdefault(gate.anchor_of(request.case), []).append(request)
        for commit, group in groups.items():
            arm = self._anchor(commit)
            if isinstance(arm, Arm):
                yield arm, group
            else:
                for request in group:
                    gate.without_anchor(request.case, arm)

    def _anchor(self, commit: str) -> Arm | str:
        if commit not in self._anchors:
            assert self._base is not None
            try:
                self._anchors[commit] = (
                    self._base.anchor(commit) if self._base.anchor else "this session can make no arm of a commit"
                )
            except PerfsuiteError as error:
                self._anchors[commit] = first_line(error)
        return self._anchors[commit]

    def _run_pair(self, gate: Gate, older: Arm, requests: Sequence[Request]) -> Iterator[str]:
        """A pair of each of these cases: older, new, older, so that neither comes first more often.

        Yields the cases that both arms measured.
        """
        assert self._base is not None
        first = [request.case for request in requests if request.first == "base"]
        last = [request.case for request in requests if request.first == "new"]
        then = self._arm(gate, older, first)
        new = self._arm(gate, self._base.new, [*(case for case in first if case in then), *last])
        then.update(self._arm(gate, older, last))
        for case in [*first, *last]:
            changed = changed_settings(then[case], new[case]) if case in then and case in new else ""
            if changed:
                give_up = gate.without_base if older is self._base.base else gate.without_anchor
                give_up(case, f"{older.name} ran it with other settings: {changed}")
            elif case in then and case in new:
                old_run, new_run = summarise(then[case]), summarise(new[case])
                if older is self._base.base:
                    gate.add_pair(case, base=old_run, new=new_run)
                else:
                    gate.add_anchor_pair(case, anchor=old_run, new=new_run)
                yield case

    def _arm(self, gate: Gate, arm: Arm, cases: Sequence[str]) -> dict[str, Result]:
        """What an arm measured.  A case that an older arm cannot run is judged without it; ours ends where it fails."""
        assert self._base is not None
        if not cases:
            return {}
        give_up = gate.without_anchor
        if arm in (self._base.base, self._base.new):
            give_up = gate.without_base if arm is self._base.base else gate.withdraw
        deadline_s = _ARM_SPARE_S + sum(self._base.case_deadline_s(case) for case in cases)
        try:
            results = dict(run_arm(arm, [*self._base.arguments, "--perf-yardstick", *cases], deadline_s))
        except ArmFailed as failure:
            if failure.whatever_case:
                for case in cases:
                    give_up(case, first_line(failure))
                return {}
            if len(cases) > 1:  # one case that the base does not have makes pytest refuse them all
                parts = [self._arm(gate, arm, [case]) for case in cases]
                return {case: result for part in parts for case, result in part.items()}
            give_up(cases[0], first_line(failure))
            return {}
        for case in cases:
            if case not in results:
                give_up(case, f"{arm.name} did not measure it")
        return results


def rounds(requests: Sequence[Request]) -> list[list[Request]]:
    """Successive requests cut where a case would come a second time, so that each round runs a case at most once.

    >>> [[request.case for request in turn] for turn in rounds([Request(case=c, kind="ab_pair") for c in "abab"])]
    [['a', 'b'], ['a', 'b']]
    """
    turns: list[list[Request]] = []
    for request in requests:
        if not turns or any(earlier.case == request.case for earlier in turns[-1]):
            turns.append([])
        turns[-1].append(request)
    return turns


def hardware_of(fingerprint: Any, platform: str, simulated: bool) -> Hardware:
    """The hard key as a baseline file keeps it."""
    return Hardware(platform=platform, fingerprint=fingerprint.key, key=dict(fingerprint.parts), simulated=simulated)
