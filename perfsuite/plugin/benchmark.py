"""Pass the samples of the ranks to pytest-benchmark through its public interface.

pytest-benchmark times a call with the ``timer=`` of the ``benchmark`` marker.  perfsuite's timer moves only when
:func:`feed` advances it by one sample, inside the documented ``benchmark.pedantic``.  So the table, JSON, storage and
comparison hold exactly the seconds per iteration that the ranks reported.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from perfsuite.base.errors import InvalidParameter
from perfsuite.plugin import projecting
from perfsuite.plugin.collect import definitions_of, is_case
from perfsuite.plugin.gate_options import gate_options_key
from perfsuite.plugin.options import bare_compare_key
from perfsuite.plugin.state import suite_key

if TYPE_CHECKING:
    from perfsuite.plugin.suite import Suite
    from perfsuite.record.result import Result

ONE_RECORD = (
    "perf and benchmark were both used in one test, and a case has one record; use perf for code on ranks and "
    "benchmark for a function of this process, each in its own test"
)
REMEDY = "or add -m 'not perf' to leave the perf cases out"


def require_benchmark(item: pytest.Item) -> None:
    """Fail a case in one line if no plugin has the fixture ``benchmark``; other tests still run."""
    if "benchmark" not in definitions_of(item):
        raise pytest.fail.Exception(
            "perf stores its samples by pytest-benchmark, and its fixture benchmark is missing: leave out "
            f"-p no:benchmark, add -p pytest_benchmark.plugin if plugins are not loaded automatically, {REMEDY}",
            pytrace=False,
        )


def require_own_benchmark(benchmark: object) -> None:
    """Fail a case in one line if its fixture ``benchmark`` is not pytest-benchmark's."""
    if not _is_own(benchmark):
        kind = type(benchmark)
        raise pytest.fail.Exception(
            "perf stores its samples by pytest-benchmark, but another plugin or a conftest.py has replaced its "
            f"fixture benchmark by one that gives {kind.__module__}.{kind.__qualname__}: run without it, {REMEDY}",
            pytrace=False,
        )


def drop_foreign_benchmark(item: pytest.Item) -> None:
    """Remove a fixture value of another plugin that pytest-benchmark mistakes for its own and cannot report."""
    funcargs = getattr(item, "funcargs", {})
    if "benchmark" in funcargs and not _is_own(funcargs["benchmark"]):
        del funcargs["benchmark"]


def _is_own(benchmark: object) -> bool:
    module = sys.modules.get("pytest_benchmark.fixture")
    # Not isinstance: the fixture of pytest-codspeed claims pytest-benchmark's class by __class__.
    return module is not None and issubclass(type(benchmark), module.BenchmarkFixture)


class WorkerClock:
    """A timer that :func:`feed` sets."""

    __name__ = "worker_clock"  # pytest-benchmark stores it; without it every file would hold a repr with an address

    def __init__(self) -> None:
        self.now_s: float | None = None

    def __call__(self) -> float:
        """Return the seconds since it was set to zero.  Raises InvalidParameter if a test times other code with it."""
        if self.now_s is None:
            raise InvalidParameter(ONE_RECORD)
        return self.now_s


clock_key = pytest.StashKey[WorkerClock]()
apart_key = pytest.StashKey[list[str]]()  # Lines about cases that were not compared, because their settings differ.


def give_clock(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Set the worker clock in the benchmark marker of every perf case; pytest-benchmark reads only the nearest one."""
    if not hasattr(config, "_benchmarksession"):  # without pytest-benchmark its marker is not registered
        return
    clock = config.stash.setdefault(clock_key, WorkerClock())
    plain = pytest.mark.benchmark(timer=clock)
    for item in items:
        if is_case(item):
            own = item.get_closest_marker("benchmark")
            mark = pytest.mark.benchmark(**{**own.kwargs, "timer": clock}) if own else plain
            item.add_marker(mark, append=False)


def feed(benchmark: Any, clock: WorkerClock, result: Result) -> None:
    """Pass the samples of ``result`` to pytest-benchmark, one round each; the metrics go to ``extra_info``."""
    assert result.measurement is not None
    benchmark.extra_info.update(extra_info(result))
    times: Iterator[float] = iter(result.measurement.times_s)

    def rewind() -> None:  # always from zero, so that end - start is exactly the sample
        clock.now_s = 0.0

    def one_sample() -> None:  # pytest-benchmark may call once more for a profile: that call takes no time
        clock.now_s = clock() + next(times, 0.0)

    try:
        benchmark.pedantic(one_sample, setup=rewind, rounds=len(result.measurement.times_s), iterations=1)
    finally:
        clock.now_s = None


class _NothingMeasured(Exception):
    """Passes through pytest-benchmark, which then makes an entry without numbers."""


def feed_nothing(benchmark: Any) -> None:
    """Make pytest-benchmark skip this case: no entry, and no warning about an unused fixture."""

    def nothing() -> None:
        raise _NothingMeasured

    with contextlib.suppress(_NothingMeasured):
        benchmark.pedantic(nothing, setup=nothing)  # raises before the clock is read


def extra_info(result: Result) -> dict[str, Any]:
    """Return every metric by name and the settings of the case, for pytest-benchmark's files."""
    assert result.measurement is not None
    measurement = result.measurement
    return {
        **{metric.name: metric.value for metric in result.metrics if not metric.moves_with_peak},
        "platform": result.platform,
        "parameters": result.parameters,
        "defaults": result.defaults,
        "world_size": result.world_size,
        "backend": measurement.backend,
        "process": measurement.process,
        "transport": measurement.transport,
        "iterations_per_sample": measurement.iterations,
        "slowest_rank": measurement.slowest_rank,
        "rank_spread": measurement.rank_spread,
        "fingerprint": result.fingerprint,
        **({"simulated": True} if result.simulated else {}),
    }


def mark_failed(item: pytest.Item, report: pytest.TestReport) -> None:
    """Mark a case that failed after :func:`feed`: pytest-benchmark must not keep it as a reference."""
    benchmark = getattr(item, "funcargs", {}).get("benchmark")
    if report.failed and benchmark is not None:
        benchmark.has_error = True


def _hardware(suite: Suite) -> dict[str, Any]:
    assert suite.session is not None
    return {
        "platform": suite.machine.name,
        "devices": suite.machine.device_count,
        "fingerprint": suite.session.fingerprint,
    }


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """Add perfsuite's hardware to files of sessions with perf cases."""
    suite = config.stash.get(suite_key, None)
    if suite is not None and suite.session is not None:
        machine_info["perfsuite"] = _hardware(suite)


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_benchmark_compare_machine_info(
    config: pytest.Config, machine_info: dict[str, Any], compared_benchmark: dict[str, Any]
) -> None:
    """Add perfsuite's hardware to this machine's information if the compared file has it.

    pytest-benchmark loads files before the collection, when the tests of this session are unknown.
    """
    machine_info.pop("perfsuite", None)
    if "perfsuite" in compared_benchmark and not compared_benchmark.get("machine_info"):
        # A baseline of this hardware, found by its fingerprint; it has no machine information that could differ.
        machine_info.clear()
        return
    if "perfsuite" in compared_benchmark.get("machine_info", {}):
        from perfsuite.plugin.suite import Suite

        suite = Suite(config)  # a separate one: this session may have no perf cases
        if suite.prepare():
            machine_info["perfsuite"] = _hardware(suite)


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_json(config: pytest.Config, output_json: dict[str, Any]) -> None:
    """Add the version of the metrics and the projections to the file."""
    suite = config.stash.get(suite_key, None)
    if suite is not None and suite.session is not None:
        from perfsuite.record.result import SCHEMA  # imported since collection

        output_json["perfsuite"] = {"schema": SCHEMA, "session": suite.session.id}
        if projected := projecting.projections(suite):
            from perfsuite.reports.projected import as_json

            if records := as_json(*projected):
                output_json["perfsuite"]["projected"] = records


# -- A bare --benchmark-compare compares with this machine's baseline if the session has only perf cases.
# pytest-benchmark loads the compared files before the collection, when the tests are unknown.  So a bare option is
# removed, and set again after the collection, with the baseline file if there is one.


def take_bare_option(config: pytest.Config) -> None:
    """Remove a bare --benchmark-compare until the collection is done."""
    in_workers = getattr(config.option, "tx", None) or hasattr(config, "workerinput")  # pytest-xdist measures no case
    config.stash[bare_compare_key] = config.getoption("benchmark_compare", None) is True and not in_workers
    if config.stash[bare_compare_key]:
        config.option.benchmark_compare = None


def give_bare_option_back(session: pytest.Session) -> None:
    """Set a bare --benchmark-compare again: with this machine's file, or as it was."""
    config = session.config
    # pytest-benchmark has no public way to set the compared files later.
    benchmarks = getattr(config, "_benchmarksession", None)
    if not config.stash.get(bare_compare_key, False) or benchmarks is None:
        return
    perf = any(is_case(item) for item in session.items)
    plain = any("benchmark" in getattr(item, "fixturenames", ()) and not is_case(item) for item in session.items)
    suite = config.stash.get(suite_key, None)
    config.option.benchmark_compare = True
    if perf and not plain and suite is not None and suite.session is not None:
        from perfsuite.baselines.baseline import Hardware
        from perfsuite.baselines.store import path_of

        hardware = Hardware(platform=suite.machine.name, fingerprint=suite.session.fingerprint, key={})
        folder = config.stash[gate_options_key].folder_for(simulated=suite.machine.simulated)
        file = path_of(folder, hardware)
        if file.exists():
            config.option.benchmark_compare = str(file)
    benchmarks.compare = config.option.benchmark_compare
    with warnings.catch_warnings():
        if not perf:  # print a warning at once, as pytest-benchmark does in pytest_configure
            warnings.showwarning = lambda *warning: print(warnings.formatwarning(*warning[:4]), file=sys.stderr, end="")
        benchmarks.handle_loading()


def leave_out_changed(session: pytest.Session) -> None:
    """Remove cases with other settings from the files that pytest-benchmark compares with.

    If ``--benchmark-compare-fail`` then compares no case, the run is a usage error.
    """
    config = session.config
    files = getattr(getattr(config, "_benchmarksession", None), "compared_mapping", None) or {}
    suite = config.stash.get(suite_key, None)
    if not files or suite is None or suite.session is None:
        return
    from perfsuite.baselines.runs import CaseIdentity
    from perfsuite.baselines.summarise import case_of

    lines = config.stash.setdefault(apart_key, [])
    for path, stored in files.items():
        for node in stored.keys() & suite.session.results.keys():
            extra = stored[node].get("extra_info", {})
            parameters = extra.get("parameters", stored[node].get("params") if "workload" in extra else None)
            now = case_of(suite.session.results[node])
            if parameters is None:  # a file that an earlier version saved
                continue
            then = CaseIdentity(
                node=node,
                world_size=extra["world_size"],
                backend=extra["backend"],
                parameters=parameters,
                workload=extra.get("workload", now.workload),
                defaults=extra.get("defaults", {}),
            )
            changed = "; ".join(f"{name}: {old} -> {new}" for name, new, old in now.changed(then))
            if changed:
                del stored[node]
                lines.append(f"not compared with {Path(str(path)).name}: {node}: {changed}")
    ran = [bench.fullname for bench in config._benchmarksession.benchmarks]  # type: ignore[attr-defined]
    common = any(name in stored for stored in files.values() for name in ran)
    if lines and not common and config.getoption("benchmark_compare_fail", None) and not session.exitstatus:
        lines.append("--benchmark-compare-fail: no case was compared; compare with a file of the same settings")
        session.exitstatus = pytest.ExitCode.USAGE_ERROR
