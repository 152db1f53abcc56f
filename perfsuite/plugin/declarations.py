"""Declare the options and ini keys of the plugin, with their help."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from perfsuite.plugin.options import BESIDE, DEFAULT_TIMEOUT, SHOWN, STYLE_NAMES, UPDATE_MODES
from perfsuite.record.verdict import FAILING

_Options = tuple[tuple[str, str, str], ...]  # Name, metavar and help of each option; a flag has an empty metavar.
_SELECT: _Options = (
    ("--perf-platform", "NAME", "run the cases of this platform, e.g. s4000 (default: the one found here)"),
    (
        "--perf-scale",
        "full|small",
        "use the published sizes or small ones (default: full on an accelerator, small elsewhere)",
    ),
    (
        "--perf-world-sizes",
        "LIST",
        "set the numbers of ranks of tests that sweep them, e.g. 8,16,32 (default: the test's numbers, doubled up to "
        "256, and all ranks of the launch or devices of the host)",
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
        "run tests with the shapes of FILE, a line is 'TEST SHAPE', e.g. test_matmul 64x64x64 (default: the tests' "
        "own); see perfsuite docs shapes",
    ),
    ("--perf-resume", "JOURNAL", "report the cases that JOURNAL has and run the others (default: run all)"),
    ("--perf-time-budget", "DURATION", "skip the remaining cases after DURATION, e.g. 30min (default: no limit)"),
)
_TIME: _Options = (
    (
        "--perf-timeout",
        "DURATION",
        f"stop a case whose build takes longer, e.g. 90s (default: {DEFAULT_TIMEOUT}; ini: perf_timeout)",
    ),
    ("--perf-oversubscribe", "", "let several ranks share a device if there are more ranks than devices"),
    ("--perf-fresh", "", "start new rank processes for each case"),
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
        "warm up each case for at least DURATION, e.g. 3s (default: until two batches of iterations agree; 0.5 s for "
        "communication below 10 ms)",
    ),
    (
        "--perf-sustain",
        "DURATION",
        "time each case for DURATION, e.g. 15s, and record clocks, power and temperature (default: no minimum)",
    ),
    (
        "--perf-yardstick",
        "",
        "time a control after each sample, to detect host noise (on with --perf-gate and --perf-update)",
    ),
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
    ("--perf-annotations", "", "print an annotation of GitHub Actions for each failing case, ten at most"),
    ("--perf-show-hosts", "", "keep host names in page and summary, instead of host 1, host 2"),
)
_CHECK: _Options = (
    (
        "--perf-expect",
        "FILE",
        "fail cases below the figures of healthy devices and print a line per question; FILE adds [[expectation]] rows "
        "(default: no expectations); write --perf-expect=FILE, or put the option last",
    ),
    (
        "--perf-expect-devices",
        "N",
        "fail unless every host of the run has N devices, e.g. 8 (default: any number; an acceptance run with "
        "--perf-expect needs the number of the platform's row)",
    ),
    ("--perf-allow-unjudged", "", "pass with --perf-expect even if no result was judged"),
)
_GATE: _Options = (
    ("--perf-gate", "", "fail a case that is slower than its baseline or breaks a rule of physics"),
    (
        "--perf-against",
        "REV",
        "confirm suspects by an A/B with this git revision or Python, e.g. origin/main (default: no A/B)",
    ),
    ("--perf-base", "REV", "set --perf-against; old name, removed in 0.2 (default: no A/B)"),
    (
        "--perf-fail-on",
        "LIST",
        "fail these verdicts with --perf-gate, e.g. default,inconclusive,unstable-host "
        f"(default: {','.join(sorted(FAILING))}; ini: perf_fail_on)",
    ),
    ("--perf-require-baseline", "", "fail a case without a baseline, with --perf-gate"),
    ("--perf-allow-ungated", "", "pass with --perf-gate even if no case has a baseline"),
    (
        "--perf-update",
        "|".join(UPDATE_MODES),
        "store this session's runs in the baseline: all, improved cases only, or as a new level (default: none)",
    ),
    (
        "--perf-accept",
        "environment|all",
        "accept slowdowns as the new level: those caused by another environment, or all (as --perf-update=accept); "
        "needs --perf-reason (default: none)",
    ),
    ("--perf-reason", "TEXT", "store TEXT as the reason of --perf-update=accept or --perf-accept (default: none)"),
    ("--perf-runs", "N", "take N runs of each case, each in new processes (default: 1)"),
    (
        "--perf-gate-budget",
        "DURATION|none",
        "limit the gate's time after the first run of each case, e.g. 10min, or none for no limit "
        "(default: the larger of 3 min and 10 times the first runs; ini: perf_gate_budget)",
    ),
    ("--perf-baselines", "DIR", "read and store baselines in DIR (default: baselines; ini: perf_baselines)"),
)
_PROJECT: _Options = (
    (
        "--perf-project",
        "FILE|SOFTWARE",
        "project training steps that cannot run here, with a FILE of perfsuite calibrate, as the code of a SOFTWARE "
        "such as megatron, or with the platform's row (default: no projection); write --perf-project=FILE, or put the "
        "option last",
    ),
)
_TRAIN: _Options = (
    (
        "--perf-data",
        "DIR",
        "read your own data sets from DIR, with a folder for each model (default: generated data); see perfsuite docs "
        "published",
    ),
    ("--perf-loss-steps", "N", "train a published run for N steps to read its loss (default: 20; Latte 100)"),
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
    ("perf_timeout", f"stop a case whose build takes longer (default: {DEFAULT_TIMEOUT})", DEFAULT_TIMEOUT),
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
    (
        "perf_gate_budget",
        "limit the gate's time after the first runs, e.g. 10min, none (default: as --perf-gate-budget)",
        "",
    ),
    ("perf_fail_on", "fail these verdicts with --perf-gate (default: as --perf-fail-on)", "default"),
    ("perf_baselines_links", "allow links out of the baselines' folder (default: false)", False),
    ("perf_tolerance", "accept a slowdown up to this share (default: 0.03)", "0.03"),
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
