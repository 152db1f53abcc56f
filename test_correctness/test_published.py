"""The published reference tables: complete, undamaged, consistently labelled, found by the case that they belong to."""

import functools
import json
import operator
import random
import re
from pathlib import Path

import pytest

from perfsuite.audit.audit import audit, derived_label
from perfsuite.audit.read import tables_of
from perfsuite.base.errors import BaselineError
from perfsuite.cli.audit import label_disagreements
from perfsuite.published.lookup import shipped
from perfsuite.published.numbers import printed
from perfsuite.published.records import LABELS, PublishedTable, digest, directory, read_all, read_report

REPORTS = {report.report: report for report in shipped()}
TABLES = {f"{report.report}/{table.id}": table for report in shipped() for table in report.tables}
ROOT = Path(__file__).parents[1]


# ---- completeness --------------------------------------------------------------------------------------------------

SIZES = {
    "000": {"configuration": (1, 2), "overview": (4, 20), "compute": (4, 24), "time": (4, 24), "memory": (4, 36)},
    "001": {"peaks": (3, 9), "model-sizes": (4, 8), "claims": (5, 10), "latte-l": (13, 73), "latte-xl": (5, 20),
            "deepspeed": (0, 0)},
    "002": {"environment": (13, 26), "batch": (4, 11), "common": (9, 18), "tokens": (1, 2), "performance": (1, 4)},
    "003": {"environment": (17, 34), "topology": (9, 98), "cases": (22, 238), "logs": (22, 58), "results": (22, 94)},
    "004": {"hardware": (13, 26), "software": (9, 18), "methods": (9, 18), "metrics": (6, 12), "peaks": (3, 6),
            "ddp": (4, 20), "fsdp": (4, 20), "multi-node": (3, 15), "schedules": (5, 25), "stages": (4, 20),
            "tensor": (4, 20), "column-row": (3, 15), "long-sequences": (5, 25), "ring-attention": (3, 12),
            "moe": (3, 15), "router": (4, 16), "3d": (5, 30), "5d": (6, 24), "weak": (7, 35), "strong": (5, 25),
            "moe-claims": (2, 4), "choose-parallelism": (9, 18), "communication-advice": (4, 8),
            "batch-advice": (4, 8), "summary": (15, 30)},
}  # fmt: skip
"""Rows and cells of every table."""


@pytest.mark.parametrize("report", SIZES)
def test_no_row_and_no_cell_is_lost(report):
    ours = {
        table.id: (len(table.rows), sum(raw is not None for row in table.rows for raw in row.cells))
        for table in REPORTS[report].tables
    }
    assert SIZES[report] == ours


@pytest.mark.parametrize("name", TABLES)
def test_every_table_has_a_digest_a_label_a_reason_and_a_source(name):
    table = TABLES[name]
    assert table.digest == digest(table)
    judgements = [table.judge(row, column) for row in table.rows for column in table.columns] or [table.judgement]
    for judgement in judgements:
        assert judgement.label in LABELS
        assert judgement.reason
    for fact in (*table.added_facts, *(each for row in table.rows for each in row.added_facts)):
        assert fact.source


# ---- labels --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REPORTS)
def test_labels_follow_from_the_rules_and_from_outside_knowledge_where_those_are_silent(name):
    report = REPORTS[name]
    findings = audit(tables_of(report))
    assert [] == [line for table in report.tables for line in label_disagreements(report, table, findings)]
    for table in report.tables:
        if table.judgement.basis == "outside":
            derived = derived_label(findings, f"{name}/{table.id}")
            assert LABELS.index(derived) < LABELS.index(table.judgement.label), table.id


LABELLED = {
    "M": "001/latte-l 001/latte-xl 001/deepspeed 003/results",
    "M?": "000/overview 000/compute 000/time 000/memory 002/performance",
    "R": "004/ddp 004/multi-node 004/ring-attention 004/router 004/weak 004/strong",
    "X": "004/fsdp 004/schedules 004/stages 004/tensor 004/column-row 004/long-sequences 004/moe 004/3d 004/5d",
}


def test_labels_are_those_of_the_audit():
    labels = {name: table.judgement.label for name, table in TABLES.items() if table.kind == "result"}
    assert {name: label for label, names in LABELLED.items() for name in names.split()} == labels


def label(name, line, column):
    table = TABLES[name]
    row = next(row for row in table.rows if row.line == line)
    return table.judge(row, next(each for each in table.columns if each.name == column)).label


def test_labels_of_single_figures():
    assert ["M?", "X", "X", "M?"] == [label("000/overview", line, "final_loss") for line in (8, 9, 10, 11)]
    assert "X" == label("000/compute", 18, "tflops_per_device")
    assert "X" == label("000/compute", 21, "tflops_per_device_megatron")
    assert "M?" == label("001/latte-l", 25, "iterations_per_s") == label("001/latte-l", 32, "samples_per_s")
    assert "M" == label("001/latte-l", 24, "iterations_per_s")
    assert "M?" == label("001/peaks", 7, "fp16_tensor")


# ---- what the reasons claim ----------------------------------------------------------------------------------------


def test_results_of_report_003_carry_their_configuration():
    cases = {row.cells[1]: row for row in TABLES["003/cases"].rows if row.cells[1]}
    names = [column.name for column in TABLES["003/cases"].columns]
    results = [row for row in TABLES["003/results"].rows if row.cells[1]]
    assert 18 == len(results) == len(cases)
    for row in results:
        stated = dict(zip(names, cases[row.cells[1]].cells, strict=True))
        for name in ("dp", "tp", "pp", "num_micro_batches", "global_batch_size", "hidden_size", "num_heads"):
            assert stated[name][1] == row.parameters[name]
        for name in ("micro_batch_size", "num_layers"):
            assert stated[name][1] == row.parameters[name]
        assert row.parameters["devices"] == stated["num_nodes"][1] * stated["devices_per_node"][1]


# ---- reading -------------------------------------------------------------------------------------------------------


def copy(tmp_path, change):
    plain = json.loads((directory() / "000.json").read_text(encoding="utf-8"))
    change(plain)
    path = tmp_path / "000.json"
    path.write_text(json.dumps(plain), encoding="utf-8")
    return path


def test_an_unchanged_copy_reads_the_same(tmp_path):
    assert REPORTS["000"] == read_report(copy(tmp_path, lambda plain: None))


TABLE = ("tables", 1)
ROW = (*TABLE, "rows", 0)
CELL = (*ROW, "cells", 2)
DAMAGES = [
    (("schema",), 99, "schema 99 is newer than 1; update perfsuite"),
    (("tables",), None, "not a file of published tables"),
    (("schema",), True, "not a file of published tables"),
    ((*TABLE, "colour"), 1, "unknown fields colour"),
    ((*TABLE, "judgement", "label"), "good", "'good', not one of"),
    ((*TABLE, "columns", 2, "role"), "speed", "images_per_s has the unknown role 'speed'"),
    (CELL, ["0.654", 0.654], "do not match their digest"),
    (CELL, ["0.645", 0.654], "which is not 0.654"),
    (CELL, 0.645, "not null, text or [text, number]"),
    ((*ROW, "cells"), ["1", "2", "3", "4"], "row of line 8: 4 cells for 5 columns"),
    ((*TABLE, "columns", 1, "name"), "configuration", "two columns have one name"),
    ((*TABLE, "columns", 1, "of"), "nothing", "part of 'nothing'"),
    ((*ROW, "cell_judgements"), {"x": {"label": "M", "reason": "r"}}, "a label for 'x', which is not a column"),
    ((*ROW, "cell_judgements"), {"final_loss": {"label": "Q", "reason": "r"}}, "'Q', not one of"),
    (("tables", 2, "added_facts", 0, "role"), "weight", "stated for the unknown role 'weight'"),
]
"""A place in report 000, what is put there, and what is said; None takes it out."""


@pytest.mark.parametrize(("place", "new", "message"), DAMAGES)
def test_damage_is_named(tmp_path, place, new, message):
    def damage(plain):
        *to, last = place
        at = functools.reduce(operator.getitem, to, plain)
        at[last] = new
        if new is None:
            del at[last]

    path = copy(tmp_path, damage)
    with pytest.raises(BaselineError) as error:
        read_report(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)


def test_damaged_text_is_named_with_its_line(tmp_path):
    text = (directory() / "000.json").read_text(encoding="utf-8")
    path = tmp_path / "000.json"
    path.write_text(text[: len(text) // 2], encoding="utf-8")
    with pytest.raises(BaselineError, match=r"000\.json:\d+: not JSON"):
        read_report(path)
    path.write_bytes(b"\xff\xfe" + text.encode())
    with pytest.raises(BaselineError, match="is not UTF-8 at byte 0"):
        read_report(path)
    with pytest.raises(BaselineError, match="cannot be read"):
        read_report(tmp_path / "none.json")


def report_or_error(path):
    try:
        return read_report(path)
    except BaselineError as error:
        return str(error)


def test_a_damaged_byte_is_an_error_or_harmless(tmp_path):
    """One changed byte anywhere: a BaselineError, or a file whose cells are what they were."""
    data = (directory() / "002.json").read_bytes()
    path = tmp_path / "002.json"
    chance = random.Random(2)
    cells = [[row.cells for row in table.rows] for table in REPORTS["002"].tables]
    for _ in range(300):
        at = chance.randrange(len(data))
        path.write_bytes(data[:at] + bytes([chance.randrange(256)]) + data[at + 1 :])
        outcome = report_or_error(path)
        if isinstance(outcome, str):
            assert str(path) in outcome
        else:
            assert cells == [[row.cells for row in table.rows] for table in outcome.tables]


def test_no_files_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("perfsuite.base.files.__file__", str(tmp_path / "a" / "b" / "c.py"))
    with pytest.raises(BaselineError, match="reinstall perfsuite"):
        directory()
    assert () == read_all(tmp_path)


# ---- documentation -------------------------------------------------------------------------------------------------


def test_numbers_are_read_as_printed():
    assert [82.6, 330.3] == [float(each.value) for each in printed("82.6 /  330.3").numbers]
    assert [32.0, 704.0, 32.0, 22.0] == [
        float(each.value) for each in printed("32<br/><br/>704/32 = 22<br/>steps/epoch").numbers
    ]


def test_a_table_without_rows_has_a_judgement():
    assert PublishedTable(id="t", title="", columns=(), rows=()).judge().label == "M"


def test_the_example_of_the_docs_runs():
    text = (ROOT / "docs" / "reference" / "published.md").read_text(encoding="utf-8")
    recipes, looked_up = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)

    def values(block):
        """Of the lines that are neither imports nor assignments."""
        names = {}
        lines = [line for line in block.splitlines() if line]
        setup = [line for line in lines if line.startswith("from ") or ", video = " in line]
        exec("\n".join(setup), names)
        return [(eval(line, names), line.partition("  # ")[2]) for line in lines if line not in setup]

    (one, _), (two, _) = values(looked_up)
    assert {8} == {figure.world_size for figure in one}
    assert 18 == len(two)
    for value, said in values(recipes):
        assert value
        assert value == said or not said.startswith("test_perf/")
