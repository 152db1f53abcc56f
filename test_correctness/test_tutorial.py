"""The tutorial's commands do what it says, one after the other, as they are printed."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from test_correctness.helpers.markdown import blocks
from test_correctness.helpers.scripted_driver import ROOT

PAGE = ROOT / "docs" / "tutorials" / "check-a-node.md"
TEXT = PAGE.read_text(encoding="utf-8")
COMMANDS = re.findall(r"^(python3 .*\S)\s+# exit code (\d)$", TEXT, re.MULTILINE)
COPIED = ("perfsuite", "test_perf", "conftest.py", "pytest.ini", "pyproject.toml")


def test_every_block_of_commands_says_how_its_commands_end_and_the_page_is_short():
    assert "".join(blocks(PAGE, "sh")).splitlines() == re.findall(r"^python3 .*# exit code \d$", TEXT, re.MULTILINE)
    assert len(COMMANDS) == 5
    assert len(TEXT.splitlines()) <= 120
    (install,) = blocks(PAGE, "")
    assert f"{install.strip()} && python3 -m pytest test_perf" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_commands_of_the_tutorial_run_as_they_are_printed(tmp_path):
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tmp_path)
    (row,) = blocks(PAGE, "toml")
    (tmp_path / "own.toml").write_text(row)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PATH": path}
    said = []
    for command, code in COMMANDS:
        done = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=600, check=False
        )
        assert int(code) == done.returncode, f"{command}\n{done.stdout}{done.stderr}"
        said.append(done.stdout)
    accepted, shown, fleet, own, again = said
    assert re.search(r"FAIL: 5 acceptance cases without a result, .*no\s+result was judged", accepted, re.DOTALL)
    assert "soak: the last minute has " in accepted
    assert "test_memory_everywhere" in shown
    assert "not judged" in fleet
    assert ("", 1) == ((tmp_path / "good.txt").read_text(), len((tmp_path / "bad.txt").read_text().splitlines()))
    assert (tmp_path / "fleet.html").read_text().startswith("<!doctype html>")
    assert "PASS: 1 judged result" in own
    assert "has 2 journals: node1.jsonl is compared, the later ones are second looks" in again
