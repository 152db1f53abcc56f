"""What tox -e versions runs: cases that there are, the lowest releases that are admitted, and no skip for a pass."""

import configparser
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from test_correctness.helpers.scripted_driver import ROOT
from tools import promised_versions

CASE = "test_mine.py::test_it[cpu-ws2]"
PASSED = '<testcase classname="test_perf.test_mine" name="test_it[cpu-ws2]">{}</testcase>'
METRIC = '<properties><property name="latency_us" value="1"/></properties>'


def tox():
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(ROOT / "tox.ini", encoding="utf-8")
    return parser


def project():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    asked = [Requirement(line) for line in re.findall(r'^ {4}"([^:]*?)",', text, re.MULTILINE)]
    return {requirement.name: requirement for requirement in asked}


def test_the_selected_cases_exist():
    known = set((ROOT / "test_correctness" / "ids" / "cpu.txt").read_text(encoding="utf-8").split())
    chosen = {*promised_versions.CORE, *promised_versions.NEWEST, *promised_versions.DEEPSPEED}
    assert {f"test_perf/{case}" for case in chosen} <= known
    assert len(promised_versions.CORE_MEASURED) == len(promised_versions.DEEPSPEED_MEASURED) == 2


@pytest.mark.parametrize(
    ("junit", "status", "needs_metrics", "why"),
    [
        (PASSED.format(""), 0, False, []),
        (PASSED.format(METRIC), 0, True, []),
        (PASSED.format(""), 0, True, [f"{CASE}: passed without a metric"]),
        (PASSED.format('<skipped message="no DeepSpeed"/>'), 0, False, [f"{CASE}: skipped: no DeepSpeed"]),
        (PASSED.format('<failure message="wrong"/>'), 1, False, [f"{CASE}: failure: wrong"]),
        (PASSED.format('<error message="no fixture"/>'), 1, False, [f"{CASE}: error: no fixture"]),
        (PASSED.replace("[cpu-ws2]", "[cpu-ws3]").format(""), 0, False, [f"{CASE}: not run"]),
        (PASSED.format(""), 1, False, ["pytest ended with exit code 1"]),
        (None, 4, False, [f"{CASE}: not run"]),
    ],
)
def test_only_a_passed_case_passes(junit, status, needs_metrics, why, monkeypatch):
    def pytest_run(command, **_):
        (file,) = (option.partition("=")[2] for option in command if option.startswith("--junitxml="))
        if junit is not None:
            Path(file).write_text(f"<testsuites><testsuite>{junit}</testsuite></testsuites>")
        return SimpleNamespace(returncode=status)

    monkeypatch.setattr(subprocess, "run", pytest_run)
    assert promised_versions.run([CASE], needs_metrics=needs_metrics) == why


def test_all_environments_of_promised_versions_are_run():
    (section,) = (name for name in tox().sections() if name.startswith("testenv:{"))
    names = section.removeprefix("testenv:{").removesuffix("}")
    command = tox()["testenv:versions"]["commands"]
    assert f"-e {names} " in command
    assert "--skip-missing-interpreters=false" in command
    assert "-e py310-torch25)" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_the_oldest_environments_have_the_lowest_releases_that_are_admitted():
    (section,) = (tox()[name] for name in tox().sections() if name.startswith("testenv:{"))
    pins = {}
    for line in section["deps"].splitlines():
        factor, _, pin = line.partition(": ")
        if factor in ("torch25", "deepspeed") and "==" in pin:
            pins.setdefault(Requirement(pin).name, Requirement(pin).specifier)
    floors = {**project(), "deepspeed": Requirement("deepspeed>=0.15")}
    assert 'zero = ["deepspeed>=0.15"]' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert pins.keys() == {"torch", "numpy", "pytest", "pytest-benchmark", "tomli", "deepspeed"}
    for name, pin in pins.items():
        (lowest,) = (found.version for found in floors[name].specifier)
        (pinned,) = (found.version for found in pin)
        assert Version(pinned) == Version(lowest), name


def test_the_page_has_a_row_for_every_version_that_is_claimed():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "evidence" / "versions.md").read_text(encoding="utf-8")
    rows = [line.split("|") for line in page.splitlines() if re.match(r"\| 3\.\d+\.\d+\b", line)]
    claimed = set(re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text))
    assert claimed == {".".join(row[1].split()[0].split(".")[:2]) for row in rows}
    assert {"2.5.0", "2.15.0"} <= {row[2].strip() for row in rows}
    (section,) = (name for name in tox().sections() if name.startswith("testenv:{"))
    for name in section.removeprefix("testenv:{").removesuffix("}").split(","):
        assert any(f"`tox -e {name}`" in row[4] for row in rows), name
