"""One session's gate, without pytest: collects results, has the verdicts settled, offers the runs to the baseline.

The gate decides but does not measure; :mod:`perfsuite.run.settling` executes its requests. Stored runs come from the
baseline file of this hardware.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from perfsuite.base.errors import BaselineError
from perfsuite.base.units import plural
from perfsuite.baselines import store
from perfsuite.baselines.baseline import Baseline, Entry, Hardware
from perfsuite.baselines.draft import Draft, NewRuns, UpdateMode, offered
from perfsuite.baselines.runs import CaseIdentity, RunSummary
from perfsuite.baselines.summarise import case_of, summarise
from perfsuite.gate.budget import usual_s
from perfsuite.gate.comparable import gate_case
from perfsuite.gate.evidence import GateCase
from perfsuite.gate.gate import Gate
from perfsuite.gate.physics import violations
from perfsuite.metrics import REGISTRY
from perfsuite.record.result import Result
from perfsuite.record.verdict import INSTRUMENTED, GateSettings, SuiteVerdict, Verdict
from perfsuite.run.settling import Base, GateClock, Say, Settling


class Rerunner(Protocol):
    """The part of :class:`perfsuite.run.session.PerfSession` that the keeper uses."""

    def rerun(self, case_id: str, *, fresh: bool = True) -> Result:
        """Run a case of this session once more."""


Tolerances = tuple[float | None, Mapping[str, float]]
"""Tolerances of a case's own marker: of its time, None for the usual one, and of metrics by name."""


@dataclass(kw_only=True)
class _Taken:
    identity: CaseIdentity
    first: Result  # Result of the first run.
    tolerances: Tolerances
    runs: list[RunSummary] = field(default_factory=list)  # Every usable run of this session.
    again: list[RunSummary] = field(default_factory=list)  # Runs after a suspicion: only these count.
    broken: list[str] = field(default_factory=list)  # Reasons why runs are impossible or invalid.

    @property
    def instrumented(self) -> str:
        """Why its times cannot be compared or stored; empty if its ranks were not instrumented."""
        return f"{INSTRUMENTED}{', '.join(self.first.instruments)}" if self.first.instruments else ""


class Gatekeeper:
    """One session's gate: collects results, settles the verdicts, offers the runs to the baseline."""

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
        clock: GateClock | None = None,
    ) -> None:
        """Load the baseline file of this hardware; raise BaselineError if it is damaged.

        ``backend`` is used for cases that ran out of memory before their group was made. Equal ``commit`` and ``boot``
        identify runs of one machine session; empty if unknown. ``links`` allows a baseline file that is a symbolic link
        out of ``folder``. ``clock`` has the budget of the gate beyond the first runs. ``disturbance`` returns, after
        every run, the telemetry's reasons for disturbed devices; empty without any.
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
        self.covered: set[str] = set()  # Cases with enough stored runs for a comparison.
        self.banner: tuple[str, ...] = ()  # Remarks about the session as a whole.
        self.suite: SuiteVerdict | None = None  # Verdict on the session as a whole, if its cases are slower together.
        self.clock = clock or GateClock()
        self._hosts: Counter[str] = Counter()  # Number of cases by remark about the hosts of their stored runs.
        self._open: Gate | None = None  # The gate of the current or last settling.

    def stored(self, nodes: Iterable[str]) -> list[Entry]:
        """Return the entries of these node ids on this hardware, before the measurement."""
        by_node = self.baseline.by_node if self.baseline else {}
        return [entry for node in nodes for entry in by_node.get(node, ())]

    def take(self, result: Result, tolerances: Tolerances) -> None:
        """Add the first run of a case."""
        if result.case not in self._taken:
            identity = case_of(result, backend=self._backend)
            self._taken[result.case] = _Taken(identity=identity, first=result, tolerances=tolerances)
            if result.took_s:
                self.clock.run_s[result.case] = result.took_s
        self.take_again(result)

    @property
    def instrumented(self) -> Mapping[str, str]:
        """Cases that are not compared because tools or debug settings slowed their ranks, with the reason."""
        return {node: taken.instrumented for node, taken in self._taken.items() if taken.instrumented}

    @property
    def taken(self) -> Collection[str]:
        """Node ids of the cases with a run, in order."""
        return self._taken.keys()

    def take_again(self, result: Result) -> RunSummary | None:
        """Add one more run of a case; return None if it is not a valid measurement."""
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

    def settle(self, say: Say) -> Mapping[str, Verdict]:
        """Execute the gate's requests until all verdicts are certain or the budget ends; ``say`` prints progress."""
        self._open = None
        self._open = gate = self._gate(self._taken.values(), self.settings)
        return self._keep(gate, self._settling(gate, say).settle(None))

    def settle_one(self, node: str, planned: int, say: Say) -> Verdict:
        """Settle one case right after it ran, without data of the other cases (-x, --maxfail, --pdb)."""
        settings = dataclasses.replace(self.settings, in_place=True, planned_cases=planned)
        self._open = None
        self._open = gate = self._gate([self._taken[node]], settings)
        ended = self._settling(gate, say).settle(node)
        self.banner = tuple(filter(None, (*self.banner, ended)))
        return self._keep_one(gate, node)

    def conclude(self, why: str, node: str | None = None) -> None:
        """Set the verdicts that the present runs allow, or of one case in place; ``why``: reason of open cases."""
        settings = self.settings if node is None else dataclasses.replace(self.settings, in_place=True)
        cases = self._taken.values() if node is None else [self._taken[node]]
        gate = self._open or self._gate(cases, settings)
        ended = gate.end(why, node)
        if node is None:
            self._keep(gate, f"{why}: {plural(len(ended), 'case')} needed more runs" if ended else "")
        else:
            self._keep_one(gate, node)

    def _keep(self, gate: Gate, ended: str) -> Mapping[str, Verdict]:
        self.verdicts = gate.verdicts()
        self.covered = set(gate.covered)
        hosts = (f"{plural(count, 'case')}: {remark}" for remark, count in self._hosts.most_common())
        self.banner = tuple(filter(None, (ended, *hosts, *gate.banner())))
        self.suite = gate.suite()
        return self.verdicts

    def _keep_one(self, gate: Gate, node: str) -> Verdict:
        self.verdicts[node] = gate.verdict(node)
        self.covered |= set(gate.covered)
        return self.verdicts[node]

    def _settling(self, gate: Gate, say: Say) -> Settling:
        plain_s = sum(taken.first.took_s for taken in self._taken.values())
        self.clock.budget_s = usual_s(plain_s) if self.clock.asked_s is None else self.clock.asked_s
        return Settling(
            gate=gate,
            clock=self.clock,
            say=say,
            rerun=self._session.rerun,
            add=functools.partial(self._add_again, gate),
            base=self._base,
        )

    def _add_again(self, gate: Gate, result: Result) -> None:
        run, node = self.take_again(result), result.case
        broken = self._taken[node].broken
        if broken:
            gate.add_impossible(node, broken)
        elif run is not None:
            gate.add(node, run)
            if gate.suspects(node):
                self._taken[node].again.append(run)

    def offered(self, *, accepted: bool = False) -> list[NewRuns]:
        """Return every fresh run of this session, for :func:`perfsuite.baselines.store.update`.

        A case that was measured again offers only its later runs: the first were suspected because they were outliers.
        For an ``accepted`` change all runs count: fewer would be too few for the comparison of the next session.
        """
        runs = []
        for node, taken in self._taken.items():
            if taken.runs or taken.broken:
                verdict = self.verdicts.get(node)
                new = NewRuns(
                    case=taken.identity,
                    runs=tuple(taken.runs if accepted else taken.again or taken.runs),
                    verdict="impossible" if taken.broken else None,
                    seen=f"impossible: {taken.broken[0]}" if taken.broken else "",
                    tolerance=taken.tolerances[0] or self.settings.tolerance,
                    instrumented=taken.instrumented,
                )
                runs.append(new if verdict is None or taken.broken else offered(new, verdict, self.suite))
        return runs

    def update(self, mode: UpdateMode, reason: str, session_runs: int) -> Draft:
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

    def _gate(self, cases: Collection[_Taken], settings: GateSettings) -> Gate:
        gate_cases = [
            gate_case(
                taken.identity,
                environment=taken.first.environment,
                boot=self._boot,
                baseline=self.baseline,
                hardware=self.hardware,
                folder=self.folder,
                tolerance=taken.tolerances[0],
                metric_tolerances=taken.tolerances[1],
            )
            if not taken.instrumented
            else GateCase(case=taken.identity, specs=REGISTRY, refusal="not-comparable", reasons=(taken.instrumented,))
            for taken in cases
        ]
        self._hosts = Counter(case.hosts for case in gate_cases if case.hosts)
        gate = Gate(gate_cases, settings)
        for taken in cases:
            for run in taken.runs:
                gate.add(taken.identity.node, run)
            gate.add_impossible(taken.identity.node, taken.broken)
        for node, reason in self._accepted_since_base.items():
            if node in self._taken:
                gate.without_base(node, f"the base lacks an accepted change ({reason})")
        return gate

    @functools.cached_property
    def _accepted_since_base(self) -> Mapping[str, str]:
        """Reasons by node id of the levels that were accepted after the base, which cannot judge these cases.

        They come from the base's own file of baselines; without one there are none.
        """
        if self._base is None or self.baseline is None:
            return {}
        try:
            folder = self._base.base.root / self.folder.relative_to(self._base.new.root)
            before = store.load(folder, self.hardware, links=self._links)
        except (ValueError, BaselineError):  # a folder outside the repository, a damaged file of the base
            return {}
        if before is None:
            return {}
        before_base = {key: entry.accepted for key, entry in before.entries.items()}
        return {
            entry.case.node: entry.accepted.reason
            for key, entry in self.baseline.entries.items()
            if entry.accepted and entry.accepted.kind != "improved" and before_base.get(key) != entry.accepted
        }


def hardware_of(fingerprint: Any, platform: str, simulated: bool) -> Hardware:
    """Return the hardware key in the form of a baseline file."""
    return Hardware(platform=platform, fingerprint=fingerprint.key, key=dict(fingerprint.parts), simulated=simulated)
