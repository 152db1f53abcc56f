"""The README's promises: its first block is near the top, the gate script runs its test command."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


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
