"""Findings of a run, the gravest first, for terminal, summary and page.

An effect has an interval only if it comes from several runs.  A finding from one run of each case is ``unsure``.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from perfsuite.base.errors import first_line
from perfsuite.base.text import listed
from perfsuite.base.units import format_seconds, plural
from perfsuite.metrics.pipeline import SIMULATION_TOLERANCE
from perfsuite.record.describe import amount, change_in_words, foreign_line
from perfsuite.record.result import Measurement, RankFacts, Result
from perfsuite.record.run import RunRecord
from perfsuite.record.verdict import FAILING, GateSettings, Verdict
from perfsuite.reports.document import grouped
from perfsuite.reports.pairs import pair_matrices

FEWEST_CASES = 5
CHANCE = 1e-3  # Probability with which equal ranks give one of them so many slowest places.
_LEAST_SHARE = 0.8
_LEAST_EXCESS = 0.02


def _names(ranks: Sequence[RankFacts]) -> tuple[str, ...]:
    if len({(rank.host, rank.device) for rank in ranks}) < len(ranks):
        return tuple(f"rank {place} of {len(ranks)}" for place in range(len(ranks)))
    several = len({rank.host for rank in ranks}) > 1
    return tuple(f"device {f'{rank.host} ' if several else ''}{rank.device}" for rank in ranks)


def _slowest(ranks: Sequence[RankFacts], measurement: Measurement) -> tuple[int, float]:
    """Return the slowest rank and its excess; of ranks that wait for each other, the one that comes last."""
    arrival = measurement.arrival
    if arrival is not None and arrival.late_rank < len(ranks) and measurement.median_s > 0:
        return arrival.late_rank, arrival.lag_s / measurement.median_s
    times = [rank.median_s for rank in ranks]
    slowest = max(range(len(times)), key=times.__getitem__)
    others = statistics.median(time for place, time in enumerate(times) if place != slowest)
    return slowest, times[slowest] / others - 1 if others > 0 else 0.0


def _at_least(count: int, of: int, chance: float) -> float:
    """Probability of ``count`` or more successes.

    >>> round(_at_least(5, 5, 0.5), 5)
    0.03125
    """
    return math.fsum(math.comb(of, hit) * chance**hit * (1 - chance) ** (of - hit) for hit in range(count, of + 1))


Kind = Literal[
    "impossible",
    "failed",
    "other-code",
    "regressed",
    "drifted",
    "environment",
    "undecided",
    "out-of-memory",
    "above-peak",
    "equal-work",
    "slowest",
    "slow-pair",
    "bubble",
    "improved",
]
"""The gravest first; ``undecided`` are other verdicts that fail by ``--perf-fail-on``."""
KINDS: tuple[Kind, ...] = get_args(Kind)
Sure = Literal["sure", "likely", "unsure"]
"""sure: a fact, or confirmed by runs of both sides; likely: runs against stored ones; unsure: one run of each case."""
_NAMED = 3  # Keys of an environment that a sentence names.
TOLERANCE = GateSettings.tolerance  # Largest difference between cases of equal work that is not a finding.


@dataclass(frozen=True, kw_only=True)
class Notable:
    """One finding."""

    kind: Kind
    case: str  # pytest node id, of several cases the one with the largest effect; empty for the suite as a whole.
    sentence: str  # Without the case's id.
    sure: Sure
    effect: float | None = None
    """Relative change, larger is worse (0.05: 5 % slower); of equal work slowest over fastest less 1; None without."""
    interval: tuple[float, float] | None = None  # 95 % interval of the effect; None where there are not several runs.
    cases: tuple[str, ...] = ()  # All cases of the finding, if there are several.


def notable(run: RunRecord) -> tuple[Notable, ...]:
    """Return all findings of a run, the gravest kind first and in each the largest effect."""
    notes = [
        *_failed(run),
        *_other_code(run.results),
        *_judged(run),
        *_out_of_memory(run),
        *_above_peak(run.results.values()),
        *_equal_work(equal_work(run.results.values())),
        *slow_ranks(run.results.values()),
        *_slow_pairs(run.results.values()),
        *_bubbles(run.results.values()),
    ]
    return tuple(sorted(notes, key=lambda one: (_gravity(one), -(one.effect or 0.0))))


def _gravity(one: Notable) -> int:
    """Place of its kind; a suite that fails comes before its cases."""
    return KINDS.index("regressed" if one.kind in FAILING and not one.case else one.kind)


def spread_of_equal_work(groups: Iterable[tuple[Result, ...]]) -> float | None:
    """Slowest over fastest of the group (of :func:`equal_work`) that is furthest apart, less 1.

    None where no two cases do the same.
    """
    return max((group[-1].median_s / group[0].median_s - 1 for group in groups), default=None)


def _failed(run: RunRecord) -> Iterator[Notable]:
    for case, message in run.failures.items():
        yield Notable(kind="failed", case=case, sentence=f"failed: {first_line(message)}", sure="sure")
    for case, signal in run.interrupted.items():
        yield Notable(kind="failed", case=case, sentence=f"interrupted by {signal}", sure="sure")


def _other_code(results: Mapping[str, Result]) -> Iterator[Notable]:
    """Modules of the project that were imported from outside of the checkout: a run that judges fails for them."""
    foreign = {case: result.foreign_imports for case, result in results.items()}
    cases = tuple(case for case, files in foreign.items() if files)
    if cases:
        sentence = foreign_line({name: file for files in foreign.values() for name, file in files.items()})
        yield Notable(kind="other-code", case=cases[0], sentence=sentence, sure="sure", cases=cases)


def _judged(run: RunRecord) -> Iterator[Notable]:
    gate = run.gate
    if gate is None:
        return
    if gate.suite is not None and gate.suite_line:
        kind: Kind = gate.suite if gate.suite in ("regressed", "drifted", "environment") else "undecided"
        yield Notable(kind=kind, case="", sentence=gate.suite_line, sure="likely", effect=math.inf)
    for verdict in gate.verdicts:
        if verdict.name in FAILING or verdict.name == "improved":
            yield _of_verdict(verdict, verdict.name)  # type: ignore[arg-type]  # these names are kinds
        elif gate.fails(verdict.name):
            yield _of_verdict(verdict, "undecided")


def _of_verdict(verdict: Verdict, kind: Kind) -> Notable:
    finding = verdict.decisive
    confirmed = kind == "impossible" or (finding is not None and bool(finding.exact or finding.change))
    return Notable(
        kind=kind,
        case=verdict.case,
        sentence=_sentence(verdict),
        sure="sure" if confirmed else "likely",
        effect=finding.effect if finding else None,
        interval=finding.interval if finding else None,
    )


def _sentence(verdict: Verdict) -> str:
    finding = verdict.decisive
    if finding is None or finding.effect is None:
        return ": ".join(filter(None, (verdict.name, "; ".join(verdict.reasons))))
    text = change_in_words(finding.effect, finding.interval, finding.quantity)
    if finding.before is not None and finding.after is not None:
        text += f", {amount(finding.before, finding.unit)} -> {amount(finding.after, finding.unit)}"
    if verdict.name == "environment" and verdict.soft_differences:
        differs = dict.fromkeys(difference.partition(" ")[0] for difference in verdict.soft_differences)
        text += f"; not as stored: {listed(list(differs), _NAMED)}"
    return text if verdict.name in ("regressed", "improved") else f"{verdict.name}: {text}"


def _out_of_memory(run: RunRecord) -> Iterator[Notable]:
    verdicts = run.gate.by_case if run.gate else {}
    for case, result in run.results.items():
        verdict = verdicts.get(case)
        if result.outcome == "out_of_memory" and not (verdict and verdict.name in FAILING):
            as_stored = ", as in the stored runs" if verdict and verdict.name == "pass" else ""
            amount_text = result.detail.removeprefix("OOM").strip()
            sentence = f"out of memory {amount_text}".strip() + as_stored
            yield Notable(kind="out-of-memory", case=case, sentence=sentence, sure="sure")


def _above_peak(results: Iterable[Result]) -> Iterator[Notable]:
    above: dict[str, dict[str, float]] = defaultdict(dict)
    for result in results:
        for metric in result.above_peak:
            if metric.peak is not None:
                name = f"{result.work.dtype} {metric.peak.unit}" if result.work.flops else metric.peak.unit
                excess = (metric.value or 0.0) / metric.peak.value if metric.peak.value else math.inf
                above[name][result.case] = max(excess, above[name].get(result.case, 0.0))
    for name, cases in above.items():
        worst = max(cases, key=cases.__getitem__)
        sentence = f"peak exceeded: {plural(len(cases), 'case')} above the measured peak ({name}), which was none"
        yield Notable(kind="above-peak", case=worst, sentence=sentence, sure="sure", cases=tuple(cases))


def _equal_work(groups: Iterable[tuple[Result, ...]]) -> Iterator[Notable]:
    for group in groups:
        fastest, slowest = group[0], group[-1]
        apart = slowest.median_s / fastest.median_s - 1
        if apart > TOLERANCE:
            ends = f"{format_seconds(fastest.median_s)} to {format_seconds(slowest.median_s)}, {apart:.0%} apart"
            sentence = f"{plural(len(group), 'case')} of equal work: {ends}, one run each"
            case, cases = slowest.case, tuple(result.case for result in group)
            yield Notable(kind="equal-work", case=case, sentence=sentence, sure="unsure", effect=apart, cases=cases)


def slow_ranks(results: Iterable[Result]) -> Iterator[Notable]:
    """Yield ranks or devices that are slowest in at least four of five cases of equal ranks, more often than by chance.

    The effect is the median excess of the rank's time over the others' in the cases where it is slowest.
    """
    places: dict[tuple[str, ...], list[tuple[str, str, float]]] = defaultdict(list)
    for result in results:
        measurement = result.measurement if result.outcome == "measured" and result.world_size > 1 else None
        if measurement is not None and len(measurement.ranks) > 1:
            ranks = sorted(measurement.ranks, key=lambda rank: rank.rank)
            names = _names(ranks)
            slowest, excess = _slowest(ranks, measurement)
            places[names].append((names[slowest], result.case, excess))
    for names, members in places.items():
        counts = grouped((name, (excess, case)) for name, case, excess in members)
        name, own = max(counts.items(), key=lambda item: len(item[1]))
        excess = statistics.median(excess for excess, _ in own)
        often = len(own) >= FEWEST_CASES and len(own) >= _LEAST_SHARE * len(members)
        if often and excess >= _LEAST_EXCESS and _at_least(len(own), len(members), 1 / len(names)) <= CHANCE:
            count = f"{len(own)} of {plural(len(members), 'case')}"
            sentence = f"{name} is the slowest in {count}, typically by {excess:.1%}"
            worst, cases = max(own)[1], tuple(case for _, case in own)
            yield Notable(kind="slowest", case=worst, sentence=sentence, sure="likely", effect=excess, cases=cases)


def _slow_pairs(results: Iterable[Result]) -> Iterator[Notable]:
    for matrix in pair_matrices(results):
        if matrix.slow:
            worst = matrix.slow[0]
            more = f" and {len(matrix.slow) - 1} more" if len(matrix.slow) > 1 else ""
            sentence, effect = f"{matrix.sentence(worst)}{more}", worst.factor - 1
            yield Notable(kind="slow-pair", case=matrix.case, sentence=sentence, sure="unsure", effect=effect)


def _bubbles(results: Iterable[Result]) -> Iterator[Notable]:
    beyond: dict[str, tuple[float, float]] = {}
    for result in results:
        measured, simulated = (result.values.get(name) for name in ("bubble_ratio", "simulated_bubble_ratio"))
        if measured is not None and simulated is not None and measured > simulated + SIMULATION_TOLERANCE:
            beyond[result.case] = (measured, simulated)
    if beyond:
        worst = max(beyond, key=lambda case: beyond[case][0] - beyond[case][1])
        measured, simulated = beyond[worst]
        most = f"most: bubble {measured:.0%}, simulated {simulated:.0%}"
        sentence = f"{plural(len(beyond), 'pipeline')} idle for longer than their own durations explain, {most}"
        yield Notable(kind="bubble", case=worst, sentence=sentence, sure="unsure", cases=tuple(beyond))


_SETTINGS = json.JSONEncoder(sort_keys=True, default=str)


def equal_work(results: Iterable[Result]) -> list[tuple[Result, ...]]:
    """Return groups of measured cases with equal workload, parameters, mesh, ranks and hardware, fastest first."""
    alike: dict[tuple[object, ...], list[Result]] = defaultdict(list)
    for result in results:
        if result.outcome == "measured":
            hardware, work = (result.platform, result.fingerprint, result.simulated), result.work
            amount_of_work = (work.dtype, work.bytes_moved, work.message_bytes, work.samples, work.tokens)
            key = (result.workload, result.world_size, *hardware, *amount_of_work, *work.flops.items())
            alike[key].append(result)
    groups = grouped(
        ((*key, _SETTINGS.encode(result.parameters)), result)
        for key, members in alike.items()
        for result in (members if len(members) > 1 else ())
        if result.median_s > 0
    )
    return [tuple(sorted(group, key=lambda one: one.median_s)) for group in groups.values() if len(group) > 1]
