"""Options, ini keys and markers: declared, checked and read once into frozen :class:`Settings` and a Budget."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import pytest

from perfsuite.base.errors import ConfigurationError
from perfsuite.base.units import parse_duration
from perfsuite.plugin import collisions
from perfsuite.plugin.shapes import ShapeFile, read_shapes
from perfsuite.plugin.sweep import Scale
from perfsuite.record.verdict import FAILING
from perfsuite.record.workload import Budget, Pin

MARKERS = (
    "perf: the test is a perf case; leave these out with -m 'not perf'",
    "platform(name): the case belongs to this platform; select with -m 'platform(name=\"s4000\")'",
    "world_size(n): number of ranks of the case; select with -m 'world_size(n=8)'",
    "extended: at the small scale the case is left out unless -k, -m or a node id selects it",
    'published(report, table): the case reproduces a row of a published report, e.g. report="002", '
    'table="002/performance"; set where --perf-published or -m asks for it',
    "acceptance: the case belongs to the acceptance run of a node, see perfsuite docs acceptance",
    "soak: the case takes minutes: it runs last, and only if -m acceptance, -k soak or a node id selects it",
    "perf_timeout(seconds): deadline of a perf case, instead of --perf-timeout",
    "perf_sizes: set by the decorator perfsuite.sizes",
    "perf_world_sizes: set by the decorator perfsuite.world_sizes",
    "perf_nothing: set where a test has no case at the scale in use; it is not collected",
    "perf_dtypes: set by the decorator perfsuite.dtypes",
    "perf_acceptance: set by the decorator perfsuite.acceptance",
)
DEFAULT_TIMEOUT = "120s"
SHOWN = ("summary", "tables", "cases")
"""Choices of --perf-show."""
STYLE_NAMES = ("opensora", "latte", "flagperf", "oneflow", "methods")
"""Names of ``perfsuite.reports.tables.styles.STYLES``, which a run that asks for no report does not import."""
UPDATE_MODES = ("append", "improved", "accept")
BESIDE = "beside the journal"
"""Where the page goes when no file is named; no file is called so."""
_NO_RUN = (
    "help",
    "version",
    "collectonly",
    "showfixtures",
    "show_fixtures_per_test",
    "markers",
    "cacheshow",
    "setupplan",
)
"""Options with which pytest runs no test."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of one pytest run."""

    platform: str | None
    """Platform to generate cases for; None: the accelerator found, else cpu."""
    scale: Scale | None
    """None: the platform decides."""
    world_sizes: tuple[int, ...]
    """In place of those of sweeps that follow the launch; none: as the launch has room."""
    oversubscribe: bool
    """Ranks may share devices on platforms where that is not always allowed."""
    fresh: bool
    """Every case in rank processes of its own."""
    pin: Pin
    """What ranks are pinned to."""
    backend: str | None
    """What ranks communicate by; None: what their devices have."""
    resume: Path | None
    """Journal whose finished cases are reported instead of run."""
    time_budget_s: float | None
    """When the cases have taken this long the rest is skipped."""
    journal: Path | None
    """Where this run's journal goes; None: a new file under ``.perfsuite`` in the root directory."""
    trace: Path | None
    """Folder for a trace and a picture of every case with a timeline."""
    platform_files: tuple[Path, ...]
    """TOML files with platforms of the user's own."""
    budget: Budget
    """How every case is timed unless a marker says otherwise."""
    shapes: ShapeFile | None = None
    """Shapes of the user's own, in place of the sizes of the tests that they are for."""


settings_key = pytest.StashKey[Settings]()
bare_compare_key = pytest.StashKey[bool]()
"""Whether --benchmark-compare was given without a file."""


def declare(parser: pytest.Parser) -> None:
    """Declare every option and ini key, in the order of ``pytest --help``."""
    add = parser.getgroup("perfsuite", "performance of distributed training").addoption
    add("--perf-platform", metavar="NAME", help="generate the cases of this platform instead of the one found here")
    add("--perf-scale", metavar="full|small", help="sizes as published, or small ones; default: the platform decides")
    add(
        "--perf-world-sizes",
        metavar="LIST",
        help="numbers of ranks for tests that sweep them, e.g. 8,16,32; default: those of the test, doubled up to "
        "256, then the ranks of the launch or the devices of the host",
    )
    add(
        "--perf-published",
        metavar="REPORTS",
        help="run only the cases that reproduce rows of published reports, e.g. 002 or 002/performance,004/weak "
        "(ini: perf_published)",
    )
    add("--perf-timeout", metavar="DURATION", help="deadline of a case's build, e.g. 90s or 2min (ini: perf_timeout)")
    add("--perf-oversubscribe", action="store_true", help="let ranks share devices when there are fewer than ranks")
    add("--perf-fresh", action="store_true", help="start new rank processes for every case")
    add(
        "--perf-backend",
        metavar="NAME",
        help="what ranks communicate by, where the devices have more than one, e.g. gloo on nccl's; default: their own",
    )
    add(
        "--perf-pin",
        metavar="none|cores|numa",
        default="none",
        help="where ranks run: as a plain program's (none, default), each pinned to its share of the cores, "
        "or to whole physical cores of the memory node of its device",
    )
    add("--perf-cache-flush", action="store_true", help="flush the last-level cache before every iteration")
    add(
        "--perf-warmup",
        metavar="DURATION",
        help="warm every case up for at least so long, e.g. 3s; default: until two batches of iterations agree, half a "
        "second at least where ranks wait for each other in iterations below 10 ms",
    )
    add(
        "--perf-sustain",
        metavar="DURATION",
        help="time every case for so long, e.g. 15s, and record clocks, power and temperature meanwhile",
    )
    add("--perf-yardstick", action="store_true", help="time a control after every sample, to detect host noise")
    add(
        "--perf-shapes",
        metavar="FILE",
        help="lines 'TEST SHAPE': shapes of your own for the tests named, perfsuite docs shapes",
    )
    add("--perf-resume", metavar="JOURNAL", help="report the cases finished in JOURNAL from it and run the others")
    add("--perf-time-budget", metavar="DURATION", help="skip the cases that remain after this long, e.g. 30min")
    add("--perf-journal", metavar="FILE", help="journal of this run; default: .perfsuite/journal-<time>-<pid>.jsonl")
    add(
        "--perf-trace", metavar="DIR", help="write a Perfetto trace and a picture of each pipeline case's step into DIR"
    )
    add(
        "--perf-show",
        metavar="|".join(SHOWN),
        help="one screen (summary, default), all tables (also by -v), or tables and pytest-benchmark's own table of "
        "the cases; -q: counts and what is notable (ini: perf_show)",
    )
    add("--perf-summary", metavar="FILE", help="write a Markdown summary; $GITHUB_STEP_SUMMARY gets it too")
    add("--perf-annotations", action="store_true", help="under GitHub Actions: an annotation at each case that fails")
    add("--perf-show-hosts", action="store_true", help="keep names of hosts in files meant for others")
    _declare_gate(add)
    _declare_expectations(add)
    add("--perf-report", metavar="FILE", help="write the published reports' tables as Markdown (ini: perf_report)")
    styles = "|".join(STYLE_NAMES)
    add("--perf-report-style", metavar=styles, help="whose tables; default: those that fit (ini: perf_report_style)")
    add(
        "--perf-project",
        nargs="?",
        const="",
        metavar="CALIBRATION",
        help="project training steps that cannot run here, from a file of perfsuite calibrate, else from the "
        "platform's row; write --perf-project=FILE, or put it last",
    )
    add(
        "--perf-history",
        metavar="FILE",
        help="add a line of this session to a history; a folder gets a file for each hardware (ini: perf_history)",
    )
    add(
        "--perf-html",
        nargs="?",
        const=BESIDE,
        metavar="FILE",
        help="write one page with charts, offline in one file; default: beside the journal (ini: perf_html)",
    )
    ini = parser.addini
    ini("perf_timeout", f"deadline of one perf case (default {DEFAULT_TIMEOUT})", default=DEFAULT_TIMEOUT)
    ini("perf_platforms", "TOML files that describe platforms of your own", type="paths", default=[])
    ini("perf_published", "published reports or tables whose cases alone run, with commas", default="")
    ini("perf_show", f"what is shown unless an option says otherwise: {', '.join(SHOWN)}", default="")
    ini("perf_baselines", "folder of the baselines, relative to the root", default="baselines")
    ini(
        "perf_simulated_baselines",
        "folder of the baselines of simulated devices, relative to the root",
        default=".perfsuite/simulated-baselines",
    )
    ini("perf_gate_budget", "time the gate may take beyond the first runs, e.g. 10min, or none", default="")
    ini("perf_fail_on", "verdicts that fail under --perf-gate, with commas", default="default")
    ini("perf_baselines_links", "a baseline file may be a link out of its folder", type="bool", default=False)
    ini("perf_tolerance", "relative slowdown that is accepted, e.g. 0.03", default="0.03")
    ini("perf_report", "file of the report in Markdown, relative to the root", default="")
    ini("perf_report_style", f"whose tables it has: {styles}", default="")
    ini("perf_history", "history that every run adds a line to, relative to the root", default="")
    ini("perf_html", "file of the page, relative to the root; yes: beside the journal", default="")


def _declare_expectations(add: Callable[..., None]) -> None:
    """Options of expectations."""
    add(
        "--perf-expect",
        nargs="?",
        const="",
        metavar="FILE",
        help="fail cases below what healthy devices of the model are known to reach, and print a line per question; "
        "FILE: a platform file with [[expectation]] rows of your own; write --perf-expect=FILE, or put it last",
    )
    add(
        "--perf-expect-devices",
        metavar="N",
        type=int,
        help="fail unless every host of the run has N devices, e.g. 8 (default with -m acceptance and --perf-expect: "
        "those of the platform's row)",
    )
    add("--perf-allow-unjudged", action="store_true", help="with --perf-expect: do not fail if no case has a row")


def _declare_gate(add: Callable[..., None]) -> None:
    """Options of the gate and of the baselines."""
    add("--perf-gate", action="store_true", help="fail a case that regressed against its baseline or breaks physics")
    add("--perf-against", metavar="REV", help="confirm suspects by an A/B with this git revision, or with this Python")
    add("--perf-base", metavar="REV", help="set --perf-against by its old name, which goes with 0.2")
    add(
        "--perf-fail-on",
        metavar="LIST",
        help="with --perf-gate: the verdicts that fail, e.g. default,inconclusive,unstable-host "
        f"(default: {','.join(sorted(FAILING))}; ini: perf_fail_on)",
    )
    add("--perf-require-baseline", action="store_true", help="with --perf-gate: a case without a baseline fails")
    add("--perf-allow-ungated", action="store_true", help="with --perf-gate: it is no error that nothing is gated")
    add("--perf-update", metavar="|".join(UPDATE_MODES), help="store this session's runs in the baseline")
    accepts = "store slower levels as right: what another environment costs, or all (the same as --perf-update=accept)"
    add("--perf-accept", metavar="environment|all", help=accepts)
    add("--perf-reason", metavar="TEXT", default="", help="why --perf-update=accept or --perf-accept is right")
    add("--perf-runs", metavar="N", type=int, default=1, help="record N runs of each case, each in fresh processes")
    add(
        "--perf-gate-budget",
        metavar="DURATION|none",
        help="limit what the gate runs beyond the first run of every case, e.g. 300 or 10min; none: no limit (default: "
        "the larger of 3 min and 10 times the first runs; ini: perf_gate_budget)",
    )
    add("--perf-baselines", metavar="DIR", help="folder of the baselines (ini: perf_baselines)")


def configure(config: pytest.Config) -> None:
    """Register markers, check the options and keep them."""
    for line in MARKERS:
        config.addinivalue_line("markers", line)
    config.stash[settings_key] = read_settings(config)


def read_settings(config: pytest.Config) -> Settings:
    """The options of this run; raises UsageError that names the option, what was given and what to do."""
    option = functools.partial(collisions.option, config)
    scale = option("perf_scale")
    if scale not in (None, "full", "small"):
        raise pytest.UsageError(f"--perf-scale: {scale!r} is no scale; choose full or small")
    pin = option("perf_pin")
    if pin not in get_args(Pin):
        raise pytest.UsageError(f"--perf-pin: {pin!r} is no way to pin ranks; choose none, cores or numa")
    directory = config.invocation_params.dir
    resume = _path(option("perf_resume"), directory)
    if resume and not resume.is_file():
        raise pytest.UsageError(f"--perf-resume: {resume} is no file; give the journal that an earlier run named")
    journal = _path(option("perf_journal"), directory)
    if journal and journal.exists():
        raise pytest.UsageError(
            f"--perf-journal: {journal} exists and is not overwritten; "
            "choose another file, or go on from this one by --perf-resume"
        )
    trace = _path(option("perf_trace"), directory)
    if trace and trace.exists() and not trace.is_dir():
        raise pytest.UsageError(f"--perf-trace: {trace} is no folder; name one that is there or can be made")
    budget_text = option("perf_time_budget")
    shapes = _path(option("perf_shapes"), directory)
    return Settings(
        platform=option("perf_platform"),
        scale=scale,
        world_sizes=_read_world_sizes(option("perf_world_sizes")),
        oversubscribe=option("perf_oversubscribe"),
        fresh=option("perf_fresh"),
        pin=pin,
        backend=option("perf_backend"),
        resume=resume,
        time_budget_s=positive_duration(budget_text, "--perf-time-budget") if budget_text is not None else None,
        journal=journal,
        trace=trace,
        platform_files=tuple(Path(path) for path in collisions.ini(config, "perf_platforms")),
        budget=_read_budget(config),
        shapes=read_shapes(shapes) if shapes else None,
    )


def timed_options(settings: Settings) -> dict[str, str]:
    """The options given that change what is timed on the same cases: recorded, and told when the gate compares."""
    sustain_s, warmup_s = settings.budget.sustain_s, settings.budget.warmup_min_s
    options = {
        "perf-pin": settings.pin if settings.pin != "none" else "",
        "perf-backend": settings.backend or "",
        "perf-cache-flush": "yes" if settings.budget.cache_flush else "",
        "perf-warmup": f"{warmup_s:g}s" if warmup_s is not None else "",
        "perf-sustain": f"{sustain_s:g}s" if sustain_s is not None else "",
    }
    return {name: value for name, value in options.items() if value}


def _read_world_sizes(written: str | None) -> tuple[int, ...]:
    """Whole numbers from 1, smallest first; UsageError that names what is none."""
    if written is None:
        return ()
    words = [word.strip() for word in written.split(",")]
    wrong = [word for word in words if not (word.isdecimal() and int(word))]
    if wrong:
        raise pytest.UsageError(
            f"--perf-world-sizes: {wrong[0]!r} in {written!r} is no number of ranks; "
            "write whole numbers of at least 1 such as 8,16,32"
        )
    return tuple(sorted({int(word) for word in words}))


def file_of(name: str, config: pytest.Config) -> Path | None:
    """Where an option says that a file goes, else its ini key."""
    asked, written = collisions.option(config, name), collisions.ini(config, name)
    return config.invocation_params.dir / asked if asked else config.rootpath / written if written else None


def runs_tests(config: pytest.Config) -> bool:
    """Whether this run of pytest is one that runs tests."""
    return not any(config.getoption(name, None) for name in _NO_RUN)


def positive_duration(written: object, where: str) -> float:
    """Seconds of a duration given as text or number; raises UsageError that names ``where`` unless it is above 0."""
    try:
        seconds = parse_duration(str(written))
    except ConfigurationError as error:
        raise pytest.UsageError(f"{where}: {error}") from None
    if seconds <= 0:
        raise pytest.UsageError(f"{where}: {written} is no time at all; give more than 0s")
    return seconds


def _path(text: str | None, directory: Path) -> Path | None:
    return None if text is None else directory / text


def _read_budget(config: pytest.Config) -> Budget:
    option = functools.partial(collisions.option, config)
    timeout, sustain, warmup = option("perf_timeout"), option("perf_sustain"), option("perf_warmup")
    # pytest-benchmark's, with its defaults where that plugin is switched off (-p no:benchmark).
    max_time_s = float(config.getoption("benchmark_max_time", "1.0"))
    min_rounds = config.getoption("benchmark_min_rounds", 5)
    disabled, enabled = (config.getoption(f"benchmark_{name}", False) for name in ("disable", "enable"))
    return Budget(
        min_rounds=min_rounds,
        max_rounds=max(min_rounds, Budget.max_rounds),
        max_time_s=max_time_s,
        # pytest-benchmark documents that its warm-up obeys --benchmark-max-time too.
        warmup_time_s=max_time_s,
        smoke=disabled and not enabled,
        cache_flush=option("perf_cache_flush"),
        warmup_min_s=None if warmup is None else positive_duration(warmup, "--perf-warmup"),
        sustain_s=None if sustain is None else positive_duration(sustain, "--perf-sustain"),
        yardstick=option("perf_yardstick"),
        timeout_s=positive_duration(timeout, "--perf-timeout")
        if timeout is not None
        else positive_duration(collisions.ini(config, "perf_timeout") or DEFAULT_TIMEOUT, "ini perf_timeout"),
        fixed_timeout=timeout is not None,
    )


def budget_of(item: pytest.Item, budget: Budget) -> Budget:
    """The budget of one case: what its ``perf_timeout`` and ``benchmark`` markers change in the run's budget."""
    timeout = item.get_closest_marker("perf_timeout")
    if timeout:
        if len(timeout.args) + len(timeout.kwargs) != 1 or not set(timeout.kwargs) <= {"seconds"}:
            raise pytest.UsageError(f"{item.nodeid}: marker perf_timeout takes one value, e.g. perf_timeout(90)")
        written = timeout.args[0] if timeout.args else timeout.kwargs["seconds"]
        limit_s = positive_duration(written, f"{item.nodeid}: marker perf_timeout")
        budget = replace(budget, timeout_s=limit_s, fixed_timeout=True)
    benchmark = item.get_closest_marker("benchmark")
    changes: dict[str, Any] = {}
    if benchmark and "min_rounds" in benchmark.kwargs:
        changes["min_rounds"] = int(benchmark.kwargs["min_rounds"])
        changes["max_rounds"] = max(changes["min_rounds"], Budget.max_rounds)
    if benchmark and "max_time" in benchmark.kwargs:
        changes["max_time_s"] = changes["warmup_time_s"] = float(benchmark.kwargs["max_time"])
    return replace(budget, **changes) if changes else budget
