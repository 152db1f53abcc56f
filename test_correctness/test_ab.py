"""A/B of revisions and settings: the arithmetic of pairs, the arms, and one comparison of real commits."""

import json
import math
import os
import random
import subprocess
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.ab_coverage import tally
from benchmarks.gate_simulation import HOSTS
from perfsuite.cli import ab
from perfsuite.cli.ab import looks
from perfsuite.run.arms import Arm, ArmFailed, arm_environment, arm_of, run_arm
from perfsuite.statistics.comparison import COLUMNS, compare, progress, table
from perfsuite.statistics.paired import Paired, paired_mean, pairs_needed, smallest_found
from test_correctness.helpers.command_line import printed, refused

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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ab"], "both arms are the same"),
        (["ab", "--a", "HEAD", "--b", "HEAD"], "both arms are the same"),
        (["ab", "--a-env", "X"], "setting 'X' is not NAME=VALUE"),
        (["ab", "--a", "HEAD", "--pairs", "2"], "--pairs=2 is too few"),
        (["ab", "--a", "HEAD", "--until-decided", "--max-pairs", "4"], "--max-pairs=4 is less than --pairs=6; give at"),
        (["ab", "--a", "HEAD", "--tolerance", "3"], "--tolerance=3.0 is not between 0 and 1"),
        (["ab", "--a", "no-such-branch"], "revision 'no-such-branch' is not a commit of"),
    ],
)
def test_wrong_usage_is_one_line(repository, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(repository)
    assert message in refused(capsys, *arguments)


def test_a_work_tree_is_of_the_revision_and_gone_afterwards(repository):
    before = git(repository, "status", "--porcelain"), git(repository, "worktree", "list")
    with arm_of(repository / "suite", "HEAD~1", "before") as arm:
        assert (arm.name, arm.root.name, arm.checkout) == ("before", "suite", repository)
        assert (arm.tree / "src" / "shop" / "__init__.py").read_text() == "DELAY_S = 0.02\n"
    assert not arm.tree.exists()
    assert (git(repository, "status", "--porcelain"), git(repository, "worktree", "list")) == before


def test_an_arm_has_its_root_first_on_the_path_and_nothing_of_this_pytest(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    environment = arm_environment(Arm(name="a", root=tmp_path, env={"NCCL_ALGO": "Ring"}))
    assert environment["PYTHONPATH"] == f"{tmp_path}:/elsewhere"
    assert environment["NCCL_ALGO"] == "Ring"
    assert not [name for name in environment if name.startswith("PYTEST_")]


def test_an_arm_whose_module_cannot_be_imported_names_the_reason(repository, checkout_on_path):
    (repository / "suite" / "test_broken.py").write_text("raise ImportError('half of a merge')\n")
    arm = Arm(name="base", root=repository / "suite")
    with pytest.raises(ArmFailed, match=r"^base was not measured: its pytest ended with exit code 4; ImportError: hal"):
        run_arm(arm, ["test_broken.py::test_it"], 60)


@pytest.mark.extended
def test_a_known_slowdown_is_found_between_two_commits(repository, checkout_on_path, monkeypatch, capsys):
    monkeypatch.chdir(repository / "suite")
    command = ["ab", "--a", "HEAD~1", "--b", "HEAD", "--pairs", "3", "--json", "out.json", "--", "."]
    out = printed(capsys, *command, code=1)
    (found,) = json.loads((repository / "suite" / "out.json").read_text())
    assert found["case"] == "test_sleep.py::test_sleep[cpu]"
    assert found["outcome"] == "slower"
    assert found["low"] <= 0.25 <= found["high"] or found["change"] == pytest.approx(0.25, abs=0.02)
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


DIFFERENCES = st.lists(st.floats(-0.2, 0.2), min_size=3, max_size=30)


@pytest.mark.parametrize(
    ("host", "pairs"),
    [("R4", 3), ("hostile", 12), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("R3", 3), ("R4", 6)))],
)
def test_what_is_printed_is_true_on_a_noisy_host(host, pairs):
    counts = tally(HOSTS[host], pairs, 150, "test")
    assert counts.covers >= 0.93 * counts.trials
    assert counts.until_covers >= 0.95 * counts.trials
    assert counts.found >= 0.92 * counts.trials  # 95 % of 150 are 142 +- 3
    assert counts.false <= 0.05 * counts.unchanged
    assert counts.until_false <= 0.05 * counts.unchanged


@given(DIFFERENCES, st.floats(-1, 1), st.floats(0.1, 10))
def test_the_mean_moves_and_grows_with_its_values(differences, shift, factor):
    plain = paired_mean(differences)
    moved = paired_mean([value * factor + shift for value in differences])
    assert moved.mean == pytest.approx(plain.mean * factor + shift, abs=1e-9)
    assert moved.error == pytest.approx(plain.error * factor, rel=0.5, abs=1e-9)  # a value at the clip's edge
    assert min(differences) - 1e-12 <= plain.mean <= max(differences) + 1e-12
    assert 1 <= plain.dof < plain.pairs == len(differences)


def test_one_pair_that_something_hit_moves_nothing_far():
    calm = [0.01, 0.012, 0.008, 0.011, 0.009, 0.01]
    assert abs(paired_mean([*calm, 2.0]).mean - 0.01) < 0.003


@given(st.integers(3, 60), st.floats(0.0001, 0.1), st.floats(0.001, 0.1))
def test_less_noise_finds_smaller_changes_and_needs_fewer_pairs(pairs, error, tolerance):
    noisy, calm = (Paired(mean=0.0, error=each, dof=pairs - 1, pairs=pairs) for each in (error, error / 2))
    assert smallest_found(noisy, tolerance) >= smallest_found(calm, tolerance) >= tolerance
    needed = [pairs_needed(each, tolerance, 200) or 201 for each in (noisy, calm)]
    assert 3 <= needed[1] <= needed[0] <= 201
    assert (pairs_needed(noisy, tolerance, 200, alpha=0.01) or 201) >= needed[0]


def test_looks_share_the_error_rate():
    a_s, b_s = [1.0] * 8, [1.02, 1.04, 1.03, 1.05, 1.03, 1.02, 1.05, 1.04]
    one, four = (compare("case", a_s, b_s, 0.03, alpha=0.05 / len(looks(6, most))) for most in (6, 48))
    assert four.low < one.low < one.high < four.high


def rows(noise, tolerance=0.03, name="test_it.py::test_case[cpu-1]", pairs=4):
    b_s = [math.exp(0.02 + (noise if pair % 2 else -noise)) for pair in range(pairs)]
    return compare(name, [1.0] * pairs, b_s, tolerance)


def test_undecided_says_what_would_decide():
    calm, noisy = rows(0.02), rows(0.5)
    assert calm.outcome == noisy.outcome == "undecided"
    assert calm.outcome_text == f"undecided, ~{calm.pairs_needed} pairs"
    assert 4 < calm.pairs_needed <= 200
    assert noisy.outcome_text == "undecided, > 200 pairs"
    assert "this host is too noisy for 3.0%" in "\n".join(table([noisy], 0.03))
    near = rows(0.005, tolerance=0.0205, pairs=48)
    assert near.outcome_text == "undecided, near it"
    assert progress([calm, noisy, rows(0.0001)], 6) == "1 of 3 decided; 6 pairs will hardly decide 2"


@pytest.mark.parametrize("name", ["t.py::t[1]", "test_perf/test_training.py::test_step[" + "x" * 48 + "]"])
def test_the_table_fits_100_columns(name):
    lines = list(table([rows(noise, name=name) for noise in (0.0001, 0.02, 0.5, 3.0)], 0.03))
    assert max(map(len, lines)) <= COLUMNS
    assert lines[0].startswith("case")
    head, first = lines[:2] if len(name) < 20 else lines[1:4:2]
    assert head.index("outcome") == first.index("no difference")
