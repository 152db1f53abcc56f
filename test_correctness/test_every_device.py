"""One kernel on every device: which one is slow is said, and of equal ones nothing is."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from perfsuite.record.result import Work
from perfsuite.reports.devices import every_device_grid, outliers
from test_correctness.test_metrics import measured, on

FLOPS = Work(flops={"exact": 1e12}, dtype="bf16")


def result(medians, *, work=FLOPS, places=None, **changes):
    measurement = measured(1.0, places=places or on(devices=len(medians)))
    ranks = tuple(replace(rank, median_s=median) for rank, median in zip(measurement.ranks, medians, strict=True))
    return SimpleNamespace(
        name="test_x[h100-ws8]", outcome="measured", work=work, measurement=replace(measurement, ranks=ranks, **changes)
    )


def test_the_slow_device_is_named():
    grid = every_device_grid([result([1.0, 1.001, 0.999, 1.0, 1.002, 1.1, 1.0, 1.001])])
    assert grid.columns == ("every device", "devices", "median", "fastest", "slowest", "spread", "out of line")
    slow = "musa:5 1.1 s (+9.9%)"
    assert grid.rows == (("test_x[h100-ws8]", "8", "1 s", "musa:2 999 ms (-0.1%)", slow, "10.1%", slow),)


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
    ((*_, slowest, _, odd),) = every_device_grid([result([1.0, 1.0, 1.0, 1.2], places=on(devices=2, hosts=2))]).rows
    assert slowest == odd == "host1 musa:1 1.2 s (+20.0%)"


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
    assert () == every_device_grid(cases).rows
