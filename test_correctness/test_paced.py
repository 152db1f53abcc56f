"""A kernel that paces TCP is named where gloo sent something: its small messages scatter."""

import dataclasses

import pytest

from perfsuite.plugin.summary import paced
from test_correctness.helpers.report_runs import trained


def sent(backend, ranks):
    result = trained("test_ddp", ranks, 1.0, model="gpt2", strategy="ddp")
    return dataclasses.replace(result, measurement=dataclasses.replace(result.measurement, backend=backend))


@pytest.mark.parametrize(
    ("control", "backend", "ranks", "told"),
    [
        ("bbr", "gloo", 2, True),
        ("bbr2", "gloo", 2, True),
        ("cubic", "gloo", 2, False),
        ("unknown", "gloo", 2, False),
        ("bbr", "nccl", 2, False),
        ("bbr", "gloo", 1, False),
    ],
)
def test_pacing_is_told_where_messages_went_by_it(control, backend, ranks, told):
    line = paced(control, [sent(backend, ranks)])
    assert bool(line) == told
    assert not told or f"TCP uses {control}:" in line


def test_nothing_measured_is_not_paced():
    assert paced("bbr", []) == ""
