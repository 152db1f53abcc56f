"""Prose is plain: the rules of helpers/plain_language.py hold for pages, docstrings, comments, messages and names."""

from pathlib import Path

import pytest

from test_correctness.helpers.plain_language import breaches, breaches_of_code, breaches_of_page

ROOT = Path(__file__).parent.parent
PLACES = sorted(
    str(path.relative_to(ROOT))
    for path in [
        *(ROOT / "perfsuite").iterdir(),
        *(ROOT / "docs").glob("*/*.md"),
        *ROOT.glob("*.md"),
        *(ROOT / "examples").rglob("*.[mp][dy]"),
    ]
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
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("A row is no figure.", "'is no X'"),
        ("What no sample was taken of, no gate sees.", "begins with a clause"),
        ("It prints what was measured.", "'what' for a noun"),
        ("The ranks are told apart.", "a house word"),
        ("The ids are those of the suite.", "'is that of'"),
        ("word " * 40 + "end.", "words per sentence"),
    ],
)
def test_a_breach_on_a_page_is_found(text, rule):
    assert any(rule in breach for breach in breaches_of_page(text))


def test_breaches_in_code_are_found():
    source = '"""Whose figures nobody has."""\n# A time is no rate of it.\ntold = "it says what was lost"\n'
    rules = {breach.split(": ")[1][:12] for breach in breaches_of_code(source)}
    assert rules == {"a sentence b", "a house word", "'is no X'", "a name that ", "'what' for a"}
