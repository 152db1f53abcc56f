"""The bridge to pytest-benchmark: what the ranks measured enters its records through its public interface.

pytest-benchmark times a call with the ``timer=`` of the ``benchmark`` marker.  Here that is a clock which stands still
until :func:`feed` moves it by one sample, inside the documented ``benchmark.pedantic``: so table, JSON, storage and
comparison hold exactly the seconds per iteration that the ranks reported.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from perfsuite.base.errors import InvalidParameter
from perfsuite.plugin import projecting
from perfsuite.plugin.collect import definitions_of, is_case
from perfsuite.plugin.state import suite_key

if TYPE_CHECKING:
    from perfsuite.plugin.suite import Suite
    from perfsuite.record.result import Result

ONE_RECORD = (
    "perf and benchmark were both used in one test, and a case has one record; use perf for what runs on ranks, "
    "benchmark for a function of this process, each in a test of its own"
)


_REMEDY = "or add -m 'not platform' to leave the perf cases out"


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
        projections = projecting.rows(suite)
        if projections:
            output_json["perfsuite"]["projected"] = list(projections)
