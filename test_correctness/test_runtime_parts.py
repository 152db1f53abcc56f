"""The parts of the runtime that need no process: references, failure reports, lateness, spans, assembly."""

from __future__ import annotations

import functools
import json
import os
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.base.errors import CaseError, InvalidParameter
from perfsuite.platforms.base import Clock
from perfsuite.record.result import ClockFacts, Work
from perfsuite.record.workload import FunctionWorkload, Workload
from perfsuite.runtime.assembly import assemble, judge_arrivals
from perfsuite.runtime.ranks.arrival import iterations_within
from perfsuite.runtime.ranks.spans import SpanRecorder
from perfsuite.runtime.values import describe, refer, resolve
from test_correctness.helpers import steps

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True, kw_only=True)
class Toy(Workload):
    """A workload of this test file."""

    shape: tuple[int, int] = (2, 3)
    name: str = "toy"

    def work(self, shape):
        return Work()

    def build(self, rank):
        raise AssertionError("never built")


def hidden(function):
    """A decorator without functools.wraps: the result carries the decorator's name."""

    def inner(rank):
        return function(rank)

    return inner


@hidden
def decorated(rank):
    return lambda: rank


@functools.lru_cache
def cached(rank):
    return lambda: rank


def round_trip(workload):
    return resolve(json.loads(json.dumps(refer(workload, ROOT, __name__))))


def test_a_workload_class_travels_with_its_fields():
    assert round_trip(Toy(shape=(4, 5), name="other")) == Toy(shape=(4, 5), name="other")


@pytest.mark.parametrize("function", [steps.add_up, decorated, cached], ids=["plain", "decorated", "cached"])
def test_functions_travel_as_the_very_object_the_module_holds(function):
    assert round_trip(FunctionWorkload(function=function, arguments={"n": 3})).function is function


def test_a_package_module_travels_by_name_and_a_test_file_by_path():
    reference = refer(Toy(), ROOT)
    assert reference["module"] == __name__
    assert describe(Toy()) == f"{__name__}:Toy"
    assert all(Path(entry).is_absolute() for entry in reference["sys_path"] if os.path.exists(entry))


def nested():
    def inner(rank):
        return rank

    return inner


@pytest.mark.parametrize("function", [nested(), lambda rank: rank, functools.partial(steps.add_up, elements=3)])
def test_what_no_module_holds_is_refused(function):
    with pytest.raises((InvalidParameter, AttributeError), match=r"move it to module level|__module__"):
        refer(FunctionWorkload(function=function), ROOT, __name__)


def test_parameters_that_cannot_travel_are_named():
    with pytest.raises(InvalidParameter, match=r"add_up\(thing=\.\.\.\) is a object, which cannot be sent"):
        refer(FunctionWorkload(function=steps.add_up, arguments={"thing": object()}), ROOT)


def test_a_test_file_loads_from_its_path_on_another_host(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "mine.py").write_text("def step(rank):\n    return lambda: 7\n")
    monkeypatch.chdir(tmp_path / "elsewhere")
    reference = {
        "function": True,
        "module": "a_module_only_known_by_path",
        "attribute": "step",
        "fields": {},
        "sys_path": [],
        "file": "/not/here/root/mine.py",
        "rootpath": "/not/here/root",
    }
    assert resolve(reference).function(None)() == 7
    del sys.modules["a_module_only_known_by_path"]


@given(
    st.integers(2, 8).flatmap(
        lambda ranks: st.tuples(
            st.integers(0, ranks - 1),
            st.lists(st.lists(st.floats(0, 0.01), min_size=5, max_size=5), min_size=ranks, max_size=ranks),
        )
    ),
    st.floats(0.1, 1.0),
)
def test_the_rank_that_is_late_is_named_with_its_lag(case, delay_s):
    late, arrivals = case
    arrivals = [[time + delay_s if rank == late else time for time in times] for rank, times in enumerate(arrivals)]
    judged = judge_arrivals(arrivals)
    assert judged.late_rank == late
    assert abs(judged.lag_s - delay_s) <= 0.0100001
    assert judged.iterations == 5


@pytest.mark.parametrize(("step_s", "watched"), [(1e-3, 5), (0.2, 5), (0.25, 4), (0.5, 3), (20.0, 3), (0.0, 5)])
def test_of_slow_steps_fewer_are_watched_and_of_none_less_than_a_median_needs(step_s, watched):
    assert iterations_within(1.0, [step_s] * 4 + [99.0]) == watched


def test_without_communication_nobody_is_late():
    assert judge_arrivals([[0.1], []]) is None
    assert judge_arrivals([[0.1, 0.2]]) is None


class Ticks(Clock):
    """A clock that the test moves."""

    now = 0.0

    def stamp(self):
        return self.now

    def wait(self, stamp):
        pass

    def elapsed_s(self, start, end):
        return end - start

    def facts(self):
        return ClockFacts(name="ticks", resolution_s=1e-9, cost_s=0.0)


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=6),
    st.integers(1, 4),
)
def test_spans_and_remainder_make_up_the_sample_exactly(parts, iterations):
    clock = Ticks()
    recorder = SpanRecorder(clock=clock)
    for _ in range(iterations):
        for name, inside, outside in parts:
            with recorder.span(name):
                clock.now += inside
            clock.now += outside
    recorder.close_sample(0.0, clock.now, iterations)
    report = recorder.report()
    expected = sum(inside + outside for _, inside, outside in parts)
    assert sum(seconds for seconds, _ in report.values()) == pytest.approx(expected)
    assert report["remainder"][0] == pytest.approx(sum(outside for _, _, outside in parts))


STEPS = st.lists(  # per rank and sample: sixteenths of a second in data, forward, backward, optimizer and outside
    st.lists(st.tuples(*[st.integers(0, 64)] * 5), min_size=5, max_size=5), min_size=2, max_size=4
)


@given(STEPS, st.integers(1, 5), st.sampled_from([1, 2, 4]))
def test_parts_of_the_reported_step_sum_to_it_to_the_last_bit(ranks, rounds, iterations):
    recorders, own = [], []
    for walk in ranks:
        clock = Ticks()
        recorder, mine = SpanRecorder(clock=clock), []
        for step in walk[:rounds]:
            start = clock.now
            for _ in range(iterations):
                for name, length in zip(("data", "forward", "backward", "optimizer", ""), step, strict=True):
                    with recorder.span(name) if name else nullcontext():
                        clock.now += length / 16
            recorder.close_sample(start, clock.now, iterations)
            mine.append((clock.now - start) / iterations)
        recorders.append(recorder)
        own.append(mine)
    times = [max(each) for each in zip(*own, strict=True)]
    reports = []
    for rank, each in enumerate(recorders):
        parts = {"spans": each.report(), "middle": each.middle(times, own[rank])}
        reports.append(report_of(rank, times_s=times, involuntary_switches=[], **parts))
    measurement = put_together(*reports)
    assert {"data", "forward", "backward", "optimizer", "remainder"} == {span.name for span in measurement.spans}
    assert sum(span.time_s for span in measurement.spans) == measurement.median_s
    for span in measurement.spans:
        assert span.slowest_s == max(each.report()[span.name][0] for each in recorders)


def report_of(rank, **changes):
    facts = {"host": "h", "device": "cpu", "threads": 1, "cores": None, "min_s": 1.0, "max_s": 1.0, "cpu_share": 1.0}
    return {
        "rank": {"rank": rank, "median_s": 1.0 + rank, "max_rss_bytes": 1, **facts},
        "times_s": [2.0, 3.0],
        "involuntary_switches": [0, 1],
        "yardsticks_s": [],
        "iterations": 1,
        "warmup_iterations": 1,
        "warmup_steady": True,
        "control": "compute",
        "warmup_s": 0.1,
        "clock": {"name": "ticks", "resolution_s": 1e-9, "cost_s": 0.0},
        "arrivals": [0.1 * rank],
        "spans": {"a": [1.0 + rank, 1.0], "remainder": [1.0, 1.0]},
        "middle": [[2.0, {"a": 1.5, "remainder": 0.5}], [3.0 - rank, {"a": 2.5 - rank, "remainder": 0.5}]],
        "records": {"mean": [float(rank), "", "mean", None]},
        "peak_memory_bytes": 10 * rank,
        "imports": {"shop": f"shop/{rank}.py"},
        "traffic": None,
        **changes,
    }


def put_together(*reports):
    return assemble(reports, aligned=True, backend="gloo", fresh=True, transport="local", smoke=False)


def test_a_measurement_takes_the_worst_rank():
    measurement = put_together(report_of(0), report_of(1))
    assert measurement.median_s == 2.5
    assert measurement.slowest_rank == 1
    assert measurement.rank_spread == 1.0
    assert measurement.disturbed_share == 0.5
    assert measurement.peak_memory_bytes == 10
    part, rest = measurement.spans
    assert (part.slowest_rank, part.slowest_s) == (1, 2.0)
    # The median is of both samples: rank 0 took longest in the second, nobody longer than it in the first.
    assert (part.time_s, rest.time_s) == (2.0, 0.5)
    assert part.time_s + rest.time_s == measurement.median_s
    assert measurement.records[0].value == 0.5
    assert measurement.arrival.late_rank == 1


def test_a_record_that_one_rank_alone_may_give():
    only = {"loss": [1.0, "", "only", None]}
    assert put_together(report_of(0, records={}), report_of(1, records=only)).records[0].value == 1.0
    with pytest.raises(CaseError, match="reduce='only' allows one rank"):
        put_together(report_of(0, records=only), report_of(1, records=only))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("how", ["max", "mean", "equal", "only"])
def test_a_record_that_is_no_finite_number_fails_with_its_rank(how, value):
    reports = [report_of(rank, records={"loss": [1.0 if rank < 2 else value, "", how, None]}) for rank in range(3)]
    if how == "only":
        reports[:2] = [report_of(rank, records={}) for rank in range(2)]
    with pytest.raises(CaseError, match=f"^rank 2 recorded loss={value}; a record must be a finite number"):
        put_together(*reports)
    many = [report_of(rank, records={"loss": [value, "", how, None]}) for rank in range(7)]
    with pytest.raises(CaseError, match=r"rank 3 recorded loss=-?(nan|inf) \(and 3 more ranks\)"):
        put_together(*many)
