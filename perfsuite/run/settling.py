"""Execute the requests of one gate within a budget: fresh runs of a case, and A/B pairs with an older revision.

The gate decides but does not measure. This module measures, and reports cost and remaining budget to the gate.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from perfsuite.base.errors import PerfsuiteError, first_line
from perfsuite.base.units import plural
from perfsuite.baselines.summarise import changed_settings, summarise
from perfsuite.gate.budget import Costs, Spending
from perfsuite.gate.gate import Gate
from perfsuite.record.result import Result
from perfsuite.record.verdict import Request
from perfsuite.run.arms import Arm, ArmFailed, LiveArm

_OLDER = {"ab_pair": "base", "anchor_pair": "stored commit"}
_ARM_SPARE_S = 120.0  # Time limit of an arm beyond its cases, for the start of pytest and the import of torch.
_LIVE = 3  # Most arms that are alive together: the new code, the base, one commit of stored runs.
_OVERRUN_S = 60.0  # Time beyond the budget for an arm that began within it.
_REPORT_EVERY_S = 30.0
NO_LIMIT = float("inf")


class Say(Protocol):
    """Prints the progress of the settling."""

    def __call__(self, text: str, *, always: bool = False) -> None:
        """``always``: also with ``-q``."""


@dataclass(frozen=True, kw_only=True)
class Base:
    """Arms and options for runs of the base and the new code."""

    base: Arm
    new: Arm
    arguments: tuple[str, ...] = ()  # Options of this run that the arms share: scale, platform, time per case.
    case_deadline_s: Callable[[str], float]
    commit: str = ""  # Revision of the base; empty if unknown.
    anchor: Callable[[str], Arm] | None = None  # Makes the arm of a commit; raises PerfsuiteError without it.
    anchors: dict[str, Arm | str] = field(default_factory=dict)  # By commit: its arm, or the reason why there is none.

    def arm_of(self, commit: str) -> Arm | str:
        """Return the arm of a commit, made once, or the reason why there is none."""
        if commit not in self.anchors:
            try:
                none = "this session cannot make an arm of a commit"
                self.anchors[commit] = self.anchor(commit) if self.anchor else none
            except PerfsuiteError as error:
                self.anchors[commit] = first_line(error)
        return self.anchors[commit]


@dataclass(kw_only=True)
class GateClock:
    """Cost of further runs of one session, and the budget that is left for them."""

    asked_s: float | None = None  # Budget of the option; None: :func:`perfsuite.gate.budget.usual_s`.
    budget_s: float = NO_LIMIT
    now: Callable[[], float] = time.monotonic
    spent_s: float = 0.0  # Seconds of finished settlings.
    began_s: float | None = None
    run_s: dict[str, float] = field(default_factory=dict)  # Seconds of the last fresh run of each case.
    starts_s: list[float] = field(default_factory=list)  # Seconds of each arm in addition to its cases.

    @property
    def used_s(self) -> float:
        """Seconds of the budget that are used."""
        return self.spent_s + (self.now() - self.began_s if self.began_s is not None else 0.0)

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left; negative if it was exceeded."""
        return self.budget_s - self.used_s

    @property
    def costs(self) -> Costs:
        """Expected costs of requests from the runs so far."""
        usual_s = sum(self.run_s.values()) / len(self.run_s) if self.run_s else Costs.usual_run_s
        start_s = sum(self.starts_s) / len(self.starts_s) if self.starts_s else Costs.start_s
        return Costs(start_s=start_s, run_s=self.run_s, usual_run_s=usual_s)

    @property
    def is_limited(self) -> bool:
        """Whether there is a budget."""
        return self.budget_s != NO_LIMIT


@dataclass(kw_only=True)
class Settling:
    """One settling of a gate: of all cases of a session, or of one in place."""

    gate: Gate
    clock: GateClock
    say: Say
    rerun: Callable[[str], Result]
    add: Callable[[Result], None]  # Stores a further run of a case and passes it to the gate.
    base: Base | None = None
    made: int = 0  # Number of runs, those of pairs included.
    _expected: frozenset[str] = frozenset()  # Cases that pairs may need; arms can measure them all.
    _arms: dict[str, LiveArm] = field(default_factory=dict)  # Arms that are alive, by name.
    _total: int = 0
    _reported_s: float = 0.0

    def settle(self, node: str | None) -> str:
        """Execute the gate's requests until there are none; return why cases stay undecided if time ended."""
        self.clock.began_s = self._reported_s = self.clock.now()
        try:
            while requests := self.gate.next_requests(node, self._spending):
                self._report(requests, node)
                rest = list(requests)
                while rest and self.clock.left_s > 0:
                    kind = rest[0].kind
                    same = [request for request in rest if request.kind == kind]
                    rest = [request for request in rest if request.kind != kind]
                    self._run_again(same) if kind == "run" else self._run_pairs(same)
            ended = self.gate.end(self._why_ended, node) if self.clock.is_limited else ()
        finally:
            with contextlib.ExitStack() as closing:  # closes all of them, even if a second signal interrupts one
                for name in list(self._arms):
                    closing.callback(self._close, name)
            self.clock.spent_s, self.clock.began_s = self.clock.used_s, None
        return self._closing(ended)

    @property
    def _costs(self) -> Costs:
        alive = set(self._arms)
        both = {self.base.base.name, self.base.new.name} if self.base else set()
        return dataclasses.replace(
            self.clock.costs, starts={"ab_pair": len(both - alive), "anchor_pair": 0 if alive - both else 1}
        )

    @property
    def _spending(self) -> Spending | None:
        """Budget that the gate may spend; None without a limit."""
        if not self.clock.is_limited:
            return None
        return Spending(whole_s=self.clock.budget_s, left_s=self.clock.left_s, costs=self._costs)

    @property
    def _why_ended(self) -> str:
        return f"the gate's budget of {self.clock.budget_s:.0f} s ended"

    def _closing(self, ended: Collection[str]) -> str:
        """Print the last line; return it without the time if cases are undecided."""
        if not ended:
            if self.made:
                self.say(f"gate: settled by {plural(self.made, 'run')}, {self.clock.spent_s:.0f} s", always=True)
            return ""
        reason = f"{self._why_ended}: {plural(len(ended), 'case')} needed more runs (--perf-gate-budget)"
        self.say(f"gate: {reason}; {plural(self.made, 'run')}, {self.clock.spent_s:.0f} s", always=True)
        return reason

    def _report(self, requests: Sequence[Request], node: str | None) -> None:
        budget = f"budget {self.clock.budget_s:.0f} s" if self.clock.is_limited else "no budget"
        if not self._total:
            wanted = self.gate.outlook(node)
            cases = {case for counts in wanted.values() for case, count in counts.items() if count}
            runs = sum((1 if kind == "run" else 2) * sum(counts.values()) for kind, counts in wanted.items())
            self._total = max(runs, len(requests))
            self._expected = frozenset(node for node, count in wanted["ab_pair"].items() if count)
            need = f"{plural(len(cases), 'case')} may need up to {plural(self._total, 'run')}"
            self.say(f"gate: {need}, about {self._costs.of(wanted):.0f} s; {budget}", always=True)
        elif self.clock.now() - self._reported_s >= _REPORT_EVERY_S:
            self._reported_s = self.clock.now()
            used = f"{self.made} of up to {self._total} runs, {self.clock.used_s:.0f} s of {budget}"
            self.say(f"gate: {used}: {requests[0].why}", always=True)

    def _run_again(self, requests: Sequence[Request]) -> None:
        for number, request in enumerate(requests, start=1):
            if self.clock.left_s <= 0:
                return
            self._report([request], None)
            self.say(f"{request.why}: run {number} of {len(requests)}: {request.case}")
            began_s = self.clock.now()
            self.made += 1
            try:
                result = self.rerun(request.case)
            except PerfsuiteError as error:  # also a skip on a rank, which is not a CaseError
                self.gate.withdraw(request.case, f"it failed in a further run: {first_line(error)}")
                continue
            self.clock.run_s[request.case] = self.clock.now() - began_s
            self.add(result)

    def _run_pairs(self, requests: Sequence[Request]) -> None:
        gone: set[str] = set()  # cases that an arm did not measure: they get no further pairs
        for number, asked in enumerate(rounds(requests), start=1):
            turn = [request for request in asked if request.case not in gone]
            if not turn or self.clock.left_s <= 0:
                break
            self._report(turn, None)
            older = _OLDER[turn[0].kind]
            self.say(f"{turn[0].why}: pair {number}: {plural(len(turn), 'case')} on {older} and new code")
            gone.update(request.case for request in turn)
            for arm, group in self._older_arms(turn):
                gone.difference_update(self._run_pair(arm, group))

    def _older_arms(self, turn: Sequence[Request]) -> Iterator[tuple[Arm, list[Request]]]:
        """Yield the older arms of a turn, each with its requests."""
        assert self.base is not None, "the gate requests pairs only if a base can run"
        if turn[0].kind == "ab_pair":
            yield self.base.base, list(turn)
            return
        groups: dict[str, list[Request]] = {}
        for request in turn:
            groups.setdefault(self.gate.anchor_of(request.case), []).append(request)
        for commit, group in groups.items():
            arm = self.base.arm_of(commit)
            if isinstance(arm, Arm):
                yield arm, group
            else:
                for request in group:
                    self.gate.without_anchor(request.case, arm)

    def _run_pair(self, older: Arm, requests: Sequence[Request]) -> Iterator[str]:
        """Run a pair of each case in the order older, new, older, so that each arm comes first equally often.

        Yields the cases that both arms measured.
        """
        assert self.base is not None
        gate = self.gate
        first = [request.case for request in requests if request.first == "base"]
        last = [request.case for request in requests if request.first == "new"]
        then = self._arm(older, first)
        new = self._arm(self.base.new, [*(case for case in first if case in then), *last])
        then.update(self._arm(older, [case for case in last if case in new]))
        for case in [*first, *last]:
            changed = changed_settings(then[case], new[case]) if case in then and case in new else ""
            if changed:
                give_up = gate.without_base if older is self.base.base else gate.without_anchor
                give_up(case, f"{older.name} ran it with other settings: {changed}")
            elif case in then and case in new:
                old_run, new_run = summarise(then[case]), summarise(new[case])
                if older is self.base.base:
                    gate.add_pair(case, base=old_run, new=new_run)
                else:
                    gate.add_anchor_pair(case, anchor=old_run, new=new_run)
                yield case

    def _arm(self, arm: Arm, cases: Sequence[str]) -> dict[str, Result]:
        """Return an arm's results. A case that an older arm cannot run is judged without it; else it is withdrawn."""
        assert self.base is not None
        if not cases or self.clock.left_s <= 0:
            return {}
        give_up = self.gate.without_anchor
        if arm in (self.base.base, self.base.new):
            give_up = self.gate.without_base if arm is self.base.base else self.gate.withdraw
        deadline_s = _ARM_SPARE_S + sum(self.base.case_deadline_s(case) for case in cases)
        limit_s = min(deadline_s, self.clock.left_s + _OVERRUN_S)
        began_s = self.clock.now()
        self.made += len(cases)
        try:
            live = self._live(arm, cases, began_s + limit_s)
            turn_s = self.clock.now()
            results = live.measure(cases, began_s + limit_s - turn_s)
        except ArmFailed as failure:
            if limit_s < deadline_s and self.clock.now() - began_s >= limit_s:
                return {}  # the budget ended it, which is not a failure of the arm
            if len(cases) > 1 and not failure.whatever_case:
                # One case that the base does not have makes pytest refuse all of them.
                parts = [self._arm(arm, [case]) for case in cases]
                return {case: result for part in parts for case, result in part.items()}
            for case in cases:
                give_up(case, first_line(failure))
            return {}
        for case in cases:
            self.clock.run_s[case] = (self.clock.now() - turn_s) / len(cases)
            if case not in results:
                give_up(case, f"{arm.name} did not measure it")
        return results

    def _live(self, arm: Arm, cases: Sequence[str], until_s: float) -> LiveArm:
        """Return the live arm for these cases; start one if there is none, or if it failed before."""
        assert self.base is not None
        live = self._arms.get(arm.name)
        if live is not None and live.serves(cases):
            return live
        self._close(arm.name)
        while len(self._arms) >= _LIVE:
            self._close(next(name for name in self._arms if name != self.base.new.name))
        wider = [*cases, *sorted(self._expected - set(cases))]
        while True:
            began_s = self.clock.now()
            live = self._arms[arm.name] = LiveArm(arm, [*self.base.arguments, "--perf-yardstick"], wider)
            try:
                live.start(until_s - began_s)
            except ArmFailed:
                if len(wider) == len(cases) or self.clock.now() >= until_s:
                    raise
                self._expected, wider = frozenset(), [*cases]  # it may be unable to collect one of the others
            else:
                self.clock.starts_s.append(self.clock.now() - began_s)
                return live

    def _close(self, name: str) -> None:
        live = self._arms.pop(name, None)
        if live is not None:
            live.close()


def rounds(requests: Sequence[Request]) -> list[list[Request]]:
    """Return the requests in rounds of which each runs a case at most once.

    >>> [[request.case for request in turn] for turn in rounds([Request(case=c, kind="ab_pair") for c in "abab"])]
    [['a', 'b'], ['a', 'b']]
    """
    turns: list[list[Request]] = []
    for request in requests:
        if not turns or any(earlier.case == request.case for earlier in turns[-1]):
            turns.append([])
        turns[-1].append(request)
    return turns
