"""No line of ``show`` or ``report`` is wider than the terminal, but an id or a path alone on its line."""

import sys

import pytest

from perfsuite.cli.main import main
from test_correctness.test_golden import FOLDER, JOURNALS

COMMANDS = (("show",), ("show", "--show=tables"), ("show", "--show=cases"), ("report",), ("report", "--style=all"))


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("command", COMMANDS, ids="-".join)
@pytest.mark.parametrize("journal", JOURNALS)
def test_no_line_is_wider_than_the_terminal(journal, command, columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    if main([command[0], str(FOLDER / f"{journal}.jsonl"), *command[1:]]):
        assert "no report has a table for these results" in capsys.readouterr().err
        return
    lines = capsys.readouterr().out.splitlines()
    assert [] == [line for line in lines if len(line) > columns and len(line.split()) > 1]
    assert lines
