"""Published figures, ``report --history`` and ``--imported``: each row under its own label, text of others as text."""

import dataclasses
from pathlib import Path

import pytest

from perfsuite.cli import main as cli
from perfsuite.imports.formats import read_file
from perfsuite.imports.row import ImportOptions
from perfsuite.record.result import Metric
from perfsuite.reports.beside_others import foreign_markdown, imported_grids
from perfsuite.reports.tables.case import TableCase
from perfsuite.reports.tables.published import published_lines
from test_correctness.helpers.histories import drawn, written
from test_correctness.helpers.measurements import result_of
from test_correctness.helpers.report_runs import latte, table
from test_correctness.test_tables_command import journal

SAMPLES = Path(__file__).parent / "samples"
H100 = SAMPLES / "nccl-tests/all_reduce-8xH100.log"
CASES = tuple(f"t.py::test_{number:02d}" for number in range(24))


@pytest.fixture
def results(tmp_path):
    return journal(tmp_path / "j.jsonl", latte(1, 0.5), latte(2, 0.25))


def reported(capsys, *arguments):
    assert cli.main(["report", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_what_changed_over_time_stands_below_the_tables(tmp_path, capsys, results):
    def level(case, number):
        return 0.05 if case == CASES[0] and number >= 20 else 0.0

    path = written(tmp_path / "h.jsonl", *drawn(40, CASES, level))
    text = reported(capsys, results, "--history", path)
    _, (case, ratio, where) = table(text, "Over time: changes of level, newest first")
    assert (CASES[0], True) == (case, where.startswith("between 2026-01-01T19:00 and"))
    assert 4.0 < float(ratio.split()[0]) < 6.0
    assert "ordered by time" in text


def test_imported_figures_stand_under_their_own_label(capsys, results):
    text = reported(capsys, results, "--imported", H100, "--imported", SAMPLES / "megatron/megatron-deepspeed.log")
    _, *rows = table(text, "Collectives of other tools and measured ones")
    assert {"imported: nccl-tests"} == {row[0] for row in rows}
    assert ("1GiB", "466.3") in {(row[4], row[7]) for row in rows}
    _, *others = table(text, "Figures of other tools")
    assert ("step 5", "150.6", "TFLOPS") in {(row[1], row[3], row[4]) for row in others}
    assert "never a baseline, never gated" in text


def test_measured_rows_of_the_same_collective_stand_beside():
    mine = TableCase(
        case="t.py::test_all_reduce[cpu-ws2-1MiB]",
        platform="cpu",
        workload="AllReduce",
        ranks=2,
        parameters={"message_bytes": 1 << 20, "dtype": "fp32"},
        settings={"collective": "all_reduce"},
        values={"latency_us": 900.0, "busbw_gb_per_s": 1.165},
    )
    half = dataclasses.replace(mine, case="t.py::half", parameters={"message_bytes": 1 << 20, "dtype": "bf16"})
    (grid,) = imported_grids([read_file(H100, ImportOptions(platform="h200"))], [mine, half])
    assert ["bf16", "fp32"] == [row[2] for row in grid.rows[-2:]]
    assert ("measured: cpu", "all_reduce", "fp32", "2", "1MiB", "900", "", "1.165", "nccl-tests") == grid.rows[-1]
    assert "1MiB" in {row[4] for row in grid.rows[:-1]}
    assert {"imported: nccl-tests, h200", "measured: cpu"} == {row[0] for row in grid.rows}


def test_hostile_text_is_no_markup(tmp_path):
    path = tmp_path / "0003.json"
    hostile = "<img src=x onerror=alert(1)> [click](http://x) | `y`"
    path.write_text((SAMPLES / "pytest-benchmark/0003.json").read_text().replace("tests/test_normal.py", hostile))
    (grid,) = imported_grids([read_file(path, ImportOptions())], [])
    text = "\n".join(foreign_markdown(grid))
    assert "&lt;img src=x onerror=alert(1)&gt; \\[click\\](http:\\//x) \\| \\`y\\`" in text
    assert "<img" not in text


PUBLISHED = result_of(
    case="test_perf/test_train_step.py::test_opensora[s4000-ws8]",
    workload="perfsuite.workloads.training.train_step:TrainStep",
    parameters={"model": "opensora", "micro_batch_size": 1},
    platform="s4000",
    world_size=8,
    metrics=[Metric(name="samples_per_s", value=2.5, unit="samples/s", better="higher")],
)


def test_measured_and_published_stand_side_by_side_with_label_and_reason():
    (line,) = published_lines([PUBLISHED])
    assert line.startswith(f"{PUBLISHED.case}: samples_per_s measured 2.5 samples/s; published 2.025 images/s")
    assert "[M?: " in line


def test_other_platforms_and_simulated_devices_show_nothing():
    assert list(published_lines([dataclasses.replace(PUBLISHED, platform="cpu")])) == []
    assert list(published_lines([dataclasses.replace(PUBLISHED, simulated=True)])) == []
    assert list(published_lines([dataclasses.replace(PUBLISHED, world_size=3)])) == []
