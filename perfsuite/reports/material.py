"""The input of a page: cases of journals, baseline files or a session, findings, and comparisons."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from perfsuite.record.result import Result
from perfsuite.record.run import RunRecord
from perfsuite.record.verdict import Verdict
from perfsuite.reports.beside_others import OverTime
from perfsuite.reports.changes import (
    CaseChange,
    Timed,
    changes_between,
    changes_of_verdicts,
    joined,
    timed,
    timed_result,
)
from perfsuite.reports.document import Grid
from perfsuite.reports.ids import anchor_of, hosts_of
from perfsuite.reports.notable import Notable, notable
from perfsuite.reports.stored import Recording


@dataclass(frozen=True, kw_only=True)
class Material:
    """All that a page shows."""

    runs: tuple[Recording, ...]
    base: Recording | None = None  # The run to compare with.
    changes: tuple[CaseChange, ...] = ()  # Every case that was compared, in order of appearance.
    compared: str = ""  # The comparison in words: ``b (HEAD) against a (main), 6 pairs``.
    notable: tuple[Notable, ...] = ()  # The gravest first.
    over_time: OverTime | None = None  # A history to show with the runs.
    beside: tuple[Grid, ...] = ()  # Tables of other tools' figures.
    hidden_hosts: tuple[str, ...] = ()  # Names of hosts that the page has numbers for.

    @functools.cached_property
    def _known(self) -> Mapping[tuple[str, str], Timed]:
        """Each case once, with the times of all its runs: of several runs of one case the newest."""
        cases: dict[tuple[str, str], Timed] = {}
        for result, times_s in (pair for recording in self.runs for pair in timed(recording)):
            key = (result.fingerprint, result.case)
            cases[key] = joined(cases.get(key), (result, times_s))
        return cases

    @property
    def timed(self) -> Iterable[Timed]:
        """Each case once, with the times of all its runs."""
        return self._known.values()

    @functools.cached_property
    def cases(self) -> tuple[Result, ...]:
        """Each case once."""
        return tuple(result for result, _ in self._known.values())

    @functools.cached_property
    def measured(self) -> tuple[Result, ...]:
        """Measured cases."""
        return tuple(result for result in self.cases if result.outcome == "measured")

    def times_s(self, result: Result) -> tuple[float, ...]:
        """Median seconds of each run of a case, the newest last."""
        return self._known[result.fingerprint, result.case][1]

    @functools.cached_property
    def missing(self) -> Mapping[str, str]:
        """Reasons of cases without a result in any run."""
        there = {result.case for result in self.cases}
        return {node: why for one in self.runs for node, why in one.run.missing.items() if node not in there}

    def left(self, name: str) -> Mapping[str, str]:
        """Return ``failures``, ``interrupted`` or ``skips`` of all runs, without cases that a later run measured."""
        found: dict[str, str] = {}
        for one in self.runs:
            found = {node: why for node, why in found.items() if node not in one.run.results}
            found.update(getattr(one.run, name))
        return found

    @functools.cached_property
    def verdicts(self) -> Mapping[str, Verdict]:
        """The newest of each case."""
        gates = [recording.run.gate for recording in self.runs]
        return {node: verdict for gate in gates if gate for node, verdict in gate.by_case.items()}

    @property
    def simulated(self) -> bool:
        """Whether any time here is of a simulated device."""
        return any(recording.run.simulated for recording in self.runs)

    @functools.cached_property
    def anchors(self) -> Mapping[str, str]:
        """Anchor of each case on the page, by node id."""
        return {result.case: anchor_of(result.case, result.fingerprint) for result in self.cases}


def material_of(runs: Sequence[Recording], base: Recording | None = None, *, show_hosts: bool = False) -> Material:
    """Return the material of these runs, compared with ``base``, without one with the stored runs by the gate.

    ``show_hosts``: keep names of hosts.
    """
    notes = tuple(one for recording in runs[-1:] for one in notable(recording.run))
    alone = Material(runs=tuple(runs), base=base, notable=notes)
    if base is not None:
        changes = tuple(changes_between(timed(base), alone.timed))
        compared = f"{', '.join(map(named_run, runs))} with {named_run(base)}"
    else:
        changes = tuple(changes_of_verdicts(alone.verdicts.values()))
        compared = "the stored runs of the baseline, by the gate" if changes else ""
    hidden = () if show_hosts else hosts_of(_results((*runs, *((base,) if base else ()))))
    return dataclasses.replace(alone, changes=changes, compared=compared, hidden_hosts=hidden)


def material_of_arms(
    a: Sequence[Sequence[Result]],
    b: Sequence[Sequence[Result]],
    names: Sequence[str],
    changes: Sequence[CaseChange],
    compared: str,
) -> Material:
    """Return the material of an A/B: arm b compared with arm a."""
    arms = [_arm(results, name) for results, name in zip((a, b), names, strict=True)]
    hidden = hosts_of(_results(arms))
    return Material(runs=(arms[1],), base=arms[0], changes=tuple(changes), compared=compared, hidden_hosts=hidden)


def _arm(runs: Sequence[Sequence[Result]], name: str) -> Recording:
    cases: dict[str, Timed] = {}
    for result in (result for results in runs for result in results):
        cases[result.case] = joined(cases.get(result.case), timed_result(result))
    newest = next((results[-1] for results in reversed(runs) if results), None)
    run = RunRecord(
        name=name,
        platform=newest.platform if newest else "",
        fingerprint=newest.fingerprint if newest else "",
        results={case: result for case, (result, _) in cases.items()},
    )
    return Recording(run=run, times_s={case: times_s for case, (_, times_s) in cases.items()})


def named_run(recording: Recording) -> str:
    """Return the name of a run without its folder."""
    return PurePath(recording.run.name).name


def _results(runs: Sequence[Recording]) -> Iterator[Result]:
    return (result for recording in runs for result in recording.run.results.values())


MOST_CASES = 150  # Cases in the tables of reports on a page.


def recordings(material: Material) -> list[Recording]:
    """Return a recording per run: training steps, then collectives, at most MOST_CASES together."""
    left = MOST_CASES
    kept = []
    for recording in reversed(material.runs):
        results = [result for result in recording.run.results.values() if result.outcome != "smoke"]
        shown = [one for one in results if "model" in one.parameters or "busbw_gb_per_s" in one.values]
        ordered = sorted(shown, key=lambda result: bool(result.values.get("busbw_gb_per_s")))
        run = dataclasses.replace(recording.run, results={result.case: result for result in ordered[:left]})
        kept.append(dataclasses.replace(recording, run=run))
        left -= len(run.results)
    return kept[::-1]
