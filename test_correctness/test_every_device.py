"""One kernel on every device: which one is slow is said, and of equal ones nothing is."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from perfsuite.record.result import Work
from perfsuite.reports.devices import every_device_lines, outliers
from test_correctness.test_metrics import measured, on

FLOPS = Work(flops={"exact": 1e12}, dtype="bf16")


def result(medians, *, work=FLOPS, places=None, **changes):
    measurement = measured(1.0, places=places or on(devices=len(medians)))
    ranks = tuple(replace(rank, median_s=median) for rank, median in zip(measurement.ranks, medians, strict=True))
    return SimpleNamespace(
        case="t.py::test_x[h100-ws8]", work=work, measurement=replace(measurement, ranks=ranks, **changes)
    )


def test_the_slow_device_is_named():
    (line,) = every_device_lines([result([1.0, 1.001, 0.999, 1.0, 1.002, 1.1, 1.0, 1.001])])
    assert line == (
        "t.py::test_x[h100-ws8]: 8 devices, median 1 s, slowest musa:5 1.1 s (+9.9%), spread 10.1%; "
        "out of line: musa:5 (+9.9%)"
    )


@pytest.mark.parametrize(
    ("medians", "odd"),
    [
        ([1.0, 1.0, 1.0, 1.0], []),
        ([1.0, 1.015, 0.99, 1.01], []),  # within 2 %
        ([1.0, 1.1, 0.9, 1.05], []),  # all differ: none is out of line
        ([1.0, 1.5], []),  # of two nobody can say which
        ([1.0, 1.0, 1.03], [2]),
        ([1.0, 0.9, 1.0, 1.05, 1.0, 1.0], [1, 3]),
    ],
)
def test_out_of_line_is_who_differs_where_the_others_agree(medians, odd):
    assert odd == [rank.rank for rank in outliers(result(medians).measurement.ranks)]


def test_hosts_are_named_where_there_are_several():
    (line,) = every_device_lines([result([1.0, 1.0, 1.0, 1.2], places=on(devices=2, hosts=2))])
    assert "slowest host1 musa:1 1.2 s (+20.0%)" in line


def test_nothing_is_said_of_what_communicates_trains_or_shares_a_device():
    shared = on(devices=1, ranks_per_device=2)
    cases = [
        result([1.0, 2.0], places=shared),
        result([1.0]),
        result([1.0, 2.0], work=Work(collective="all_reduce", message_bytes=1024)),
        result([1.0, 2.0], work=Work(tokens=64)),
        result([1.0, 2.0], smoke=True),
        result([1.0, 2.0], aligned=False),
    ]
    assert [] == every_device_lines(cases)
