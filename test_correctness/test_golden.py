"""What commands print of six stored journals stays as it is, byte for byte.

``PERFSUITE_GOLDEN=write pytest test_correctness/test_golden.py`` writes the files in ``golden/`` anew; every difference
is then read, and is in the commit with its reason.
"""

from __future__ import annotations

import hashlib
import os
import re
from html import unescape
from pathlib import Path

import pytest

from perfsuite.cli.main import main
from perfsuite.metrics import read_run
from perfsuite.reports.notable import notable
from perfsuite.reports.page import page
from perfsuite.reports.summary import markdown_summary

FOLDER = Path(__file__).parent / "golden"
JOURNALS = sorted(path.stem for path in FOLDER.glob("*.jsonl"))
COMMANDS = {
    "summary.txt": ("show", "{journal}"),
    "tables.txt": ("show", "{journal}", "--show=tables"),
    "cases.txt": ("show", "{journal}", "--show=cases"),
    "report.md": ("report", "{journal}"),
    "checklist.md": ("checklist", "{journal}"),
    "export.csv": ("export", "{journal}", "--format=csv"),
    "export.txt": ("export", "{journal}", "--format=openmetrics"),
}


def words_of(html: str) -> str:
    """The text of a page, a line for each piece, and a digest of its tags."""
    body = re.sub(r"(?s)<(style|script)\b.*?</\1>", "", html)
    tags = hashlib.sha256("".join(re.findall(r"<[^>]*>", body)).encode()).hexdigest()
    pieces = (unescape(piece).strip() for piece in re.split(r"<[^>]*>", body))
    return "\n".join([f"tags {tags}", *filter(None, pieces)]) + "\n"


def require_same(path: Path, text: str) -> None:
    if os.environ.get("PERFSUITE_GOLDEN") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text


def test_there_are_journals():
    assert JOURNALS == ["broken", "gated", "kernels", "projected", "simmusa", "training"]


@pytest.mark.parametrize("journal", JOURNALS)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_prints_what_it_printed(journal, name, monkeypatch, capsys):
    monkeypatch.chdir(FOLDER)
    monkeypatch.setenv("COLUMNS", "80")
    status = main([argument.format(journal=f"{journal}.jsonl") for argument in COMMANDS[name]])
    printed = capsys.readouterr()
    require_same(FOLDER / journal / name, f"{printed.out}{printed.err}exit {status}\n")


@pytest.mark.parametrize("journal", JOURNALS)
def test_a_page_says_what_it_said(journal, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(FOLDER)
    monkeypatch.setattr(page, "renderer", lambda: None)
    assert main(["report", f"{journal}.jsonl", "--html", str(tmp_path / "page.html")]) == 0
    require_same(FOLDER / journal / "page.txt", words_of((tmp_path / "page.html").read_text(encoding="utf-8")))


@pytest.mark.parametrize("journal", JOURNALS)
def test_a_ci_summary_says_what_it_said(journal):
    run = read_run(FOLDER / f"{journal}.jsonl")
    require_same(FOLDER / journal / "summary.md", markdown_summary(run, notable(run)) + "\n")
