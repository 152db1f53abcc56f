"""Every worked number in a docstring or on a page holds, and pages show what their tables and commands print."""

import dataclasses
import doctest
import importlib
import re
import shlex
from pathlib import Path

import pytest

from benchmarks import schedule
from perfsuite.base.mesh import AXES
from perfsuite.reports.tables.report import STYLES, report
from test_correctness.helpers.report_runs import latte, run, section
from test_correctness.helpers.scripted_driver import ROOT

PACKAGE, DOCS = ROOT / "perfsuite", ROOT / "docs"
DOCUMENTED = sorted(path for path in PACKAGE.glob("**/*.py") if "\n    >>> " in path.read_text())
WORKED = DOCS / "evidence" / "worked-messages.md"
MODEL_PARALLEL, ADD_A_TABLE, TIMELINES = (
    (DOCS / f"{name}.md").read_text(encoding="utf-8")
    for name in ("explanation/model-parallel", "how-to/add-a-table", "how-to/timelines")
)


@pytest.mark.parametrize("path", DOCUMENTED, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_worked_numbers_hold(path):
    name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    failed, tried = doctest.testmod(importlib.import_module(name))
    assert tried > 0
    assert failed == 0


# -- model-parallel.md and worked-messages.md ----------------------------------------------------------------------


def test_the_worked_messages_are_those_of_the_closed_forms():
    found = doctest.testfile(str(WORKED), module_relative=False)
    assert (found.failed, found.attempted > 15) == (0, True)


def test_every_axis_has_its_messages_derived():
    axes = {axis for axis in AXES if not axis.startswith("dp_")}
    assert axes == set(re.findall(r"^### (\w+)$", MODEL_PARALLEL, re.MULTILINE))
    assert axes == set(re.findall(r"^## (\w+)$", WORKED.read_text(encoding="utf-8"), re.MULTILINE))


def test_the_tables_that_the_page_on_model_parallelism_names_are_there():
    titles = {spec.title for style in STYLES.values() for spec in style.tables}
    rows = MODEL_PARALLEL.partition("| table | cases |")[2]
    named = [name for row in rows.splitlines() if row.startswith("| ") for name in row.split("|")[1].split(",")]
    for name in filter(None, map(str.strip, named)):
        if name not in ("OneFlow cases", "results", "logs"):  # Cases, Results and Logs of style oneflow
            assert any(title.startswith(name) for title in titles), name


# -- add-a-table.md ------------------------------------------------------------------------------------------------


def test_the_table_of_the_page_prints_what_the_page_shows():
    names = {}
    exec(re.search(r"^```python\n(.*?)^```$", ADD_A_TABLE, re.MULTILINE | re.DOTALL)[1], names)
    style = dataclasses.replace(STYLES["latte"], tables=(*STYLES["latte"].tables, names["LOADER"]))
    cases = (latte(ranks, time_s, data="generated", num_workers=4) for ranks, time_s in ((1, 0.5), (2, 0.6)))
    text = report([run(*cases)], [style])
    shown = re.search(r"<!-- example -->\n### Data loading\n(.*?)<!-- end of example -->", ADD_A_TABLE, re.DOTALL)[1]
    assert shown.strip().splitlines() == "\n".join(section(text, "Data loading")).strip().splitlines()


def test_the_settings_and_values_that_the_page_names_are_there():
    named = set(re.findall(r"`(\w+)`", ADD_A_TABLE.partition("A column is")[2].partition("Columns that several")[0]))
    code = "".join((PACKAGE / "reports" / "tables" / f"{name}.py").read_text() for name in ("case", "recording"))
    fields = {"num_workers", "title", "scale"}  # of workloads and of a column
    assert {name for name in named - fields if name not in code} == set()


# -- timelines.md --------------------------------------------------------------------------------------------------

SHOWN = re.findall(r"```console\n\$ python benchmarks/schedule.py (.*?)\n(.*?)```", TIMELINES, flags=re.DOTALL)


@pytest.mark.parametrize(("command", "output"), SHOWN, ids=[command.partition(" --")[0] for command, _ in SHOWN])
def test_a_command_prints_what_the_page_shows(command, output, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = schedule.main(shlex.split(command))
    said = capsys.readouterr()
    assert said.out + said.err == output
    assert code == (4 if "error:" in output else 0)


def test_the_picture_of_the_page_is_what_its_command_draws(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (picture,) = re.findall(r"!\[.*?\]\((.*?)\)", TIMELINES)
    (command,) = (command for command, _ in SHOWN if "--out" in command)
    schedule.main(shlex.split(command))
    assert Path(picture).read_text(encoding="utf-8") == (DOCS / "how-to" / picture).read_text(encoding="utf-8")
