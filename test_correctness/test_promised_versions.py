"""What tox -e versions runs: cases that there are, the lowest releases that are admitted, and no skip for a pass.

The constraints pin each package once on every Python that perfsuite says it runs on.
"""

import configparser
import re
import subprocess
from collections import Counter
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


TOX = configparser.ConfigParser(interpolation=None)
TOX.read(ROOT / "tox.ini", encoding="utf-8")
(SECTION,) = (name for name in TOX.sections() if name.startswith("testenv:{"))
NAMES = SECTION.removeprefix("testenv:{").removesuffix("}")
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


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
    command = TOX["testenv:versions"]["commands"]
    assert f"-e {NAMES} " in command
    assert "--skip-missing-interpreters=false" in command
    assert "-e py310-torch25)" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_the_oldest_environments_have_the_lowest_releases_that_are_admitted():
    pins = {}
    for line in TOX[SECTION]["deps"].splitlines():
        factor, _, pin = line.partition(": ")
        if factor in ("torch25", "deepspeed") and "==" in pin:
            pins.setdefault(Requirement(pin).name, Requirement(pin).specifier)
    asked = [Requirement(line) for line in re.findall(r'^ {4}"([^:]*?)",', PROJECT, re.MULTILINE)]
    floors = {each.name: each for each in (*asked, Requirement("deepspeed>=0.15"))}
    assert 'zero = ["deepspeed>=0.15"]' in PROJECT
    assert pins.keys() == {"torch", "numpy", "pytest", "pytest-benchmark", "tomli", "deepspeed"}
    for name, pin in pins.items():
        (lowest,) = (found.version for found in floors[name].specifier)
        (pinned,) = (found.version for found in pin)
        assert Version(pinned) == Version(lowest), name


def test_the_page_has_a_row_for_every_version_that_is_claimed():
    page = (ROOT / "docs" / "evidence" / "versions.md").read_text(encoding="utf-8")
    rows = [line.split("|") for line in page.splitlines() if re.match(r"\| 3\.\d+\.\d+\b", line)]
    claimed = set(re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT))
    assert claimed == {".".join(row[1].split()[0].split(".")[:2]) for row in rows}
    assert {"2.5.0", "2.15.0"} <= {row[2].strip() for row in rows}
    for name in NAMES.split(","):
        assert any(f"`tox -e {name}`" in row[4] for row in rows), name


PYTHONS = ("3.10", "3.11", "3.12", "3.13")


@pytest.mark.parametrize("python", PYTHONS)
def test_every_package_is_pinned_once(python):
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    here = [pin for pin in pins if pin.marker is None or pin.marker.evaluate({"python_version": python})]
    assert {pin.name: 1 for pin in pins} == Counter(pin.name for pin in here)
    assert all(re.fullmatch(r"==[\d.]+", str(pin.specifier)) for pin in pins)


def test_the_oldest_of_them_is_the_one_that_the_package_asks_for():
    assert f'requires-python = ">={PYTHONS[0]}"' in PROJECT
