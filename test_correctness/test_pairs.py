"""Messages between every two ranks: the matrix, the link that is slower than its like, and by which factor."""

import dataclasses
from itertools import permutations

import pytest

from perfsuite.base.errors import InvalidParameter, WrongResult
from perfsuite.base.mesh import MeshShape
from perfsuite.metrics import derive
from perfsuite.metrics.pairs import message_times_s, name_of, slow_pairs
from perfsuite.platforms.cuda import Cuda
from perfsuite.platforms.musa import Musa
from perfsuite.record.result import Peak, Peaks, Work
from perfsuite.record.run import RunRecord
from perfsuite.record.step import SpanTotal
from perfsuite.reports.layout import grid_lines
from perfsuite.reports.notable import notable
from perfsuite.reports.page.sections.collectives import pair_blocks
from perfsuite.reports.pairs import VISIBLE, links, pair_grids, pair_matrices
from perfsuite.reports.stored import Recording
from perfsuite.reports.tables.grids import markdown
from perfsuite.reports.tables.report import STYLES, report
from perfsuite.run.session import Case
from perfsuite.workloads.pairs import Pairs
from simmusa.costs import Costs
from test_correctness.helpers.local_driver import local_driver, run
from test_correctness.helpers.machines import matrix
from test_correctness.helpers.measurements import result_of
from test_correctness.helpers.simmusa_ranks import KERNELS, QUICK, opened, require_built
from test_correctness.test_metrics import measured, on

MIB = 1 << 20
TOPOLOGY = """\
      GPU0  GPU1  GPU2  GPU3  NIC0
GPU0   X    NV18  NV18  SYS   PIX
GPU1  NV18   X    NV18  SYS   SYS
GPU2  NV18  NV18   X    SYS   SYS
GPU3  SYS   SYS   SYS    X    SYS
"""


def spans(times_s, *, both=False, messages=4):
    return tuple(
        SpanTotal(name=name_of(pair, messages, both=both), time_s=0.0, count=1, slowest_rank=0, slowest_s=s * messages)
        for pair, s in times_s.items()
    )


def result(times_s, *, devices, both=False, topology="", variables=None, message_bytes=MIB, **places):
    measurement = dataclasses.replace(
        measured(1.0, places=on(devices=devices, **places)), spans=spans(times_s, both=both)
    )
    workload = Pairs(message_bytes=message_bytes, directions="both" if both else "one")
    return result_of(
        measurement,
        f"t.py::test_pair_bandwidth[s4000-ws{measurement.world_size}]",
        workload="perfsuite.workloads.pairs:Pairs",
        parameters=workload.parameters(),
        platform="s4000",
        work=Work(collective="pairs", message_bytes=message_bytes, dtype="fp32"),
        metrics=workload.metrics,
        environment={"topology": topology, "variables": variables or {}},
    )


def alike(ranks, time_s=1e-3):
    return dict.fromkeys(permutations(range(ranks), 2), time_s)


def test_the_median_and_the_slowest_pair_are_metrics():
    one = result({**alike(4), (2, 1): 4e-3}, devices=4)
    values = {metric.name: metric.value for metric in one.metrics}
    assert pytest.approx(MIB / 1e-3 / 1e9) == values["pair_gb_per_s"]
    assert pytest.approx(MIB / 4e-3 / 1e9) == values["slowest_pair_gb_per_s"]
    small = result(alike(4), devices=4, message_bytes=1024)
    assert [("pair_us", 1000.0), ("slowest_pair_us", 1000.0)] == [(m.name, m.value) for m in small.metrics[1:]]


def test_a_pair_is_measured_against_the_link_within_a_node_only():
    peaks = Peaks(link=Peak(value=100.0, unit="GB/s", source="sheet"))
    for hosts, peak in ((1, peaks.link), (2, None)):
        one = result(alike(4), devices=2 if hosts == 2 else 4, hosts=hosts)
        (rate,) = derive(["pair_gb_per_s"], work=one.work, measurement=one.measurement, peaks=peaks)
        assert peak == rate.peak


def test_both_directions_are_two_pairs_of_one_time():
    times_s = {(0, 1): 2.0, (0, 2): 3.0, (1, 2): 4.0}
    measurement = result(times_s, devices=3, both=True).measurement
    assert {**times_s, (1, 0): 2.0, (2, 0): 3.0, (2, 1): 4.0} == message_times_s(measurement)


# -- which pairs are out of line --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("times_s", "odd"),
    [
        (alike(4), []),
        ({**alike(4), (1, 2): 1.04e-3}, []),  # within 5 %
        ({**alike(4), (1, 2): 1.1e-3}, [(1, 2)]),
        ({pair: 1e-3 * (1 + 0.1 * index) for index, pair in enumerate(alike(4))}, []),  # all differ
        ({**alike(3), (0, 1): 1.2e-3}, []),  # of six a quarter
        ({**alike(3), (0, 1): 1.3e-3}, [(0, 1)]),
        ({(0, 1): 1.0, (1, 0): 3.0}, []),  # of two nobody can say which
        ({pair: 2.0 if 3 in pair else 1.0 for pair in alike(4)}, [pair for pair in alike(4) if 3 in pair]),
    ],
)
def test_out_of_line_is_what_lies_beyond_a_gap(times_s, odd):
    assert sorted(odd) == sorted(slow.pair for slow in slow_pairs(times_s, {}))


def test_pairs_are_compared_with_their_like_alone():
    one = result({pair: 9e-3 if 3 in pair else 1e-3 for pair in alike(4)}, devices=4, topology=TOPOLOGY)
    kinds = links(one.measurement.ranks, one.environment)
    assert {"NV18", "SYS"} == set(kinds.values())
    assert [] == slow_pairs(message_times_s(one.measurement), kinds)
    assert 6 == len(slow_pairs(message_times_s(one.measurement), {}))


# -- kinds of links ---------------------------------------------------------------------------------------------


def kinds(devices=2, *, ranks=2, topology=TOPOLOGY, variables=None, **places):
    one = result(alike(ranks), devices=devices, topology=topology, variables=variables, **places)
    return set(links(one.measurement.ranks, one.environment).values())


@pytest.mark.parametrize(
    ("variable", "given", "kind"),
    [
        ("MUSA_VISIBLE_DEVICES", "3,1", "SYS"),
        ("CUDA_VISIBLE_DEVICES", "GPU-1a2b,GPU-3c4d", "within the host"),
        ("CUDA_VISIBLE_DEVICES", "7", "within the host"),
        *(("NVIDIA_VISIBLE_DEVICES", of_container, "NV18") for of_container in ("all", "void", "3,1", "GPU-1a2b")),
    ],
)
def test_links_follow_the_devices_that_are_visible_and_not_the_variable_of_a_container(variable, given, kind):
    assert ({"NV18"}, {kind}) == (kinds(), kinds(variables={variable: given}))
    assert (Cuda.visible_variable, Musa.visible_variable) == VISIBLE


def test_links_between_hosts_and_of_one_device():
    assert {"MT2", "network"} == kinds(ranks=4, hosts=2, topology=matrix(2, "MT2"))
    assert {"one device"} == kinds(1, ranks_per_device=2, topology="")


# -- what is shown ----------------------------------------------------------------------------------------------


@pytest.fixture
def slow_link():
    return result({**alike(4), (1, 2): 2.5e-3}, devices=4, topology=matrix(4, "MT2"))


SLOW = "musa:1 to musa:2 (MT2): 2.50 times slower than its like: 0.419 GB/s, others 1.05"


def test_the_matrix_stands_beside_the_links_and_names_the_slow_one(slow_link):
    figures, kinds = pair_grids([slow_link])
    assert ("musa:1", "1.05", "", "0.419", "1.05") == figures.rows[1]
    assert (SLOW,) == figures.notes
    assert ("musa:1", "MT2", "", "MT2", "MT2") == kinds.rows[1]
    told = grid_lines(pair_grids([slow_link]), 100)
    assert "Pairs, 1MiB in one direction, GB/s per direction (test_pair_bandwidth[s4000-ws4])" == told[1]
    assert f"  {SLOW}" in told


def test_the_report_has_the_matrix_after_the_topology(slow_link):
    run = RunRecord(name="run.jsonl", platform="s4000", fingerprint="s4000-4x", results={slow_link.case: slow_link})
    style = next(style for style in STYLES.values() if style.environment)
    text = report([Recording(run=run)], [style])
    lines = text.splitlines()
    assert lines.index("### Topology: s4000 (s4000-4x)") < lines.index(f"### {pair_grids([slow_link])[0].title}")
    assert markdown(pair_grids([slow_link])[0])[3] in lines
    assert f"- {SLOW}" in lines
    assert "### Pairs of ranks" in lines


def test_the_slow_link_is_notable_and_drawn(slow_link):
    run = RunRecord(name="s", platform="s4000", fingerprint="s4000-4x", results={slow_link.case: slow_link})
    (found,) = (one for one in notable(run) if one.kind == "slow-pair")
    assert (SLOW, 1.5) == (found.sentence, pytest.approx(found.effect))
    charts, table = pair_blocks([slow_link])
    assert 12 == len(charts.charts[0].spec["data"]["values"])
    assert table.grid.title == "Links of these pairs"


def test_of_many_matrices_a_page_has_those_with_slow_links(slow_link):
    others = [dataclasses.replace(result(alike(2), devices=2), case=f"t.py::test_pairs[{n}]") for n in range(14)]
    charts, *_, words = pair_blocks([*others, slow_link])
    assert (12, "3 more cases of pairs: perfsuite show --show=tables prints them") == (len(charts.charts), words.text)
    assert any("s4000-ws4" in chart.title for chart in charts.charts)


def test_smoke_runs_and_other_cases_have_no_matrix(slow_link):
    other = dataclasses.replace(slow_link, work=Work(collective="barrier"))
    assert [] == pair_matrices([dataclasses.replace(slow_link, outcome="smoke"), other])


# -- the workload -----------------------------------------------------------------------------------------------


def test_every_ordered_pair_takes_its_turn():
    assert list(permutations(range(3), 2)) == Pairs(message_bytes=4).pairs(3)
    assert [(0, 1), (0, 2), (1, 2)] == Pairs(message_bytes=4, directions="both").pairs(3)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"directions": "two"}, "directions='two' is unknown; choose from one, both"),
        ({"messages": 0}, "messages=0 is not valid; choose a whole number from 1"),
        ({"message_bytes": 3}, "message_bytes=3 is not a positive multiple of 4"),
    ],
)
def test_bad_parameters_are_told(changes, said):
    with pytest.raises(InvalidParameter, match=said):
        Pairs(**{"message_bytes": 4, **changes})
    with pytest.raises(InvalidParameter, match="world_size=1 is too small for pairs"):
        Pairs(message_bytes=4).work(MeshShape.of(dp=1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Misdirected(Pairs):
    """Rank 0 sends to rank 2 what it got before, not its own buffer; what rank 1 sends later hides that."""

    def turn(self, dist, end, pair):
        if pair == (0, 2) and end.rank == 0:
            return super().turn(dist, dataclasses.replace(end, source=end.target), pair)
        return super().turn(dist, end, pair)


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    require_built()
    costs = Costs(alpha_ns=20_000, link_bytes_per_s=100e9, slow={"mccl::link 1 to 2": 2.5})
    with opened(costs, tmp_path_factory.mktemp("ranks"), KERNELS) as session:
        yield session


def simulated(session, workload, ranks=4):
    case = Case(id=f"t.py::{workload}", workload=workload, world_size=ranks, budget=QUICK, platform="s4000")
    return session.run(case)


@pytest.mark.extended
def test_a_link_made_slow_is_named_with_its_factor(session):
    """On simulated devices, whose time is exact: a message takes 20 us + 1 MiB / (100 GB/s), that link 2.5 times."""
    one = simulated(session, Pairs(message_bytes=MIB))
    usual_s = 20e-6 + MIB / 100e9
    times_s = message_times_s(one.measurement)
    assert {pair: pytest.approx((2.5 if pair == (1, 2) else 1) * usual_s, rel=1e-4) for pair in alike(4)} == times_s
    (slow,) = pair_matrices([one])[0].slow
    assert ((1, 2), pytest.approx(2.5, rel=1e-4)) == (slow.pair, slow.factor)


@pytest.mark.extended
def test_both_directions_at_once_are_as_slow_as_the_slower(session):
    one = simulated(session, Pairs(message_bytes=1024, directions="both"), ranks=3)
    assert [(1, 2)] == [slow.pair for slow in pair_matrices([one])[0].slow]
    assert "pair_us" in {metric.name for metric in one.metrics}


def test_a_message_of_another_rank_is_wrong(tmp_path):
    wrong = pytest.raises(WrongResult, match="on rank 2, element 0 of the message from rank 0")
    with local_driver(tmp_path) as driver, wrong:
        run(driver, Misdirected(message_bytes=1024), 3)
