"""The README and the tutorials: their commands run as they are printed, and end with the printed exit codes."""

import os
import re
import shutil
import subprocess

import pytest

from test_correctness.helpers.markdown import blocks
from test_correctness.helpers.processes import unlaunched
from test_correctness.helpers.scripted_driver import ROOT
from test_correctness.test_ci_recipe import THIS_PYTHON, Service, program

README = (ROOT / "README.md").read_text(encoding="utf-8")
NODE, CASE, GATE = (
    ROOT / "docs" / "tutorials" / f"{name}.md" for name in ("check-a-node", "first-own-case", "gate-my-repository")
)
COPIED = ("perfsuite", "test_perf", "conftest.py", "pytest.ini", "pyproject.toml")


def command(marker):
    found = re.search(rf"<!-- {marker} -->\n```\n(.+)\n```", README)
    assert found, f"README has no command marked {marker}"
    return found[1]


def test_a_block_with_its_output_stands_within_the_first_22_lines():
    lines = README.splitlines()[:22]
    fences = [number for number, line in enumerate(lines) if line.startswith("```")]
    assert len(fences) >= 2
    assert lines[fences[0] + 1].startswith("$ python3 -m pip install")
    assert fences[1] - fences[0] > 3


def test_the_two_commands_set_up_all_they_need():
    for marker in ("measure", "tests"):
        assert command(marker).startswith("python3 -m pip install -q -c constraints.txt -e ")
    assert command("measure").endswith("python3 -m pytest test_perf")
    assert "pytest test_correctness" in command("tests")


def test_the_gate_script_runs_the_test_command_that_is_printed():
    script = (ROOT / ".ci" / "run").read_text()
    assert "command=$(grep -A2 '^<!-- tests -->$' README.md | tail -n 1)" in script
    lines = README.splitlines()
    start = lines.index("<!-- tests -->")
    assert lines[start + 1 : start + 4] == ["```", command("tests"), "```"]


# -- the tutorials -----------------------------------------------------------------------------------------------------


def commands(page):
    """The commands of a page, each with its exit code."""
    found = [re.fullmatch(r"(.*\S)\s+# exit code (\d)", line) for line in "".join(blocks(page, "sh")).splitlines()]
    assert all(found), "a command without an exit code"
    return [(each[1], int(each[2])) for each in found]


def files(page):
    """The text of each file that a page shows below its path."""
    found = re.findall(
        r"`([\w./]+)`:\n\n```\w+\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    return dict(found)


@pytest.fixture
def place(tmp_path):
    """The folder in which the commands run; python3 is this Python."""
    program(tmp_path / "bin" / "python3", THIS_PYTHON)
    (tmp_path / "mine").mkdir()
    return tmp_path / "mine"


def run(place, command, code, environ):
    """What a command printed, in one line."""
    path = f"{place.parent / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environ = {**environ, "PATH": path}
    done = subprocess.run(
        ["bash", "-c", command], cwd=place, env=environ, capture_output=True, text=True, timeout=600, check=False
    )
    assert code == done.returncode, f"{command}\n{done.stdout}{done.stderr}"
    return " ".join(done.stdout.split())


def test_every_command_has_its_exit_code_and_every_file_its_path():
    assert [5, 4, 16] == [len(commands(page)) for page in (NODE, CASE, GATE)]
    assert [1] == [code for _, code in commands(GATE) if code]
    assert {"git", "sed", "python3"} == {command.split()[0] for command, _ in commands(GATE)}
    assert ["pytest.ini", ".gitignore", "perf/test_speed.py"] == list(files(GATE))
    assert len(NODE.read_text(encoding="utf-8").splitlines()) <= 120
    (install,) = blocks(NODE, "")
    assert f"{install.strip()} && python3 -m pytest test_perf" in README


@pytest.mark.slow
def test_a_node_is_checked(place):
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, place / name)
    (row,) = blocks(NODE, "toml")
    (place / "own.toml").write_text(row)
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    accepted, shown, fleet, own, again = [run(place, *each, environ) for each in commands(NODE)]
    assert re.search("FAIL: 5 acceptance cases without a result, .*no result was judged", accepted)
    assert "soak: the last minute has " in accepted
    assert "test_memory_everywhere" in shown
    assert "not judged" in fleet
    assert ("", 1) == ((place / "good.txt").read_text(), len((place / "bad.txt").read_text().splitlines()))
    assert (place / "fleet.html").read_text().startswith("<!doctype html>")
    assert "PASS: 1 judged result" in own
    assert "has 2 journals: node1.jsonl is compared, the later ones are second looks" in again


@pytest.mark.extended
def test_a_first_case_is_written(place):
    ((name, source),) = files(CASE).items()
    (place / name).write_text(source)
    first, tables, stored, gated = [run(place, *each, unlaunched()) for each in commands(CASE)]
    assert re.search(r"mine ws2 [\d.]+ ms", first)
    assert "test_mine[cpu-ws2]" in tables
    assert "5 runs of 1 case added" in stored
    verdicts = "gated 1 of 1 case: 1 (pass|inconclusive|improved)|gated 0 of 1 case: 1 unstable-host"  # by the load
    assert re.search(verdicts, gated)
    (place / name).write_text(source.replace("1 << 20", "1 << 21"))  # the page: double the numbers and run again
    assert "numbers=2097152, stored 1048576" in run(place, commands(CASE)[-1][0], 4, unlaunched())


@pytest.mark.slow
def test_a_repository_is_gated(place):
    environ = Service(place.parent).environ
    for path, text in files(GATE).items():
        (place / path).parent.mkdir(exist_ok=True)
        (place / path).write_text(text)
    done = [(command, run(place, command, code, environ)) for command, code in commands(GATE)]
    printed = [text for command, text in done if command.startswith("python3")]
    _, ungated, stored, slower, *_ = printed
    assert ["1 measured" in text for text in printed] == [True] * 6
    assert "not gated yet: 0 of 5 runs stored" in ungated
    assert "5 runs of 1 case added" in stored
    assert "REGRESSED" in slower
    assert "change against the base" in slower
    assert "waits for a slower disk" in next((place / "baselines" / "cpu").glob("*.json")).read_text()
