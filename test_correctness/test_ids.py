"""Ids are API: stored results are matched by them, so a change of any is seen and meant.

After a change that is meant: ``PERFSUITE_UPDATE_IDS=1 pytest test_correctness/test_ids.py``, and the diff of
``test_correctness/ids`` is reviewed.
"""

import os
from pathlib import Path

import pytest

from test_correctness.helpers.processes import run_python

ROOT = Path(__file__).parent.parent
STORED = Path(__file__).parent / "ids"


def collect(*arguments):
    """Node ids of the suite, a line each."""
    command = ("-m", "pytest", "test_perf", "--collect-only", "-q", "-p", "no:cacheprovider", *arguments)
    done = run_python(*command, cwd=ROOT, PYTEST_ADDOPTS="")
    assert done.returncode == 0, done.stdout
    return "".join(f"{line}\n" for line in done.stdout.splitlines() if "::" in line)


@pytest.mark.parametrize("name", ["cpu", "s4000"])
def test_the_ids_of_the_suite_are_those_that_are_stored(name):
    arguments = ["--perf-platform=cpu", *(["-k", name] if name != "cpu" else ["-m", "extended or not extended"])]
    found = collect(*arguments)
    if os.environ.get("PERFSUITE_UPDATE_IDS"):
        STORED.mkdir(exist_ok=True)
        (STORED / f"{name}.txt").write_text(found)
    stored = (STORED / f"{name}.txt").read_text()
    changed = sorted({*found.splitlines()} ^ {*stored.splitlines()})
    write = "PERFSUITE_UPDATE_IDS=1 pytest test_correctness/test_ids.py"
    assert found == stored, f"{len(changed)} ids are new or gone, such as {changed[:3]}; if that is right: {write}"
    assert found.count("\n") == len(set(found.splitlines()))


def test_a_run_of_the_whole_checkout_has_each_case_once_and_few_cases():
    """perfsuite/suite/test_perf is another way to test_perf; the number of small cases is limited."""
    cases = collect(".", "--ignore=test_correctness", "--ignore=examples", "--perf-platform=cpu").splitlines()
    assert 200 < len(cases) == len(set(cases)) <= 228
    assert len((STORED / "cpu.txt").read_text().splitlines()) <= 384
