"""Prose is plain: the rules of helpers/plain_language.py hold for pages, docstrings, comments, messages and names.

``OPEN`` counts the breaches that older text still has; a number may only fall.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from test_correctness.helpers.plain_language import breaches, breaches_of_code, breaches_of_page, figures_of_page

ROOT = Path(__file__).parent.parent
OPEN: dict[str, int] = {
    "CHANGELOG.md": 113,
    "CONTRIBUTING.md": 16,
    "README.md": 8,
    "docs/contributing/architecture.md": 15,
    "docs/contributing/processes.md": 21,
    "docs/contributing/simmusa.md": 18,
    "docs/evidence/truth.md": 57,
    "docs/explanation/gate.md": 68,
    "docs/explanation/model-parallel.md": 19,
    "docs/explanation/projection.md": 41,
    "docs/how-to/ab.md": 9,
    "docs/how-to/acceptance.md": 7,
    "docs/how-to/add-a-platform.md": 13,
    "docs/how-to/add-a-strategy.md": 5,
    "docs/how-to/add-a-table.md": 6,
    "docs/how-to/add-a-workload.md": 30,
    "docs/how-to/ci.md": 13,
    "docs/how-to/clusters.md": 26,
    "docs/how-to/history.md": 19,
    "docs/how-to/imports.md": 6,
    "docs/how-to/kernels.md": 13,
    "docs/how-to/musa.md": 21,
    "docs/how-to/page.md": 5,
    "docs/how-to/reports.md": 30,
    "docs/how-to/shapes.md": 7,
    "docs/how-to/timelines.md": 10,
    "docs/reference/baselines.md": 10,
    "docs/reference/metrics.md": 72,
    "docs/reference/published.md": 28,
    "docs/reference/schedules.md": 11,
    "docs/reference/versions.md": 3,
    "docs/tutorials/check-a-node.md": 1,
    "perfsuite/__init__.py": 1,
    "perfsuite/audit": 57,
    "perfsuite/base": 68,
    "perfsuite/baselines": 130,
    "perfsuite/cli": 147,
    "perfsuite/expectations": 22,
    "perfsuite/exports": 8,
    "perfsuite/fleet": 35,
    "perfsuite/gate": 323,
    "perfsuite/history": 93,
    "perfsuite/imports": 100,
    "perfsuite/metrics": 62,
    "perfsuite/models": 103,
    "perfsuite/platforms": 211,
    "perfsuite/plugin": 323,
    "perfsuite/projection": 222,
    "perfsuite/published": 76,
    "perfsuite/record": 177,
    "perfsuite/reports": 510,
    "perfsuite/run": 100,
    "perfsuite/runtime": 415,
    "perfsuite/schedules": 22,
    "perfsuite/statistics": 35,
    "perfsuite/strategies": 197,
    "perfsuite/workloads": 286,
}
PLACES = sorted(
    str(path.relative_to(ROOT))
    for path in [*(ROOT / "perfsuite").iterdir(), *(ROOT / "docs").glob("*/*.md"), *ROOT.glob("*.md")]
    if path.suffix in (".py", ".md") or (path / "__init__.py").is_file()
)


@pytest.mark.parametrize("place", PLACES)
def test_text_is_plain(place):
    path = ROOT / place
    found = [
        f"{file.relative_to(ROOT)}:{breach}"
        for file in ([*sorted(path.rglob("*.py"))] if path.is_dir() else [path])
        for breach in breaches(file)
    ]
    allowed = OPEN.get(place, 0)
    assert len(found) <= allowed, f"{len(found)} breaches, {allowed} allowed:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("A row is no figure.", "'is no X'"),
        ("What no sample was taken of, no gate sees.", "begins with a clause"),
        ("It prints what was measured.", "'what' for a noun"),
        ("The ranks are told apart.", "a house word"),
        ("word " * 40 + "end.", "words per sentence"),
    ],
)
def test_a_breach_on_a_page_is_found(text, rule):
    assert any(rule in breach for breach in breaches_of_page(text))


def test_breaches_in_code_are_found():
    source = '"""Whose figures nobody has."""\n# A time is no rate of it.\ntold = "it says what was lost"\n'
    rules = {breach.split(": ")[1][:12] for breach in breaches_of_code(source)}
    assert rules == {"a sentence b", "a house word", "'is no X'", "a name that ", "'what' for a"}


def test_plain_text_passes():
    page = "# Title\n\nThe gate compares each case with its baseline. There is no limit.\n\n```\nwhat is no code\n```\n"
    assert list(breaches_of_page(page)) == []
    assert figures_of_page(page) == (6.0, 4.0)
    assert list(breaches_of_code('"""Return the time of one call in seconds."""\n')) == []
