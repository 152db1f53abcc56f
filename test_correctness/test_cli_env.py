"""``perfsuite env`` and ``perfsuite platforms``: text, JSON, errors and exit codes."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import perfsuite
from perfsuite.cli import main as cli
from perfsuite.cli import platforms
from perfsuite.platforms import Host
from perfsuite.platforms.host import ToolAnswer
from test_correctness.helpers import machines
from test_correctness.helpers.command_line import as_json, printed, refused, run

ROOT = Path(__file__).parent.parent
Use = Callable[[Host], None]


@pytest.fixture
def use(monkeypatch):
    """Let the command line find this machine."""
    return lambda host: monkeypatch.setattr(platforms, "Host", lambda: host)


def test_env_of_eight_s4000_for_people(tmp_path, use, capsys):
    use(machines.s4000(tmp_path, environ={"MUSA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}))
    mine = tmp_path / "mine.toml"
    mine.write_text('[environment]\nmachine = "MCCX D800"\noptimisation = ["SDPA", "checkpointing"]\n')
    lines = printed(capsys, "env", "--platform-file", mine).splitlines()
    assert "platform     s4000 (8 x MTT S4000)" == lines[0]
    assert lines[1].startswith("fingerprint  s4000-8x-")
    for line in (
        "  accelerators          8 x MTT S4000",
        "  links                 MT2",
        "  kernel         5.4.0-42-generic",
        "  network        mlx5_0 port 1: 200 Gb/sec (4X HDR) InfiniBand",
        "    musa_toolkits  3.1.0",
        "    MUSA_VISIBLE_DEVICES  0,1,2,3,4,5,6,7",
        "  machine       MCCX D800",
        "  optimisation  SDPA",
        "                checkpointing",
        "topology",
    ):
        assert line in lines
    assert machines.matrix(8, "MT2").splitlines()[0] in lines


def test_env_as_json(tmp_path, use, capsys):
    use(machines.nvidia(tmp_path, ["NVIDIA H200"]))
    plain = as_json(capsys, "env")
    assert "h200" == plain["platform"]
    assert plain["fingerprint"]["key"].startswith("h200-1x-")
    assert "1 x NVIDIA H200" == plain["fingerprint"]["parts"]["accelerators"]
    assert ["700.00 W"] == plain["environment"]["power_caps"]
    assert {"driver": "580.159.03", "ecc": "Enabled"} == plain["environment"]["driver"]


def test_env_takes_a_platform_by_name(tmp_path, use, capsys):
    use(machines.nvidia(tmp_path, ["NVIDIA H200"]))
    assert "fingerprint  cpu-intel-xeon-gold-6330-112c-" in printed(capsys, "env", "--platform", "cpu")


def test_platforms_lists_peaks_sources_and_presence(tmp_path, use, capsys):
    use(machines.s4000(tmp_path))
    first, *others = printed(capsys, "platforms").splitlines()
    assert first.startswith("this machine: s4000 (8 x MTT S4000); architecture mp_22")
    assert "  h200              NVIDIA H200 SXM, bf16 989 TFLOPS, 141 GiB, 4800 GB/s" in others
    assert not any("not found" in line or line.startswith("  s4000 ") for line in others)
    out = printed(capsys, "platforms", "s4000", "H200", "s80", "cpu", "mccx-d800")
    assert "s4000 (musa): MTT S4000, on this machine\n" in out
    assert "h200 (cuda): NVIDIA H200 SXM\n  not on this machine: no /dev/nvidia* here; run inside" in out
    assert "  not on this machine: this machine has 8 x MTT S4000; run on one that has it" in out
    assert "  bf16                  989 TFLOPS   NVIDIA H200 data sheet, SXM: half of 1979 with sparsity" in out
    assert "cpu (cpu): CPU, on this machine\n  no peaks\n" in out
    assert "  native, but without a published peak: fp16" in out
    assert "\n\nmccx-d800 (machine of s4000): " in out


def test_platforms_of_some_names_as_json(tmp_path, use, capsys):
    use(machines.host(machines.xeon(tmp_path), {}))
    plain = as_json(capsys, "platforms", "s4000", "cpu")
    assert ("cpu", ["s4000", "cpu"]) == (plain["here"], [each["name"] for each in plain["platforms"]])
    assert "no /dev/mtgpu* here" in plain["platforms"][0]["absent"]
    assert 100.0 == plain["platforms"][0]["tflops"]["bf16"]["value"]
    assert "" == plain["platforms"][1]["absent"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["env", "--platform", "s4001"], "platform 's4001' is unknown, did you mean 's4000'?"),
        (["env", "--platform", "s4000"], "MTT S4000 not found: no /dev/mtgpu* here; run inside the vendor's image"),
        (["env", "--platform-file", "no.toml"], "platform file no.toml cannot be read: No such file or directory"),
        (["platforms", "warp9"], "platform 'warp9' is unknown; choose from cpu, s4000"),
    ],
)
def test_an_error_is_one_line_and_exit_code_4(tmp_path, use, capsys, arguments, said):
    use(machines.host(machines.xeon(tmp_path), {}))
    assert refused(capsys, *arguments).startswith(f"perfsuite: error: {said}")


def test_the_version_is_told(capsys):
    assert f"perfsuite {perfsuite.__version__}\n" == printed(capsys, "--version")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--bogus"], "error: "),
        (["shwo"], "command 'shwo' is unknown; did you mean show?"),
        (["env", "--bogus"], "error: "),
        (["env", "--platform"], "error: "),
    ],
)
def test_wrong_usage_is_exit_code_4(capsys, arguments, said):
    code, _, err = run(capsys, *arguments)
    assert (4, True) == (code, said in err)


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_without_a_command_all_are_printed_in_their_groups(capsys, arguments):
    lines = printed(capsys, *arguments).splitlines()
    assert list(cli.COMMANDS) == [line.split()[0] for line in lines if re.match(r"  \w", line)]
    assert list(cli.GROUPS) == [line for line in lines if line in cli.GROUPS]


@pytest.mark.parametrize("command", [*cli.COMMANDS, "baselines verify", "baselines merge"])
def test_every_help_has_its_exit_codes(command, capsys):
    said = " ".join(printed(capsys, *command.split(), "--help").split())
    assert 1 == said.count("exit codes: 0 done; ")
    assert "4 wrong usage" in said
    finds = command == "baselines verify" or (command in cli.COMMANDS and bool(cli.find_command(command).found))
    assert ("; 1 " in said) == finds


def test_a_driver_that_hangs_is_said_and_not_waited_for(tmp_path, use, capsys):
    machines.write(machines.xeon(tmp_path), {"dev/mtgpu.0": ""})
    use(machines.host(tmp_path, {"mthreads-gmi -q": ToolAnswer(problem="no answer in 10 s")}))
    out = printed(capsys, "env")
    assert "mthreads-gmi does not show which device this is (no answer in 10 s)" in out
    assert "driver  unknown" in out


def test_the_module_runs_on_this_machine_into_a_closed_pipe():
    program = f"{sys.executable} -m perfsuite.cli platforms | {{ read line; echo $line; }}"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", program], capture_output=True, text=True, timeout=60, check=False, cwd=ROOT
    )
    assert (0, "") == (done.returncode, done.stderr)
    assert done.stdout.startswith("this machine: cpu")
