"""Files of a run that cannot be written: one line at every verbosity, a failing exit code, and all else is there."""

import contextlib
import errno
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from perfsuite.plugin import launch
from perfsuite.record.journal import read_journal
from perfsuite.reports.page import page as page_module
from test_correctness.helpers.scripted_driver import repository

TWO = "".join(f"def test_{name}(perf):\n    perf(step, name={name!r})\n" for name in ("first", "second"))


@pytest.fixture(autouse=True)
def cache(pytester, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(pytester.path / "cache"))


@pytest.fixture
def repo(pytester, monkeypatch):
    return repository(pytester, monkeypatch, TWO)


def errors(found):
    start = "perfsuite: error: "
    return [line.removeprefix(start) for line in found.outlines if line.startswith(start)]


@pytest.mark.parametrize("verbosity", [[], ["-q"], ["-qq"], ["-v"], ["--no-summary"]], ids=" ".join)
def test_a_page_that_fails_and_a_folder_removed_meanwhile_are_one_line_each(pytester, monkeypatch, verbosity):
    def broken(material):
        raise RuntimeError("a chart has no axis\nsecond line")

    monkeypatch.setattr(page_module, "render", broken)
    removes = "import shutil\ndef test_between():\n    shutil.rmtree('.perfsuite')\n"
    repo = repository(pytester, monkeypatch, TWO.replace("def test_second", f"{removes}def test_second"))
    found = repo.run("--perf-html=page.html", "--junitxml=out.xml", *verbosity)
    assert found.ret == pytest.ExitCode.TESTS_FAILED
    (kept,) = pytester.path.glob("cache/perfsuite/journals/*/journal-*.jsonl")
    first = pytester.path / ".perfsuite" / kept.name
    why = "another program removed, replaced or changed it during the run"
    failed = "RuntimeError in broken: a chart has no axis; please report this"
    assert sorted(errors(found)) == [
        f"journal: 2 of 2 cases kept in {kept}: {first}: {why}",
        f"page {Path('page.html').absolute()} was not written: {failed}",
    ]
    journal = read_journal(kept)
    assert len(journal.results) == 2
    assert journal.end is not None
    assert journal.end.exit_status == 1
    assert 'tests="3"' in Path("out.xml").read_text()
    assert "Traceback" not in found.stdout.str()
    if "--no-summary" not in verbosity:
        assert "2 measured" in found.stdout.str()


def test_a_folder_that_is_removed_after_the_last_case(pytester, monkeypatch):
    removes = "import shutil\ndef test_zuletzt():\n    shutil.rmtree('.perfsuite')\n"
    found = repository(pytester, monkeypatch, TWO + removes).run()
    assert found.ret == pytest.ExitCode.TESTS_FAILED
    (told,) = errors(found)
    assert told.startswith("journal: 2 of 2 cases kept in ")


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("--perf-html=out/x.html", "page *x.html was not written: *; perfsuite report * --html FILE writes it"),
        ("--perf-summary=out/x", "summary * cannot be written: No space left on device"),
        ("--perf-history=out/x", "nothing was added to the history: * cannot be written: No space *"),
    ],
)
def test_a_file_that_does_not_fit_fails_the_run(repo, monkeypatch, option, told):
    Path("out").mkdir()
    replace = os.replace

    def full(source, target):
        if Path(target).parent.name == "out":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    found = repo.run(option, "--junitxml=out.xml", "-qq")
    assert found.ret == pytest.ExitCode.TESTS_FAILED
    (line,) = errors(found)
    assert re.fullmatch(told.replace("*", ".*"), line)
    assert 'tests="2"' in Path("out.xml").read_text()
    assert os.listdir("out") == []


def test_a_storage_of_pytest_benchmark_that_cannot_be_is_told_before_anything_is_measured(repo):
    Path(".benchmarks").write_text("a file in the way")
    says = "--benchmark-autosave: *.benchmarks* cannot be written: *; name another file"
    repo.refuses("--benchmark-autosave", says=says)


@pytest.mark.parametrize("option", ["--benchmark-autosave", "--junitxml=gone/out.xml"])
def test_a_file_of_another_plugin_costs_no_verdict_and_none_of_ours(pytester, monkeypatch, option):
    breaks = (
        "import os, shutil\n"
        "def test_between():\n"
        "    shutil.rmtree('.benchmarks', ignore_errors=True)\n"
        "    open('.benchmarks', 'w'), open('gone', 'w')\n"
    )
    found = repository(pytester, monkeypatch, TWO + breaks).run(option, "--perf-html=page.html")
    assert found.ret == pytest.ExitCode.TESTS_FAILED
    (told,) = errors(found)
    assert told.startswith("another plugin could not write its file: ")
    assert "2 measured" in found.stdout.str()
    assert Path("page.html").exists()


def test_files_are_written_without_a_summary_too(repo):
    found = repo.run("--no-summary", "--perf-html=x.html", "--perf-summary=x.md")
    assert found.ret == pytest.ExitCode.OK
    assert Path("x.html").exists()
    assert Path("x.md").exists()


def test_a_step_summary_is_added_to(repo, monkeypatch):
    Path("step.md").write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "step.md")
    assert repo.run().ret == pytest.ExitCode.OK
    assert Path("step.md").read_text().startswith("before\n**perfsuite**")


@pytest.mark.parametrize("options", [[], ["-p", "no:terminal"]], ids=["terminal", "stderr"])
def test_a_step_summary_that_cannot_be_written_fails_the_run(repo, monkeypatch, options):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "none/step.md")
    found = repo.run(*options)
    assert found.ret == pytest.ExitCode.TESTS_FAILED
    line = "perfsuite: error: summary none/step.md cannot be written: No such file or directory"
    assert line in (found.errlines if options else found.outlines)


def test_the_driver_says_the_code_that_it_exits_with():
    said = []
    reporter = SimpleNamespace(write_line=said.append)
    config = SimpleNamespace(pluginmanager=SimpleNamespace(get_plugin=lambda name: reporter))
    session = SimpleNamespace(config=config, exitstatus=0)
    hook = launch._Driver("torchrun", ()).pytest_sessionfinish(session)
    next(hook)
    session.exitstatus = pytest.ExitCode.TESTS_FAILED  # by a file that could not be written
    with contextlib.suppress(StopIteration):
        hook.send(None)
    assert said == ["perfsuite: the driver exits with 1; torchrun may exit with another code"]
