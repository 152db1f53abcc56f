"""The tutorial on gating a repository: its commands run literally, in an empty folder, with the printed exit codes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from test_correctness.helpers.scripted_driver import ROOT
from test_correctness.test_ci_recipe import Service

TEXT = (ROOT / "docs" / "tutorials" / "gate-my-repository.md").read_text(encoding="utf-8")
LINES = "".join(re.findall(r"^```sh\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)).splitlines()
COMMANDS = [
    (command, int(code)) for command, code in re.findall(r"^(.*\S)\s+# exit code (\d)$", "\n".join(LINES), re.M)
]
FILES = re.findall(r"`([\w./]+)`:\n\n```\w+\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def test_each_command_has_its_exit_code_and_each_file_its_path():
    assert (len(LINES), [1]) == (len(COMMANDS), [code for _, code in COMMANDS if code])
    assert ["pytest.ini", ".gitignore", "perf/test_speed.py"] == [path for path, _ in FILES]
    assert {"git", "sed", "python3"} == {command.split()[0] for command, _ in COMMANDS}


@pytest.mark.slow
def test_the_commands_run_as_they_are_printed(tmp_path):
    service = Service(tmp_path)
    printed = []
    place, programs = tmp_path / "mine", tmp_path / "bin"
    for path, text in FILES:
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_text(text)
    programs.mkdir()
    (programs / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (programs / "python3").chmod(0o755)
    for command, code in COMMANDS:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=place,
            env={**service.environ, "PATH": f"{programs}:{service.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert code == done.returncode, f"{command}\n{done.stdout}{done.stderr}"
        if command.startswith("python3"):
            printed.append(" ".join(done.stdout.split()))
    _, ungated, stored, slower, *_ = printed
    assert ["1 measured" in text for text in printed] == [True] * 6
    assert "not gated yet: 0 of 5 runs stored" in ungated
    assert "5 runs of 1 case added" in stored
    assert "REGRESSED" in slower
    assert "change against the base" in slower
    assert "waits for a slower disk" in next(Path(place, "baselines", "cpu").glob("*.json")).read_text()
