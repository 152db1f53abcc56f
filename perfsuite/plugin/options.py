"""Register the markers; check and read the options and the file of --perf-shapes once into :class:`Settings`."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import pytest

from perfsuite.base.errors import ConfigurationError, did_you_mean
from perfsuite.base.units import parse_duration
from perfsuite.plugin import collisions
from perfsuite.plugin.sweep import Scale, Size, Sweep
from perfsuite.record.workload import Budget, Pin

_NAME = re.compile(r"[A-Za-z_]\w*")
_SHAPE = re.compile(r"\d+(x\d+)*")


@dataclass(frozen=True, kw_only=True)
class ShapeFile:
    """The shapes of one file by name of the test function, in the order of the file.

    A line is the name and one shape, ``test_matmul 4096x4096x11008``; ``#`` begins a comment.
    """

    path: Path
    shapes: Mapping[str, tuple[tuple[int, Size], ...]]  # Number of the line, from 1, and the shape on it.

    def apply(self, test: str, sweep: Sweep) -> Sweep:
        """Return the sweep with the file's shapes for ``test`` at both scales; unchanged if the file has none.

        Raises ConfigurationError with the line if the test takes no shapes, or shapes of another length.
        """
        shapes = self.shapes.get(test, ())
        if not shapes:
            return sweep
        own = [size for size in (*sweep.full, *sweep.small) if isinstance(size.value, tuple)]
        for line, size in shapes:
            if not own:
                raise self.error(line, f"{test} has no sizes that are shapes; use another test, or delete the line")
            if len(size.value) != len(own[0].value):
                raise self.error(line, f"{test} takes {len(own[0].value)} numbers, as in {own[0].id}, not {size.id}")
        sizes = tuple(size for _, size in shapes)
        only_at = sweep.only_at and sizes[0]  # a test with further dtypes at one size runs them at the first shape
        return replace(sweep, full=sizes, small=sizes, extended_sizes=(), only_at=only_at)

    def require_known(self, tests: Iterable[str]) -> None:
        """Raise ConfigurationError for a name that no collected test has."""
        names = sorted(set(tests))
        for name, ((line, _), *_) in self.shapes.items():
            if name not in names:
                near = did_you_mean(name, names) if names else "there is none; add the file of the tests"
                raise self.error(line, f"no collected perf test is named {name!r}; {near}")

    def error(self, line: int, rule: str) -> ConfigurationError:
        """Return an error about a line of the file."""
        return ConfigurationError(f"--perf-shapes: {self.path}, line {line}: {rule}")


def read_shapes(path: Path) -> ShapeFile:
    """Read and check the file.  Raises UsageError with file, line, rule and remedy."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise pytest.UsageError(f"--perf-shapes: {path} cannot be read: {error.strerror}; give a text file") from None
    except UnicodeDecodeError as error:
        raise pytest.UsageError(f"--perf-shapes: {path} is not UTF-8 at byte {error.start}; save it as text") from None
    shapes: dict[str, tuple[tuple[int, Size], ...]] = {}
    file = ShapeFile(path=path, shapes=shapes)
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            size = _read_line(file, number, words)
        except ConfigurationError as error:
            raise pytest.UsageError(str(error)) from None
        earlier = shapes.get(words[0], ())
        if twin := [other for other, one in earlier if one == size]:
            text = f"{words[0]} has {size.id} in line {twin[0]} already; write each shape once"
            raise pytest.UsageError(str(file.error(number, text)))
        shapes[words[0]] = (*earlier, (number, size))
    if not shapes:
        raise pytest.UsageError(f"--perf-shapes: {path} has no shape; write a line such as: test_matmul 4096x4096x4096")
    return file


def _read_line(file: ShapeFile, number: int, words: list[str]) -> Size:
    if len(words) != 2:
        raise file.error(
            number, f"has {len(words)} words; write a test's name and one shape: test_matmul 4096x4096x4096"
        )
    name, text = words
    if not _NAME.fullmatch(name):
        raise file.error(number, f"{name!r} is not the name of a test function; write for example test_matmul")
    if not _SHAPE.fullmatch(text):
        raise file.error(number, f"{text!r} is not a shape; write whole numbers with x between them: 4096x4096x11008")
    value = tuple(int(part) for part in text.split("x"))
    if 0 in value:
        raise file.error(number, f"{text} has a 0; a dimension is at least 1")
    return Size(value=value, id="x".join(map(str, value)))


MARKERS = (
    "perf: the test is a perf case; leave these out with -m 'not perf'",
    "perf_platform(name): the case belongs to this platform; select with -m 'perf_platform(name=\"s4000\")'",
    "perf_world_size(n): number of ranks of the case; select with -m 'perf_world_size(n=8)'",
    "perf_extended: at the small scale the case is left out unless -k, -m or a node id selects it",
    'published(report, table): the case reproduces a row of a published report, e.g. report="002", '
    'table="002/performance"; set if --perf-published or -m uses it',
    "acceptance: the case belongs to the acceptance run of a node, see perfsuite docs acceptance",
    "soak: the case takes minutes: it runs last, and only if -m acceptance, -k soak or a node id selects it",
    "perf_timeout(seconds): deadline of a perf case, instead of --perf-timeout",
    "perf_sizes: set by the decorator perfsuite.sizes",
    "perf_world_sizes: set by the decorator perfsuite.world_sizes",
    "perf_nothing: set on a test without a case at the scale in use; it is not collected",
    "perf_dtypes: set by the decorator perfsuite.dtypes",
    "perf_acceptance: set by the decorator perfsuite.acceptance",
)
SHORT_MARKERS = ("platform", "world_size", "extended")
"""Short names of perf_platform, perf_world_size and perf_extended, unless ini perf_short_names is false."""
DEFAULT_TIMEOUT = "120s"
SHOWN = ("summary", "tables", "cases")  # Choices of --perf-show.
STYLE_NAMES = ("opensora", "latte", "flagperf", "oneflow", "methods")
"""Names of ``perfsuite.reports.tables.report.STYLES``, which is not imported in a run without a report."""
UPDATE_MODES = ("append", "improved", "accept")
BESIDE = "beside the journal"  # Value of --perf-html without a file: the page goes next to the journal.
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

    platform: str | None  # Platform to generate cases for; None: the accelerator found, else cpu.
    scale: Scale | None  # None: the scale of the platform.
    world_sizes: tuple[int, ...]
    """World sizes that replace those of sweeps that follow the launch; empty: as many as the launch can run."""
    oversubscribe: bool  # Whether ranks may share devices on every platform.
    fresh: bool  # Whether every case runs in new rank processes.
    pin: Pin  # Cores that ranks are pinned to.
    backend: str | None  # Communication backend; None: the default of the devices.
    resume: Path | None  # Journal whose finished cases are reported instead of run.
    time_budget_s: float | None  # Seconds of all cases after which the other cases are skipped.
    journal: Path | None  # Journal of this run; None: a new file under ``.perfsuite`` in the root directory.
    trace: Path | None  # Folder for a trace and a picture of every case with a timeline.
    platform_files: tuple[Path, ...]  # TOML files with the user's platforms.
    budget: Budget  # Timing of every case, unless a marker changes it.
    shapes: ShapeFile | None = None  # The user's shapes, which replace the sizes of some tests.


settings_key = pytest.StashKey[Settings]()
bare_compare_key = pytest.StashKey[bool]()  # Whether --benchmark-compare was used without a file.


def configure(config: pytest.Config) -> None:
    """Register markers, check the options and keep them in the stash."""
    for line in MARKERS:
        config.addinivalue_line("markers", line)
    for name in SHORT_MARKERS if short_names(config) else ():
        config.addinivalue_line("markers", f"{name}: short name of perf_{name}")
    config.stash[settings_key] = read_settings(config)


def short_names(config: pytest.Config) -> bool:
    """Return whether the fixtures and markers have their short names too."""
    return bool(collisions.ini(config, "perf_short_names"))


def read_settings(config: pytest.Config) -> Settings:
    """Return the options of this run.  Raises UsageError with option, value, rule and remedy."""
    option = functools.partial(collisions.option, config)
    scale = option("perf_scale")
    if scale not in (None, "full", "small"):
        raise pytest.UsageError(f"--perf-scale: {scale!r} is not a scale; choose full or small")
    pin = option("perf_pin")
    if pin not in get_args(Pin):
        raise pytest.UsageError(f"--perf-pin: {pin!r} is not a way to pin ranks; choose none, cores or numa")
    directory = config.invocation_params.dir
    resume = _path(option("perf_resume"), directory)
    if resume and not resume.is_file():
        raise pytest.UsageError(f"--perf-resume: {resume} is not a file; give the journal of an earlier run")
    journal = _path(option("perf_journal"), directory)
    if journal and journal.exists():
        raise pytest.UsageError(
            f"--perf-journal: {journal} exists and is not overwritten; "
            "choose another file, or go on from this one by --perf-resume"
        )
    trace = _path(option("perf_trace"), directory)
    if trace and trace.exists() and not trace.is_dir():
        raise pytest.UsageError(f"--perf-trace: {trace} is not a folder; give a folder")
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
    """Return the options in use that change the timing of a case, for the record and for comparisons of the gate."""
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
    if written is None:
        return ()
    words = [word.strip() for word in written.split(",")]
    wrong = [word for word in words if not (word.isdecimal() and int(word))]
    if wrong:
        raise pytest.UsageError(
            f"--perf-world-sizes: {wrong[0]!r} in {written!r} is not a number of ranks; "
            "write whole numbers of at least 1 such as 8,16,32"
        )
    return tuple(sorted({int(word) for word in words}))


def file_of(name: str, config: pytest.Config) -> Path | None:
    """Return the file of an option, else of its ini key; None without both."""
    asked, written = collisions.option(config, name), collisions.ini(config, name)
    return config.invocation_params.dir / asked if asked else config.rootpath / written if written else None


def runs_tests(config: pytest.Config) -> bool:
    """Return whether this run of pytest runs tests."""
    return not any(config.getoption(name, None) for name in _NO_RUN)


def positive_duration(written: object, where: str) -> float:
    """Return the seconds of a duration in text or a number.  Raises UsageError with ``where`` unless it is above 0."""
    try:
        seconds = parse_duration(str(written))
    except ConfigurationError as error:
        raise pytest.UsageError(f"{where}: {error}") from None
    if seconds <= 0:
        raise pytest.UsageError(f"{where}: {written} is not above 0; give for example 90s")
    return seconds


def _path(text: str | None, directory: Path) -> Path | None:
    return None if text is None else directory / text


def _read_budget(config: pytest.Config) -> Budget:
    option = functools.partial(collisions.option, config)
    timeout, sustain, warmup = option("perf_timeout"), option("perf_sustain"), option("perf_warmup")
    # pytest-benchmark's options, with its defaults if that plugin is switched off (-p no:benchmark).
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
    """Return the budget of one case: that of the run, changed by the markers ``perf_timeout`` and ``benchmark``."""
    timeout = item.get_closest_marker("perf_timeout")
    if timeout:
        if len(timeout.args) + len(timeout.kwargs) != 1 or not set(timeout.kwargs) <= {"seconds"}:
            raise pytest.UsageError(
                f"{item.nodeid}: marker perf_timeout takes one value; write for example perf_timeout(90)"
            )
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
