"""Declare the options and ini keys of the plugin, with their help."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from perfsuite.plugin.options import BESIDE, DEFAULT_TIMEOUT, SHOWN, STYLE_NAMES, UPDATE_MODES
from perfsuite.record.verdict import FAILING

_Options = tuple[tuple[str, str, str], ...]
"""Name, metavar and help of each option; a flag has an empty metavar."""
_SELECT: _Options = (
    ("--perf-platform", "NAME", "run the cases of this platform (default: the one found here)"),
    ("--perf-scale", "full|small", "use published sizes or small ones (default: as the platform has)"),
    (
        "--perf-world-sizes",
        "LIST",
        "set the numbers of ranks of tests that sweep them, e.g. 8,16,32 (default: those of the test, doubled up to "
        "256, then the ranks of the launch or the devices of the host)",
    ),
    (
        "--perf-published",
        "REPORTS",
        "run only cases that reproduce rows of published reports, e.g. 002 or 002/performance,004/weak (default: all "
        "cases; ini: perf_published)",
    ),
    (
        "--perf-shapes",
        "FILE",
        "run tests with the shapes of FILE, a line is 'TEST SHAPE' (default: none); see perfsuite docs shapes",
    ),
    ("--perf-resume", "JOURNAL", "report cases finished in JOURNAL and run the others (default: none)"),
    ("--perf-time-budget", "DURATION", "skip the cases that remain after DURATION, e.g. 30min (default: no limit)"),
)
_TIME: _Options = (
    (
        "--perf-timeout",
        "DURATION",
        f"limit the build of a case, e.g. 90s (default: {DEFAULT_TIMEOUT}; ini: perf_timeout)",
    ),
    ("--perf-oversubscribe", "", "let ranks share devices if there are more ranks than devices"),
    ("--perf-fresh", "", "start new rank processes for every case"),
    ("--perf-backend", "NAME", "use this backend of the devices, e.g. gloo (default: their own)"),
    (
        "--perf-pin",
        "none|cores|numa",
        "pin each rank to its share of the cores, or to whole physical cores of the memory node of its device "
        "(default: none)",
    ),
    ("--perf-cache-flush", "", "flush the last-level cache before every iteration"),
    (
        "--perf-warmup",
        "DURATION",
        "warm up every case for at least DURATION, e.g. 3s (default: until two batches of iterations agree, at least "
        "0.5 s if ranks wait for each other in iterations below 10 ms)",
    ),
    (
        "--perf-sustain",
        "DURATION",
        "time every case for DURATION, e.g. 15s, and record clocks, power and temperature (default: no minimum)",
    ),
    ("--perf-yardstick", "", "time a control after every sample, to detect host noise"),
)
_PRINT: _Options = (
    (
        "--perf-show",
        "|".join(SHOWN),
        "print one screen, all tables (also by -v), or tables and pytest-benchmark's table; -q prints counts and "
        "remarks (default: summary; ini: perf_show)",
    ),
    (
        "--perf-html",
        "FILE",
        "write an offline page with charts; without FILE next to the journal (default: no page; ini: perf_html)",
    ),
    (
        "--perf-summary",
        "FILE",
        "write a Markdown summary to FILE; $GITHUB_STEP_SUMMARY gets it too (default: no file)",
    ),
    (
        "--perf-report",
        "FILE",
        "write the tables of the published reports as Markdown (default: no file; ini: perf_report)",
    ),
    (
        "--perf-report-style",
        "STYLE",
        f"write tables of this style: {', '.join(STYLE_NAMES)} (default: all that fit; ini: perf_report_style)",
    ),
    ("--perf-journal", "FILE", "write the journal to FILE (default: .perfsuite/journal-<time>-<pid>.jsonl)"),
    (
        "--perf-history",
        "FILE",
        "add a line of this session to a history; a folder gets a file per hardware (default: no history; ini: "
        "perf_history)",
    ),
    ("--perf-trace", "DIR", "write a Perfetto trace and a picture of each pipeline case into DIR (default: none)"),
    ("--perf-annotations", "", "print an annotation of GitHub Actions for each failing case"),
    ("--perf-show-hosts", "", "keep host names in files for others"),
)
_CHECK: _Options = (
    (
        "--perf-expect",
        "FILE",
        "fail cases below the figures of healthy devices, print a line per question; FILE adds [[expectation]] rows; "
        "write --perf-expect=FILE, or put it last (default: no expectations)",
    ),
    (
        "--perf-expect-devices",
        "N",
        "fail unless every host of the run has N devices, e.g. 8 (default: any number; an acceptance run with "
        "--perf-expect needs the number of the platform's row)",
    ),
    ("--perf-allow-unjudged", "", "pass with --perf-expect even if no case has a row"),
)
_GATE: _Options = (
    ("--perf-gate", "", "fail a case that regressed against its baseline or breaks physics"),
    ("--perf-against", "REV", "confirm suspects by an A/B with this git revision, or with this Python (default: none)"),
    ("--perf-base", "REV", "set --perf-against by its old name, until 0.2 (default: none)"),
    (
        "--perf-fail-on",
        "LIST",
        "fail these verdicts with --perf-gate, e.g. default,inconclusive,unstable-host "
        f"(default: {','.join(sorted(FAILING))}; ini: perf_fail_on)",
    ),
    ("--perf-require-baseline", "", "fail a case without a baseline, with --perf-gate"),
    ("--perf-allow-ungated", "", "pass with --perf-gate even if no case has a baseline"),
    ("--perf-update", "|".join(UPDATE_MODES), "store this session's runs in the baseline (default: no)"),
    (
        "--perf-accept",
        "environment|all",
        "accept slowdowns caused by another environment, or all (same as --perf-update=accept), as the new level; "
        "needs --perf-reason (default: none)",
    ),
    ("--perf-reason", "TEXT", "store TEXT as the reason of --perf-update=accept or --perf-accept (default: none)"),
    ("--perf-runs", "N", "record N runs of each case, each in fresh processes (default: 1)"),
    (
        "--perf-gate-budget",
        "DURATION|none",
        "limit the time of the gate after the first run of every case, e.g. 300 or 10min, or none for no limit "
        "(default: the larger of 3 min and 10 times the first runs; ini: perf_gate_budget)",
    ),
    ("--perf-baselines", "DIR", "use baselines in DIR (default: baselines; ini: perf_baselines)"),
)
_PROJECT: _Options = (
    (
        "--perf-project",
        "FILE|SOFTWARE",
        "project training steps that cannot run here, from a file of perfsuite calibrate, as the code of a software "
        "such as megatron, or from the platform's row; write --perf-project=FILE, or put it last (default: no "
        "projection)",
    ),
)
_TRAIN: _Options = (
    (
        "--perf-data",
        "DIR",
        "read your own data sets from DIR, a folder for each model (default: generated data); see perfsuite docs "
        "published",
    ),
    ("--perf-loss-steps", "N", "read the loss of a published run after N steps (default: 20; Latte 100)"),
    (
        "--perf-target-loss",
        "LOSS",
        "record the time to reach this loss (default: 0.9 for Latte, not measured for others)",
    ),
    (
        "--perf-memory-budget",
        "SIZE",
        "limit the memory of a rank in test_largest_batch, e.g. 2GiB (default: 16MiB on a CPU and on simulated "
        "devices, else the whole device)",
    ),
)
GROUPS: dict[str, tuple[str, _Options]] = {
    "perfsuite": ("select cases", _SELECT),
    "perfsuite-time": ("run and time cases", _TIME),
    "perfsuite-train": ("train the models of the suite", _TRAIN),
    "perfsuite-print": ("print and write results", _PRINT),
    "perfsuite-check": ("check a node", _CHECK),
    "perfsuite-gate": ("compare with stored runs", _GATE),
    "perfsuite-project": ("project onto other devices", _PROJECT),
}
"""pytest's name of each group of options -> its purpose and its options, in the order of ``pytest --help``."""
_SETTINGS: dict[str, dict[str, Any]] = {
    "--perf-pin": {"default": "none"},
    "--perf-html": {"nargs": "?", "const": BESIDE},
    "--perf-expect": {"nargs": "?", "const": ""},
    "--perf-project": {"nargs": "?", "const": ""},
    "--perf-reason": {"default": ""},
    "--perf-runs": {"type": int, "default": 1},
    "--perf-expect-devices": {"type": int},
    "--perf-loss-steps": {"type": int},
    "--perf-target-loss": {"type": float},
}
_KEYS: tuple[tuple[str, str, Any], ...] = (
    ("perf_timeout", f"limit the build of a case (default: {DEFAULT_TIMEOUT})", DEFAULT_TIMEOUT),
    ("perf_platforms", "add platforms from these TOML files (default: none)", []),
    ("perf_published", "run only cases of these published reports or tables, e.g. 002,004 (default: all)", ""),
    ("perf_show", f"print one of {', '.join(SHOWN)} (default: summary)", ""),
    (
        "perf_short_names",
        "register the fixtures ranks, platform and the markers platform, world_size, extended (default: true)",
        True,
    ),
    ("perf_baselines", "store baselines in this folder, relative to the root (default: baselines)", "baselines"),
    (
        "perf_simulated_baselines",
        "store baselines of simulated devices here (default: .perfsuite/simulated-baselines)",
        ".perfsuite/simulated-baselines",
    ),
    ("perf_gate_budget", "limit the time of the gate after the first runs, e.g. 10min, none (default: usual)", ""),
    ("perf_fail_on", "fail these verdicts under --perf-gate (default: default)", "default"),
    ("perf_baselines_links", "allow links out of the baselines' folder (default: false)", False),
    ("perf_tolerance", "accept a relative slowdown up to this share (default: 0.03)", "0.03"),
    ("perf_report", "write the report in Markdown to this file, relative to the root (default: none)", ""),
    ("perf_report_style", "write the tables of this style (default: all that fit)", ""),
    ("perf_history", "add a line of every run to this history, relative to the root (default: none)", ""),
    ("perf_html", "write the page to this file, or yes: next to the journal (default: no page)", ""),
)
"""Name, help and default of each ini key; the default gives its type."""


def declare(parser: pytest.Parser) -> None:
    """Declare every option and ini key, in the order of ``pytest --help``."""
    for group, (purpose, options) in GROUPS.items():
        add = parser.getgroup(group, f"perfsuite: {purpose}").addoption
        for name, metavar, text in options:
            form = {"metavar": metavar} if metavar else {"action": "store_true"}
            add(name, help=text, **form, **_SETTINGS.get(name, {}))
    for key, text, default in _KEYS:
        kind: Literal["bool", "paths"] | None = (
            None if isinstance(default, str) else "bool" if isinstance(default, bool) else "paths"
        )
        parser.addini(key, text, type=kind, default=default)
