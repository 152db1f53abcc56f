"""The published tables against the reports themselves, cell by cell.

The reports are not in this repository.  Where PERFSUITE_SEEDS names the directory that holds them, every cell is
compared with the text and every figure of the text is looked for; without it these tests are skipped, and the digests
(test_published.py) hold the cells to what the comparison saw.
"""

import hashlib
import os
import re
from pathlib import Path

import pytest

from perfsuite.published.lookup import shipped

SEEDS = Path(os.environ.get("PERFSUITE_SEEDS", ""))
REPORTS = {report.report: report for report in shipped()}

pytestmark = pytest.mark.skipif(
    "PERFSUITE_SEEDS" not in os.environ, reason="PERFSUITE_SEEDS does not name the directory of the five reports"
)


def text_of(raw):
    return raw[0] if isinstance(raw, list) else raw


def cells_of(line):
    if "│" in line:
        return [cell.strip() for cell in line.strip().strip("│").split("│")]
    if line.startswith("|"):
        line = line.strip().removeprefix("|").removesuffix("|")
    return [cell.strip() for cell in line.split("|")]


def is_rule(line):
    return not re.search(r"\w", line)


def seed_lines(report):
    return (SEEDS / report.file).read_text(encoding="utf-8").split("\n")


def code_lines(lines):
    """Numbers of the lines in fenced Python blocks, fences included."""
    inside, found = False, set()
    for number, line in enumerate(lines, 1):
        if line.startswith("```python"):
            inside = True
        if inside:
            found.add(number)
        if line.strip() == "```":
            inside = False
    return found


def cited_lines(report):
    rows = [row.line for table in report.tables for row in table.rows]
    headers = [table.line for table in report.tables if table.layout == "table"]
    return [*rows, *headers, *(stated.line for table in report.tables for stated in table.stated)]


@pytest.mark.parametrize("name", REPORTS)
def test_report_is_the_one_that_was_read(name):
    data = (SEEDS / REPORTS[name].file).read_bytes()
    assert REPORTS[name].sha256 == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("name", REPORTS)
def test_cells_are_exactly_as_printed(name):
    lines = seed_lines(REPORTS[name])
    for table in REPORTS[name].tables:
        for stated in table.stated:
            assert stated.text in lines[stated.line - 1], f"{table.id}, line {stated.line}"
        for row in table.rows:
            line = lines[row.line - 1]
            ours = [text_of(raw) for raw in row.cells]
            if table.layout == "lines":
                assert all(text is None or text in line for text in ours[1:]), f"{table.id}, line {row.line}"
                continue
            theirs = line.split() if table.id == "topology" else cells_of(line)
            theirs += [""] * (len(ours) - len(theirs))
            pairs = zip(table.printed_columns, theirs, strict=True)
            expected = [None if column.prose else cell or None for column, cell in pairs]
            assert expected == ours, f"{table.id}, line {row.line}"


@pytest.mark.parametrize("name", REPORTS)
def test_titles_are_as_printed(name):
    lines = seed_lines(REPORTS[name])
    for table in (each for each in REPORTS[name].tables if each.layout == "table" and each.rows):
        line = lines[table.line - 1].replace("CPU Affinity", "CPU_Affinity")
        theirs = ["", *line.split()] if table.id == "topology" else cells_of(line)
        ours = [column.title for column in table.printed_columns]
        assert [title.replace("CPU_Affinity", "CPU Affinity") for title in theirs] == ours, table.id


@pytest.mark.parametrize("name", REPORTS)
def test_every_table_line_is_there_once(name):
    lines = seed_lines(REPORTS[name])
    code = code_lines(lines)
    printed_rows = {
        number
        for number, line in enumerate(lines, 1)
        if ("|" in line or "│" in line) and not is_rule(line) and number not in code
    }
    tables = [table for table in REPORTS[name].tables if table.layout == "table" and table.id != "topology"]
    ours = [row.line for table in tables for row in table.rows] + [table.line for table in tables if table.rows]
    assert sorted(printed_rows) == sorted(ours)


@pytest.mark.parametrize("name", REPORTS)
def test_every_figure_outside_tables_is_cited(name):
    """Headings, tables of contents and code repeat figures or are not results; everything else must be cited."""
    lines = seed_lines(REPORTS[name])
    cited, code = set(cited_lines(REPORTS[name])), code_lines(lines)
    loose = {
        number: line
        for number, line in enumerate(lines, 1)
        if re.search(r"\d", line) and number not in cited and number not in code and not line.startswith("#")
    }
    allowed = {
        "001": {11},  # "fp16": which of the peaks is meant
        "004": {608},  # the number of a list's item
    }
    assert not {number: line for number, line in loose.items() if number not in allowed.get(name, set())}
