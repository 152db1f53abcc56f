"""``perfsuite published``: every table of the reports as printed, for people and for programs."""

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from perfsuite.published.lookup import rows, shipped
from perfsuite.published.recipes import why_none
from perfsuite.reports.tables.grids import escape
from test_correctness.helpers.command_line import printed, refused


def test_without_a_name_every_table_is_listed(capsys):
    out = printed(capsys, "published")
    missing = [table.id for report in shipped() for table in report.tables if f"{report.report}/{table.id} " not in out]
    assert missing == []


def test_a_table_has_its_rows_labels_and_reasons(capsys):
    lines = printed(capsys, "published", "004/3d").splitlines()
    assert "## 004/3d: 3D parallelism, 175B" in lines
    assert "|  426 | DP-only   |  64 |   1 |   1 | OOM [X]        | -        |" in lines
    reason = "- [X] throughput, mfu; lines 426, 427, 428, 429, 430: throughput over MFU varies"
    assert any(line.startswith(reason) for line in lines)


def test_every_figure_of_every_report_is_printed(capsys):
    out = " ".join(printed(capsys, "published", *(report.report for report in shipped())).split())
    for report in shipped():
        for table in report.tables:
            for row in table.rows:
                for column in table.printed_columns:
                    cell = table.cell(row, column)
                    if cell and cell.numbers and not column.prose and "<" not in cell.text:
                        assert escape(cell.text) in out, (report.report, table.id, row.line, column.name)


def test_programs_get_a_record_for_every_figure(capsys):
    cells = json.loads(printed(capsys, "published", "003/results", "--format=json"))
    latency = [cell for cell in cells if cell["column"] == "latency" and cell["value"] is not None]
    assert (18, 406.16, "ms", "step_time_s", "M") == (
        len(latency),
        *(latency[0][name] for name in ("value", "unit", "metric", "label")),
    )
    rows = csv.DictReader(io.StringIO(printed(capsys, "published", "003/results", "--format=csv")))
    assert [row["text"] for row in rows] == [cell["text"] for cell in cells]


@pytest.mark.parametrize(
    ("name", "meant"), [("3", "003"), ("results", "003/results"), ("003/resutls", "003/results"), ("005", "00")]
)
def test_an_unknown_report_is_one_line_with_what_was_meant(name, meant, capsys):
    said = f"no published report or table is called {name!r}; did you mean {meant}"
    assert said in refused(capsys, "published", name)


def test_it_imports_no_torch():
    code = "import sys; from perfsuite.cli.main import main; main(['published', '--cases'])"
    code += "; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


# -- the cases ---------------------------------------------------------------------------------------------------


def cases(capsys, *arguments):
    """By line of the report: the first case, and why it is skipped."""
    records = json.loads(printed(capsys, "published", *arguments, "--cases", "--format=json"))
    return {record["line"]: (record["case"].rpartition("[")[2], record["skipped"]) for record in reversed(records)}


def test_each_row_has_its_case_or_why_it_is_skipped_there(capsys):
    assert cases(capsys, "002", "--platform", "s4000") == {50: ("s4000-002-llama2_7b-fp16-1x8]", "")}
    told = cases(capsys, "004/3d", "004/ddp", "--platform", "a100")
    assert told[221] == ("a100-004-gpt2-xl-ddp-b32-1x8]", "")
    assert told[426][1].startswith("cannot fit: gpt3-175b under ddp on 64 ranks takes 3263 GiB by estimate")
    assert told[427][1].startswith("64 ranks on a host with 8 devices; use 8 such hosts (torchrun --nnodes=8")
    assert told[428] == ("", f"impossible as declared: {why_none('004/3d', 428)}")


def test_the_devices_that_are_there_are_counted(capsys):
    assert cases(capsys, "004/3d", "--platform", "a100", "--devices", "64")[430] == ("a100-pp8-dp2-tp4]", "")
    few = cases(capsys, "003", "--platform", "v100", "--devices", "1")
    assert few[110] == ("v100-DP_1x1x1_2_1536x16-math]", "")
    assert few[118] == ("v100-MP_1x32x1_16_3072x32-math]", "32 ranks, on 1 device")


def test_without_a_platform_each_row_has_its_own(capsys):
    told = cases(capsys, "001/latte-l")
    assert len(told) == 13
    assert [told[line][0].partition("-")[0] for line in (26, 28, 37)] == ["rtx4090", "rtx6000ada", "h100"]


def test_on_a_cpu_the_small_case_is_named(capsys):
    case, why = cases(capsys, "002", "--platform", "cpu")[50]
    assert case == "cpu-002-llama2_7b-fp16-1x8]"
    small = "test_perf/test_published.py::test_published[cpu-002-llama2-tiny-zero3-1x2]"
    assert why == f"only at --perf-scale=full; else {small} runs"


def test_every_row_of_a_run_is_listed_and_is_what_pytest_collects(capsys):
    """No test file is collected for it; the ids that are stored are those of the suite."""
    records = json.loads(printed(capsys, "published", "--cases", "--platform", "s4000", "--format=json"))
    assert {(f"{row.report}/{row.table}", row.line) for row in rows(shipped())} == {
        (f"{record['report']}/{record['table']}", record["line"]) for record in records
    }
    collected = (Path(__file__).parent / "ids" / "s4000.txt").read_text().splitlines()
    assert {record["case"] for record in records} - {""} <= set(collected)


def test_cases_are_a_table_to_read(capsys):
    out = printed(capsys, "published", "002", "--cases", "--platform=s4000")
    assert "## 002/performance on MTT S4000 (s4000)" in out
    assert "- 1 of 1 row can run there: pytest test_perf --perf-published=002/performance -k s4000" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["002", "--platform", "s4000"], "--platform is for a list of cases; add --cases, or leave --platform out"),
        (["002", "--cases", "--devices", "0"], "--devices=0 is not a number of devices; give at least 1"),
        (["002", "--cases", "--platform", "s400"], "platform 's400' is unknown, did you mean 's4000'?"),
        (["002/common", "--cases"], "002/common has no row that is a run, so no case reproduces it; tables of report"),
    ],
)
def test_a_wrong_list_of_cases_is_one_line(arguments, message, capsys):
    assert refused(capsys, "published", *arguments).startswith(f"perfsuite: error: {message}")
