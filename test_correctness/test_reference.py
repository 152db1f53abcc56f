"""The generated pages of docs/reference are current and have every name."""

import re
from typing import get_args

import pytest

import perfsuite
from perfsuite.cli.main import COMMANDS
from perfsuite.expectations.judge import Answer
from perfsuite.fleet.standing import Standing
from perfsuite.record.verdict import FAILING, VerdictName
from test_correctness.helpers import reference_pages
from test_correctness.helpers.reference_pages import COMMAND, FOLDER, PAGES, PARTS, ROOT, VARIABLES, generated


@pytest.mark.parametrize("page", [*PAGES, *dict.fromkeys(name for name, _ in PARTS)])
def test_a_page_is_current(page):
    text = (FOLDER / f"{page}.md").read_text(encoding="utf-8")
    assert text.splitlines() == generated(page, text).splitlines(), f"the page is out of date; run: {COMMAND}"


@pytest.mark.parametrize("page", ["api", "files"])
def test_every_field_has_its_meaning(page):
    text = (FOLDER / f"{page}.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `\w+` \| `.*` \| .*\|$", text, re.M)
    assert len(rows) > 15
    assert [] == [row for row in rows if row.endswith("|  |")]


def test_options_commands_and_public_names_are_all_there():
    options, commands, api = ("\n".join(PAGES[name]()) for name in ("options", "commands", "api"))
    plugin = (ROOT / "perfsuite" / "plugin" / "declarations.py").read_text(encoding="utf-8")
    assert set(re.findall(r'\(\s*"(--perf-[a-z-]+)",', plugin)) == set(
        re.findall(r"^\| `(--perf-[a-z-]+)", options, re.M)
    )
    assert set(re.findall(r'\(\s*"(perf_\w+)", *\n? *f?"[a-z]', plugin)) == set(
        re.findall(r"^\| `(perf_\w+)`", options, re.M)
    )
    assert set(COMMANDS) == set(re.findall(r"^### perfsuite (\S+)$", commands, re.M))
    public = {name for name in perfsuite.__all__ if not name.startswith("_")}
    assert public <= set(re.findall(r"^(?:### |\| `)(\w+)", api, re.M))
    assert {"perf", "perf_ranks", "perf_platform"} <= set(re.findall(r"^\| `(\w+)`", api, re.M))


def test_every_environment_variable_of_the_code_is_explained():
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "perfsuite").rglob("*.py"))
    tests = (ROOT / "test_correctness" / "conftest.py").read_text(encoding="utf-8")
    used = set(re.findall(r'"(PERFSUITE_[A-Z_]+)"', code))
    assert used <= set(VARIABLES), f"explain it in VARIABLES of {reference_pages.__file__}"
    assert {name for name in VARIABLES if name not in code + tests and name != "PERFSUITE_SEEDS"} == set()


def test_the_page_of_verdicts_has_every_verdict():
    page = (FOLDER / "verdicts.md").read_text(encoding="utf-8")
    rows = {row[0]: row[1] for row in re.findall(r"^\| `([\w -]+)` \| (yes|no) \|", page, re.M)}
    assert rows == {name: "yes" if name in FAILING else "no" for name in get_args(VerdictName)}
    for name in (*get_args(Answer), *get_args(Standing)):
        assert f"`{name}`" in page, name


def test_the_example_of_the_page_of_files_reads_a_journal():
    page = (FOLDER / "files.md").read_text(encoding="utf-8")
    names = {}
    exec(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1], names)
    found = dict(names["medians"](ROOT / "test_correctness" / "golden" / "kernels.jsonl"))
    assert found
    assert min(found.values()) > 0
