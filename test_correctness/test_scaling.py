"""Speed-up and efficiency: counted from the smallest number of ranks of a series, and named after it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.metrics.spec import efficiency, kind_of, speed_up
from perfsuite.plugin.summary import oddities
from perfsuite.reports.ids import without_ranks
from perfsuite.reports.layout import grid_lines
from perfsuite.reports.scaling import Point, point_of, scale, scaling_grid, scalings
from test_correctness.helpers.report_runs import trained

SIZES = st.lists(st.sampled_from([1, 2, 3, 4, 8, 16, 32]), min_size=2, max_size=6, unique=True)
TIMES = st.floats(1e-4, 1e3)


def scaling_table(results):
    return grid_lines([scaling_grid(scalings(results).values())])


def ddp(ranks, time_s, **changes):
    return trained("test_ddp", ranks, time_s, **{"model": "gpt2", "strategy": "ddp", **changes})


def points(times, work):
    return [
        Point(case=f"t[ws{ranks}]", series=("t",), ranks=ranks, work=work(ranks), time_s=time_s)
        for ranks, time_s in times.items()
    ]


@given(sizes=SIZES, time_s=TIMES)
def test_linear_scaling_has_an_efficiency_of_one(sizes, time_s):
    weak = scale(points(dict.fromkeys(sizes, time_s), work=float))
    strong = scale(points({ranks: time_s / ranks for ranks in sizes}, work=lambda ranks: 96.0))
    for found, kind in ((weak, "weak"), (strong, "strong")):
        assert {kind} == {each.kind for each in found.values()}
        for each in found.values():
            assert each.efficiency == pytest.approx(1)
            assert each.speed_up == pytest.approx(each.point.ranks / min(sizes))


@given(times=st.dictionaries(st.sampled_from([1, 2, 4, 8, 16]), TIMES, min_size=2), order=st.randoms())
def test_the_base_is_the_smallest_whatever_the_order(times, order):
    given_points = points(times, work=lambda ranks: 64.0)
    shuffled = list(given_points)
    order.shuffle(shuffled)
    found = scale(shuffled)
    assert found == scale(given_points)
    smallest = min(times)
    for each in found.values():
        assert each.base.ranks == smallest
        assert each.base_name == ("1 rank" if smallest == 1 else f"{smallest} ranks")
        assert each.speed_up == pytest.approx(times[smallest] / each.point.time_s)


@given(serial=st.floats(0.01, 0.99), ranks=st.integers(2, 1024))
def test_amdahl_bounds_a_strong_speed_up(serial, ranks):
    time_s = serial + (1 - serial) / ranks
    assert speed_up(1, time_s, 1, 1.0) < 1 / serial + 1e-9
    assert 0 < efficiency(speed_up(1, time_s, 1, 1.0), ranks, 1) <= 1


def test_the_figures_of_the_reports():
    # report 001: 3.05 and 1.52 iter/s on 1 and 8 cards; report 004, strong scaling: 12.45 s on 8 and 1.34 s on 128
    assert round(speed_up(8, 1 / 1.52, 1, 1 / 3.05), 2) == 3.99
    assert round(speed_up(1024, 1.34, 1024, 12.45), 2) == 9.29
    assert round(100 * efficiency(9.29, 128, 8), 1) == 58.1
    assert kind_of(1024, 128, 1024, 8) == "strong"


def test_one_number_of_ranks_scales_to_nothing():
    assert {} == scalings([ddp(4, 1.0)])
    assert [] == scaling_table([ddp(4, 1.0)])


def test_cases_of_other_parameters_tests_or_hardware_are_other_series():
    cases = [
        ddp(1, 1.0),
        ddp(2, 1.0, micro_batch_size=4),
        trained("test_other", 2, 1.0, model="gpt2", strategy="ddp"),
        ddp(2, 1.0, platform="a100"),
    ]
    assert {} == scalings(cases)
    assert 2 == len(scalings([*cases, ddp(2, 1.0)]))


def test_a_case_without_a_time_or_counted_work_has_no_point():
    assert point_of(ddp(1, 1.0, oom="OOM at 1 GiB of 2 GiB")) is None
    assert point_of(ddp(1, 1.0)).work == 1.0


def test_the_number_of_ranks_is_taken_out_of_an_id():
    assert without_ranks("t.py::test_x[cpu-ws2-1MiB-fp32]") == "t.py::test_x[cpu-1MiB-fp32]"
    assert without_ranks("t.py::test_x[ws16]") == "t.py::test_x"
    assert without_ranks("t.py::test_news2[cpu]") == "t.py::test_news2[cpu]"


def test_the_terminal_names_the_base_in_every_row():
    lines = scaling_table([ddp(4, 1.25), ddp(2, 1.0), ddp(8, 2.0)])
    assert lines == [
        "",
        "scaling                   ranks  kind  speed-up  over        efficiency",
        "test_ddp[s4000-ws2-gpt2]      2  weak      base",
        "test_ddp[s4000-ws4-gpt2]      4  weak       1.6  vs 2 ranks         80%",
        "test_ddp[s4000-ws8-gpt2]      8  weak         2  vs 2 ranks         50%",
    ]


def test_ranks_that_share_a_device_are_told():
    assert "share one device" in scaling_table([ddp(1, 1.0, shared=True), ddp(2, 2.0, shared=True)])[-1]


def test_a_speed_up_above_the_ranks_is_warned_of_with_its_base():
    results = {result.case: result for result in (ddp(2, 1.0), ddp(4, 0.5), ddp(8, 1.0))}
    (said,) = oddities(results)
    assert said.endswith("::test_ddp[s4000-ws4-gpt2]: speed-up 4 on 2 times the ranks is above linear (base: 2 ranks)")
