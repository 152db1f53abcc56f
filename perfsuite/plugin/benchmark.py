"""The bridge to pytest-benchmark: what the ranks measured enters its records through its public interface.

pytest-benchmark times a call with the ``timer=`` of the ``benchmark`` marker.  Here that is a clock which stands still
until :func:`feed` moves it by one sample, inside the documented ``benchmark.pedantic``: so table, JSON, storage and
comparison hold exactly the seconds per iteration that the ranks reported.
"""

from __future__ import annotations

import contextlib
import sys
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
    "perf and benchmark were both used in one test, and a case has one record; use perf for what runs on ranks, "
    "benchmark for a function of this process, each in a test of its own"
)


_REMEDY = "or add -m 'not perf' to leave the perf cases out"


def require_benchmark(item: pytest.Item) -> None:
    """Fail a case in one line where nothing has the fixture ``benchmark``; the other tests of a run are not touched."""
    if "benchmark" not in definitions_of(item):
        raise pytest.fail.Exception(
            "perf records what it measures by pytest-benchmark, and its fixture benchmark is not there: leave out "
            f"-p no:benchmark, add -p pytest_benchmark.plugin where plugins are not loaded by themselves, {_REMEDY}",
            pytrace=False,
        )


def require_own_benchmark(benchmark: object) -> None:
    """Fail a case in one line whose fixture ``benchmark`` is not pytest-benchmark's."""
    if not _is_own(benchmark):
        kind = type(benchmark)
        raise pytest.fail.Exception(
            "perf records what it measures by pytest-benchmark, but another plugin or a conftest.py has replaced its "
            f"fixture benchmark by one that gives {kind.__module__}.{kind.__qualname__}: run without it, {_REMEDY}",
            pytrace=False,
        )


def drop_foreign_benchmark(item: pytest.Item) -> None:
    """Take a fixture value from a case that pytest-benchmark takes for its own and cannot report."""
    funcargs = getattr(item, "funcargs", {})
    if "benchmark" in funcargs and not _is_own(funcargs["benchmark"]):
        del funcargs["benchmark"]


def _is_own(benchmark: object) -> bool:
    module = sys.modules.get("pytest_benchmark.fixture")
    # Not isinstance: pytest-codspeed's says by __class__ that it is pytest-benchmark's.
    return module is not None and issubclass(type(benchmark), module.BenchmarkFixture)


class WorkerClock:
    """A timer that moves only when told to, and runs only while :func:`feed` holds it."""

    __name__ = "worker_clock"  # pytest-benchmark stores it; without it a repr with an address would be in every file

    def __init__(self) -> None:
        self.now_s: float | None = None

    def __call__(self) -> float:
        """Seconds since it was last set to zero; InvalidParameter for a test that times something else with it."""
        if self.now_s is None:
            raise InvalidParameter(ONE_RECORD)
        return self.now_s


clock_key = pytest.StashKey[WorkerClock]()
apart_key = pytest.StashKey[list[str]]()
"""Lines on cases that were not compared, because they ran with other settings."""


def give_clock(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Give every perf case the worker clock, merged into its own benchmark marker: only the nearest one is read."""
    if not hasattr(config, "_benchmarksession"):  # without pytest-benchmark its marker is unknown
        return
    clock = config.stash.setdefault(clock_key, WorkerClock())
    plain = pytest.mark.benchmark(timer=clock)
    for item in items:
        if is_case(item):
            own = item.get_closest_marker("benchmark")
            mark = pytest.mark.benchmark(**{**own.kwargs, "timer": clock}) if own else plain
            item.add_marker(mark, append=False)


def feed(benchmark: Any, clock: WorkerClock, result: Result) -> None:
    """Hand the samples of ``result`` to pytest-benchmark, one round each; its metrics go to ``extra_info``."""
    assert result.measurement is not None
    benchmark.extra_info.update(extra_info(result))
    times: Iterator[float] = iter(result.measurement.times_s)

    def rewind() -> None:  # from zero each time: end - start is then the sample to the bit
        clock.now_s = 0.0

    def one_sample() -> None:  # pytest-benchmark may call once more for a profile: no time passes then
        clock.now_s = clock() + next(times, 0.0)

    try:
        benchmark.pedantic(one_sample, setup=rewind, rounds=len(result.measurement.times_s), iterations=1)
    finally:
        clock.now_s = None


class _NothingMeasured(Exception):
    """Passes through pytest-benchmark and marks its entry as one without numbers."""


def feed_nothing(benchmark: Any) -> None:
    """Tell pytest-benchmark that this case has no samples: no entry, and no warning about an unused fixture."""

    def nothing() -> None:
        raise _NothingMeasured

    with contextlib.suppress(_NothingMeasured):
        benchmark.pedantic(nothing, setup=nothing)  # before it looks at the clock


def extra_info(result: Result) -> dict[str, Any]:
    """What pytest-benchmark's files keep beside the times: every metric by name, and how the case ran."""
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
    """Mark a case that failed after its samples were fed: pytest-benchmark must not keep it as a reference."""
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
    """Name the hardware that pytest-benchmark knows nothing of, in files of sessions with perf cases."""
    suite = config.stash.get(suite_key, None)
    if suite is not None and suite.session is not None:
        machine_info["perfsuite"] = _hardware(suite)


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_benchmark_compare_machine_info(
    config: pytest.Config, machine_info: dict[str, Any], compared_benchmark: dict[str, Any]
) -> None:
    """Compare like with like: files are loaded before collection, when no test is known yet.

    A file of a session with perf cases names its hardware, so this machine's is put beside it; other files do not.
    """
    machine_info.pop("perfsuite", None)
    if "perfsuite" in compared_benchmark and not compared_benchmark.get("machine_info"):
        # A baseline of this hardware, found by its fingerprint; it keeps no readings that could differ.
        machine_info.clear()
        return
    if "perfsuite" in compared_benchmark.get("machine_info", {}):
        from perfsuite.plugin.suite import Suite

        suite = Suite(config)  # of its own: whether this session has perf cases is not known yet
        if suite.prepare():
            machine_info["perfsuite"] = _hardware(suite)


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_json(config: pytest.Config, output_json: dict[str, Any]) -> None:
    """Stamp the file with the version of the metrics in it."""
    suite = config.stash.get(suite_key, None)
    if suite is not None and suite.session is not None:
        from perfsuite.record.result import SCHEMA  # there since collection

        output_json["perfsuite"] = {"schema": SCHEMA, "session": suite.session.id}
        if told := projecting.told(suite):
            from perfsuite.reports.projected import as_json

            if projections := as_json(*told):
                output_json["perfsuite"]["projected"] = list(projections)


# -- A bare --benchmark-compare means this machine's baseline, where the session has perf cases and nothing else.
# pytest-benchmark loads what it compares with before collection, when it is not known which tests there are.  So a bare
# option is taken from it and given back, with the file where there is one, once collection is done.


def take_bare_option(config: pytest.Config) -> None:
    """Take a bare option from pytest-benchmark for now."""
    config.stash[bare_compare_key] = config.getoption("benchmark_compare", None) is True
    if config.stash[bare_compare_key]:
        config.option.benchmark_compare = None


def give_bare_option_back(session: pytest.Session) -> None:
    """Give it back: with this machine's file, or as it was."""
    config = session.config
    # pytest-benchmark has no public way to say later what to compare with.
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
    benchmarks.handle_loading()


def leave_out_changed(session: pytest.Session) -> None:
    """Take cases that ran with other settings out of what pytest-benchmark compares with, before it compares.

    Where nothing is left that ``--benchmark-compare-fail`` could fail for, the run is a usage error.
    """
    config = session.config
    files = getattr(getattr(config, "_benchmarksession", None), "compared_mapping", None) or {}
    suite = config.stash.get(suite_key, None)
    if not files or suite is None or suite.session is None:
        return
    from perfsuite.baselines.runs import CaseIdentity
    from perfsuite.baselines.summarise import case_of

    said = config.stash.setdefault(apart_key, [])
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
                said.append(f"not compared with {Path(str(path)).name}: {node}: {changed}")
    ran = [bench.fullname for bench in config._benchmarksession.benchmarks]  # type: ignore[attr-defined]
    common = any(name in stored for stored in files.values() for name in ran)
    if said and not common and config.getoption("benchmark_compare_fail", None) and not session.exitstatus:
        said.append("--benchmark-compare-fail: no case was compared; compare with a file of the same settings")
        session.exitstatus = pytest.ExitCode.USAGE_ERROR
