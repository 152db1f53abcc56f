"""No line of ``show`` or ``report`` is wider than the terminal, but an id or a path alone on its line."""

import re
import sys
import unicodedata

import pytest

from perfsuite.cli.main import main
from perfsuite.reports.layout import lay_out
from test_correctness.test_golden import FOLDER, JOURNALS

COMMANDS = (("show",), ("show", "--show=tables"), ("show", "--show=cases"), ("report",), ("report", "--style=all"))


@pytest.mark.parametrize("columns", [60, 80, 200])
@pytest.mark.parametrize("command", COMMANDS, ids="-".join)
@pytest.mark.parametrize("journal", JOURNALS)
def test_no_line_is_wider_than_the_terminal(journal, command, columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    if main([command[0], str(FOLDER / f"{journal}.jsonl"), *command[1:]]):
        assert "no report has a table for these results" in capsys.readouterr().err
        return
    lines = re.sub(r"\x1b\[\d+m", "", capsys.readouterr().out).splitlines()
    assert [] == [line for line in lines if len(line) > columns and len(line.split()) > 1]
    assert lines


def width_of(text):
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)


def test_chinese_names_take_two_columns_per_letter(tmp_path, monkeypatch, capsys):
    journal = tmp_path / "j.jsonl"
    text = (FOLDER / "kernels.jsonl").read_text(encoding="utf-8")
    journal.write_text(text.replace("test_matmul", "test_矩阵乘法性能测试"), encoding="utf-8")
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["show", str(journal), "--show=tables"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [] == [line for line in lines if width_of(line) > 60 and len(line.split()) > 1]
    assert lay_out(("case", "us"), [("带宽", "1"), ("copy", "12")]) == ["case  us", "带宽   1", "copy  12"]
