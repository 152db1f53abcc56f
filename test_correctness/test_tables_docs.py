"""docs/how-to/add-a-table.md: its table is one, and prints what the page shows."""

import dataclasses
import re

from perfsuite.reports.tables.report import STYLES, report
from test_correctness.helpers.report_runs import latte, run, section
from test_correctness.helpers.scripted_driver import ROOT

PAGE = (ROOT / "docs" / "how-to" / "add-a-table.md").read_text(encoding="utf-8")


def test_the_table_of_the_page_prints_what_the_page_shows():
    names = {}
    exec(re.search(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[1], names)
    style = dataclasses.replace(STYLES["latte"], tables=(*STYLES["latte"].tables, names["LOADER"]))
    text = report(
        [run(*(latte(ranks, time_s, data="generated", num_workers=4) for ranks, time_s in ((1, 0.5), (2, 0.6))))],
        [style],
    )
    shown = re.search(r"<!-- example -->\n### Data loading\n(.*?)<!-- end of example -->", PAGE, re.DOTALL)[1]
    assert shown.strip().splitlines() == "\n".join(section(text, "Data loading")).strip().splitlines()


def test_the_settings_and_values_that_it_names_are_there():
    named = set(re.findall(r"`(\w+)`", PAGE.partition("A column is")[2].partition("Columns that several")[0]))
    code = "".join(
        (ROOT / "perfsuite" / "reports" / "tables" / f"{name}.py").read_text() for name in ("case", "recording")
    )
    fields = {"num_workers", "title", "scale"}  # of workloads and of a column
    assert {name for name in named - fields if name not in code} == set()
