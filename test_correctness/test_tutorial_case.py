"""The tutorial on a first case: its commands run literally, in an empty folder, with the printed exit codes."""

import re

import pytest

from test_correctness.helpers.processes import run_python
from test_correctness.helpers.scripted_driver import ROOT

TEXT = (ROOT / "docs" / "tutorials" / "first-own-case.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^(python3 .*\S)\s+# exit code (\d)$", TEXT, re.MULTILINE)


@pytest.mark.extended
def test_the_commands_run_as_they_are_printed(tmp_path):
    assert len(COMMANDS) == 4
    ((name, source),) = re.findall(r"`([\w./]+)`:\n\n```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    (tmp_path / name).write_text(source)
    printed = []
    for command, code in [*COMMANDS, (COMMANDS[-1][0], "4")]:
        done = run_python(*command.split()[1:], cwd=tmp_path, timeout_s=600)
        text = " ".join(done.stdout.split())
        assert int(code) == done.returncode, f"{command}\n{text}{done.stderr}"
        printed.append(text)
        if len(printed) == len(COMMANDS):  # the page: double the numbers and run again
            (tmp_path / name).write_text(source.replace("1 << 20", "1 << 21"))
    first, tables, stored, gated, refused = printed
    assert re.search(r"mine ws2 [\d.]+ ms", first)
    assert "test_mine[cpu-ws2]" in tables
    assert "5 runs of 1 case added" in stored
    assert "gated 1 of 1 case" in gated
    assert "numbers=2097152, stored 1048576" in refused
