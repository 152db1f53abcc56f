"""A/B of revisions and settings: the arithmetic, the arms, and one comparison of real commits."""

import json
import math
import os
import random
import subprocess
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.base.errors import ConfigurationError
from perfsuite.cli import ab
from perfsuite.cli import main as cli
from perfsuite.run.arms import Arm, ArmFailed, arm_environment, arm_of, run_arm

STEP = """
    from shop import DELAY_S

    def step(rank):
        return lambda: DELAY_S

    def test_sleep(perf):
        perf(step)
"""
CONFTEST = """
    import dataclasses
    from perfsuite.plugin.suite import Suite
    from test_correctness.helpers.scripted_driver import ScriptedDriver, measurement

    pytest_plugins = ["perfsuite.plugin"]

    def lasting(job):
        delay_s = job.workload.function.__globals__["DELAY_S"]
        return measurement(job, [delay_s * factor for factor in (1.01, 0.99, 1.0, 1.005, 0.995)])

    Suite._open_driver = lambda suite: ScriptedDriver(lasting)
"""
"""Real pytest processes whose ranks are scripted: what is compared is known."""


@pytest.fixture
def repository(tmp_path):
    """A git repository with a perf test of a package in src/; the second commit is 25 % slower."""
    root = tmp_path / "repository"
    (root / "suite").mkdir(parents=True)
    (root / "suite" / "pytest.ini").write_text("[pytest]\naddopts = --benchmark-max-time=0.2 -p no:hypothesispytest\n")
    (root / "suite" / "conftest.py").write_text(textwrap.dedent(CONFTEST))
    git(root, "init", "--quiet")
    (root / "suite" / "test_sleep.py").write_text(textwrap.dedent(STEP))
    (root / "src" / "shop").mkdir(parents=True)
    for delay_s in (0.02, 0.025):
        (root / "src" / "shop" / "__init__.py").write_text(f"DELAY_S = {delay_s}\n")
        git(root, "add", "--all")
        git(root, "-c", "user.name=n", "-c", "user.email=e", "commit", "--quiet", "--message", str(delay_s))
    return root


def git(root, *arguments):
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def checkout_on_path(repository, monkeypatch, pytestconfig):
    """As an editable install puts it there: what is in src/ of the user's checkout, in every process."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(repository / "src"), str(pytestconfig.rootpath)]))
    monkeypatch.syspath_prepend(repository / "src")


@given(st.integers(3, 20), st.floats(-0.3, 0.3), st.integers(0, 1000))
def test_a_common_factor_is_found_exactly_whatever_drifts(pairs, change, seed):
    draw = random.Random(seed)
    a_s = [0.01 * math.exp(draw.gauss(0, 0.3)) for _ in range(pairs)]  # the host drifts between pairs
    found = ab.compare("case", a_s, [value * (1 + change) for value in a_s], tolerance=0.03)
    assert found.change == pytest.approx(change, abs=1e-9)
    assert found.low <= found.change + 1e-9
    assert found.high >= found.change - 1e-9
    if abs(change) > 0.031:
        assert found.outcome == ("slower" if change > 0 else "faster")
    elif abs(change) < 0.029:
        assert found.outcome == "no difference"


def test_noise_without_a_difference_is_undecided_and_says_what_could_be_seen():
    found = ab.compare("case", [1.0, 1.3, 0.8, 1.1], [1.2, 0.9, 1.1, 1.0], tolerance=0.03)
    assert found.outcome == "undecided"
    assert found.low < 0 < found.high
    assert found.smallest > 0.2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ab"], "both arms are the same"),
        (["ab", "--a", "HEAD", "--b", "HEAD"], "both arms are the same"),
        (["ab", "--a-env", "X"], "setting 'X' is not NAME=VALUE"),
        (["ab", "--a", "HEAD", "--pairs", "2"], "--pairs=2 is too few"),
        (
            ["ab", "--a", "HEAD", "--until-decided", "--max-pairs", "4"],
            "--max-pairs=4 is less than --pairs=6; give at least 6",
        ),
        (["ab", "--a", "HEAD", "--tolerance", "3"], "--tolerance=3.0 is not between 0 and 1"),
        (["ab", "--a", "no-such-branch"], "revision 'no-such-branch' is not a commit of"),
    ],
)
def test_wrong_usage_is_one_line(repository, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(repository)
    assert cli.main(arguments) == 4
    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 1
    assert message in errors[0]


def test_a_work_tree_is_of_the_revision_and_gone_afterwards(repository):
    before = git(repository, "status", "--porcelain"), git(repository, "worktree", "list")
    with arm_of(repository / "suite", "HEAD~1", "before") as arm:
        assert (arm.name, arm.root.name, arm.checkout) == ("before", "suite", repository)
        assert (arm.tree / "src" / "shop" / "__init__.py").read_text() == "DELAY_S = 0.02\n"
    assert not arm.tree.exists()
    assert (git(repository, "status", "--porcelain"), git(repository, "worktree", "list")) == before


def test_outside_a_repository_there_are_no_revisions(tmp_path):
    with pytest.raises(ConfigurationError, match="is not in a git repository"), arm_of(tmp_path, "HEAD", "a"):
        pass


def test_an_arm_has_its_root_first_on_the_path_and_nothing_of_this_pytest(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    environment = arm_environment(Arm(name="a", root=tmp_path, env={"NCCL_ALGO": "Ring"}))
    assert environment["PYTHONPATH"] == f"{tmp_path}:/elsewhere"
    assert environment["NCCL_ALGO"] == "Ring"
    assert not [name for name in environment if name.startswith("PYTEST_")]


def test_an_arm_that_cannot_be_measured_says_why(repository, checkout_on_path):
    arm = Arm(name="base", root=repository / "suite")
    with pytest.raises(ArmFailed, match=r"(?s)base was not measured: its pytest ended with exit code 4.*nowhere"):
        run_arm(arm, ["test_sleep.py::nowhere"], 60)


def test_an_arm_whose_module_cannot_be_imported_names_the_reason(repository, checkout_on_path):
    (repository / "suite" / "test_broken.py").write_text("raise ImportError('half of a merge')\n")
    arm = Arm(name="base", root=repository / "suite")
    with pytest.raises(
        ArmFailed, match=r"^base was not measured: its pytest ended with exit code 4; ImportError: half"
    ):
        run_arm(arm, ["test_broken.py::test_it"], 60)


@pytest.mark.extended
def test_a_known_slowdown_is_found_between_two_commits(repository, checkout_on_path, monkeypatch, capsys):
    monkeypatch.chdir(repository / "suite")
    assert cli.main(["ab", "--a", "HEAD~1", "--b", "HEAD", "--pairs", "3", "--json", "out.json", "--", "."]) == 1
    (found,) = json.loads((repository / "suite" / "out.json").read_text())
    assert found["case"] == "test_sleep.py::test_sleep[cpu]"
    assert found["outcome"] == "slower"
    assert found["low"] <= 0.25 <= found["high"] or found["change"] == pytest.approx(0.25, abs=0.02)
    out = capsys.readouterr().out
    assert "+2" in out
    assert "code in both trees: conftest from suite, shop from src, test_sleep from suite" in out
    assert found["b_s"] / found["a_s"] - 1 == pytest.approx(found["change"])  # the printed figures agree


def test_pairs_go_on_until_all_is_decided_or_cannot_be(monkeypatch, capsys):
    """Four cases: one differs, one does not, one needs more than six pairs, one would need more than 200."""
    draw = random.Random(1)
    noises = {"slow": (0.1, 0.001), "equal": (0.0, 0.001), "noisy": (0.0, 0.02), "wild": (0.0, 3.0)}

    def run_arm(arm, arguments, deadline_s):
        return {case: (arm, *noise) for case, noise in noises.items()}

    monkeypatch.setattr(ab, "run_arm", run_arm)
    monkeypatch.setattr(ab, "changed_settings", lambda before, after: "")
    monkeypatch.setattr(ab, "time_of", lambda run: math.exp(draw.gauss(run[1] * (run[0] == "b"), run[2])))
    runs = ab._Runs(arms=["a", "b"], arguments=[], deadline_s=1.0)
    found = {each.case: each for each in ab.measure(runs, ab.looks(6, 48), 0.03)}
    assert (found["slow"].outcome, found["equal"].outcome) == ("slower", "no difference")
    assert found["wild"].outcome_text == "undecided, > 200 pairs"
    assert runs.pairs in (12, 24, 48)
    assert runs.pairs == 48 or found["noisy"].outcome != "undecided"
    assert "2 of 4 decided; 48 pairs will hardly decide 1" in capsys.readouterr().err
    assert len(ab.measure(ab._Runs(arms=["a", "b"], arguments=[], deadline_s=1.0), [3], 0.03)) == 4
