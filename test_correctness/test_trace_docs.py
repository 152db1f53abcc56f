"""docs/how-to/timelines.md: its commands print what it shows, its picture is the one that the command draws."""

import re
import shlex
from pathlib import Path

import pytest

from benchmarks import schedule

DOCS = Path(__file__).parent.parent / "docs" / "how-to"
TEXT = (DOCS / "timelines.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"```console\n\$ python benchmarks/schedule.py (.*?)\n(.*?)```", TEXT, flags=re.DOTALL)


@pytest.mark.parametrize(("command", "output"), SHOWN, ids=[command.partition(" --")[0] for command, _ in SHOWN])
def test_a_command_prints_what_the_page_shows(command, output, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = schedule.main(shlex.split(command))
    said = capsys.readouterr()
    assert said.out + said.err == output
    assert code == (4 if "error:" in output else 0)


def test_the_picture_of_the_page_is_what_its_command_draws(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (picture,) = re.findall(r"!\[.*?\]\((.*?)\)", TEXT)
    (command,) = (command for command, _ in SHOWN if "--out" in command)
    schedule.main(shlex.split(command))
    assert Path(picture).read_text(encoding="utf-8") == (DOCS / picture).read_text(encoding="utf-8")
