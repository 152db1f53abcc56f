"""The search for the largest batch: on made-up memories, on a device's allocator that is made up, on real ranks."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.base.errors import InvalidParameter, OutOfMemory
from perfsuite.base.units import MIB
from perfsuite.metrics import derive
from perfsuite.record.result import Peaks, Record, Work
from perfsuite.record.workload import Budget
from perfsuite.runtime.driver import Job
from perfsuite.workloads.training import largest_batch
from perfsuite.workloads.training.largest_batch import (
    LargestBatch,
    Limited,
    by_doubling,
    by_prediction,
    by_stepping_down,
)
from test_correctness.helpers import scripted_driver, steps, training_faults
from test_correctness.helpers.local_driver import WORKER, job, local_driver

ONCE = Budget(smoke=True, timeout_s=90.0)


# -- the search --------------------------------------------------------------------------------------------------


@given(st.integers(0, 5000), st.integers(1, 4096))
def test_doubling_ends_at_the_largest_batch_that_fits(limit, most):
    asked = []

    def fits(batch):
        asked.append(batch)
        return batch <= limit

    found = by_doubling(fits, most)
    assert found.batch == min(limit, most)
    assert found.limited == (limit >= most)
    assert len(asked) == len(set(asked)) == found.tries <= 2 * math.log2(most) + 2
    assert all(1 <= batch <= most for batch in asked)
    assert all(batch <= max(1, 2 * limit) for batch in asked)  # never more than twice what fits


@st.composite
def memories(draw):
    """Peaks that grow by the sample once activations outweigh the optimizer: the most of a few straight lines."""
    activation = draw(st.integers(1, 50))
    lines = [(draw(st.integers(0, 300)), 0), (draw(st.integers(0, 100)), activation)]
    lines += [
        (draw(st.integers(0, 100)), activation + draw(st.integers(0, 20))) for _ in range(draw(st.integers(0, 2)))
    ]
    return lambda batch: (float(max(fixed + slope * batch for fixed, slope in lines)), float(activation * batch))


@given(memories(), st.integers(1, 20000), st.integers(1, 500))
def test_prediction_ends_there_too_and_hardly_ever_tries_more(memory, budget, most):
    tried = {}

    def measure(batch):
        assert batch not in tried
        tried[batch] = memory(batch)
        return tried[batch]

    found = by_prediction(measure, budget, most)
    best = max((batch for batch in range(1, most + 1) if memory(batch)[0] <= budget), default=0)
    if sum(memory(1)) > budget:  # then nobody dares to try 2
        best = min(best, 1)
    assert found.batch == best
    assert found.tries == len(tried)
    assert found.batch == 0 or found.batch in tried  # what is reported was seen to fit
    over = [batch for batch, (peak, _) in tried.items() if peak > budget]
    assert len(over) <= 1 + math.log2(most)


# -- the case ----------------------------------------------------------------------------------------------------


def ranks_with(device, memory_bytes, timed_extra=0):
    """A probe on one rank whose step takes 100 bytes and 10 per sample of ``memory_bytes``; notes what it is asked."""
    asked = []

    def probe(workload, purpose):
        asked.append((workload.micro_batch_size, purpose))
        peak = 100 + 10 * workload.micro_batch_size + (timed_extra if purpose == "time" else 0)
        if peak > memory_bytes:
            raise OutOfMemory(f"OOM at {peak} of {memory_bytes}")
        plain = scripted_driver.measurement(Job(workload=workload, world_size=1, budget=ONCE))
        values = {"peak_bytes": peak, "activations_bytes": 10 * workload.micro_batch_size}
        records = tuple(Record(name=n, value=float(v), unit="bytes", reduce="max") for n, v in values.items())
        facts = tuple(dataclasses.replace(rank, device=device) for rank in plain.ranks)
        return dataclasses.replace(plain, ranks=facts, records=records)

    return probe, asked


def test_on_an_accelerator_out_of_memory_ends_the_search():
    probe, asked = ranks_with("cuda:0", 250)
    workload, records = LargestBatch(model="gpt2-tiny").settle(probe)
    assert (workload.micro_batch_size, workload.builds) == (15, ())
    values = {record.name: record.value for record in records}
    assert (values["largest_local_batch"], values["batches_tried"], values["peak_bytes"]) == (15.0, 8.0, 250.0)
    assert asked == [*((batch, "memory") for batch in (1, 2, 4, 8, 16, 12, 14, 15)), (15, "time")]


def test_what_is_found_is_what_the_timed_step_can_run():
    probe, asked = ranks_with("cuda:0", 250, timed_extra=45)
    workload, records = LargestBatch(model="gpt2-tiny").settle(probe)
    values = {record.name: record.value for record in records}
    expected = {"largest_local_batch": 10.0, "largest_observed_batch": 15.0, "peak_bytes": 200.0}
    assert (10, expected) == (workload.micro_batch_size, {name: values[name] for name in expected})
    assert asked[8:] == [*((batch, "time") for batch in (15, 14, 12, 8, 10, 11)), (10, "memory")]
    with pytest.raises(OutOfMemory, match="OOM at 510 of 250"):
        LargestBatch(model="gpt2-tiny").settle(ranks_with("cuda:0", 250, timed_extra=400)[0])


@given(st.integers(0, 300), st.integers(1, 300))
def test_stepping_down_ends_at_the_largest_that_fits(limit, most):
    asked = []

    def fits(batch):
        assert 1 <= batch <= most
        assert batch not in asked
        asked.append(batch)
        return batch <= limit

    assert min(limit, most) == by_stepping_down(fits, most)
    assert len(asked) <= 2 + 2 * math.log2(most + 1)


def test_on_a_cpu_nothing_is_allocated_that_is_predicted_not_to_fit():
    probe, asked = ranks_with("cpu", math.inf)
    workload, records = LargestBatch(model="gpt2-tiny", memory_budget_bytes=455).settle(probe)
    values = {record.name: record.value for record in records}
    assert workload.micro_batch_size == values["largest_local_batch"] == 35
    assert values["predicted_peak_bytes"] == values["peak_bytes"] == 450
    assert [batch for batch, _ in asked] == [1, 2, 4, 35]


def test_one_sample_that_does_not_fit_is_out_of_memory():
    with pytest.raises(OutOfMemory, match="OOM at 110 of 90"):
        LargestBatch(model="gpt2-tiny").settle(ranks_with("cuda:0", 90)[0])
    with pytest.raises(OutOfMemory, match=r"OOM at .* GiB of .* GiB: a local batch of 1 is over the budget of a rank"):
        LargestBatch(model="gpt2-tiny", memory_budget_bytes=90).settle(ranks_with("cpu", math.inf)[0])


def test_the_end_of_the_search_is_told():
    probe, _ = ranks_with("cuda:0", math.inf)
    workload = LargestBatch(model="gpt2-tiny", most=6)
    settled, records = workload.settle(probe)
    assert settled.micro_batch_size == 6
    plain = scripted_driver.measurement(Job(workload=settled, world_size=1, budget=ONCE))
    measurement = dataclasses.replace(plain, records=records)
    (metric,) = derive(["largest_local_batch_samples"], work=Work(), measurement=measurement, peaks=Peaks())
    assert (metric.value, metric.unit, metric.note) == (6.0, "samples", "the search ended at 6, which fits")
    assert "largest_local_batch_samples" in workload.metrics


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"memory_budget_bytes": 0}, "memory_budget_bytes=0 is below 1"),
        ({"most": 0}, "most=0 is below 1"),
        ({"global_batch_size": 8}, "global_batch_size=8 sets the local batch, which is searched"),
        ({"builds": ("memory",)}, "its memory is always recorded"),
    ],
)
def test_fields_that_leave_nothing_to_look_for_are_refused(fields, message):
    with pytest.raises(InvalidParameter, match=message):
        LargestBatch(model="gpt2-tiny", **fields)


def test_a_cpu_needs_a_budget():
    with pytest.raises(InvalidParameter, match="memory_budget_bytes=None on a CPU"):
        LargestBatch(model="gpt2-tiny").settle(ranks_with("cpu", math.inf)[0])


# -- a device's limit --------------------------------------------------------------------------------------------


def test_a_budget_on_an_accelerator_is_a_limit_of_its_allocator(monkeypatch):
    fractions = []
    module = SimpleNamespace(
        mem_get_info=lambda device: (400, 1000),
        empty_cache=lambda: None,
        set_per_process_memory_fraction=lambda fraction, device: fractions.append(fraction),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    rank = SimpleNamespace(device=torch.device("meta"), purpose="memory")
    workload = LargestBatch(model="gpt2-tiny", memory_budget_bytes=250)
    step = Limited(rank.device, 250, lambda: SimpleNamespace(close=lambda: None))
    assert fractions == [0.25]
    step.close()
    assert fractions == [0.25, 1.0]

    def no_memory(self, rank):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(largest_batch.TrainStep, "build", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        workload.build(rank)
    assert fractions == [0.25, 1.0, 0.25, 1.0]  # what fails leaves no limit behind


def test_a_budget_is_kept_by_prediction_where_the_allocator_knows_no_limit(monkeypatch):
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())
    monkeypatch.setattr(largest_batch.TrainStep, "build", lambda self, rank: "built")
    told = []
    rank = SimpleNamespace(
        device=torch.device("meta"), purpose="memory", record=lambda name, value, **more: told.append((name, value))
    )
    workload = LargestBatch(model="gpt2-tiny", memory_budget_bytes=455)
    assert ("built", [("allocator_without_limit", 1.0)]) == (workload.build(rank), told)
    probe, asked = ranks_with("musa:0", math.inf)

    def without_limit(tried, purpose):
        measurement = probe(tried, purpose)
        record = Record(name="allocator_without_limit", value=1.0, unit="", reduce="equal")
        return dataclasses.replace(measurement, records=(*measurement.records, record))

    settled, _ = workload.settle(without_limit)
    assert settled.micro_batch_size == 35
    assert max(batch for batch, _ in asked) == 35  # nothing beyond the budget was tried


# -- real ranks --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def family(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return request.param


@pytest.fixture(scope="module")
def driver(family, tmp_path_factory):
    with local_driver(tmp_path_factory.mktemp("logs"), "torch", WORKER, family=family) as driver:
        yield driver


@pytest.mark.extended
def test_what_is_found_fits_and_one_more_does_not(driver, family):
    ranks = 2 if family == "cpu" else 1

    def probe(workload, purpose):
        return driver.run(Job(workload=workload, world_size=ranks, budget=ONCE, purpose=purpose))

    budget = {"memory_budget_bytes": 12 * MIB, "most": 256}
    largest = LargestBatch(model="gpt2-tiny", strategy="ddp", overrides={"layers": 1}, **budget)
    settled, records = largest.settle(probe)
    found = {record.name: record.value for record in records}
    assert 2 < settled.micro_batch_size < 256
    assert found["peak_bytes"] <= 12 * MIB
    if "predicted_peak_bytes" in found:  # on a CPU
        assert found["predicted_peak_bytes"] <= 12 * MIB
        more = dataclasses.replace(settled, micro_batch_size=settled.micro_batch_size + 1)
        records = {record.name: record.value for record in probe(more, "memory").records}
        assert records["peak_bytes"] > 12 * MIB
    timed = driver.run(Job(workload=settled, world_size=ranks, budget=ONCE))  # and the device is as good as before
    assert timed.smoke


def test_running_out_of_memory_is_told_and_the_next_case_runs(driver):
    with pytest.raises(OutOfMemory, match=r"OOM at [\d.]+ GiB of [\d.]+ GiB"):
        driver.run(job(training_faults.greedy, budget=ONCE, culprit=0))
    assert driver.run(job(steps.add_up, budget=ONCE)).smoke


@pytest.mark.extended
@pytest.mark.parametrize("others", ["wait", "fail"])
def test_one_rank_that_runs_out_of_memory_is_the_cause_of_what_others_do(driver, family, others):
    if family != "cpu":
        pytest.skip("needs two ranks")
    with pytest.raises(OutOfMemory, match=r"OOM at [\d.]+ GiB of [\d.]+ GiB"):
        driver.run(job(training_faults.greedy, 2, budget=ONCE, culprit=1, others=others))
    assert driver.run(job(steps.add_up, 2, budget=ONCE)).smoke
