"""Rows that people misread: units that fit their figures, bandwidths of a cache, the batch of a pipeline."""

import dataclasses

import pytest

from perfsuite.record.result import Metric, Work
from perfsuite.reports.terminal import metric_tables
from perfsuite.runtime.ranks.spans import SpanRecorder
from test_correctness.helpers.pipelines import staged
from test_correctness.helpers.report_runs import gpt, kernel, llama, pipeline, rows, run, style, table
from test_correctness.helpers.runs import remeasured
from test_correctness.test_runtime_parts import Ticks

MIB, GIB = 2**20, 2**30


def test_a_pipelines_micro_batch_is_its_local_batch_and_their_number_its_accumulation():
    case = dataclasses.replace(
        pipeline("1F1B", 4, 0.28),
        workload="perfsuite.workloads.training.train_step:TrainStep",
        parameters={"model": "llama2-7b", "mesh": "pp2-dp2", **staged(num_micro_batches=4)},
        work=Work(samples=24.0, tokens=24.0 * 4096),
    )
    text = style("flagperf", run(case, platform="s4000"))
    for title in ("Batch", "Performance"):
        told = rows(text, title)[0]
        assert ["3", "4"] == [value for name, value in told.items() if name.startswith(("LBS", "GAS"))]
    assert ["24"] == [row["GBS = LBS x GAS x DP"] for row in rows(text, "Batch")]


@pytest.mark.parametrize(
    ("sizes_bytes", "unit", "cells"),
    [
        ((11.2 * MIB,), "MiB", ["11.2"]),
        ((3 * GIB,), "GiB", ["3"]),
        ((48 * 2**10, 50 * 2**10, 3 * GIB), "KiB", ["48", "50", "3145728"]),
    ],
)
def test_a_column_of_sizes_has_the_unit_it_reads_best_in(sizes_bytes, unit, cells):
    cases = [
        gpt(f"test_{number}", 2, 1.0, builds=("memory",), records=(("peak_bytes", size),))
        for number, size in enumerate(sizes_bytes)
    ]
    assert cells == [row[f"peak {unit}"] for row in rows(style("methods", run(*cases)), "Memory per device")]


def test_sizes_that_are_compared_have_one_unit():
    records = (("weights_bytes", 3 * MIB), ("optimizer_bytes", 6 * GIB), ("peak_bytes", 9 * GIB))
    case = gpt("test_it", 2, 1.0, builds=("memory",), records=records)
    heads, *_ = table(style("methods", run(case)), "Memory per device")
    units = {unit for head in heads for unit in ("KiB", "MiB", "GiB") if unit in head}
    assert units == {"GiB"}


def test_published_sizes_stand_in_the_unit_of_their_column():
    small = llama(8, 1.0, records=(("whole_device_bytes", 6 * MIB),))
    told = rows(style("flagperf", run(small)), "Performance")
    assert ["6", "45261 [M?]"] == [row["memory used MiB (whole device)"] for row in told]


def test_the_terminal_shows_sizes_in_the_unit_they_read_best_in():
    metric = Metric(name="peak_gib", value=0.0109, unit="GiB", better="lower")
    result = dataclasses.replace(llama(8, 1.0), metrics=(metric,))
    heading, units, row = metric_tables([result])[2:5]
    assert (heading.split()[3], units.split()[0], row.split()[4]) == ("peak", "MiB", "11.16")


def test_a_bandwidth_of_the_cache_says_so():
    def copy(size_bytes):
        work = Work(bytes_moved=2.0 * size_bytes, memory_path="device", footprint_bytes=2.0 * size_bytes)
        plain = kernel(f"copy{size_bytes}", "MemoryCopy", 1, {"buffer_bytes": size_bytes}, work, gb_per_s=139.0)
        (rank,) = plain.measurement.ranks
        return remeasured(plain, ranks=(dataclasses.replace(rank, cache_bytes=32 * MIB),))

    text = style("methods", run(copy(MIB), copy(32 * MIB), copy(GIB)))
    told = [row["bandwidth of"] for row in rows(text, "Memory bandwidth")]
    assert told == ["cache-resident", "partly cache-resident", ""]
    assert "bandwidth of" not in table(style("methods", run(copy(GIB))), "Memory bandwidth")[0]


def test_a_remainder_below_what_the_clock_tells_is_none():
    clock = Ticks()
    recorder = SpanRecorder(clock=clock)
    for name, length in (("data", 0.1), ("forward", 0.2), ("backward", 0.3)):
        with recorder.span(name):
            clock.now += length
    assert clock.now - sum((0.1, 0.2, 0.3)) == 0.0
    recorder.close_sample(0.0, clock.now + 4e-16, 1)
    recorder.close_sample(0.0, clock.now + 4e-16, 1)  # nothing covered: no spans, no remainder
    spans, nothing = recorder.samples
    assert (list(spans), nothing) == (["data", "forward", "backward", "remainder"], {})
    assert spans["remainder"] == (0.0, 1.0)
