"""Tables of OSU, perftest, nvbandwidth and hccl_test: excerpts of public logs, their units, and damaged lines."""

from __future__ import annotations

import functools

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from perfsuite.base.errors import ImportFailed
from test_correctness.helpers import import_samples
from test_correctness.helpers.import_samples import damaged, written
from test_correctness.test_import_nccl import WHOLE

OSU = """\
# OSU MPI-CUDA Bandwidth Test v7.5
# Datatype: MPI_CHAR.
# Size      Bandwidth (MB/s)
1                       1.42
1024                 1893.21
4194304             26903.29

# OSU MPI Bi-Directional Bandwidth Test v5.9
# Size      Bandwidth (MB/s)
1                       2.41
512                  2059.54

# OSU MPI-CUDA Allreduce Latency Test v7.0
# Size       Avg Latency(us)   Min Latency(us)   Max Latency(us)  Iterations
16777216             8630.58           8619.50           8642.46         10

# OSU MPI Allgather Latency Test v7.4
# Size       Avg Latency(us)
1                       2.81
1048576               104.30

# OSU MPI Latency Test v5.8
# Size          Latency (us)
4194304               584.22

# OSU MPI Multiple Bandwidth / Message Rate Test v5.7
# [ pairs: 620 ] [ window size: 64 ]
# Size                  MB/s        Messages/s
1                    1348.55     1348549706.72
64                  84665.37     1322896425.33

# OSU MPI Barrier Latency Test v5.8
# Avg Latency(us)
             8.32
"""
"""Cluster documentation and issues of OSU users."""
PERFTEST = """\
                    RDMA_Write BW Test
 Dual-port       : OFF          Device         : mlx5_0
 Number of qps   : 1            Transport type : IB
 Mtu             : 4096[B]
 #bytes     #iterations    BW peak[MiB/sec]    BW average[MiB/sec]   MsgRate[Mpps]
 65536      5000             11030.78            11030.45\t\t     0.176487
---------------------------------------------------------------------------------------
                    Send BW Test
 #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]
 65536      1000             357.12             353.53             0.674308
                    RDMA_Read BW Test
 #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
 65536      5000             1103.39            1103.38            0.017654
                    RDMA_Write Bidirectional BW Test
 #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]
 1048576    38096            0.00               213.05 \t\t   0.025397
                    RDMA_Write Latency Test
 #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   \
99% percentile[usec]   99.9% percentile[usec]
 64      1000          0.81           2.58         0.85     \t       0.85        \t0.06   \t\t0.89    \t\t2.58
"""
"""Issues and README files of RDMA users."""
NVBANDWIDTH = """\
nvbandwidth Version: v0.4
Running host_to_device_memcpy_ce.
memcpy CE CPU(row) <- GPU(column) bandwidth (GB/s)
          0         1
0     55.17     54.02

SUM host_to_device_memcpy_ce 109.19

Running device_to_device_memcpy_read_ce.
memcpy CE GPU(row) -> GPU(column) bandwidth (GB/s)
           0         1
 0       N/A    340.55
 1    339.87       N/A

SUM device_to_device_memcpy_read_ce 680.42

Running device_to_device_bidirectional_memcpy_read_ce.
memcpy CE GPU(row) <-> GPU(column) Read1 bandwidth (GB/s)
           0         1
 0      0.00    760.10
 1    760.10      0.00

SUM device_to_device_bidirectional_memcpy_read_ce_read1 1520.20

memcpy CE GPU(row) <-> GPU(column) Total bandwidth (GB/s)
           0         1
 0       N/A   1520.31
 1   1520.31       N/A

SUM device_to_device_bidirectional_memcpy_read_ce_total 3040.62
"""
"""Documents of cloud providers; the total is shortened."""
HCCL = """\
# mpirun -n 8 ./bin/all_reduce_test -b 8K -e 64M -f 2 -d fp32 -o sum -p 8
the minbytes is 8192, maxbytes is 67108864, iters is 20, warmup_iters is 5
data_size(Bytes): |   avg_time(us): | alg_bandwidth(GB/s): | check_result:
8192              |     764.55    |       0.00998        | success
65536             |     900.00    |       0.06782        | NULL
1073741824        |   10442.38    |     102.82543        | success
"""
"""hccl_test's documents: GB of 2**30 bytes in the first rows, of 1e9 in the last."""
TEXTS = {"osu": OSU, "perftest": PERFTEST, "nvbandwidth": NVBANDWIDTH, "hccl-test": HCCL}


def read(tmp_path, text, **told):
    return import_samples.read(written(tmp_path, text), **told)


def values(imported, metric, name=""):
    return [round(row.value, 6) for row in imported.rows if row.metric == metric and name in row.name]


@pytest.mark.parametrize(("tool", "count"), [("osu", 16), ("perftest", 14), ("nvbandwidth", 8), ("hccl-test", 6)])
def test_formats_are_recognised_and_every_figure_stands_in_its_line(tmp_path, tool, count):
    imported = read(tmp_path, TEXTS[tool])
    assert (tool, count, ()) == (imported.tool, len(imported.rows), imported.refused)
    lines = TEXTS[tool].split("\n")
    for row in imported.rows:
        assert row.printed in lines[row.line - 1].split()
        assert row.unit in ("us", "GB/s", "messages/s")
        assert row.convention
    assert count == len({(row.name, row.metric) for row in imported.rows})


def test_osu_says_directions_ranks_and_megabytes(tmp_path):
    imported = read(tmp_path, OSU, ranks=4)
    conventions = {row.name.partition(" v")[0]: row.convention for row in imported.rows if "andwidth" in row.name}
    assert [0.00142, 1.89321, 26.90329] == values(imported, "bandwidth_gb_per_s", "MPI-CUDA Bandwidth")
    assert "osu: one direction; printed in MB/s of 1e6 bytes" == conventions["OSU MPI-CUDA Bandwidth 1 B"]
    assert "both directions added" in conventions["OSU MPI Bi-Directional Bandwidth 1 B"]
    assert "one direction, all pairs added" in conventions["OSU MPI Multiple Bandwidth / Message Rate 1 B"]
    reduced = [row for row in imported.rows if "Allreduce" in row.name]
    assert [("all_reduce", 16777216.0, 4)] == [(one.collective, one.message_bytes, one.ranks) for one in reduced[:1]]
    gathered = [row for row in imported.rows if "Allgather" in row.name]
    assert all((row.collective, row.message_bytes) == ("", None) and "B per rank" in row.name for row in gathered)
    (alone,) = [row for row in imported.rows if row.name == "OSU MPI Latency 4194304 B"]
    assert (584.22, "osu: one way, half of a round trip") == (alone.value, alone.convention)
    assert [8.32] == values(imported, "latency_us", "Barrier")


def test_perftest_converts_its_units_and_checks_them_by_the_message_rate(tmp_path):
    imported = read(tmp_path, PERFTEST)
    expected = [11030.45 * 2**20 / 1e9, 353.53 / 8, 1103.38 * 2**20 / 1e9, 213.05 / 8]
    assert [round(value, 6) for value in expected] == values(imported, "bandwidth_gb_per_s")
    assert "1 peaks of 0 left out: a run by duration has none" in imported.notes
    for what, latency_us in {"": 0.85, "min_": 0.81, "max_": 2.58, "p99_": 0.89}.items():
        assert latency_us == values(imported, f"latency_{what}us")[0]
    assert {"Number of qps": "1", "Mtu": "4096[B]", "iterations": "5000"} == imported.rows[0].settings
    wrong = read(tmp_path, PERFTEST.replace("11030.45", "12030.45"))
    assert "size times message rate is 1.103e+04: the row is not consistent" in wrong.refused[0].why
    with pytest.raises(ImportFailed, match="one direction and both print the same; add the line"):
        read(tmp_path, "\n".join(PERFTEST.split("\n")[4:6]))
    command = "$ ib_write_bw -d mlx5_0 -b 10.0.0.1\n" + "\n".join(PERFTEST.split("\n")[4:6])
    assert "perftest: both directions added; printed in MiB/sec" == read(tmp_path, command).rows[0].convention


def test_nvbandwidth_names_pairs_and_directions(tmp_path):
    imported = read(tmp_path, NVBANDWIDTH)
    assert [340.55, 339.87] == values(imported, "bandwidth_gb_per_s", "device_to_device_memcpy_read_ce")
    assert [760.1, 760.1] == values(imported, "bandwidth_gb_per_s", "Read1")
    conventions = {row.name.partition(" row")[0]: row.convention for row in imported.rows}
    assert conventions["device_to_device_bidirectional_memcpy_read_ce Read1"].endswith("one direction of two at once")
    assert conventions["device_to_device_bidirectional_memcpy_read_ce Total"].endswith("both directions added")
    assert "6 cells of N/A or 0.00 left out: not measured" in imported.notes
    lost = read(tmp_path, NVBANDWIDTH.replace(" 1    339.87       N/A\n", ""))
    assert ["the cells give 340.55, SUM says 680.42: a line is lost or cut"] == [one.why for one in lost.refused]


@pytest.mark.parametrize(
    ("text", "name", "figures"),
    [
        (  # the line of the test was left out
            NVBANDWIDTH.partition("Running host_to_device_memcpy_ce.\n")[2].partition("\nRunning")[0],
            "host_to_device_memcpy_ce row 0 column 0",
            [55.17, 54.02],
        ),
        (
            "Atomic FETCH_AND_ADD BW Test\n #bytes   #iterations   BW peak[MB/sec] BW average[MB/sec] MsgRate[Mpps]\n"
            " 8          1000             0.00              19.90              2.608333\n",
            "Atomic FETCH_AND_ADD BW 8 B",
            [pytest.approx(0.0208666624)],
        ),
        (
            "RDMA_Write Latency Test\n #bytes        #iterations       t_avg[usec]    tps average\n"
            " 2             1000000           1.05           952380.95\n",
            "RDMA_Write Latency 2 B",
            [1.05],
        ),
        (
            "# OSU MPI Latency Test v7.4\n# Size       Avg Latency(us)  P50 Tail Lat(us)  P99 Tail Lat(us)\n"
            "4                       1.34              1.30              1.52\n",
            "OSU MPI Latency 4 B",
            [1.34, 1.30, 1.52],
        ),
    ],
)
def test_other_columns_and_titles_of_these_tools_are_read(tmp_path, text, name, figures):
    imported = read(tmp_path, text)
    assert (name, figures) == (imported.rows[0].name, [row.value for row in imported.rows])


def test_rows_below_other_text_need_the_sum_of_nvbandwidth(tmp_path):
    """A log was cut in a matrix; the next program prints a matrix too."""
    cut = NVBANDWIDTH.partition(" 1    339.87")[0]
    after = "P2P=Enabled Bandwidth\n   D\\D     0      1\n     1 274.70 1581.48\n"
    assert 3 == len(read(tmp_path, cut).rows)
    imported = read(tmp_path, cut + after)
    assert (2, "other text is between its rows") == (len(imported.rows), imported.refused[0].why[:30])
    whole = NVBANDWIDTH.replace(" 1    339.87", "WARNING of another rank\n 1    339.87")
    assert 8 == len(read(tmp_path, whole).rows)


def test_hccl_takes_its_bandwidth_from_size_and_time(tmp_path):
    imported = read(tmp_path, HCCL, ranks=8)
    algbw = [size / time_us / 1e3 for size, time_us in ((8192, 764.55), (65536, 900), (1073741824, 10442.38))]
    assert pytest.approx(algbw, abs=1e-6) == values(imported, "algbw_gb_per_s")
    assert pytest.approx([value * 1.75 for value in algbw], abs=1e-4) == values(imported, "busbw_gb_per_s")
    assert "the values of 1 row were not checked" in imported.notes
    failed = read(tmp_path, HCCL.replace("0.00998        | success", "0.00998        | failed"))
    assert ["the check says 'failed': the result is wrong, or the row is cut"] == [one.why for one in failed.refused]
    unnamed = HCCL.partition("\n")[2]
    with pytest.raises(ImportFailed, match="the collective is not named; say which: --collective NAME"):
        read(tmp_path, unnamed)
    assert 6 == len(read(tmp_path, unnamed, collective="broadcast").rows)


# -- one damaged line ----------------------------------------------------------------------------------------------


WHOLES = {tool: [(text.rstrip("\n").split("\n"), {})] for tool, text in TEXTS.items()}
WHOLES["nccl-tests"] = [*WHOLE.values()]
WAYS = ("end cut", "begin cut", "doubled", "prefixed", "inside", "joined before", "split")


def known(imported):
    """Every figure, without the mark of a repeated row or run."""
    return {(row.name.partition(", r")[0], row.metric, row.value, row.unit, row.convention) for row in imported.rows}


@functools.cache
def figures_of_whole(tool, number, folder):
    lines, told = WHOLES[tool][number]
    return known(import_samples.read(written(folder, *lines), tool, **told))


@pytest.mark.extended
@pytest.mark.parametrize("tool", WHOLES)
@settings(max_examples=500)
@given(data=st.data())
def test_a_damaged_line_never_gives_a_figure_that_the_whole_table_does_not_have(tmp_path_factory, tool, data):
    number = data.draw(st.integers(0, len(WHOLES[tool]) - 1))
    (lines, told), folder = WHOLES[tool][number], tmp_path_factory.getbasetemp()
    whole = figures_of_whole(tool, number, folder)
    way, text = damaged(data.draw, lines, WAYS)
    # Nothing else in a log of two ranks that only send tells of the second one.
    assume(way != "begin cut" or "Rank  1 " in text or not any("Rank  1 " in line for line in lines))
    try:
        imported = import_samples.read(written(folder, text), tool, **told)
    except ImportFailed:
        return
    assert known(imported) <= whole, text
    assert len(imported.rows) == len({(row.name, row.metric) for row in imported.rows})
    assert all(row.unit and row.convention for row in imported.rows)
    if way in ("doubled", "prefixed"):
        assert known(imported) == whole, text
