"""``perfsuite ab``: which of two revisions, environments or settings is faster on this machine, now.

No stored baseline is needed.  Each pair runs both arms one after the other, the order alternating; the pairs, not the
samples, are the unit of evidence, and the interval is Student's t over their differences.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from perfsuite.arms import Arm, arm_of, run_arm
from perfsuite.baselines.runs import summarise
from perfsuite.cli.command import EXIT_FOUND, EXIT_OK, Command
from perfsuite.errors import ConfigurationError
from perfsuite.records import Result, to_json
from perfsuite.statistics.student import t_quantile
from perfsuite.units import format_seconds, parse_duration

_EXITS = "exit codes: 0 done; 1 a case is slower on b by more than the tolerance; 4 wrong usage"

Outcome = Literal["slower", "faster", "no difference", "undecided"]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One case on both arms; ``b`` over ``a``."""

    case: str
    pairs: int
    a_s: float
    """Median over pairs of the seconds per iteration of arm a."""
    b_s: float
    change: float
    """Relative change from a to b: 0.05 is 5 % slower."""
    low: float
    """Lower end of the 95 % interval of the change."""
    high: float
    smallest: float
    """Smallest slowdown that this many pairs would have shown with 95 % probability."""
    outcome: Outcome


def compare(case: str, a_s: Sequence[float], b_s: Sequence[float], tolerance: float) -> Comparison:
    """Paired comparison of times in seconds, pair by pair; needs three pairs.

    Outcome: slower or faster when the interval excludes 0 and the change exceeds the tolerance; no difference when the
    interval lies within the tolerance; else undecided.

    >>> found = compare("case", [1.0, 1.01, 0.99, 1.0], [1.10, 1.12, 1.09, 1.09], tolerance=0.03)
    >>> round(found.change, 3), found.outcome
    (0.1, 'slower')
    """
    count = len(a_s)
    assert count == len(b_s) >= 3, f"{count} and {len(b_s)} runs make no three pairs"
    logs = [math.log(b / a) for a, b in zip(a_s, b_s, strict=True)]
    mean, error = statistics.fmean(logs), statistics.stdev(logs) / math.sqrt(count)
    reach = t_quantile(0.975, count - 1) * error
    change, low, high = (math.expm1(value) for value in (mean, mean - reach, mean + reach))
    outcome: Outcome = "undecided"
    if low > 0 and change > tolerance:
        outcome = "slower"
    elif high < 0 and change < -tolerance:
        outcome = "faster"
    elif -tolerance <= low and high <= tolerance:
        outcome = "no difference"
    return Comparison(
        case=case,
        pairs=count,
        a_s=statistics.median(a_s),
        b_s=statistics.median(b_s),
        change=change,
        low=low,
        high=high,
        smallest=math.expm1((t_quantile(0.975, count - 1) + t_quantile(0.95, count - 1)) * error),
        outcome=outcome,
    )


def time_of(result: Result) -> float:
    """Seconds per iteration of one run: median of the undisturbed samples where there are enough, else of all."""
    run = summarise(result)
    return math.exp(run.location) if run.has_clean and run.location is not None else result.median_s


def run_pairs(
    arms: Sequence[Arm], pairs: int, arguments: Sequence[str], deadline_s: float, say: bool = True
) -> Mapping[str, tuple[list[float], list[float]]]:
    """Times of both arms by case, pair by pair; a case that any run lacks is left out."""
    runs: list[list[Mapping[str, Result]]] = [[], []]
    for pair in range(pairs):
        for which in (0, 1) if pair % 2 == 0 else (1, 0):
            if say:
                print(f"pair {pair + 1} of {pairs}: {arms[which].name}", file=sys.stderr, flush=True)
            runs[which].append(run_arm(arms[which], arguments, deadline_s))
    everywhere = set.intersection(*(set(results) for side in runs for results in side))
    ordered = [case for case in runs[0][0] if case in everywhere]
    return {
        case: ([time_of(results[case]) for results in runs[0]], [time_of(results[case]) for results in runs[1]])
        for case in ordered
    }


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "example: perfsuite ab --a main --b HEAD -- test_perf -k 'matmul and fp32'.  " + _EXITS
    for side in ("a", "b"):
        parser.add_argument(f"--{side}", metavar="REV", help="git revision; without it the working tree as it is")
        parser.add_argument(
            f"--{side}-env", metavar="NAME=VALUE", action="append", default=[], help="variable of this arm; repeatable"
        )
        parser.add_argument(f"--{side}-python", metavar="PATH", help="interpreter of this arm")
    parser.add_argument("--pairs", type=int, default=6, help="pairs of runs, at least 3 (default 6)")
    parser.add_argument("--tolerance", type=float, default=0.03, help="change that does not matter (default 0.03)")
    parser.add_argument("--deadline", metavar="DURATION", default="1h", help="for one run of one arm (default 1h)")
    parser.add_argument("--json", metavar="FILE", help="write the comparison to FILE as well")
    parser.add_argument("pytest_args", nargs="*", metavar="-- PYTEST ARGS", help="which cases, as pytest takes them")


def run_ab(options: argparse.Namespace) -> int:
    """Carry out ``perfsuite ab``."""
    if options.pairs < 3:
        raise ConfigurationError(f"--pairs {options.pairs} is too few to know any noise; give 3 or more")
    if not 0 < options.tolerance < 1:
        raise ConfigurationError(f"--tolerance {options.tolerance} is not between 0 and 1; write 0.03 for 3 %")
    environments = [read_env(texts) for texts in (options.a_env, options.b_env)]
    if (options.a, options.a_python, environments[0]) == (options.b, options.b_python, environments[1]):
        raise ConfigurationError("both arms are the same; give --a and --b, or --a-env and --b-env, that differ")
    root = Path.cwd()
    arguments = options.pytest_args or ["test_perf"]
    with ExitStack() as trees:
        arms = []
        for side, env in zip("ab", environments, strict=True):
            revision = getattr(options, side)
            name = " ".join([revision or "working tree", *(f"{key}={value}" for key, value in env.items())])
            python = getattr(options, f"{side}_python") or sys.executable
            arm = Arm(name=f"{side} ({name})", root=root)
            if revision:
                arm = trees.enter_context(arm_of(root, revision, arm.name))
            arms.append(dataclasses.replace(arm, interpreter=python, env=env))
        times = run_pairs(arms, options.pairs, arguments, parse_duration(options.deadline))
    comparisons = [compare(case, *pair, options.tolerance) for case, pair in times.items()]
    print_comparisons(comparisons, arms, options.tolerance)
    if options.json:
        Path(options.json).write_text(json.dumps(to_json(comparisons), indent=1) + "\n")
    return EXIT_FOUND if any(comparison.outcome == "slower" for comparison in comparisons) else EXIT_OK


def read_env(texts: Sequence[str]) -> dict[str, str]:
    """Variables written NAME=VALUE.

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


def print_comparisons(comparisons: Sequence[Comparison], arms: Sequence[Arm], tolerance: float) -> None:
    """A line per case; what was measured, how b differs, and what could have been seen."""
    print(f"a: {arms[0].name}   b: {arms[1].name}")
    print(f"{comparisons[0].pairs if comparisons else 0} pairs, 95 % intervals, tolerance {tolerance:.1%}")
    width = max((len(comparison.case) for comparison in comparisons), default=4)
    print(f"{'case':{width}}  {'a':>10}  {'b':>10}  {'b vs a':>8}  {'interval':>18}  {'visible':>8}")
    for comparison in comparisons:
        times = (
            f"{format_seconds(comparison.a_s):>10}  {format_seconds(comparison.b_s):>10}  {comparison.change:>+8.1%}"
        )
        interval = f"{comparison.low:+.1%} .. {comparison.high:+.1%}"
        visible = f"{comparison.smallest:>8.1%}  {comparison.outcome}"
        print(f"{comparison.case:{width}}  {times}  {interval:>18}  {visible}")


COMMAND = Command(
    name="ab",
    help="compare two revisions, environments or settings, alternating on this machine",
    arguments=_arguments,
    run=run_ab,
)
