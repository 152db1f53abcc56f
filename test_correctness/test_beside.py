"""A case of a published run shows the published figure beside its own; no other case does."""

import dataclasses

from perfsuite.record.result import Metric
from perfsuite.reports.tables.published import published_lines
from test_correctness.helpers.measurements import result_of

CASE = result_of(
    case="test_perf/test_train_step.py::test_opensora[s4000-ws8]",
    workload="perfsuite.workloads.training.train_step:TrainStep",
    parameters={"model": "opensora", "micro_batch_size": 1},
    platform="s4000",
    world_size=8,
    metrics=[Metric(name="samples_per_s", value=2.5, unit="samples/s", better="higher")],
)


def test_measured_and_published_stand_side_by_side_with_label_and_reason():
    (line,) = published_lines([CASE])
    assert line.startswith(f"{CASE.case}: samples_per_s measured 2.5 samples/s; published 2.025 images/s")
    assert "[M?: " in line


def test_other_platforms_and_simulated_devices_show_nothing():
    assert list(published_lines([dataclasses.replace(CASE, platform="cpu")])) == []
    assert list(published_lines([dataclasses.replace(CASE, simulated=True)])) == []
    assert list(published_lines([dataclasses.replace(CASE, world_size=3)])) == []
