"""``perfsuite ab``: compare two revisions, environments or settings on this machine, without a baseline.

Each pair runs both arms one after the other, in alternating order.  The statistics compare the pairs, not the samples
(:mod:`perfsuite.statistics.paired`).
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from perfsuite.base.errors import ConfigurationError, PerfsuiteError
from perfsuite.base.masking import masked_words
from perfsuite.base.units import format_seconds, parse_duration, plural, significant
from perfsuite.base.writing import require_writable, write_file
from perfsuite.baselines.summarise import changed_settings, summarise
from perfsuite.cli.main import EXIT_FOUND, EXIT_OK, Command, print_lines, screen_width
from perfsuite.record.codec import to_json
from perfsuite.record.describe import instrumented_line
from perfsuite.record.result import Metric, Result
from perfsuite.run.arms import Arm, arm_of, described_imports, run_arm
from perfsuite.statistics.comparison import COLUMNS, Comparison, compare, progress, table
from perfsuite.statistics.paired import MIN_PAIRS
from perfsuite.suite import pytest_arguments

if TYPE_CHECKING:
    from perfsuite.reports.changes import CaseChange


def time_of(result: Result) -> float:
    """Return the seconds per iteration of one run: the median of the undisturbed samples if enough, else of all."""
    run = summarise(result)
    return math.exp(run.location) if run.has_clean and run.location is not None else result.median_s


@dataclass(kw_only=True)
class _Runs:
    """The runs of both arms, pair by pair."""

    arms: Sequence[Arm]
    arguments: Sequence[str]
    deadline_s: float
    of: tuple[list[Mapping[str, Result]], list[Mapping[str, Result]]] = field(default_factory=lambda: ([], []))

    @property
    def pairs(self) -> int:
        return len(self.of[1])

    def add_pair(self) -> None:
        """Run both arms once; every second pair runs arm b first."""
        for which in (0, 1) if self.pairs % 2 == 0 else (1, 0):
            self.of[which].append(run_arm(self.arms[which], self.arguments, self.deadline_s))

    def compared(self, tolerance: float, alpha: float) -> list[Comparison]:
        """Return a comparison of each case that every run measured with the same settings, in order."""
        left_out = {*self.left_out(), *self.changed()}
        comparisons = []
        for case in self.of[0][0]:
            if case not in left_out:
                a_s, b_s = ([time_of(results[case]) for results in side] for side in self.of)
                comparisons.append(compare(case, a_s, b_s, tolerance, alpha=alpha))
        return comparisons

    def changed(self) -> dict[str, str]:
        """Return the settings that differ between the arms, such as ``n: 128 -> 256``, of each case that has any."""
        (before, *_), (after, *_) = self.of
        changes = {case: changed_settings(before[case], after[case]) for case in before if case in after}
        return {case: change for case, change in changes.items() if change}

    def require_comparable(self) -> None:
        """Raise ConfigurationError if no case was measured by both arms with the same settings."""
        left_out = self.left_out()
        if len({*left_out, *self.changed()}) < len({case for side in self.of for run in side for case in run}):
            return
        reasons = [f"{case}: {change}" for case, change in self.changed().items()]
        reasons += [f"{case}: not measured in every run" for case in left_out]
        more = f"; and {len(reasons) - 1} more" if len(reasons) > 1 else ""
        raise ConfigurationError(
            f"no case can be compared: {reasons[0]}{more}; choose cases that both arms measure with the same parameters"
        )

    def own(self, tolerance: float, alpha: float) -> list[tuple[Comparison, Metric]]:
        """Return the comparisons of the project's own metrics, each with the metric of the first run.

        A metric without a direction is left out.  A positive change is a change for the worse.
        """
        left_out, found = {*self.left_out(), *self.changed()}, []
        for case, first in self.of[0][0].items():
            for record in first.measurement.records if first.measurement and case not in left_out else ():
                own = record.metric
                values = [[results[case].values.get(record.name, 0.0) for results in side] for side in self.of]
                if own is None or own.better == "neither":
                    continue
                if min(map(min, values)) <= 0:
                    print(
                        f"not comparable, {record.name} of {case}: not recorded above 0 in every run", file=sys.stderr
                    )
                else:
                    a, b = values if own.better == "lower" else [[1 / value for value in side] for side in values]
                    accepted = tolerance if own.tolerance is None else own.tolerance
                    compared = compare(f"{record.name} of {case}", a, b, accepted, alpha=alpha)
                    found.append((compared, first.metric(record.name)))
        return found

    def left_out(self) -> list[str]:
        """Return the cases that some runs measured and others did not."""
        runs = [results.keys() for side in self.of for results in side]
        return sorted(case for case in set().union(*runs) if not all(case in run for run in runs))


def looks(pairs: int, most: int) -> list[int]:
    """Return the numbers of pairs after which the cases are judged: each twice the one before, ``most`` last.

    >>> looks(6, 48), looks(6, 20), looks(6, 6)
    ([6, 12, 24, 48], [6, 12, 20], [6])
    """
    counts = [pairs]
    while counts[-1] < most:
        counts.append(min(2 * counts[-1], most))
    return counts


def measure(runs: _Runs, planned: Sequence[int], tolerance: float) -> list[Comparison]:
    """Run pairs until every case is decided at one of the ``planned`` numbers, or more pairs would not help.

    Repeated looks inflate false positives, so the error budget of 5 % is split over the planned looks.
    """
    alpha = 0.05 / len(planned)
    for look in planned:
        while runs.pairs < look:
            is_early = runs.pairs < MIN_PAIRS
            so_far = "" if is_early else f"; {progress(runs.compared(tolerance, alpha), planned[-1])}"
            print(f"pair {runs.pairs + 1} of {look}{so_far}", file=sys.stderr, flush=True)
            runs.add_pair()
            runs.require_comparable()
        comparisons = runs.compared(tolerance, alpha)
        undecided = [comparison for comparison in comparisons if comparison.outcome == "undecided"]
        if not any((comparison.pairs_needed or planned[-1] + 1) <= planned[-1] for comparison in undecided):
            break
    return comparisons


def _arguments(parser: argparse.ArgumentParser) -> None:
    for side in ("a", "b"):
        add = parser.add_argument_group(f"arm {side}").add_argument
        add(f"--{side}", metavar="REV", help=f"run arm {side} at this git revision (default: the working tree)")
        add(
            f"--{side}-env",
            metavar="NAME=VALUE",
            action="append",
            default=[],
            help=f"set a variable of arm {side}, such as NCCL_ALGO=Ring; repeatable (default: none)",
        )
        add(f"--{side}-python", metavar="PATH", help=f"run arm {side} with this interpreter (default: this one)")
    add = parser.add_argument_group("pairs").add_argument
    add("--pairs", type=int, default=6, metavar="N", help="run N pairs of both arms, at least 3 (default: 6)")
    add(
        "--until-decided",
        action="store_true",
        help="double the pairs until every case is decided or more pairs would not help; widens the intervals",
    )
    add("--max-pairs", type=int, default=48, metavar="N", help="run at most N pairs with --until-decided (default: 48)")
    add("--tolerance", type=float, default=0.03, metavar="SHARE", help="accept changes up to SHARE (default: 0.03)")
    add("--deadline", metavar="DURATION", default="1h", help="stop a run of one arm after DURATION (default: 1h)")
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="write the comparison to FILE as JSON (default: no file)")
    add("--html", type=Path, metavar="FILE", help="write a page of both arms to FILE (default: no page)")
    add(
        "pytest_args",
        nargs="*",
        metavar="-- PYTEST_ARGS",
        help="pass these arguments to pytest, such as test_perf -k matmul (default: test_perf)",
    )


def _unwind(number: int, frame: object) -> None:
    """End like Ctrl-C, so that arms stop and work trees are removed; further signals are ignored."""
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)


def _run(options: argparse.Namespace) -> int:
    if options.pairs < MIN_PAIRS:
        raise ConfigurationError(f"--pairs={options.pairs} is too few to estimate the noise; give 3 or more")
    if options.until_decided and options.max_pairs < options.pairs:
        raise ConfigurationError(
            f"--max-pairs={options.max_pairs} is less than --pairs={options.pairs}; give at least {options.pairs}"
        )
    if not 0 < options.tolerance < 1:
        raise ConfigurationError(f"--tolerance={options.tolerance} is not between 0 and 1; write 0.03 for 3 %")
    for path, option in ((options.html, "--html"), (options.json, "--json")):
        if path is not None:
            require_writable(path, option)
    environments = [read_env(texts) for texts in (options.a_env, options.b_env)]
    if (options.a, options.a_python, environments[0]) == (options.b, options.b_python, environments[1]):
        raise ConfigurationError("both arms are the same; give --a and --b, or --a-env and --b-env, that differ")
    root = Path.cwd()
    arguments = options.pytest_args or pytest_arguments(["test_perf"], root)
    with ExitStack() as trees:
        trees.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, _unwind))
        arms = []
        for side, env in zip("ab", environments, strict=True):
            revision = getattr(options, side)
            name = " ".join([revision or "working tree", *masked_words(f"{key}={value}" for key, value in env.items())])
            python = getattr(options, f"{side}_python") or sys.executable
            arm = Arm(name=f"{side} ({name})", root=root)
            if revision:
                arm = trees.enter_context(arm_of(root, revision, arm.name))
            arms.append(dataclasses.replace(arm, interpreter=python, env=env))
        runs = _Runs(arms=arms, arguments=arguments, deadline_s=parse_duration(options.deadline))
        planned = looks(options.pairs, options.max_pairs) if options.until_decided else [options.pairs]
        comparisons = measure(runs, planned, options.tolerance)
    own = runs.own(options.tolerance, 0.05 / len(planned))
    print_lines(itertools.chain(_lines(runs, comparisons, planned, options.tolerance), map(_own_line, own)))
    if options.json:
        write_file(options.json, json.dumps(to_json(comparisons), indent=1) + "\n", option="--json")
    if options.html is not None:
        write_arms(runs, comparisons, options.html)
    everything = [*comparisons, *(comparison for comparison, _ in own)]
    return EXIT_FOUND if any(one.outcome == "slower" for one in everything) else EXIT_OK


def _own_line(found: tuple[Comparison, Metric]) -> str:
    """Return the line of one own metric: both means, the change of the value, and whether the change is worse."""
    compared, metric = found
    higher = metric.better == "higher"
    a, b, *ends = (
        (1 / value if higher else value) for value in (compared.a_s, compared.b_s, 1 + compared.low, 1 + compared.high)
    )
    low, high = sorted(end - 1 for end in ends)
    outcome = {"slower": "worse", "faster": "better"}.get(compared.outcome, compared.outcome_text)
    return (
        f"{compared.case}: {significant(a)} -> {significant(b)} {metric.unit}".rstrip()
        + f", {b / a - 1:+.1%} ({low:+.1%} to {high:+.1%}), {outcome}"
    )


def write_arms(runs: _Runs, comparisons: Sequence[Comparison], path: Path) -> None:
    """Write the page that compares arm b with arm a; a failed write is printed and does not end the command."""
    from perfsuite.reports.material import material_of_arms
    from perfsuite.reports.page.page import page_line, write_page

    a, b = ([tuple(results.values()) for results in side] for side in runs.of)
    changes = list(map(_change_of, comparisons))
    compared = f"{runs.arms[1].name} against {runs.arms[0].name}, {runs.pairs} pairs"
    try:
        write_page(material_of_arms(a, b, [arm.name for arm in runs.arms], changes, compared), path)
    except PerfsuiteError as error:
        print(f"page {path} was not written: {error}", file=sys.stderr)
    else:
        print(f"page {page_line(path)}")


def _change_of(comparison: Comparison) -> CaseChange:
    from perfsuite.reports.changes import CaseChange

    return CaseChange(
        node=comparison.case,
        effect=comparison.change,
        low=comparison.low,
        high=comparison.high,
        before=format_seconds(comparison.a_s),
        after=format_seconds(comparison.b_s),
        word=comparison.outcome_text,
        tone="bad" if comparison.outcome == "slower" else "good" if comparison.outcome == "faster" else "plain",
        runs=plural(comparison.pairs, "pair"),
    )


def read_env(texts: Sequence[str]) -> dict[str, str]:
    """Return the variables that ``texts`` set as NAME=VALUE.  Raises ConfigurationError for any other text.

    >>> read_env(["NCCL_ALGO=Ring", "X="])
    {'NCCL_ALGO': 'Ring', 'X': ''}
    """
    variables = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigurationError(
                f"environment setting {text!r} is not NAME=VALUE; write for example NCCL_ALGO=Ring"
            )
        variables[name] = value
    return variables


def _lines(runs: _Runs, comparisons: Sequence[Comparison], planned: Sequence[int], tolerance: float) -> Iterator[str]:
    imports = [described_imports(results[-1]) for results in runs.of]
    is_same = imports[0] == imports[1]
    for arm, places in zip(runs.arms, imports, strict=True):
        yield f"{arm.name}{f': {places}' if places and not is_same else ''}"
    if is_same and imports[0]:
        yield f"code in both trees: {imports[0]}"
    at = f" for {len(planned)} looks together" if len(planned) > 1 else ""
    yield f"{runs.pairs} pairs, 95 % intervals{at}, tolerance {tolerance:.1%}"
    if left_out := runs.left_out():
        yield f"left out, not measured in every run: {', '.join(left_out)}"
    for arm, results in zip(runs.arms, runs.of, strict=True):
        if slowed := instrumented_line(results[-1].values()):
            yield f"warning: {arm.name}: {slowed}"
    for case, change in runs.changed().items():
        yield f"not comparable, {case}: {change}"
    yield from table(comparisons, tolerance, screen_width() or COLUMNS)


AB = Command(
    help="compare two revisions, environments or settings by alternating runs on this machine",
    example="perfsuite ab --a main --b HEAD -- test_perf -k 'matmul and fp32'",
    arguments=_arguments,
    run=_run,
    found="a case is slower on b by more than the tolerance",
)
