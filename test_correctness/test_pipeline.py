"""Pipelines on real ranks: parity with one process, timelines that are what ran, faults that are named."""

import dataclasses
import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, reject, settings
from hypothesis import strategies as st

from perfsuite.base.errors import OutOfMemory, RanksFailed, UnsupportedCase, WrongResult
from perfsuite.base.mesh import MeshShape
from perfsuite.gate.physics import bubble_bound
from perfsuite.metrics import derive
from perfsuite.metrics.pipeline import COMPUTE, bubble_ratio, impossible_bubble, in_flight_micro_batches
from perfsuite.platforms import families
from perfsuite.record.codec import from_json, to_json
from perfsuite.record.result import Measurement, Peaks
from perfsuite.record.workload import Budget, FunctionWorkload
from perfsuite.runtime.driver import Driver
from perfsuite.runtime.transports.local import LocalTransport
from perfsuite.schedules import SCHEDULES, StageTimes, durations_of, simulate
from perfsuite.workloads.training.emulated_pipeline import EmulatedPipeline
from perfsuite.workloads.training.train_step import TrainStep
from test_correctness.helpers import local_driver, pipeline_faults
from test_correctness.helpers.local_driver import (
    FSDP,
    ONCE,
    PIPELINING,
    WORKER,
    driver_fixture,
    parity_error,
    records,
)
from test_correctness.helpers.pipeline_faults import FaultyStage
from test_correctness.helpers.pipelines import staged
from test_correctness.helpers.several import Build, records_of

ROOT = Path(__file__).parent.parent
QUICK = Budget(
    min_rounds=2, max_rounds=2, max_time_s=0.01, warmup_time_s=0.01, warmup_min_iterations=1, timeout_s=300.0
)
TINY = {"model": "gpt2-tiny", "overrides": {"layers": 8, "width": 48, "words": 64, "context": 16}}
"""Its blocks have the sizes of its twin's: DTensor finds out about each shape once."""

driver = driver_fixture("torch", FSDP, PIPELINING, WORKER)


def run(driver, workload, *, budget=QUICK):
    return local_driver.run(driver, workload, workload.layout(), budget=budget)


def parity(driver, mesh, **case):
    return parity_error(driver, mesh, **staged(**{"micro_batch_size": 1, **case}))


def emulated(kind=EmulatedPipeline, **case):
    """A pipeline whose stages take no time."""
    return kind(mesh="pp2", num_micro_batches=4, action_ms=0, **case)


def fewest_micro_batches(schedule, ranks):
    return 2 * ranks if schedule == "dualpipev" else 3


# -- the same training as one process ----------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_loss_and_gradients_are_those_of_one_process(driver, schedule):
    count = fewest_micro_batches(schedule, 2)
    assert parity(driver, "pp2", model="gpt2", schedule=schedule, num_micro_batches=count) <= 1e-5


@pytest.mark.parametrize(
    ("mesh", "case"),
    [
        ("pp2-dp2", {"schedule": "1f1b", "checkpointing": "full"}),
        pytest.param("pp2-dp_replicate2-dp_shard2", {"schedule": "gpipe"}, marks=pytest.mark.slow),
        pytest.param("pp2-dp2", {"schedule": "zbv", "model": "llama2-70b"}, marks=pytest.mark.slow),
        ("pp2", {"schedule": "interleaved_zero_bubble", "model": "llama2-70b", "dtype": "bf16"}),
        ("pp1", {"schedule": "gpipe"}),
        ("pp3", {"schedule": "1f1b", "num_micro_batches": 2, "micro_batch_size": 2}),
    ],
    ids=["1f1b-dp-checkpointing", "hybrid sharding", "zbv-dp", "bf16", "one rank", "fewer micro-batches than ranks"],
)
def test_beside_data_parallelism_and_in_half_precision(driver, mesh, case):
    error = parity(driver, mesh, **{"model": "gpt2", "num_micro_batches": 4, **case})
    assert error <= (2e-2 if case.get("dtype") else 1e-5)


@st.composite
def pipelines(draw, most_ranks):
    """Legal counts of a schedule, found by asking the schedule itself."""
    spec = SCHEDULES[draw(st.sampled_from(sorted(SCHEDULES)))]
    ranks = draw(st.integers(1, most_ranks))
    count = draw(st.integers(1, 2 * ranks + 3))
    assume(spec.legal_count(ranks, count))
    most = spec.most_stages_per_rank or 3
    return {
        "model": draw(st.sampled_from(["gpt2", "llama2-7b"])),
        "mesh": f"pp{ranks}",
        "schedule": spec.name,
        "num_micro_batches": count,
        "stages_per_rank": draw(st.integers(spec.fewest_stages_per_rank, most)),
    }


RANDOM = settings(
    deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def assert_parity(driver, case):
    try:
        error = parity(driver, **case)
    except UnsupportedCase:  # an older torch has not all schedules
        reject()
    assert error <= 1e-5


@settings(RANDOM, max_examples=4)
@given(case=pipelines(most_ranks=3))
def test_random_counts(driver, case):
    assert_parity(driver, case)


@pytest.mark.slow
@settings(RANDOM, max_examples=150)
@given(case=pipelines(most_ranks=4))
def test_many_random_counts(driver, case):
    assert_parity(driver, case)


def test_copies_of_the_embedding_whose_gradients_are_not_added_up_are_found(driver):
    message = r"gradient of tokens.weight under hybrid, schedule=1f1b on mesh pp2, accumulation 2"
    with pytest.raises(WrongResult, match=message):
        parity(driver, "pp2", kind=pipeline_faults.ForgetfulParity, model="gpt2", num_micro_batches=2)


def test_a_stage_that_computes_something_else_is_found(driver):
    case = emulated(FaultyStage, culprit=0, fault="differ")
    with pytest.raises(WrongResult, match=r"gradient of stage 0 has a relative error of .* rank 0\)"):
        run(driver, case, budget=ONCE)
    assert run(driver, emulated(), budget=ONCE).smoke


# -- the timeline ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_timeline_is_what_ran_on_one_clock(driver, schedule):
    case = EmulatedPipeline(
        mesh="pp2", schedule=schedule, num_micro_batches=fewest_micro_batches(schedule, 2) + 1, action_ms=0.5
    )
    timeline = run(driver, case).timeline
    plan = case.find_schedule()
    assert (timeline.schedule, timeline.source, timeline.ranks) == (schedule, "measured", 2)
    of_rank = [[event for event in timeline.events if event.rank == rank] for rank in range(2)]
    for rank, order in enumerate(plan.orders):
        ran = [(each.kind, each.stage, each.micro_batch) for each in of_rank[rank] if each.kind in COMPUTE]
        assert ran == [(action.kind, action.stage, action.micro_batch) for action in order]
        starts = [event.start_s for event in of_rank[rank]]
        assert starts == sorted(starts)
    # Every message of the schedule is posted by both sides and waited for once.
    simulated = Counter(event.kind for event in simulate(plan, durations_of(timeline), detail=True).events)
    kinds = Counter(event.kind for event in timeline.events)
    assert kinds["send"] == kinds["receive"] == kinds["wait"] == simulated["send"]
    assert all(event.end_s == event.start_s for event in timeline.events if event.kind in ("send", "receive"))
    assert all(event.end_s >= event.start_s >= 0 for event in timeline.events)
    # No action starts before what it needs has ended, on whichever rank: the clocks are one.
    took = {(each.kind, each.stage, each.micro_batch): each for each in timeline.events if each.kind in COMPUTE}
    for (kind, stage, micro_batch), event in took.items():
        for need in needs(kind, stage, micro_batch):
            assert need not in took or took[need].end_s <= event.start_s
    assert in_flight_micro_batches(timeline) == in_flight_micro_batches(simulate(plan, durations_of(timeline)))
    assert not impossible_bubble(bubble_ratio(timeline), bubble_bound(timeline))


def needs(kind, stage, micro_batch):
    """What must have ended before an action, by any name that it may have."""
    if kind == "forward":
        return [("forward", stage - 1, micro_batch)]
    if kind == "backward_weight":
        return [("backward_input", stage, micro_batch)]
    after = [(name, stage + 1, micro_batch) for name in ("backward", "backward_input")]
    return [("forward", stage, micro_batch), *after]


@pytest.mark.extended
def test_actions_last_as_long_as_their_sleep(driver):
    measurement = run(driver, EmulatedPipeline(mesh="pp2", schedule="zbv", num_micro_batches=3, action_ms=20))
    for event in measurement.timeline.events:
        sleeps = {"forward": 1, "backward": 2, "backward_input": 1, "backward_weight": 1}.get(event.kind, 0)
        if event.stage == 0 and event.kind.startswith("backward_"):
            sleeps = 2 if event.kind == "backward_weight" else 0  # torch leaves both gradients of stage 0 to the second
        assert event.end_s - event.start_s >= 0.02 * sleeps


@pytest.mark.slow  # on a quiet machine: how much a loaded one adds to 15 ms is up to the load
@pytest.mark.parametrize(("schedule", "count"), [("naive", 2), ("gpipe", 4), ("interleaved_1f1b", 4)])
def test_the_bubble_of_sleeping_stages_is_the_simulated_one(driver, schedule, count):
    case = EmulatedPipeline(mesh="pp4", schedule=schedule, num_micro_batches=count, action_ms=15)
    measurement = run(driver, case)
    found = records(measurement)
    assert -0.02 <= bubble_ratio(measurement.timeline) - found["bubble_ratio_simulated"] <= 0.15
    assert found["bubble_ratio_low"] <= found["bubble_ratio_median"] <= found["bubble_ratio_high"]
    times = StageTimes.in_proportion([1] * case.find_schedule().num_stages)
    ideal = bubble_ratio(simulate(case.find_schedule(), times))
    assert found["bubble_ratio_balanced"] == pytest.approx(ideal, abs=0.05)


def test_a_measurement_with_a_timeline_goes_through_the_journal(driver):
    case = TrainStep(mesh="pp2", **staged(num_micro_batches=4), **TINY)
    measurement = run(driver, case)
    back = from_json(Measurement, json.loads(json.dumps(to_json(measurement))))
    assert back == measurement
    assert back.timeline.events == measurement.timeline.events
    values = {
        each.name: each.value
        for each in derive(case.metrics, work=case.work(MeshShape.parse("pp2")), measurement=back, peaks=Peaks())
    }
    assert values["bubble_ratio"] == bubble_ratio(measurement.timeline)
    assert values["in_flight_micro_batches"] == 2
    phases = [values[f"{name}_percent"] for name in ("warm_up", "steady", "cool_down")]
    assert sum(phases) == pytest.approx(100)
    assert values["samples_per_s"] == pytest.approx(4 / measurement.median_s)
    assert {span.name for span in measurement.spans} >= {"forward", "backward", "wait", "tie", "optimizer", "remainder"}


@pytest.mark.extended
def test_side_by_side_pipelines_have_one_timeline(driver):
    measurement = run(driver, TrainStep(mesh="pp2-dp2", **staged(num_micro_batches=3), **TINY))
    assert measurement.world_size == 4
    assert measurement.timeline.ranks == 2
    assert measurement.arrival is None  # a later stage comes later to its first message: nobody is late
    actions = Counter(event.kind for event in measurement.timeline.events)
    assert (actions["forward"], actions["backward"]) == (6, 6)
    assert records(measurement)["parity_error"] <= 1e-5


def test_the_watch_comes_off(driver):
    found = records(local_driver.run(driver, FunctionWorkload(function=pipeline_faults.detached), "pp2"))
    assert (found["spans_detached"], found["wrapped_methods"]) == (0, 0)
    assert found["spans_attached"] > 24


def test_clocks_of_several_hosts_are_compared(driver):
    found = records(local_driver.run(driver, FunctionWorkload(function=pipeline_faults.clock), 3))
    assert found["offset_s_0"] == 0
    # Wrong by half a message's way at most: far less than a thousand seconds.
    assert found["offset_s_1"] == pytest.approx(-1000, abs=10)
    assert found["offset_s_2"] == pytest.approx(-2000, abs=10)


class TwoHosts(LocalTransport):
    """Says that every rank is on a host of its own."""

    def place(self, slot):
        return dataclasses.replace(super().place(slot), host=f"host{slot}", local_rank=0, local_world_size=1)


@pytest.mark.extended
def test_ranks_of_several_hosts_have_one_timeline(tmp_path):
    transport = TwoHosts(start_method="fork", preload=("torch",), log_directory=tmp_path)
    driver = Driver(transport=transport, family=families()["cpu"], rootpath=ROOT, device_count=1)
    try:
        timeline = run(driver, EmulatedPipeline(mesh="pp2", num_micro_batches=3, action_ms=30)).timeline
    finally:
        driver.close()
    assert Counter(event.kind for event in timeline.events if event.kind in COMPUTE) == {"forward": 6, "backward": 6}
    starts = {(event.kind, event.stage, event.micro_batch): event.start_s for event in timeline.events}
    # The offset that was measured is wrong by far less than an action lasts.
    assert starts["forward", 0, 0] < starts["forward", 1, 0] < starts["backward", 1, 0] < starts["backward", 0, 0]


# -- memory ------------------------------------------------------------------------------------------------------


def test_gpipe_holds_all_micro_batches_and_1f1b_as_many_as_stages_follow(driver):
    few = {**TINY, "overrides": {**TINY["overrides"], "layers": 2}}
    held = {}
    for schedule in ("gpipe", "1f1b"):
        case = TrainStep(mesh="pp2", **staged(schedule=schedule), builds=("memory",), **few)
        held[schedule] = Build(workload=case, purpose="memory")
    gpipe, alternating = records_of(driver, "pp2", held).values()
    for name in ("weights_bytes", "gradients_bytes", "optimizer_bytes"):
        assert gpipe[name] == alternating[name] > 0
    ranks = [f"peak_activations_bytes_rank{rank}" for rank in range(2)]
    # 8 micro-batches in flight against 2 and 1, besides buffers that do not depend on the schedule.
    assert gpipe[ranks[0]] > 2 * alternating[ranks[0]]
    assert gpipe[ranks[1]] > 2 * alternating[ranks[1]]
    assert gpipe["peak_activations_bytes"] == max(gpipe[name] for name in ranks)


# -- faults ------------------------------------------------------------------------------------------------------


@pytest.mark.extended
@pytest.mark.parametrize(("schedule", "culprit"), [("1f1b", 1), ("zbv", 2)])
def test_a_stage_that_raises_is_named_and_the_next_case_runs(driver, schedule, culprit):
    case = emulated(FaultyStage, schedule=schedule, culprit=culprit, fault="raise")
    message = f"schedule {schedule}: forward of micro-batch 2 in stage {culprit} failed: ValueError: bad luck on"
    with pytest.raises(RanksFailed, match=message) as failed:
        run(driver, case, budget=ONCE)
    assert len(str(failed.value)) < 10_000  # torch would print the whole schedule, on every rank
    assert run(driver, emulated(), budget=ONCE).smoke


@pytest.mark.extended
def test_out_of_memory_stays_what_it_is(driver):
    case = emulated(FaultyStage, culprit=1, fault="memory")
    with pytest.raises(OutOfMemory):
        run(driver, case, budget=ONCE)


@pytest.mark.slow  # it waits for its limit, as the one of test_runtime.py
def test_a_stage_that_hangs_is_named_and_the_next_case_runs(driver):
    case = emulated(FaultyStage, culprit=1, fault="hang")
    with pytest.raises(RanksFailed, match=r"rank 1.*hung"):
        run(driver, case, budget=Budget(smoke=True, timeout_s=6.0))
    assert run(driver, emulated(), budget=ONCE).smoke
