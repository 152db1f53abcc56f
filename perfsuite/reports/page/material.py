"""What a page is made of: the cases of journals, baseline files or a session, what was found, what was compared.

Layers below know nothing of journals: whoever has one (the command line, the plugin) hands over its parts here.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from perfsuite.base.text import listed
from perfsuite.baselines.summarise import changed_settings
from perfsuite.record.result import Measurement, Metric, Peak, Result, Work
from perfsuite.record.verdict import Verdict
from perfsuite.reports.notable import Notable
from perfsuite.reports.over_time import OverTime
from perfsuite.reports.page.blocks import Tone
from perfsuite.reports.stored import StoredResult
from perfsuite.reports.tables.markdown import Grid
from perfsuite.reports.tables.recording import Recording
from perfsuite.reports.tables.settings import class_of


@dataclass(frozen=True, kw_only=True)
class PageCase:
    """One case as the page sees it, from a result or from a baseline's entry; a journal's is decoded when asked for."""

    node: str
    """pytest node id."""
    workload: str
    """Class or function without its module."""
    parameters: Mapping[str, Any]
    ranks: int
    outcome: str
    """measured, out_of_memory or smoke."""
    median_s: float | None
    """Of its newest run."""
    times_s: tuple[float, ...]
    """Median seconds of each run that is known, the newest last."""
    fingerprint: str
    platform: str
    result: Result
    """Of a baseline as its newest run had it, without a measurement."""

    @functools.cached_property
    def metrics(self) -> tuple[Metric, ...]:
        """With peaks and conventions, as far as they are known."""
        return self.result.metrics

    @functools.cached_property
    def values(self) -> Mapping[str, float]:
        """Metrics that have a value."""
        return self.result.values

    @functools.cached_property
    def work(self) -> Work:
        """What an iteration does; of a baseline what follows from its rates."""
        return self.result.work

    @property
    def measurement(self) -> Measurement | None:
        """None of a baseline, and of a case that ran out of memory."""
        return self.result.measurement

    @property
    def has_measurement(self) -> bool:
        """Whether there is one."""
        return self.measurement is not None

    @property
    def detail(self) -> str:
        """Why nothing was measured."""
        return self.result.detail if self.outcome == "out_of_memory" else ""

    @property
    def name(self) -> str:
        """The id without its file."""
        return self.node.partition("::")[2] or self.node

    @property
    def test(self) -> str:
        """The test function: ``test_ddp``."""
        return self.name.partition("[")[0]

    @property
    def words(self) -> str:
        """What stands in the brackets of the id; the name where nothing does."""
        return self.name.partition("[")[2].removesuffix("]") or self.name

    @functools.cached_property
    def anchor(self) -> str:
        """Where it stands on any page of this hardware."""
        return "c-" + hashlib.sha256(f"{self.fingerprint} {self.node}".encode(errors="replace")).hexdigest()[:10]

    @property
    def is_measured(self) -> bool:
        """Whether there is a time that counts."""
        return self.outcome == "measured" and self.median_s is not None

    def peak(self, name: str) -> Peak | None:
        """What a metric's share is taken of."""
        return self.result.peak(name)


def case_of_result(result: Result) -> PageCase:
    """The case of a journal's or a baseline's result."""
    median_s = result.median_s if result.outcome == "measured" else None
    return PageCase(
        node=result.case,
        workload=class_of(result.workload),
        parameters=result.parameters,
        ranks=result.world_size,
        outcome=result.outcome,
        median_s=median_s,
        times_s=result.times_s if isinstance(result, StoredResult) else tuple(filter(None, [median_s])),
        fingerprint=result.fingerprint,
        platform=result.platform,
        result=result,
    )


@dataclass(frozen=True, kw_only=True)
class CaseChange:
    """One case before and after."""

    node: str
    effect: float | None
    """Relative change of the time: 0.05 is 5 % slower; None where nothing could be compared."""
    low: float | None = None
    """Lower end of the 95 % interval; None without one: then the effect is unsure."""
    high: float | None = None
    before: str = ""
    after: str = ""
    word: str = ""
    """What was decided: regressed, slower, pass, undecided."""
    tone: Tone = "plain"
    runs: str = ""
    """What it rests on: ``6 pairs``, ``1 run against 12``."""


@dataclass(frozen=True, kw_only=True)
class Material:
    """All that a page shows."""

    runs: tuple[Recording, ...]
    base: Recording | None = None
    """What the runs are compared with."""
    changes: tuple[CaseChange, ...] = ()
    """Every case that was compared, in order of appearance."""
    compared: str = ""
    """What with what, in words: ``b (HEAD) against a (main), 6 pairs``."""
    notable: tuple[Notable, ...] = ()
    """The gravest first."""
    over_time: OverTime | None = None
    """A history beside the runs."""
    beside: tuple[Grid, ...] = ()
    """Tables of other tools' figures."""
    hidden_hosts: tuple[str, ...] = ()
    """Names of hosts that the page has numbers for."""

    @functools.cached_property
    def cases(self) -> tuple[PageCase, ...]:
        """Each case once: of several runs the newest, with the times of all of them."""
        newest: dict[tuple[str, str], PageCase] = {}
        for case in (case for recording in self.runs for case in page_cases(recording)):
            key = (case.fingerprint, case.node)
            newest[key] = joined(newest.get(key), case)
        return tuple(newest.values())

    @functools.cached_property
    def measured(self) -> tuple[PageCase, ...]:
        """Cases with a time that counts."""
        return tuple(case for case in self.cases if case.is_measured)

    @functools.cached_property
    def missing(self) -> Mapping[str, str]:
        """Why cases have no result in any run."""
        there = {case.node for case in self.cases}
        return {node: why for one in self.runs for node, why in one.run.missing.items() if node not in there}

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
        """Where each case stands on the page, by node id."""
        return {case.node: case.anchor for case in self.cases}


def page_cases(recording: Recording) -> list[PageCase]:
    """The cases of a recording, with the times of all runs that it knows."""
    cases = map(case_of_result, recording.run.results.values())
    return [dataclasses.replace(case, times_s=recording.times_s.get(case.node, case.times_s)) for case in cases]


def joined(older: PageCase | None, newer: PageCase) -> PageCase:
    """The newer run of a case with the times of both; one that measured nothing does not hide one that did.

    Times of a run with other settings are another case's.
    """
    if older is None or changed_settings(older.result, newer.result, glance=True):
        return newer
    if older.is_measured and not newer.is_measured:
        return older
    return dataclasses.replace(newer, times_s=(*older.times_s, *newer.times_s))


def named(nodes: Iterable[str], most: int = 3) -> str:
    """Names of a few cases and how many more there are."""
    return listed([node.partition("::")[2] or node for node in nodes], most)
