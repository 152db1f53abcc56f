"""``--perf-expect``: fail results below the figures of healthy devices; print a line per question, PASS or FAIL."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from perfsuite.base.errors import ConfigurationError, PerfsuiteError, first_line
from perfsuite.base.text import bare_name
from perfsuite.base.units import percent, plural
from perfsuite.expectations.judge import (
    AnswerLine,
    Expected,
    answer_lines,
    judge_one,
    soak_lines,
    unused_line,
    verdict_of,
)
from perfsuite.expectations.rows import Expectation, load_expectations
from perfsuite.fleet.nodes import PRIORS, quantity_of
from perfsuite.fleet.rule import compare, slow_links
from perfsuite.metrics.pairs import SlowPair
from perfsuite.metrics.spec import on_every_device
from perfsuite.plugin import collisions
from perfsuite.plugin.ending import FAILED, Out, missing_key, record_key
from perfsuite.plugin.state import suite_of
from perfsuite.plugin.suite import Suite
from perfsuite.record.result import Result
from perfsuite.reports.layout import fit
from perfsuite.reports.pairs import ONE_DEVICE, UNKNOWN, pair_matrices

LOOKS = 3  # Fresh runs of a case that is below expectation; it fails if all are.


def slow_members(result: Result) -> dict[str, str]:
    """Return the devices and links of a result that are slower than their like, each with a sentence."""
    if result.measurement is None:
        return {}
    if on_every_device(result):
        ranks = result.measurement.ranks
        values: dict[str, dict[str, float]] = {}
        for rank in ranks:
            values.setdefault(rank.host, {})[rank.device] = math.log(rank.median_s) if rank.median_s > 0 else 0.0
        slow, *_ = compare(values, prior=PRIORS[quantity_of(result, len(ranks)).kind])
        names = {each.member: " ".join(each.member[len(values) < 2 :]).strip() for each in slow}
        return {names[each.member]: f"{names[each.member]} takes {percent(each.slower)} longer" for each in slow}
    if result.workload.endswith(":PairRounds"):
        ends = ((" - ".join(link.ends), link) for link in slow_links(result))
        return {name: f"link {name} takes {percent(link.again)} longer, tried again" for name, link in ends}
    return {
        f"{matrix.names[slow.pair[0]]} {matrix.names[slow.pair[1]]}": matrix.sentence(slow)
        for matrix in pair_matrices([result])
        for slow in _faulty(matrix.slow)
    }


def _faulty(slow: Sequence[SlowPair]) -> list[SlowPair]:
    """Return the slow pairs that a fault explains; with unknown kinds of links only if all of them share one device.

    Healthy devices of two sockets, or with links to some of the others, have slow pairs that share no device.
    """
    linked = [one for one in slow if one.link not in (ONE_DEVICE, UNKNOWN)]
    unknown = [one for one in slow if one.link == UNKNOWN]
    in_all = set.intersection(*(set(one.pair) for one in unknown)) if unknown else set()
    return [*linked, *(unknown if in_all else ())]


class Expecting:
    """The rows of this run and their verdicts on its results; registered as ``perfsuite.expecting``."""

    def __init__(
        self, config: pytest.Config, rows: list[Expectation] | None, devices: int, cases: Sequence[pytest.Item]
    ) -> None:
        """``rows``: None if only devices are counted; ``devices``: expected number per host, 0 for any."""
        self.config = config
        self.rows = rows
        self.devices = devices
        self.accepted = [item.nodeid for item in cases if item.get_closest_marker("acceptance") is not None]
        self.is_acceptance = "acceptance" in (config.getoption("markexpr", "") or "")
        self.judged: dict[str, list[Expected]] = {}  # Verdicts by node id.
        self.cleared: list[str] = []  # Sentences about cases that passed in a fresh run.
        self.slow: dict[str, list[str]] = {}  # Sentences about devices and links slower than their like, by node id.
        self.interrupted = False  # Whether a signal ended the run before its last case.

    def judge(self, result: Result) -> str:
        """Return the message with which the case of a result fails; empty if it passes.

        A case that is below expectation, or has a device or link that is slower than its like, is measured again in
        three fresh runs, and fails if all agree.
        """
        if self.rows is None:
            return ""
        one, other = itertools.tee(self._fresh_runs(result))  # each run is made once, at its first use
        return "\n".join(filter(None, (self._below(result, self.rows, one), self._slower_than_its_like(result, other))))

    def _below(self, result: Result, rows: list[Expectation], fresh: Iterable[Result]) -> str:
        entries = self.judged[result.case] = judge_one(result, rows)
        below = [entry for entry in entries if entry.verdict == "below"]
        if not below:
            return ""
        looks: list[list[Expected]] = []
        try:
            for again in fresh:
                looks.append(judge_one(again, rows))
                if all(entry.verdict != "below" for entry in looks[-1]):
                    self.judged[result.case] = looks[-1]
                    metrics = ", ".join(entry.metric.name for entry in below)
                    self.cleared.append(
                        f"{result.case}: {metrics} below expectation at first, not in look {len(looks)} of {LOOKS}"
                    )
                    return ""
        except PerfsuiteError as error:
            return f"below expectation, and its second run failed: {first_line(error)}"
        runs = f" in all of {len(looks) + 1} runs" if looks else ""
        return "\n".join(f"below expectation{runs}: {entry.metric.name}: {entry.reason}" for entry in below)

    def _slower_than_its_like(self, result: Result, fresh: Iterable[Result]) -> str:
        slow, looks = slow_members(result), 0
        try:
            for again in fresh if slow and not result.workload.endswith(":PairRounds") else ():
                looks += 1
                here = slow_members(again)
                gone = [name for name in slow if name not in here]
                self.cleared += [f"{result.case}: {slow.pop(name)} at first, not in look {looks}" for name in gone]
                if not slow:
                    return ""
        except PerfsuiteError as error:
            return f"slower than its like, and its second run failed: {first_line(error)}"
        runs = f" in all of {looks + 1} runs" if looks else ""
        if slow:
            self.slow[result.case] = [f"{sentence}{runs}: {bare_name(result.case)}" for sentence in slow.values()]
        return "\n".join(f"slower than its like{runs}: {sentence}" for sentence in slow.values())

    def _fresh_runs(self, result: Result) -> Iterator[Result]:
        session = suite_of(self.config).session
        assert session is not None
        is_long = session.cases[result.case].budget.sustain_s is not None  # too long to be disturbed by a short burst
        for _ in range(0 if is_long or result.case in session.reused else LOOKS):
            yield session.rerun(result.case)

    @property
    def entries(self) -> list[Expected]:
        """The verdicts on every result."""
        return [entry for entries in self.judged.values() for entry in entries]

    @property
    def withheld(self) -> list[str]:
        """Reasons why this run cannot end in PASS although no result is below expectation."""
        missing, suite = self.config.stash[missing_key], suite_of(self.config)
        assert suite.session is not None
        reasons = [
            f"{count} of {self.devices} devices{f' on {host}' if host else ''}"
            for host, count in _devices_by_host(suite).items()
            if self.devices and count < self.devices
        ]
        below = {entry.case for entry in self.entries if entry.verdict == "below"}
        failed = [
            case for case, why in missing.items() if why.startswith(FAILED) and case not in below | self.slow.keys()
        ]
        cut = [case for case, why in missing.items() if "--perf-time-budget" in why]
        slow = sum(map(len, self.slow.values()))
        reasons += [f"{plural(slow, 'result')} in which a device or link is slower than its like"] * bool(slow)
        reasons += [f"{plural(len(failed), 'case')} failed"] * bool(failed and self.rows is not None)
        reasons += [f"the time budget left out {plural(len(cut), 'case')}"] * bool(cut)
        reasons += ["the run was interrupted"] * self.interrupted
        if self.is_acceptance:
            there = set(suite.session.results) | set(failed) | set(cut)
            lost = [case for case in self.accepted if case not in there]
            reasons += [f"{plural(len(lost), 'acceptance case')} without a result, as {lost[0]}"] if lost else []
        return reasons

    def finish(self, session: pytest.Session) -> None:
        """Set the exit code of a run that judged nothing, or in which PASS is withheld."""
        self.interrupted = session.exitstatus == pytest.ExitCode.INTERRUPTED
        if session.exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            return
        if self.withheld:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        elif self._nothing_judged and not collisions.option(self.config, "perf_allow_unjudged"):
            session.exitstatus = pytest.ExitCode.USAGE_ERROR

    @property
    def _nothing_judged(self) -> bool:
        return self.rows is not None and all(entry.verdict == "not judged" for entry in self.entries)

    @property
    def verdict(self) -> str:
        """PASS or FAIL with the reason; of a run that only counts devices FAIL or empty."""
        if self.rows is None:
            return f"FAIL: {'; '.join(self.withheld)}" if self.withheld else ""
        is_allowed = bool(collisions.option(self.config, "perf_allow_unjudged"))
        verdict = verdict_of(self.entries, self.withheld, may_judge_nothing=is_allowed)
        if not self._nothing_judged or self.interrupted or is_allowed:
            return verdict
        return (
            f"{verdict}; add [[expectation]] rows (perfsuite docs acceptance), compare nodes by perfsuite fleet, or "
            "add --perf-allow-unjudged"
        )

    @property
    def remarks(self) -> tuple[str, ...]:
        """Sentences for the screen below the verdict."""
        return (*(f"SLOW: {sentence}" for slow in self.slow.values() for sentence in slow), *self.cleared)

    def show(self, terminalreporter: Any) -> None:
        """Print the table of the judged questions; the verdict too in a run without a screen."""
        out, suite = Out(terminalreporter), suite_of(self.config)
        lines = [*answer_lines(self.entries, out.width)]
        if self.rows is not None:
            lines += soak_lines(suite.session.results.values() if suite.session is not None else ())
            if unused := unused_line(self.rows, self.entries, suite.machine.name):
                lines.append(AnswerLine(text=unused, mark="doubt"))
        run = self.config.stash.get(record_key, None)
        if self.verdict and (run is None or not (run.results or run.failures or run.interrupted)):
            lines.append(AnswerLine(text=self.verdict, mark="" if self.verdict.startswith("PASS") else "bad"))
        if lines:
            out.section("perfsuite expectations")
        for line in lines:
            for text in fit([line.text], out.width):
                out.line(text, red=line.mark == "bad", yellow=line.mark == "doubt")


def _devices_by_host(suite: Suite) -> dict[str, int]:
    assert suite.session is not None
    seen: dict[str, set[str]] = {}
    for result in suite.session.results.values():
        for rank in result.measurement.ranks if result.measurement is not None else ():
            seen.setdefault(rank.host, set()).add(rank.device)
    if len(seen) > 1:
        return {host: len(devices) for host, devices in seen.items()}
    return {"": suite.machine.device_count}


def begin(session: pytest.Session, cases: Sequence[pytest.Item]) -> None:
    """Read the rows after the collection.  Raises UsageError for a wrong file or option."""
    config = session.config
    suite = suite_of(config)
    if suite.session is None or suite.settings.budget.smoke:
        return
    written, devices = (collisions.option(config, name) for name in ("perf_expect", "perf_expect_devices"))
    if devices is not None and devices < 1:
        raise pytest.UsageError(f"--perf-expect-devices: {devices} is not a number of devices; give at least 1")
    files = [*suite.settings.platform_files, *([config.invocation_params.dir / Path(written)] if written else [])]
    try:
        if written and not files[-1].is_file():
            raise ConfigurationError(f"--perf-expect: {files[-1]} is not a file; give a TOML file of rows")
        rows = load_expectations(files, suite.catalog.models) if written is not None else None
        if written and rows is not None and not any(row.place.startswith(str(files[-1])) for row in rows):
            raise ConfigurationError(f"--perf-expect: {files[-1]} has no [[expectation]] row; add one")
    except PerfsuiteError as error:
        raise pytest.UsageError(str(error)) from None
    expecting = Expecting(config, rows, devices or 0, cases)
    usual = suite.machine.model.devices_per_node
    if devices is None and expecting.is_acceptance and usual is not None:
        expecting.devices = int(usual.value)
    config.pluginmanager.register(expecting, "perfsuite.expecting")
