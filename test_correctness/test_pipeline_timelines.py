"""Timelines of pipelines without ranks: put together, shifted to one clock, kept, chosen."""

import pytest

from perfsuite.metrics.pipeline import bubble_ratio
from perfsuite.platforms.cpu import PerfCounterClock
from perfsuite.reports.timelines.files import chrome_trace
from perfsuite.reports.timelines.picture import timeline_svg
from perfsuite.runtime.assembly import join
from perfsuite.runtime.ranks.spans import KEPT_STEPS, KeptSpan, SpanRecorder, StepKeeper
from perfsuite.schedules import replay
from test_correctness.test_runtime_parts import Ticks


def keeper(**place):
    return StepKeeper(**{"schedule": "gpipe", "ranks": 2, "rank": 0, "pipeline": 0, **place})


def step(rank, begin):
    """GPipe's step of one micro-batch on two ranks, F = 1 and B = 2; the last stage's loss is half of its forward."""
    actions = [
        [("forward", 0, 0, 0, 1), ("send", 0, 0, 1, 1.1), ("wait", 0, 0, 1, 4), ("backward", 0, 0, 4, 6)],
        [("forward", 1, 0, 1, 1.5), ("forward", 1, 0, 1.5, 2), ("backward", 1, 0, 2, 4), ("optimizer", -1, -1, 6, 9)],
    ]
    return [KeptSpan(*part, start + begin, end + begin) for *part, start, end in actions[rank]]


def kept(rank, *begins, offset_s=0.0, **place):
    own = keeper(rank=rank, **place)
    for begin in begins:
        own.take(step(rank, begin))
    return {"steps": own.report([1.0 + index for index in range(len(begins))], offset_s=offset_s)}


def test_the_ranks_parts_become_one_timeline():
    timeline, records = join([kept(0, 100.0, 200.0, 300.0), kept(1, 100.0, 200.0, 300.0)])
    assert timeline.schedule == "gpipe"
    found = [(e.kind, e.rank, e.stage, e.micro_batch, round(e.start_s, 9), round(e.end_s, 9)) for e in timeline.events]
    assert found == [
        ("forward", 0, 0, 0, 0, 1),
        ("send", 0, 0, 0, 1, 1),  # only posted
        ("wait", 0, 0, 0, 1, 4),
        ("backward", 0, 0, 0, 4, 6),
        ("forward", 1, 1, 0, 1, 2),  # with the loss
        ("backward", 1, 1, 0, 2, 4),
    ]
    assert bubble_ratio(timeline) == pytest.approx(0.5)
    values = {record.name: record.value for record in records}
    assert values["bubble_ratio_median"] == values["bubble_ratio_low"] == pytest.approx(0.5)
    assert values["bubble_ratio_simulated"] == pytest.approx(0.5)
    assert values["binding_stage_excess"] == pytest.approx(0.0)


def test_the_clocks_of_other_hosts_are_shifted():
    timeline, _ = join([kept(0, 100.0), kept(1, 1100.0, offset_s=-1000.0)])
    assert bubble_ratio(timeline) == pytest.approx(0.5)


def test_of_several_pipelines_the_one_that_took_longest_is_shown():
    slow = {"steps": {**kept(1, 100.0, pipeline=2)["steps"]}}
    slow["steps"]["parts"] = [[name, s, m, start, end + 3] for name, s, m, start, end in slow["steps"]["parts"][2:]]
    timeline, _ = join([kept(0, 100.0), kept(1, 100.0), kept(0, 100.0, pipeline=2), slow])
    assert max(event.end_s for event in timeline.events if event.rank == 1) == pytest.approx(7)


def test_one_of_several_pipelines_is_named_by_its_ranks_and_its_place():
    names = {"place": "of 2 pipelines that of tp 1", "pipeline": 1}
    timeline, _ = join([kept(index, 100.0, world_rank=1 + 2 * index, **names) for index in range(2)])
    assert ("rank 1", "rank 3") == (timeline.name_of(0), timeline.name_of(1))
    trace = chrome_trace(timeline)
    assert ["rank 1", "rank 3"] == [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert trace["otherData"]["pipeline"] == "of 2 pipelines that of tp 1"
    picture = timeline_svg(timeline, title="a case")
    assert ">rank 3<" in picture
    assert ">rank 0<" not in picture
    assert "; of 2 pipelines that of tp 1; step 6 s" in picture
    assert replay(timeline).simulated.name_of(1) == "rank 3"
    alone, _ = join([kept(0, 100.0, world_rank=0), kept(1, 100.0, world_rank=1)])
    assert (alone.world_ranks, alone.place) == ((), "")


def test_without_all_ranks_there_is_no_timeline():
    assert join([{"steps": None}, {}]) == (None, ())
    assert join([kept(0, 100.0), {"steps": None}]) == (None, ())


def test_a_schedule_that_nobody_knows_is_not_simulated():
    reports = [kept(0, 100.0), kept(1, 100.0)]
    for report in reports:
        report["steps"]["schedule"] = "own"
    timeline, records = join(reports)
    assert timeline.schedule == "own"
    assert {record.name for record in records} == {"bubble_ratio_median", "bubble_ratio_low", "bubble_ratio_high"}


def test_the_step_that_is_sent_is_the_one_nearest_to_the_median():
    own = keeper()
    times = [5.0, 1.0, 3.0, 2.0, 4.0]
    for index in range(len(times)):
        own.take(step(0, 10.0 * index))
    report = own.report(times, offset_s=0.0)
    assert report["parts"][0][3] == 20.0
    assert len(report["busy"]) == 5


def test_only_the_latest_steps_are_kept_whole():
    own = keeper()
    count = KEPT_STEPS + 10
    for index in range(count):
        own.take(step(0, float(index)))
    assert len(own.kept) == KEPT_STEPS
    # The median sample is long gone: the nearest of those that are left is sent.
    times_s = [1.0 if index < 5 else 9.0 for index in range(count)]
    times_s[20] = 8.0
    report = own.report(times_s, offset_s=0.0)
    assert len(report["busy"]) == count
    assert report["parts"][0][3] >= 10.0


def test_steps_without_actions_have_no_timeline():
    own = keeper()
    own.take([KeptSpan("optimizer", -1, -1, 0, 1)])
    assert own.report([1.0], offset_s=0.0) is None


class DeviceClock(Ticks):
    """A device whose clock stands at another time than the host's and is read as stamps in seconds."""

    now = 5000.0

    def stamp(self):
        self.now += 1.0
        return self.now


def test_a_devices_stamps_are_told_on_the_hosts_clock():
    device = DeviceClock()
    assert device.host_s(5003.0, 5010.0, 70.0) == 63.0
    host = PerfCounterClock()
    stamp = host.stamp()
    assert host.host_s(stamp, host.stamp(), -1.0) == pytest.approx(stamp * 1e-9)


def test_a_sample_of_several_iterations_keeps_the_last():
    recorder = SpanRecorder(clock=DeviceClock(), keeper=keeper())
    start = recorder.clock.stamp()
    for micro_batch in (0, 1, 0, 1):
        with recorder.span("forward", stage=0, micro_batch=micro_batch):
            pass
    recorder.close_sample(start, recorder.clock.stamp(), 2)
    (parts,) = recorder.keeper.kept
    assert [part.micro_batch for part in parts] == [0, 1]
    assert [part.end_s - part.start_s for part in parts] == [1.0, 1.0]
    assert parts[1].start_s - parts[0].end_s == 1.0
