"""The CI files of examples/third_party, run as a service runs them: fresh clones, git, an empty repository at first."""

import re
import subprocess
import sys

import pytest

from test_correctness.helpers.processes import unlaunched
from test_correctness.helpers.scripted_driver import ROOT

THIRD_PARTY = ROOT / "examples" / "third_party"
GITHUB = THIRD_PARTY / ".github" / "workflows" / "performance.yml"
GITLAB = THIRD_PARTY / ".gitlab-ci.yml"
THIS_PYTHON = f'exec {sys.executable} "$@"'
IDENTITY = ("GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL")


def program(path, script):
    """Make a program of a shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def jobs(file):
    """Commands of each job, without the one that installs."""
    text = file.read_text(encoding="utf-8")
    parts = re.split(r"^(?:  )?(record|gate|accept):\n", text, flags=re.MULTILINE)
    commands = re.compile(r"^ +- (?:run: )?((?:\.venv/bin/python|git) .*)$", re.MULTILINE)
    return {name: commands.findall(body) for name, body in zip(parts[1::2], parts[2::2], strict=True)}


def identity(file):
    """Return the variables that git needs for a commit, as the file sets them."""
    return dict(re.findall(rf"^  ({'|'.join(IDENTITY)}): (\S+)$", file.read_text(encoding="utf-8"), re.MULTILINE))


@pytest.mark.parametrize("file", [GITHUB, GITLAB], ids=["GitHub", "GitLab"])
def test_a_ci_file_installs_has_an_identity_and_three_jobs(file):
    text = file.read_text(encoding="utf-8")
    assert sorted(jobs(file)) == ["accept", "gate", "record"]
    assert set(identity(file)) == set(IDENTITY)
    assert text.count('pip install -e . "$PERFSUITE"') == (3 if file == GITHUB else 1)
    assert "perfsuite @ git+https://YOUR-GIT-SERVER/" in text
    for name in ("record", "accept"):
        (measures,) = (number for number, command in enumerate(jobs(file)[name]) if "-m pytest" in command)
        measured, *rest = jobs(file)[name][measures:]
        assert "git add baselines && git commit" in rest[0]
        assert "git push" in rest[-1]
        assert ("--perf-update=append" in measured) == (name == "record")
        assert ("git pull --rebase" in " ".join(rest)) == (name == "record"), "main may move while the job measures"


class Service:
    """A bare repository and fresh clones of it."""

    def __init__(self, top):
        self.top, self.clones = top, 0
        dropped = ("GITHUB_", "GIT_", "PYTEST_")
        self.environ = {name: value for name, value in unlaunched().items() if not name.startswith(dropped)} | {
            "HOME": str(top),  # no identity of git's
            "PYTHONPATH": str(ROOT),
            "PYTEST_PLUGINS": "perfsuite.plugin",
            "PYTEST_ADDOPTS": "--perf-platform=cpu --benchmark-max-time=0.05 --benchmark-min-rounds=5 "
            "-p no:hypothesispytest -p no:cacheprovider",
            **identity(GITHUB),
        }
        self.git("init", "-q", "--bare", "-b", "main", "origin.git", cwd=top)

    def git(self, *words, cwd):
        subprocess.run(["git", *words], cwd=cwd, env=self.environ, check=True, capture_output=True)

    def clone(self, branch, *options):
        """A fresh clone, in which .venv/bin/python is this Python."""
        self.clones += 1
        place = self.top / f"clone{self.clones}"
        origin = f"file://{self.top / 'origin.git'}"
        self.git("clone", "-q", *options, "-b", branch, origin, str(place), cwd=self.top)
        program(place / ".venv" / "bin" / "python", THIS_PYTHON)
        return place

    def run(self, place, commands, **environ):
        """Exit code of the first command that fails, and what all printed."""
        printed = ""
        for command in commands:
            done = subprocess.run(
                ["bash", "-e", "-c", command],
                cwd=place,
                env={**self.environ, **environ},
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            printed += done.stdout + done.stderr
            if done.returncode:
                return done.returncode, printed
        return 0, printed


CASE = """
import time

def slept(rank):
    return lambda: time.sleep(0.004)

def test_slept(perf):
    perf(slept)
"""


@pytest.mark.slow
def test_from_an_empty_repository_to_the_first_red_regression_and_its_acceptance(tmp_path):
    service, commands = Service(tmp_path), jobs(GITHUB)
    first = tmp_path / "first"
    (first / "perf").mkdir(parents=True)
    service.git("init", "-q", "-b", "main", cwd=first)
    for name in ("pytest.ini", ".gitignore"):
        (first / name).write_text((THIRD_PARTY / name).read_text())
    (first / "perf" / "test_slept.py").write_text(CASE)
    (first / "tests").mkdir()
    service.git("add", "-A", cwd=first)
    service.git("commit", "-qm", "Begin", cwd=first)
    service.git("push", "-q", str(tmp_path / "origin.git"), "main", cwd=first)

    code, printed = service.run(service.clone("main"), commands["gate"])
    assert (0, True) == (code, "not gated yet: 0 of 5 runs stored" in printed), printed
    for number in range(5):  # as actions/checkout does: one commit deep
        place = service.clone("main", "--depth=1")
        if number == 2:  # a merge while the job measures
            (first / "README").write_text("merged")
            service.git("pull", "-q", "--rebase", str(tmp_path / "origin.git"), "main", cwd=first)
            service.git("add", "-A", cwd=first)
            service.git("commit", "-qm", "Merge", cwd=first)
            service.git("push", "-q", str(tmp_path / "origin.git"), "main", cwd=first)
        code, printed = service.run(place, commands["record"])
        assert code == 0, printed
    code, printed = service.run(service.clone("main"), commands["gate"])
    assert (0, False) == (code, "not gated yet" in printed), printed

    branch = service.clone("main")
    (branch / "perf" / "test_slept.py").write_text(CASE.replace("0.004", "0.04"))
    service.git("checkout", "-qb", "slower", cwd=branch)
    service.git("commit", "-qam", "Sleep longer", cwd=branch)
    service.git("push", "-q", "origin", "slower", cwd=branch)
    code, printed = service.run(service.clone("slower"), commands["gate"])
    assert (1, True) == (code, "REGRESSED" in printed), printed
    code, printed = service.run(service.clone("slower", "--depth=1"), commands["accept"], REASON="it must wait")
    assert code == 0, printed
    accepted = service.clone("slower")
    assert "it must wait" in next((accepted / "baselines" / "cpu").glob("*.json")).read_text()
    code, printed = service.run(accepted, commands["gate"])
    assert code == 0, printed
