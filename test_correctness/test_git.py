"""git as perfsuite starts it: nothing of a hook reaches it, none of the user's hooks runs, and a refusal is told."""

import ast
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from perfsuite.base.errors import ConfigurationError
from perfsuite.base.git import GitTimeout, git, refusal, why_missing, without_git
from perfsuite.cli import ab
from perfsuite.cli import main as cli
from perfsuite.history import file
from perfsuite.history.git import Repository, revision_of
from perfsuite.plugin.verdict_reports import tell_next_steps
from perfsuite.record.describe import phrases
from perfsuite.record.journal import read_journal
from perfsuite.record.verdict import Verdict
from perfsuite.run import arms
from perfsuite.run.arms import Arm, arm_environment, arm_of
from test_correctness.helpers.gated_repository import commit_all
from test_correctness.helpers.histories import session
from test_correctness.helpers.machines import write

ROOT = Path(__file__).parent.parent
CHECK_OUT = """
import sys
from pathlib import Path
from perfsuite.run.arms import arm_of
with arm_of(Path(), "HEAD", "base") as arm:
    Path(sys.argv[1]).write_text((arm.root / "code.py").read_text())
"""
"""Checks the base out as ``--perf-against=HEAD`` does."""


def run_git(root, *arguments):
    person = ("-c", "user.name=n", "-c", "user.email=e@example.com", "-c", "protocol.file.allow=always")
    done = subprocess.run(["git", "-C", str(root), *person, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def committed(root, *versions):
    """A git repository with a commit of each version: contents by path."""
    root.mkdir()
    run_git(root, "init", "-q", "-b", "main")
    for number, files in enumerate(versions, 1):
        write(root, files)
        run_git(root, "add", "--all")
        run_git(root, "commit", "-q", "-m", f"version {number}")
    return root


@pytest.fixture
def checkout(tmp_path):
    """A repository with two commits of code.py, and another.py."""
    versions = ({"code.py": f"VERSION = {number}\n", "another.py": ""} for number in (1, 2))
    return committed(tmp_path / "checkout", *versions)


@pytest.fixture
def base_seen(tmp_path, monkeypatch):
    """Where :data:`CHECK_OUT` writes what the base has; it imports this checkout's perfsuite."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path / "seen"


def hook(root, name, *words):
    path = root / ".git" / "hooks" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("#!/bin/sh\nexec " + " ".join(f"'{word}'" for word in words) + "\n")
    path.chmod(0o755)


# -- from a hook ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "commit", [("commit", "-q", "-m", "3"), ("commit", "-qam", "3"), ("commit", "-qm", "3", "code.py")]
)
def test_a_base_that_a_commit_hook_checks_out_leaves_the_index_of_the_commit_alone(checkout, base_seen, commit):
    hook(checkout, "pre-commit", sys.executable, "-c", CHECK_OUT, str(base_seen))
    (checkout / "code.py").write_text("VERSION = 3\n")
    if "-q" in commit:
        run_git(checkout, "add", "code.py")
    run_git(checkout, *commit)
    assert base_seen.read_text() == "VERSION = 2\n"
    assert run_git(checkout, "show", "HEAD:code.py") == "VERSION = 3"
    assert run_git(checkout, "status", "--porcelain") == ""
    assert len(run_git(checkout, "worktree", "list").splitlines()) == 1


def test_a_base_during_a_rebase_is_the_commit_that_was_replayed(checkout, base_seen):
    script = checkout.parent / "check_out.py"
    script.write_text(CHECK_OUT)
    run_git(checkout, "rebase", "-q", "--exec", f"{sys.executable} {script} {base_seen}", "HEAD~1")
    assert base_seen.read_text() == "VERSION = 2\n"
    assert run_git(checkout, "status", "--porcelain") == ""


def test_a_base_of_a_submodule_is_its_own_commit(checkout, tmp_path, base_seen):
    outer = tmp_path / "outer"
    outer.mkdir()
    run_git(outer, "init", "-q")
    run_git(outer, "submodule", "--quiet", "add", str(checkout), "inner")
    run_git(outer, "commit", "-q", "-m", "with a submodule")
    (outer / "inner" / "code.py").write_text("VERSION = 3\n")
    with arm_of(outer / "inner", "HEAD", "base") as arm:
        assert (arm.root / "code.py").read_text() == "VERSION = 2\n"
    assert run_git(outer / "inner", "status", "--porcelain") == "M code.py"
    assert revision_of(outer / "inner").commit == run_git(checkout, "rev-parse", "HEAD")


def test_no_hook_and_no_monitor_of_the_user_runs_when_a_base_is_checked_out(checkout, tmp_path):
    ran = tmp_path / "ran"
    for name in ("post-checkout", "reference-transaction", "post-index-change"):
        hook(checkout, name, "touch", str(ran))
    hook(checkout, "monitor", "touch", str(ran))
    run_git(checkout, "config", "core.fsmonitor", str(checkout / ".git" / "hooks" / "monitor"))
    ran.unlink(missing_ok=True)
    with arm_of(checkout, "HEAD~1", "base") as arm:
        assert (arm.root / "code.py").read_text() == "VERSION = 1\n"
    assert not revision_of(checkout).dirty
    assert not ran.exists()


def test_an_arm_and_every_git_are_without_the_variables_of_a_hook(checkout, monkeypatch):
    local = run_git(checkout, "rev-parse", "--local-env-vars").split()
    asks = ["GIT_NAMESPACE", "GIT_QUARANTINE_PATH", "GIT_TRACE", "GIT_ASKPASS", "GIT_EDITOR", "GIT_EXTERNAL_DIFF"]
    for name in {*local, *asks, "GIT_LITERAL_PATHSPECS", "GIT_REFLOG_ACTION"}:
        monkeypatch.setenv(name, "/nowhere")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)  # where the user's settings are is no matter of a repository
    left = {name for name in arm_environment(Arm(name="new code", root=checkout)) if name.startswith("GIT_")}
    assert left == {name for name in without_git(os.environ) if name.startswith("GIT_")}
    assert not left & {*local, *asks}
    assert "GIT_CONFIG_GLOBAL" in left
    assert git(checkout, "rev-parse", "--show-toplevel") == str(checkout)
    assert revision_of(checkout).subject == "version 2"


def test_git_is_started_in_one_place():
    def starts_git(node):
        first = node.elts[0] if isinstance(node, ast.List) and node.elts else None
        return isinstance(first, ast.Constant) and first.value == "git"

    sources = [*(ROOT / "perfsuite").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]
    texts = {path: text for path in sources if '"git"' in (text := path.read_text())}
    found = [path for path, text in texts.items() if any(map(starts_git, ast.walk(ast.parse(text))))]
    assert found == [ROOT / "perfsuite" / "base" / "git.py"]


# -- where git refuses ---------------------------------------------------------------------------------------------


def foreign(checkout, monkeypatch):
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    return checkout


def bare(checkout, monkeypatch):
    run_git(checkout, "clone", "-q", "--bare", str(checkout), "bare")
    return checkout / "bare"


def without_commit(checkout, monkeypatch):
    shutil.rmtree(checkout / ".git")
    run_git(checkout, "init", "-q")
    return checkout


def damaged(checkout, monkeypatch):
    (checkout / ".git" / "HEAD").unlink()
    return checkout


def without_object(checkout, monkeypatch):
    commit = run_git(checkout, "rev-parse", "HEAD")
    (checkout / ".git" / "objects" / commit[:2] / commit[2:]).unlink()
    return checkout


def without_main_repository(checkout, monkeypatch):
    run_git(checkout, "worktree", "add", "-q", str(checkout.parent / "linked"))
    shutil.rmtree(checkout)
    return checkout.parent / "linked"


def below_a_ceiling(checkout, monkeypatch):
    (checkout / "tests").mkdir()
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(checkout))
    return checkout / "tests"


def without_git_installed(checkout, monkeypatch):
    monkeypatch.setenv("PATH", str(checkout))
    return checkout


REFUSALS = [
    (foreign, "dubious ownership*; if you trust it: git config --global --add safe.directory */checkout"),
    (bare, "must be run in a work tree; this repository is bare*git worktree add*"),
    (without_commit, "it has no commit yet*"),
    (damaged, "*/checkout/.git is damaged*"),
    (without_object, "it has no commit yet, or lacks that of HEAD: *git fsck"),
    (without_main_repository, "not a git repository: */worktrees/linked; *git worktree repair*"),
    (below_a_ceiling, "not a git repository*; */.git is damaged, or GIT_CEILING_DIRECTORIES*"),
    (without_git_installed, "git is not installed; *"),
]


@pytest.mark.parametrize(("make", "said"), REFUSALS, ids=[make.__name__ for make, _ in REFUSALS])
def test_a_revision_that_git_does_not_tell_is_unknown_for_a_reason(checkout, monkeypatch, make, said):
    root = make(checkout, monkeypatch)
    found = revision_of(root)
    assert (found.commit, "\n" in found.problem) == ("", False)
    pytest.LineMatcher([found.problem]).fnmatch_lines([f"*{said}"])
    with pytest.raises(ConfigurationError) as refused, arm_of(root, "HEAD", "base"):
        pass
    assert "\n" not in str(refused.value)


def test_a_damaged_index_leaves_it_unknown_whether_files_differ(checkout):
    (checkout / ".git" / "index").write_bytes(b"no index")
    found = revision_of(checkout)
    assert found.dirty
    assert len(found.commit) == 40
    assert "index" in found.problem


def test_outside_of_git_nothing_is_wrong_unless_a_variable_names_a_repository(tmp_path, checkout, monkeypatch):
    assert revision_of(tmp_path).problem == refusal(tmp_path) == ""
    monkeypatch.setenv("GIT_DIR", str(checkout / ".git"))
    assert revision_of(tmp_path).problem == f"{tmp_path} is not in a git repository (GIT_DIR is not followed)"


def test_a_folder_that_the_environment_declares_safe_is_read(checkout, monkeypatch):
    foreign(checkout, monkeypatch)
    settings = {"core.worktree": "/nowhere", "safe.directory": "*"}
    for index, (name, value) in enumerate(settings.items()):
        monkeypatch.setenv(f"GIT_CONFIG_KEY_{index}", name)
        monkeypatch.setenv(f"GIT_CONFIG_VALUE_{index}", value)
    monkeypatch.setenv("GIT_CONFIG_COUNT", "2")
    assert revision_of(checkout).subject == "version 2"


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "--help", "a\nb"])
def test_a_revision_of_others_text_names_nothing(checkout, name):
    repository = Repository(root=checkout)
    assert (repository.commit(name), repository.present([name])) == ("", frozenset())


def test_a_git_that_does_not_end_is_ended_with_what_it_started(tmp_path, monkeypatch):
    (tmp_path / "git").write_text("#!/bin/sh\nsleep 600 &\nwait\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(GitTimeout, match=r"^git status in .* took longer than 0.2 s$"):
        git(tmp_path, "status", deadline_s=0.2)


def test_ctrl_c_during_a_git_that_ends_by_itself_stays_ctrl_c(checkout, monkeypatch):
    def interrupted(child, *given, **named):
        child.wait()
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        git(checkout, "rev-parse", "HEAD")


@pytest.mark.extended
def test_a_run_tells_and_keeps_why_its_revision_is_unknown(stored, monkeypatch):
    commit_all("first")
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    monkeypatch.setenv("COLUMNS", "400")
    done = stored.run("--perf-journal=j.jsonl")
    done.stdout.fnmatch_lines(["*the revision is unknown: git rev-parse refuses*safe.directory*"])
    record = read_journal(Path("j.jsonl"))
    assert "dubious ownership" in record.revision.problem
    assert any("dubious ownership" in warning for warning in record.end.warnings)
    refused = stored.run("--perf-gate", "--perf-against=HEAD")
    assert refused.ret == pytest.ExitCode.USAGE_ERROR
    refused.stderr.fnmatch_lines(["ERROR: git rev-parse refuses*dubious ownership*safe.directory*"])


def test_a_history_in_a_repository_that_git_refuses_says_so(checkout, monkeypatch, capsys):
    foreign(checkout, monkeypatch)
    history = checkout / "perf-history.jsonl"
    file.append(history, session(1))
    asked = ["history", "show", str(history), "--repository", str(checkout)]
    assert cli.main(asked) == 0
    assert "dubious ownership" in capsys.readouterr().out
    assert cli.main([*asked, "--since", "HEAD~1"]) == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert "dubious ownership" in line


SETTINGS = {
    "": "fetch-depth: 0 on GitHub, GIT_DEPTH: 0 on GitLab",
    "GITHUB_ACTIONS": "fetch-depth: 0 at actions/checkout",
    "GITLAB_CI": 'GIT_DEPTH: "0"',
    "BITBUCKET_BUILD_NUMBER": "clone: depth: full",
    "TF_BUILD": "fetchDepth: 0",
    "TRAVIS": "git: depth: false",
}


def test_a_shallow_clone_names_the_setting_of_its_ci_service_and_how_to_get_a_commit(checkout, tmp_path, monkeypatch):
    run_git(tmp_path, "clone", "-q", "--depth=1", f"file://{checkout}", "shallow")
    for variable, setting in SETTINGS.items():
        for name in filter(None, SETTINGS):
            monkeypatch.setenv(name, "true" if name == variable else "")
        assert why_missing(checkout) == ""
        told = f"this clone is shallow: git fetch --unshallow; in CI: {setting}"
        assert why_missing(tmp_path / "shallow").startswith(told)
    with pytest.raises(ConfigurationError, match="this clone is shallow: git fetch --unshallow"):
        Repository(root=tmp_path / "shallow").first_parents("nowhere")
    with pytest.raises(ConfigurationError, match=r"is not a commit of .*; this clone is shallow: git fetch"):
        arm_of(tmp_path / "shallow", "HEAD~1", "base").__enter__()
    with pytest.raises(ConfigurationError, match=r"is not a commit of .*; name one that git log --all"):
        arm_of(checkout, "nowhere", "base").__enter__()


def failing(commit, case="t.py::t[a b]"):
    return {case: Verdict(case=case, name="regressed", stored_commit=commit)}


def told(verdicts, root, start=None):
    paths = SimpleNamespace(rootpath=root, invocation_params=SimpleNamespace(dir=start or root))
    tell_next_steps(verdicts, paths)
    return phrases(next(iter(verdicts.values())))


def test_the_next_command_is_printed_where_it_works(checkout, tmp_path):
    newest = run_git(checkout, "rev-parse", "HEAD")
    older = run_git(checkout, "rev-parse", "HEAD~1")
    assert f"next: perfsuite ab --a {newest[:10]} -- 't.py::t[a b]'" in told(failing(newest), checkout)
    below = checkout / "below"
    assert f"next: cd .. && perfsuite ab --a {newest[:10]} -- 't.py::t[a b]'" in told(failing(newest), checkout, below)
    quoted = told(failing(newest, "t.py::t[it's]"), checkout)
    assert shlex.split(next(line for line in quoted if line.startswith("next: ")))[-1] == "t.py::t[it's]"
    run_git(tmp_path, "clone", "-q", "--depth=1", f"file://{checkout}", "shallow")
    lines = told(failing(older), tmp_path / "shallow")
    assert any(line.startswith(f"no A/B with {older[:10]}: this clone is shallow: git fetch --unsh") for line in lines)
    (tmp_path / "plain").mkdir()
    for other in (lines, told(failing("a" * 40), checkout), told(failing(""), tmp_path / "plain")):
        assert not any(line.startswith("next: ") for line in other)
    assert "REV: a revision that was fast; the stored runs name none" in told(failing(""), checkout)


@pytest.mark.parametrize("name", ["a\nb", "a\u2028b"])
def test_a_line_end_in_a_folder_a_branch_or_a_subject_ends_nothing(checkout, tmp_path, name):
    root = checkout.rename(tmp_path / name)
    branch = name.replace("\n", "-")
    run_git(root, "checkout", "-q", "-b", branch)
    run_git(root, "commit", "-q", "--allow-empty", "-m", "one\u2028two\x85three")
    run_git(root, "tag", "HEAD")
    revision = revision_of(root)
    assert (branch, "one\u2028two\x85three", "") == (revision.branch, revision.subject, revision.problem)
    assert ["version 1", "version 2", revision.subject] == list(Repository(root=root).first_parents(branch).values())


def test_commits_of_sha256_are_whole(tmp_path):
    run_git(tmp_path, "init", "-q", "-b", "main", "--object-format=sha256")
    run_git(tmp_path, "commit", "-q", "--allow-empty", "-m", "one")
    commit = revision_of(tmp_path).commit
    assert 64 == len(commit)
    assert {commit: "one"} == Repository(root=tmp_path).first_parents("main")
    assert {commit} == Repository(root=tmp_path).present([commit])


# -- work trees and signals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("half_made", [False, True])
def test_a_signal_while_git_makes_a_work_tree_leaves_none_registered(checkout, monkeypatch, half_made):
    def interrupted(root, *arguments, **others):
        done = git(root, *arguments, **others)
        if arguments[:2] == ("worktree", "add"):
            tree = Path(arguments[-2])
            if half_made:  # as git leaves it where it is killed at once
                (tree / ".git").unlink()
            raise KeyboardInterrupt
        return done

    monkeypatch.setattr(arms, "git", interrupted)
    with pytest.raises(KeyboardInterrupt), arm_of(checkout, "HEAD", "base"):
        pass
    assert len(git(checkout, "worktree", "list").splitlines()) == 1
    assert list((checkout / ".git").glob("worktrees/*")) == []


def test_a_killed_run_leaves_its_work_tree_registered_until_the_next(checkout, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    program = "import os; from pathlib import Path; from perfsuite.run.arms import arm_of\n"
    program += "with arm_of(Path(), 'HEAD', 'base'): os.kill(os.getpid(), 9)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], cwd=checkout, env=environment, check=False)
    git(checkout, "worktree", "add", "--detach", str(tmp_path / "own"))
    shutil.rmtree(tmp_path / "own")  # somebody's own, on a disk that is not mounted now
    assert len(git(checkout, "worktree", "list").splitlines()) == 3
    with arm_of(checkout, "HEAD", "base"):
        assert len(git(checkout, "worktree", "list").splitlines()) == 3
    assert len(git(checkout, "worktree", "list").splitlines()) == 2


def test_a_work_tree_of_another_run_stays_registered(checkout):
    with arm_of(checkout, "HEAD", "base") as arm:
        (registered,) = (checkout / ".git").glob("worktrees/*/gitdir")
        registered.write_text(os.path.relpath(arm.tree / ".git", registered.parent) + "\n")
        with arm_of(checkout, "HEAD", "base"):
            pass
        assert registered.exists()


def test_sigterm_ends_a_comparison_and_removes_its_work_tree(checkout, monkeypatch):
    monkeypatch.chdir(checkout)
    monkeypatch.setattr(ab, "run_arm", lambda *arm: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit, match="143"):
        cli.main(["ab", "--a", "HEAD", "--", "code.py"])
    assert signal.getsignal(signal.SIGTERM) == before
    assert len(git(checkout, "worktree", "list").splitlines()) == 1
