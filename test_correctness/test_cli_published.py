"""``perfsuite published``: every table of the reports as printed, for people and for programs."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys

import pytest

from perfsuite.cli import main as cli
from perfsuite.published.lookup import shipped
from perfsuite.reports.tables.markdown import escape


def printed(capsys, *arguments):
    assert cli.main(["published", *arguments]) == 0
    return capsys.readouterr().out


def test_without_a_name_every_table_is_listed(capsys):
    out = printed(capsys)
    missing = [table.id for report in shipped() for table in report.tables if f"{report.report}/{table.id} " not in out]
    assert missing == []


def test_a_table_has_its_rows_labels_and_reasons(capsys):
    lines = printed(capsys, "004/3d").splitlines()
    assert "## 004/3d: 3D parallelism, 175B" in lines
    assert next(line for line in lines if "DP-only" in line).split("|")[1:-1] == [
        "  426 ",
        " DP-only   ",
        "  64 ",
        "   1 ",
        "   1 ",
        " OOM [X]        ",
        " -        ",
    ]
    reason = "- [X] throughput, mfu; lines 426, 427, 428, 429, 430: throughput over MFU varies"
    assert any(line.startswith(reason) for line in lines)


def test_every_figure_of_every_report_is_printed(capsys):
    out = " ".join(printed(capsys, *(report.report for report in shipped())).split())
    for report in shipped():
        for table in report.tables:
            for row in table.rows:
                for column in table.printed_columns:
                    cell = table.cell(row, column)
                    if cell and cell.numbers and not column.prose and "<" not in cell.text:
                        assert escape(cell.text) in out, (report.report, table.id, row.line, column.name)


def test_programs_get_a_record_for_every_figure(capsys):
    cells = json.loads(printed(capsys, "003/results", "--format=json"))
    latency = [cell for cell in cells if cell["column"] == "latency" and cell["value"] is not None]
    assert (18, 406.16, "ms", "step_time_s", "M") == (
        len(latency),
        *(latency[0][name] for name in ("value", "unit", "metric", "label")),
    )
    rows = list(csv.DictReader(io.StringIO(printed(capsys, "003/results", "--format=csv"))))
    assert [row["text"] for row in rows] == [cell["text"] for cell in cells]


@pytest.mark.parametrize(
    ("name", "meant"), [("3", "003"), ("results", "003/results"), ("003/resutls", "003/results"), ("005", "00")]
)
def test_an_unknown_report_is_one_line_with_what_was_meant(name, meant, capsys):
    assert cli.main(["published", name]) == 4
    said = capsys.readouterr().err
    assert f"no published report or table is called {name!r}; did you mean {meant}" in said
    assert said.count("\n") == 1


def test_it_imports_no_torch():
    code = "import sys; from perfsuite.cli.main import main; main(['published']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
