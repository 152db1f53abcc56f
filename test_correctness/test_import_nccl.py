"""Logs of nccl-tests as people post them: what is read, what is asked, and that one bad line costs that line."""

from __future__ import annotations

import pytest

from perfsuite.base.errors import ImportFailed
from perfsuite.imports.formats import read_imported
from test_correctness.helpers import import_samples
from test_correctness.helpers.command_line import printed, run
from test_correctness.helpers.import_samples import NOISE, written

BEGIN = "# nThread 1 nGpus 1 minBytes 8 maxBytes 1073741824 step: 2(factor) warmup iters: 5 iters: 20 validation: 1"
END = ["# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 1.0", "#"]
INFO = NOISE[0]


def header(names, wrong="#wrong"):
    sides = f"time   algbw   busbw {wrong}     " * 2
    units = "(us)  (GB/s)  (GB/s)            " * 2
    return [f"#       size         count      type   {names}     {sides}", f"#        (B)    (elements)      {units}"]


BOTH = header("redop    root")
OLD = header("redop", "error")


def lines_of(text):
    return text.strip("\n").split("\n")


def ranks(count, group=lambda rank: 0):
    return [
        "# Using devices",
        *(
            f"#  Rank {rank:2} Group {group(rank):2} Pid  {100 + rank} on node-a device  {rank % 8} [0x0{rank % 8}] A"
            for rank in range(count)
        ),
        "#",
    ]


def log(count, rows, columns=BOTH, before=(), end=END):
    return [*before, BEGIN, "#", *ranks(count), *columns, *lines_of(rows), *end]


SENDRECV = """
         256            64     float     sum      -1    34.24    0.01    0.01      0    33.65    0.01    0.01    N/A
        4096          1024     float     sum      -1    30.74    0.13    0.13      0    30.69    0.13    0.13    N/A
"""
"""sendrecv_perf loops over the operations: an issue of nccl-tests, 2 x A40 on two nodes."""
TWO = """
        8192          2048     float     sum      -1    35.15    0.23    0.23      0    30.33    0.27    0.27      0
       65536         16384     float     sum      -1    67.93    0.96    0.96      0    64.71    1.01    1.01      0
"""
K80 = """
    33554432       8388608     float     sum    19902    1.69    2.53  2e-07    19898    1.69    2.53  2e-07
    67108864      16777216     float     sum    39770    1.69    2.53  2e-07    39763    1.69    2.53  2e-07
"""
"""nccl-tests of 2021 on 4 x K80: README of a public example."""
A100 = """
   536870912     134217728     float     sum      -1    10052   53.41   93.46      0   9676.9   55.48   97.09      0
  1073741824     268435456     float     sum      -1    20079   53.48   93.58      0    19265   55.74   97.54      0
"""
"""Only the table: an issue of nccl-tests."""
OF_16 = A100.replace("93.46", "100.14").replace("97.09", "104.02").replace("93.58", "100.27").replace("97.54", "104.50")
"""The same of 16 ranks."""
T4 = """
   104857600      26214400     float     sum   202872    0.52    0.69    N/A   224616    0.47    0.62    N/A
   105906176      26476544     float     sum   249852    0.42    0.57    N/A   261420    0.41    0.54    N/A
"""
"""3 x T4 over Ethernet, without checks: a blog."""
ALL = """
       65536           512     float    none      -1    107.5    0.61    0.59      0    105.6    0.62    0.60      0
     1048576          8192     float    none      -1   1456.6    0.72    0.70      0   1304.0    0.80    0.78      0
"""
"""32 ranks: an issue of rccl."""


def read(tmp_path, lines, **told):
    return import_samples.read(written(tmp_path, *lines, name="nccl.log"), **told)


def kinds(imported):
    return {(row.collective, row.ranks) for row in imported.rows}


def refusal(tmp_path, lines, **told):
    with pytest.raises(ImportFailed) as failed:
        read(tmp_path, lines, **told)
    return str(failed.value).partition("nccl.log:")[2]


def test_one_signature_of_two_collectives_is_asked_for_or_decided_by_other_evidence(tmp_path):
    assert {("sendrecv", 2)} == kinds(read(tmp_path, log(2, SENDRECV)))  # N/A in place
    assert "fits all_reduce and sendrecv; say which: --collective NAME" in refusal(tmp_path, log(2, TWO))
    assert {("all_reduce", 2)} == kinds(read(tmp_path, log(2, TWO), collective="all_reduce"))
    command = ["$ mpirun -np 2 -H a,b ./build/sendrecv_perf -b 8K -e 64K -f 2 -g 1"]
    assert {("sendrecv", 2)} == kinds(read(tmp_path, log(2, TWO, before=command)))
    named = ["# Collective test starting: all_reduce_perf_mpi"]
    assert {("all_reduce", 2)} == kinds(read(tmp_path, log(2, TWO, before=named)))
    unchecked = read(tmp_path, log(2, SENDRECV), collective="all_reduce")
    assert "in place was not checked, as of all_to_all and sendrecv only: is it all_reduce?" in unchecked.notes
    old = TWO.replace("sum      -1", "sum")  # sendrecv had no column of the operation before it had both
    assert {("all_reduce", 2)} == kinds(read(tmp_path, log(2, old, OLD)))


def test_commands_that_do_not_decide(tmp_path):
    several = ["for test in all_reduce_perf sendrecv_perf; do"]
    building = ["Linking  sendrecv.o > ../build/sendrecv_perf"]
    for before in (several, building):
        assert "fits all_reduce and sendrecv" in refusal(tmp_path, log(2, TWO, before=before))
    cut = ["reduce_perf -b 8K"]  # of all_reduce_perf: reduce prints a root
    assert "line 1 runs reduce, whose rows have another operation" in refusal(tmp_path, log(2, TWO, before=cut))
    other = ["$ ./build/reduce_scatter_perf -b 8"]
    assert "line 1 runs reduce_scatter, but busbw / algbw is 1.750" in refusal(tmp_path, log(8, A100, before=other))
    said = refusal(tmp_path, log(8, A100, before=other), collective="all_reduce")
    assert "runs reduce_scatter, --collective says all_reduce" in said
    hypercube = ["# Collective test starting: hypercube_perf"]
    assert "the log is of hypercube, which is none of all_reduce" in refusal(tmp_path, log(2, TWO, before=hypercube))


def test_deviations_of_old_versions_are_judged_by_their_limits_or_the_last_lines(tmp_path):
    imported = read(tmp_path, log(4, K80, OLD))
    assert (12, ()) == (len(imported.rows), imported.refused)
    assert [2.53, 2.53] == [round(row.value, 2) for row in imported.rows if row.metric == "busbw_gb_per_s"][:2]
    limits = (("float", 8388608, "9e-06", "2e-05"), ("half", 16777216, "9e-03", "2e-02"))
    for dtype, count, within, above in (*limits, ("double", 4194304, "9e-13", "2e-12")):
        rows = lines_of(K80)[0].replace("float", dtype).replace("8388608 ", f"{count} ")
        fine = read(tmp_path, log(4, rows.replace("2e-07", within), OLD, end=[]))
        assert (6, ()) == (len(fine.rows), fine.refused), dtype
        wrong = read(tmp_path, log(4, rows.replace("2e-07", above), OLD, end=[]))
        assert (0, 2) == (len(wrong.rows), len(wrong.refused)), dtype
        assert f"a deviation of {above}, more than" in wrong.refused[0].why
    between = K80.replace("2e-07", "2e-05")  # nccl-tests allows 1e-5 for each rank after the first
    assert 12 == len(read(tmp_path, log(4, between, OLD)).rows)
    failed = [END[0].replace("0 OK", "4 FAILED"), *END[1:]]
    for lines in (log(4, K80, OLD, end=failed), log(3, T4, OLD, end=failed)):
        imported = read(tmp_path, lines)
        assert ([], 4) == (list(imported.rows), len(imported.refused))
        assert "the last lines say FAILED" in imported.refused[0].why


def test_rows_of_several_operations_roots_and_cycles_have_names_of_their_own(tmp_path):
    row = lines_of(A100)[0]
    again = row.replace("10052   53.41   93.46", "10053   53.40   93.46")
    rows = [row, row.replace("sum", "max"), row.replace("sum", "min"), again]
    imported = read(tmp_path, log(8, "\n".join(rows)))
    assert 4 * 6 == len({(each.name, each.metric) for each in imported.rows}) == len(imported.rows)
    assert ["", "max", "min", "repeat 2"] == [
        each.name.partition("out of place")[2].strip(", ")
        for each in imported.rows
        if each.metric == "latency_us" and "out of" in each.name
    ]
    rooted = [row.replace("sum      -1", f"none       {root}").replace("93.46", "53.41") for root in range(3)]
    rooted = [line.replace("97.09", "55.48") for line in rooted]
    imported = read(tmp_path, log(8, "\n".join(rooted)), collective="broadcast")
    assert 3 * 6 == len({(each.name, each.metric) for each in imported.rows})
    assert {"0", "1", "2"} == {each.settings["root"] for each in imported.rows}


def test_a_row_that_is_printed_twice_word_by_word_counts_once(tmp_path):
    imported = read(tmp_path, log(8, A100 + lines_of(A100)[1]))
    assert (12, "line 17 repeats line 16 word by word: left out") == (len(imported.rows), imported.notes[1])


def test_groups_of_split_communicators_are_not_one_world(tmp_path):
    lines = [BEGIN, "#", *ranks(8, lambda rank: rank // 2), *BOTH, *lines_of(TWO), *END]
    imported = read(tmp_path, lines, collective="sendrecv")
    assert {("sendrecv", 2)} == kinds(imported)
    assert all("in each of 4 groups" in row.name and "in each of 4 groups" in row.convention for row in imported.rows)
    unequal = [BEGIN, "#", *ranks(8, lambda rank: rank // 3), *BOTH, *lines_of(TWO), *END]
    assert "3 groups of NCCL_TESTS_SPLIT whose ranks cannot be counted" in refusal(tmp_path, unequal)


def test_printed_digits_are_intervals(tmp_path):
    imported = read(tmp_path, log(3, T4, OLD))
    assert ({("all_reduce", 3)}, 12, ()) == (kinds(imported), len(imported.rows), imported.refused)
    assert "values were not checked" in imported.notes
    alone = "    2048   512     float     sum     4.85    0.42    0.00  0e+00     0.57    3.57    0.00  0e+00"
    imported = read(tmp_path, log(1, alone, OLD))
    assert ["latency_us", "algbw_gb_per_s"] * 2 == [row.metric for row in imported.rows]
    # 2048 B over 0.57 us is 3.56 to 3.63 GB/s: the printed figure has more digits.
    assert 3.57 == imported.rows[3].value
    assert "one rank: nothing is sent, so busbw is left out" in imported.notes
    assert imported.rows[3].convention.endswith("as printed; one rank sends nothing")
    assert all(row.name.startswith("all_reduce or reduce_scatter 2048 B fp32 1 rank ") for row in imported.rows)
    (wrong,) = read(tmp_path, log(3, T4.replace("0.57", "0.59"), OLD)).refused
    assert "busbw 0.59 differs from size over time, 0.5652 GB/s: the row is not consistent" == wrong.why


PREFIXES = [
    "run(), common.cu:967, ",
    " 0: ",
    "[0] ",
    "[1,0]<stdout>:",
    "2026-03-11T10:26:41.123Z ",
    "2026-03-11T10:26:41Z stdout F ",
    "node-1: ",
]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_prefixes_of_launchers_change_no_figure(tmp_path, prefix):
    plain = read(tmp_path, log(32, ALL), collective="all_gather")
    prefixed = read(tmp_path, [prefix + line for line in log(32, ALL)], collective="all_gather")
    assert 12 == len(plain.rows)
    assert plain == prefixed
    assert [{"all_gather"}, {32}] == [{row.collective for row in plain.rows}, {row.ranks for row in plain.rows}]


def test_processes_that_each_ran_alone_are_not_one_table(tmp_path):
    """mpirun with a build without MPI, after an issue of nccl-tests: headers and ranks of both in turn."""
    rows = TWO.strip("\n").replace("0.23      0", "0.00      0").replace("0.27      0", "0.00      0")
    lines = log(1, rows.replace("0.96      0", "0.00      0").replace("1.01      0", "0.00      0"))
    other = [line.replace("Pid  100", "Pid  200") for line in lines]
    mixed = [line for pair in zip(lines, other, strict=True) for line in pair]
    assert "rank 0 is listed twice, so processes that each ran alone print into one table" in refusal(tmp_path, mixed)
    labelled = [f"{index % 2}: {line}" for index, line in enumerate(mixed)]
    runs = read(tmp_path, labelled, collective="all_reduce")
    assert "2 runs" in runs.notes[0]
    assert len({(row.name, row.metric) for row in runs.rows}) == len(runs.rows) == 16


def test_one_bad_line_costs_that_line(tmp_path):
    first, second = lines_of(A100)
    half = first.index("10052")
    cases = {
        "cut": [first[:70], second],
        "nan": [first.replace("53.41", "nan"), second],
        "shifted": [first.replace("sum      -1", "1.5     -1"), second],
    }
    for what, rows in cases.items():
        imported = read(tmp_path, log(8, "\n".join(rows)))
        assert {1073741824.0} == {row.message_bytes for row in imported.rows}, what
        assert 6 == len(imported.rows), what
        assert imported.refused, what
        assert 15 == imported.refused[0].line, what
    other = second.replace("19904", "19905")[second.index("sum") + 12 :]
    mixed = read(tmp_path, log(8, "\n".join([first[:half] + INFO, other, second])))
    assert ({1073741824.0}, 2) == ({row.message_bytes for row in mixed.rows}, len(mixed.refused))
    behind = read(tmp_path, log(8, "\n".join([INFO + first, second])))
    assert 12 == len(behind.rows)
    lost = [line for line in log(8, A100) if "Rank  7" not in line]
    assert "7 lines of ranks, but busbw / algbw fits 8 ranks" in read(tmp_path, lost).notes


@pytest.mark.parametrize("gap", [" ", ""])
def test_the_halves_of_a_broken_row_are_joined(tmp_path, gap):
    first, second = lines_of(A100)
    half = first.index("10052")
    imported = read(tmp_path, log(8, "\n".join([first[:half].rstrip() + gap + INFO, INFO, first[half:], second])))
    assert (12, ()) == (len(imported.rows), imported.refused)
    assert "lines 15 and 17 are one row that another message broke" in imported.notes
    whole = read(tmp_path, log(8, A100))
    assert [row.value for row in whole.rows] == [row.value for row in imported.rows]


OLDEST = """
nThread 1 nGpus 4 minBytes 10000000 maxBytes 10000000 step: 2(factor) warmup iters: 5 iters: 20 validation: 1
# NCCL Tests compiled with NCCL 2.1
# Using devices
#   Rank  0 on   node-a device  0 [0x06] A
#   Rank  1 on   node-a device  1 [0x07] A
#   Rank  2 on   node-a device  2 [0x0a] A
#   Rank  3 on   node-a device  3 [0x0b] A

#                                                 out-of-place                    in-place
#      bytes             N    type      op     time  algbw  busbw      res     time  algbw  busbw      res
    10000000      10000000    char     sum    1.628   6.14   9.21    0e+00    1.932   5.18   7.77    0e+00
    10000000       2500000     int    prod    1.613   6.20   9.30    0e+00    1.629   6.14   9.21    0e+00
 Out of bounds values : 0 OK
 Avg bus bandwidth    : 8.87
"""
"""The columns of nccl-tests in 2017, whose times are in ms."""


def test_times_of_2017_are_in_ms(tmp_path):
    alone = lines_of(OLDEST)
    for lines in (alone, alone[8:]):
        imported = read(tmp_path, lines)
        assert {("all_reduce", 4)} == kinds(imported)
        times = [(row.value, row.printed, row.dtype) for row in imported.rows if row.metric == "latency_us"]
        assert [(1628.0, "1.628", "int8"), (1932.0, "1.932", "int8")] == times[:2]
        assert {"nccl-tests; printed in ms"} == {row.convention for row in imported.rows[:1]}
        rates = [round(row.value, 2) for row in imported.rows if row.metric == "busbw_gb_per_s"]
        assert [9.21, 7.76, 9.3, 9.21] == rates


@pytest.mark.parametrize(
    ("told", "takers"),
    [
        ({"collective": "all_reduce"}, "--collective does not apply to torchtitan, only to nccl-tests, hccl-test"),
        ({"ranks": 8}, "--ranks does not apply to torchtitan, only to nccl-tests, osu, hccl-test"),
        ({"ranks_per_node": 8}, "--ranks-per-node does not apply to torchtitan, only to flagperf"),
    ],
)
def test_an_option_that_a_format_does_not_take_is_refused(tmp_path, told, takers):
    line = "step: 14  loss:  3.24405  memory:  9.46GiB(64.99%)  tps: 7,282  mfu: 0.17%"
    with pytest.raises(ImportFailed, match=takers):
        read(tmp_path, [line, line.replace("14", "15")], **told)


def test_several_runs_are_told_apart(tmp_path, capsys):
    both = [*log(8, A100), "", "CASE 2", *log(8, A100.replace("10052   53.41   93.46", "11052   48.58   85.01"))]
    imported = read(tmp_path, both)
    second = len(log(8, A100)) + 3
    notes = ["2 runs", "run 1 line 1: all_reduce on 8 ranks", f"run 2 line {second}: all_reduce on 8 ranks"]
    assert notes == list(imported.notes)
    assert 24 == len({(row.name, row.metric) for row in imported.rows})
    assert {"run 1", "run 2"} == {row.name.rpartition(", ")[2] for row in imported.rows}
    only = read(tmp_path, both, run=2)
    assert [row for row in imported.rows if "run 2" in row.name] == list(only.rows)
    assert "--run 3 of 2 runs; choose 1 to 2" in refusal(tmp_path, both, run=3)
    mixed = [*log(8, A100, before=["# Collective test starting: all_reduce_perf"]), *log(32, ALL)]
    half = read(tmp_path, mixed)
    assert ({("all_reduce", 8)}, "all of run 2 line 21") == (kinds(half), half.refused[0].text)
    assert "--collective NAME" in half.refused[0].why


def test_a_table_alone_is_read_with_ranks_given_or_deduced(tmp_path):
    table = [*BOTH, *lines_of(A100), *END]
    deduced = read(tmp_path, table)
    assert ({("all_reduce", 8)}, True) == (kinds(deduced), "ranks deduced from busbw / algbw: 8" in deduced.notes)
    stated = read(tmp_path, table, ranks=8)
    assert deduced.rows == stated.rows
    assert "busbw / algbw is 1.750, that of all_reduce 1.500" in refusal(tmp_path, table, ranks=4)
    rows_only = read(tmp_path, lines_of(A100))
    assert ("nccl-tests", 12) == (rows_only.tool, len(rows_only.rows))
    unknown = [*BOTH, *A100.replace("93.46", "53.41").replace("97.09", "55.48").split("\n")[:2]]
    assert "--collective NAME --ranks N" in refusal(tmp_path, unknown)
    assert "fits 1 ranks and more; say it: --ranks N" in refusal(tmp_path, unknown, collective="sendrecv")
    gathered = [*BOTH, *lines_of(ALL), *END]  # size over count and type is the number of ranks
    assert {("all_gather", 32)} == kinds(read(tmp_path, gathered, collective="all_gather"))


def test_ranks_below_the_end_of_a_table_are_of_the_next_table(tmp_path):
    """The README of a cloud provider shows the last rank above each table."""
    rows = lines_of(A100)
    second = [*ranks(16)[16:17], "#", *BOTH, *lines_of(OF_16), *END]
    for first in ([BEGIN, "#", "..."], ranks(8)[8:9]):
        imported = read(tmp_path, [*first, *BOTH, *rows, *END, "", "2 nodes", *second])
        assert ({("all_reduce", 8), ("all_reduce", 16)}, ()) == (kinds(imported), imported.refused)
        assert "the list of ranks has 1 of 16" not in imported.notes[1]


def test_a_table_of_one_side_is_read(tmp_path):
    """Of a cloud provider's guide, which leaves in place out."""
    names = "#       size         count      type   redop    root     time   algbw   busbw #wrong"
    half = [" ".join(line.split()[:9]) if line.startswith("  ") else line for line in log(8, A100, [names, BOTH[1]])]
    imported = read(tmp_path, half)
    assert [10052.0, 20079.0] == [row.value for row in imported.rows if row.metric == "latency_us"]
    assert (6, {"out of place"}) == (len(imported.rows), {row.settings["place"] for row in imported.rows})


def test_lines_between_the_ranks_and_the_table_are_no_ranks(tmp_path):
    """rccl-tests prints versions below the list; a row that sends to itself does not say how many there are."""
    lines = log(2, SENDRECV)
    below = ["Rank 0 of 2 on node-a starts", "RCCL version : 2.27.7-HEAD:0d2c4fd", "Hostname     : node-a"]
    at = next(index for index, line in enumerate(lines) if "Rank  1" in line) + 1
    ended = [*lines[:at], *below, *lines[at:], "# Collective test concluded: sendrecv_perf", "#"]
    imported = read(tmp_path, ended)
    assert ({("sendrecv", 2)}, ("sendrecv on 2 ranks",)) == (kinds(imported), imported.notes)


def test_elided_ranks_and_contradictions(tmp_path):
    lines = log(16, OF_16)
    elided = [line for line in lines if not any(f"Rank {rank:2} " in line for rank in range(2, 15))]
    imported = read(tmp_path, elided)
    assert ({("all_reduce", 16)}, True) == (kinds(imported), "the list of ranks has 3 of 16" in imported.notes)
    assert "the log has 16 ranks, --ranks says 8; leave the option out" in refusal(tmp_path, lines, ranks=8)
    one_process = [line.replace("nGpus 1", "nGpus 16") for line in elided]
    assert {("all_reduce", 16)} == kinds(
        read(tmp_path, [line.replace(line[25:36], "Pid 100") if "Rank" in line else line for line in one_process])
    )


def test_a_failed_run_says_how(tmp_path):
    failure = ["node-a: Test NCCL failure all_reduce.cu:44 'unhandled cuda error (run with NCCL_DEBUG=INFO)'"]
    empty = [line for line in log(2, TWO, end=failure) if not line.startswith("  ")]
    said = "9: the run failed (line 9: Test NCCL failure all_reduce.cu:44 'unhandled cuda error"
    assert said in refusal(tmp_path, empty)
    later = read(tmp_path, log(8, A100, end=failure))
    assert 12 == len(later.rows)
    assert (17, True) == (later.refused[0].line, "rows after line 16 are missing" in later.refused[0].why)
    ended = [line for line in log(2, TWO, end=[]) if not line.startswith("  ")]
    assert "the log ends before the first row of its table" in refusal(tmp_path, ended)


def test_units_are_stated_or_proven(tmp_path):
    lines = log(8, A100)
    without = [line for line in lines if "(us)" not in line]
    imported = read(tmp_path, without)
    assert 12 == len(imported.rows)
    assert any("us and GB/s, because size over time gives algbw" in note for note in imported.notes)
    tiny = "           8          2     float     sum      -1    12.90    0.00    0.00      0    12.87  0.00  0.00  0"
    bare = [line for line in log(8, tiny) if "(us)" not in line]
    assert "the units are missing, and no row has an algbw of 0.1" in refusal(tmp_path, bare, collective="all_reduce")
    others = [line.replace("(us)", "(ms)") for line in lines]
    assert "the units below the columns' names are not us and GB/s, but ms" in refusal(tmp_path, others)


def test_cpu_time_is_not_the_latency(tmp_path):
    columns = [BOTH[0].replace(" time", " cputime"), BOTH[1]]
    imported = read(tmp_path, log(8, A100.replace("10052", "12.05"), columns))
    assert {"cpu_time_us", "algbw_gb_per_s", "busbw_gb_per_s"} == {row.metric for row in imported.rows}
    assert [12.05, 53.41, 93.46] == [row.value for row in imported.rows[:3]]


def test_options_stand_anywhere_and_files_do_not_cost_each_other(tmp_path, capsys, monkeypatch):
    gathered = written(tmp_path, *log(32, ALL), name="a.log")
    reduced = written(tmp_path, *log(8, A100), name="b.log")
    broken = written(tmp_path, "nothing", name="c.log")
    for order in (
        ("nccl-tests", "--collective", "all_gather", gathered),
        ("--collective=all_gather", "nccl-tests", gathered),
        (gathered, "--collective", "all_gather"),
    ):
        assert "12 figures; all_gather on 32 ranks" in printed(capsys, "import", *order)
    out = tmp_path / "out.json"
    code, _, err = run(capsys, "import", "nccl-tests", reduced, "--out", out, broken, gathered)
    assert (1, 12) == (code, sum(len(one.rows) for one in read_imported(out)))
    for said in ("not imported", "c.log:1: no line '# nThread", "a.log:40: the log does not name its collective"):
        assert said in err
    code, _, err = run(capsys, "import", broken, gathered)
    assert (4, True) == (code, "none of 2 files" in err)
    with open(reduced, "rb") as file:
        monkeypatch.setattr("sys.stdin", type("Input", (), {"buffer": file}))
        assert "standard input: nccl-tests, 12 figures" in printed(capsys, "import", "-", "--ranks=8")
    assert "the figure is of fp32, --dtype says bf16" in run(capsys, "import", reduced, "--dtype", "bf16")[2]
    for wrong in (("--dtype", "float"), ("--ranks", "0"), ("--run", "x")):
        assert 4 == run(capsys, "import", reduced, *wrong)[0]
    assert "'x' is not a valid count" in run(capsys, "import", reduced, "--run", "x")[2]


WHOLE = {
    "all_reduce": (log(8, A100, before=["# Collective test starting: all_reduce_perf"]), {}),
    "deduced": (log(8, A100), {}),
    "table": ([*BOTH, *lines_of(A100), *END], {}),
    "old": (log(4, K80, OLD), {}),
    "three": (log(3, T4, OLD), {}),
    "sendrecv": (log(2, SENDRECV), {}),
    "gathered": (log(32, ALL), {"collective": "all_gather"}),
    "reduced": (log(2, TWO, before=["$ mpirun ./build/all_reduce_perf -b 8K -e 64K"]), {}),
    "command": (log(2, TWO, before=["$ mpirun ./build/sendrecv_perf -b 8K -e 64K"]), {}),
    "runs": ([*log(8, A100), *log(4, K80, OLD)], {}),
}
"""Whole logs and the options that they need."""
