"""Carries out what one gate asks for, within a budget: fresh runs of a case, and A/B pairs with an older revision.

The gate decides and never measures; this measures, keeps the time, and tells the gate what runs cost and what is left.
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
_ARM_SPARE_S = 120.0
"""What an arm may take beyond its cases: starting pytest, importing torch."""
_LIVE = 3
"""Arms that are alive at once: the new code, the base, one commit of stored runs."""
_OVERRUN_S = 60.0
"""What an arm that began within the budget may take beyond what it was expected to."""
_TELL_EVERY_S = 30.0
NO_LIMIT = float("inf")


class Say(Protocol):
    """Tells people how far the settling is."""

    def __call__(self, text: str, *, always: bool = False) -> None:
        """``always``: with ``-q`` too."""


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
    anchors: dict[str, Arm | str] = field(default_factory=dict)
    """By commit: its arm, or why there is none."""

    def arm_of(self, commit: str) -> Arm | str:
        """Return the arm of a commit, made once, or why there is none."""
        if commit not in self.anchors:
            try:
                self.anchors[commit] = (
                    self.anchor(commit) if self.anchor else "this session can make no arm of a commit"
                )
            except PerfsuiteError as error:
                self.anchors[commit] = first_line(error)
        return self.anchors[commit]


@dataclass(kw_only=True)
class Clock:
    """What further runs of one session cost, and what is left for them."""

    asked_s: float | None = None
    """The budget that was asked for; None: :func:`perfsuite.gate.budget.usual_s`."""
    budget_s: float = NO_LIMIT
    now: Callable[[], float] = time.monotonic
    spent_s: float = 0.0
    """In settlings that have ended."""
    began_s: float | None = None
    run_s: dict[str, float] = field(default_factory=dict)
    """The last fresh run of each case."""
    starts_s: list[float] = field(default_factory=list)
    """What each arm took beside its cases."""

    @property
    def used_s(self) -> float:
        """Seconds of the budget that are gone."""
        return self.spent_s + (self.now() - self.began_s if self.began_s is not None else 0.0)

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left; below 0 where it was overrun."""
        return self.budget_s - self.used_s

    @property
    def costs(self) -> Costs:
        """What requests cost by the runs so far."""
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
    clock: Clock
    say: Say
    rerun: Callable[[str], Result]
    add: Callable[[Result], None]
    """Keeps a further run of a case and gives it to the gate."""
    base: Base | None = None
    made: int = 0
    """Runs, those of pairs included."""
    _expected: frozenset[str] = frozenset()
    """Cases that pairs may be asked for; arms can measure them all."""
    _arms: dict[str, LiveArm] = field(default_factory=dict)
    """Arms that are alive, by name."""
    _total: int = 0
    _told_s: float = 0.0

    def settle(self, node: str | None) -> str:
        """Run what the gate asks for until it asks for nothing; return why cases stay undecided, if time ended."""
        self.clock.began_s = self._told_s = self.clock.now()
        try:
            while requests := self.gate.next_requests(node, self._spending):
                self._tell(requests, node)
                rest = list(requests)
                while rest and self.clock.left_s > 0:
                    kind = rest[0].kind
                    same = [request for request in rest if request.kind == kind]
                    rest = [request for request in rest if request.kind != kind]
                    self._run_again(same) if kind == "run" else self._run_pairs(same)
            ended = self.gate.end(self._why_ended, node) if self.clock.is_limited else ()
        finally:
            with contextlib.ExitStack() as closing:  # all of them, also where a second signal comes meanwhile
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
        """What the gate may ask for; None without a limit."""
        if not self.clock.is_limited:
            return None
        return Spending(whole_s=self.clock.budget_s, left_s=self.clock.left_s, costs=self._costs)

    @property
    def _why_ended(self) -> str:
        return f"the gate's budget of {self.clock.budget_s:.0f} s ended"

    def _closing(self, ended: Collection[str]) -> str:
        """The last line; the same without the time where cases are undecided."""
        if not ended:
            if self.made:
                self.say(f"gate: settled by {plural(self.made, 'run')}, {self.clock.spent_s:.0f} s", always=True)
            return ""
        told = f"{self._why_ended}: {plural(len(ended), 'case')} needed more runs (--perf-gate-budget)"
        self.say(f"gate: {told}; {plural(self.made, 'run')}, {self.clock.spent_s:.0f} s", always=True)
        return told

    def _tell(self, requests: Sequence[Request], node: str | None) -> None:
        """The plan at the beginning, and now and then how far it is."""
        budget = f"budget {self.clock.budget_s:.0f} s" if self.clock.is_limited else "no budget"
        if not self._total:
            wanted = self.gate.outlook(node)
            cases = {case for counts in wanted.values() for case, count in counts.items() if count}
            runs = sum((1 if kind == "run" else 2) * sum(counts.values()) for kind, counts in wanted.items())
            self._total = max(runs, len(requests))
            self._expected = frozenset(node for node, count in wanted["ab_pair"].items() if count)
            told = f"{plural(len(cases), 'case')} may need up to {plural(self._total, 'run')}"
            self.say(f"gate: {told}, about {self._costs.of(wanted):.0f} s; {budget}", always=True)
        elif self.clock.now() - self._told_s >= _TELL_EVERY_S:
            self._told_s = self.clock.now()
            used = f"{self.made} of up to {self._total} runs, {self.clock.used_s:.0f} s of {budget}"
            self.say(f"gate: {used}: {requests[0].why}", always=True)

    def _run_again(self, requests: Sequence[Request]) -> None:
        for number, request in enumerate(requests, start=1):
            if self.clock.left_s <= 0:
                return
            self._tell([request], None)
            self.say(f"{request.why}: run {number} of {len(requests)}: {request.case}")
            began_s = self.clock.now()
            self.made += 1
            try:
                result = self.rerun(request.case)
            except PerfsuiteError as error:  # a skip on a rank is none of CaseError
                self.gate.withdraw(request.case, f"it failed when it was run again: {first_line(error)}")
                continue
            self.clock.run_s[request.case] = self.clock.now() - began_s
            self.add(result)

    def _run_pairs(self, requests: Sequence[Request]) -> None:
        gone: set[str] = set()  # cases that an arm did not measure: their further pairs are not run
        for number, asked in enumerate(rounds(requests), start=1):
            turn = [request for request in asked if request.case not in gone]
            if not turn or self.clock.left_s <= 0:
                break
            self._tell(turn, None)
            self.say(
                f"{turn[0].why}: pair {number}: {plural(len(turn), 'case')} on {_OLDER[turn[0].kind]} and new code"
            )
            gone.update(request.case for request in turn)
            for older, group in self._older_arms(turn):
                gone.difference_update(self._run_pair(older, group))

    def _older_arms(self, turn: Sequence[Request]) -> Iterator[tuple[Arm, list[Request]]]:
        """The arms that the requests of a turn want beside the new code, each with its requests."""
        assert self.base is not None, "the gate asks for pairs only where a base can run"
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
        """A pair of each of these cases: older, new, older, so that neither comes first more often.

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
        """What an arm measured.  A case that an older arm cannot run is judged without it; ours ends where it fails."""
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
                return {}  # the budget ended it: nothing is known of the arm
            if len(cases) > 1 and not failure.whatever_case:
                # One case that the base does not have makes pytest refuse them all.
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
        """The live arm for these cases, started where there is none; one that failed before is started anew."""
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
                self._expected, wider = frozenset(), [*cases]  # one of the others may be what it cannot collect
            else:
                self.clock.starts_s.append(self.clock.now() - began_s)
                return live

    def _close(self, name: str) -> None:
        live = self._arms.pop(name, None)
        if live is not None:
            live.close()


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
