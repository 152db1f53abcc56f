"""perfsuite docs model-parallel and worked-messages: every axis is derived, and the worked numbers are right."""

import doctest
import re

from perfsuite.base.mesh import AXES
from perfsuite.reports.tables.report import STYLES
from test_correctness.helpers.scripted_driver import ROOT

PAGE = ROOT / "docs" / "explanation" / "model-parallel.md"
WORKED = ROOT / "docs" / "evidence" / "worked-messages.md"


def test_the_worked_numbers_are_those_of_the_closed_forms():
    found = doctest.testfile(str(WORKED), module_relative=False)
    assert (found.failed, found.attempted > 15) == (0, True)


def test_every_axis_has_its_messages_derived():
    axes = {axis for axis in AXES if not axis.startswith("dp_")}
    assert axes == set(re.findall(r"^### (\w+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert axes == set(re.findall(r"^## (\w+)$", WORKED.read_text(encoding="utf-8"), re.MULTILINE))


def test_the_tables_that_it_names_are_there():
    titles = {spec.title for style in STYLES.values() for spec in style.tables}
    rows = PAGE.read_text(encoding="utf-8").partition("| table | cases |")[2]
    named = [name for row in rows.splitlines() if row.startswith("| ") for name in row.split("|")[1].split(",")]
    for name in filter(None, map(str.strip, named)):
        if name not in ("OneFlow cases", "results", "logs"):  # Cases, Results and Logs of style oneflow
            assert any(title.startswith(name) for title in titles), name
