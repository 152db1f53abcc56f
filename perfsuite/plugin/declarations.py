"""Declare the options and ini keys of the plugin, with their help."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from perfsuite.plugin.options import BESIDE, DEFAULT_TIMEOUT, SHOWN, STYLE_NAMES, UPDATE_MODES
from perfsuite.record.verdict import FAILING


def declare(parser: pytest.Parser) -> None:
    """Declare every option and ini key, in the order of ``pytest --help``."""
    add = parser.getgroup("perfsuite", "performance of distributed training").addoption
    add("--perf-platform", metavar="NAME", help="run the cases of this platform (default: the one found here)")
    add("--perf-scale", metavar="full|small", help="use published sizes or small ones (default: as the platform has)")
    add(
        "--perf-world-sizes",
        metavar="LIST",
        help="set the numbers of ranks of tests that sweep them, e.g. 8,16,32 (default: those of the test, doubled up "
        "to 256, then the ranks of the launch or the devices of the host)",
    )
    add(
        "--perf-published",
        metavar="REPORTS",
        help="run only cases that reproduce rows of published reports, e.g. 002 or 002/performance,004/weak "
        "(default: all cases; ini: perf_published)",
    )
    add(
        "--perf-timeout",
        metavar="DURATION",
        help=f"limit the build of a case, e.g. 90s or 2min (default: {DEFAULT_TIMEOUT}; ini: perf_timeout)",
    )
    add(
        "--perf-oversubscribe", action="store_true", help="let ranks share devices if there are more ranks than devices"
    )
    add("--perf-fresh", action="store_true", help="start new rank processes for every case")
    add("--perf-backend", metavar="NAME", help="use this backend of the devices, e.g. gloo (default: their own)")
    add(
        "--perf-pin",
        metavar="none|cores|numa",
        default="none",
        help="pin each rank to its share of the cores, or to whole physical cores of the memory node of its device "
        "(default: none)",
    )
    add("--perf-cache-flush", action="store_true", help="flush the last-level cache before every iteration")
    add(
        "--perf-warmup",
        metavar="DURATION",
        help="warm up every case for at least DURATION, e.g. 3s (default: until two batches of iterations agree, at "
        "least 0.5 s if ranks wait for each other in iterations below 10 ms)",
    )
    add(
        "--perf-sustain",
        metavar="DURATION",
        help="time every case for DURATION, e.g. 15s, and record clocks, power and temperature (default: no minimum)",
    )
    add("--perf-yardstick", action="store_true", help="time a control after every sample, to detect host noise")
    add(
        "--perf-shapes",
        metavar="FILE",
        help="run tests with the shapes of FILE, a line is 'TEST SHAPE' (default: none); see perfsuite docs shapes",
    )
    add("--perf-resume", metavar="JOURNAL", help="report cases finished in JOURNAL and run the others (default: none)")
    add(
        "--perf-time-budget",
        metavar="DURATION",
        help="skip the cases that remain after DURATION, e.g. 30min (default: no limit)",
    )
    add(
        "--perf-journal",
        metavar="FILE",
        help="write the journal to FILE (default: .perfsuite/journal-<time>-<pid>.jsonl)",
    )
    add(
        "--perf-trace",
        metavar="DIR",
        help="write a Perfetto trace and a picture of each pipeline case into DIR (default: none)",
    )
    add(
        "--perf-show",
        metavar="|".join(SHOWN),
        help="print one screen, all tables (also by -v), or tables and pytest-benchmark's table; -q prints counts and "
        "remarks (default: summary; ini: perf_show)",
    )
    add(
        "--perf-summary",
        metavar="FILE",
        help="write a Markdown summary to FILE; $GITHUB_STEP_SUMMARY gets it too (default: no file)",
    )
    add("--perf-annotations", action="store_true", help="print an annotation of GitHub Actions for each failing case")
    add("--perf-show-hosts", action="store_true", help="keep host names in files for others")
    _declare_gate(add)
    _declare_expectations(add)
    add(
        "--perf-report",
        metavar="FILE",
        help="write the tables of the published reports as Markdown (default: no file; ini: perf_report)",
    )
    add(
        "--perf-report-style",
        metavar="STYLE",
        help=f"write tables of this style: {', '.join(STYLE_NAMES)} (default: all that fit; ini: perf_report_style)",
    )
    add(
        "--perf-project",
        nargs="?",
        const="",
        metavar="FILE",
        help="project training steps that cannot run here, from a file of perfsuite calibrate or from the platform's "
        "row; write --perf-project=FILE, or put it last (default: no projection)",
    )
    add(
        "--perf-history",
        metavar="FILE",
        help="add a line of this session to a history; a folder gets a file per hardware (default: no history; ini: "
        "perf_history)",
    )
    add(
        "--perf-html",
        nargs="?",
        const=BESIDE,
        metavar="FILE",
        help="write an offline page with charts; without FILE next to the journal (default: no page; ini: perf_html)",
    )
    _declare_keys(parser.addini)


def _declare_keys(ini: Callable[..., None]) -> None:
    ini("perf_timeout", f"limit the build of a case (default: {DEFAULT_TIMEOUT})", default=DEFAULT_TIMEOUT)
    ini("perf_platforms", "add platforms from these TOML files (default: none)", type="paths", default=[])
    ini(
        "perf_published", "run only cases of these published reports or tables, e.g. 002,004 (default: all)", default=""
    )
    ini("perf_show", f"print one of {', '.join(SHOWN)} (default: summary)", default="")
    ini(
        "perf_short_names",
        "register the fixtures ranks, platform and the markers platform, world_size, extended (default: true)",
        type="bool",
        default=True,
    )
    ini(
        "perf_baselines",
        "store baselines in this folder, relative to the root (default: baselines)",
        default="baselines",
    )
    ini(
        "perf_simulated_baselines",
        "store baselines of simulated devices here (default: .perfsuite/simulated-baselines)",
        default=".perfsuite/simulated-baselines",
    )
    ini(
        "perf_gate_budget",
        "limit the time of the gate after the first runs, e.g. 10min, none (default: usual)",
        default="",
    )
    ini("perf_fail_on", "fail these verdicts under --perf-gate (default: default)", default="default")
    ini("perf_baselines_links", "allow links out of the baselines' folder (default: false)", type="bool", default=False)
    ini("perf_tolerance", "accept a relative slowdown up to this share (default: 0.03)", default="0.03")
    ini("perf_report", "write the report in Markdown to this file, relative to the root (default: none)", default="")
    ini("perf_report_style", "write the tables of this style (default: all that fit)", default="")
    ini("perf_history", "add a line of every run to this history, relative to the root (default: none)", default="")
    ini("perf_html", "write the page to this file, or yes: next to the journal (default: no page)", default="")


def _declare_expectations(add: Callable[..., None]) -> None:
    add(
        "--perf-expect",
        nargs="?",
        const="",
        metavar="FILE",
        help="fail cases below the figures of healthy devices, print a line per question; FILE adds [[expectation]] "
        "rows; write --perf-expect=FILE, or put it last (default: no expectations)",
    )
    add(
        "--perf-expect-devices",
        metavar="N",
        type=int,
        help="fail unless every host of the run has N devices, e.g. 8 (default: any number; with -m acceptance and "
        "--perf-expect that of the platform's row)",
    )
    add("--perf-allow-unjudged", action="store_true", help="pass with --perf-expect even if no case has a row")


def _declare_gate(add: Callable[..., None]) -> None:
    add("--perf-gate", action="store_true", help="fail a case that regressed against its baseline or breaks physics")
    add(
        "--perf-against",
        metavar="REV",
        help="confirm suspects by an A/B with this git revision, or with this Python (default: none)",
    )
    add("--perf-base", metavar="REV", help="set --perf-against by its old name, until 0.2 (default: none)")
    add(
        "--perf-fail-on",
        metavar="LIST",
        help="fail these verdicts with --perf-gate, e.g. default,inconclusive,unstable-host "
        f"(default: {','.join(sorted(FAILING))}; ini: perf_fail_on)",
    )
    add("--perf-require-baseline", action="store_true", help="fail a case without a baseline, with --perf-gate")
    add("--perf-allow-ungated", action="store_true", help="pass with --perf-gate even if no case has a baseline")
    add("--perf-update", metavar="|".join(UPDATE_MODES), help="store this session's runs in the baseline (default: no)")
    add(
        "--perf-accept",
        metavar="environment|all",
        help="accept slowdowns caused by another environment, or all (same as --perf-update=accept), as the new level; "
        "needs --perf-reason (default: none)",
    )
    add(
        "--perf-reason",
        metavar="TEXT",
        default="",
        help="store TEXT as the reason of --perf-update=accept or --perf-accept (default: none)",
    )
    add(
        "--perf-runs",
        metavar="N",
        type=int,
        default=1,
        help="record N runs of each case, each in fresh processes (default: 1)",
    )
    add(
        "--perf-gate-budget",
        metavar="DURATION|none",
        help="limit the time of the gate after the first run of every case, e.g. 300 or 10min, or none for no limit "
        "(default: the larger of 3 min and 10 times the first runs; ini: perf_gate_budget)",
    )
    add("--perf-baselines", metavar="DIR", help="use baselines in DIR (default: baselines; ini: perf_baselines)")
