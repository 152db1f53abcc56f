"""Every operation of the disk fails once: no file is half, nothing is silent, and what can be kept is kept."""

import ast
import errno
import itertools
import os
import resource
import shutil
import signal
from pathlib import Path

import pytest

from benchmarks.store_torture import HARDWARE, case_of, make_file, run_of
from perfsuite.base.errors import ConfigurationError, JournalError, PerfsuiteError
from perfsuite.base.writing import WriteFailed, append, put, require_writable, write_file
from perfsuite.baselines import store
from perfsuite.baselines.draft import NewRuns
from perfsuite.history import file as history_file
from perfsuite.imports.formats import write_imported
from perfsuite.projection.calibration import Calibration, write_calibration
from perfsuite.record.journal import read_journal
from perfsuite.record.journal_writer import JournalWriter, other_places
from perfsuite.reports.timelines.files import write_index
from test_correctness.helpers.failing_disk import every_fault
from test_correctness.helpers.histories import session
from test_correctness.test_journal import HEADER, result


def old(path):
    path.write_text("old" * 1000)


def link(path):
    path.with_name("there").write_text("old")
    path.symlink_to("there")


def baseline(path):
    make_file(path.parents[1], cases=2, runs=2)


def two_baselines(path):
    baseline(path)
    shutil.copy(path, path.parents[2] / "other.json")
    update(path)


def update(path):
    store.update(path.parents[1], HARDWARE, [NEW], mode="append")


def history(path):
    history_file.append(path, session(1))


STORED = str(store.path_of(Path(), HARDWARE))
NEW = NewRuns(case=case_of(1), runs=(run_of("later", 27),))
DRAWN = ("a", Path("a.json"), Path("a.svg"))
WRITERS = {
    "put new": ("page.html", None, lambda path: write_file(path, "new" * 2000)),
    "put over": ("page.html", old, lambda path: write_file(path, "new" * 2000)),
    "put over a link": ("page.html", link, lambda path: write_file(path, "new")),
    "add to a summary": ("step.md", old, lambda path: append(path, b"ours\n" * 100)),
    "add to no summary": ("step.md", None, lambda path: append(path, b"ours\n" * 100)),
    "update a baseline": (STORED, baseline, update),
    "begin a baseline": (STORED, None, update),
    "merge baselines": (STORED, two_baselines, lambda path: store.merge_files(path, [path.parents[2] / "other.json"])),
    "add to a history": ("h.jsonl", history, lambda path: history_file.append(path, session(2))),
    "begin a history": ("h.jsonl", None, lambda path: history_file.append(path, session(2))),
    "write an index": ("index.html", None, lambda path: write_index([DRAWN], path.parent)),
    "write a calibration": ("c.json", None, lambda path: write_calibration(Calibration(device="a100"), path)),
    "write imported figures": ("i.json", old, lambda path: write_imported(path, [])),
}
"""By name: the file, what prepares it, and what writes it."""


def content(path):
    return path.read_bytes() if path.exists() else None


@pytest.mark.parametrize(("file", "prepare", "write"), WRITERS.values(), ids=WRITERS)
def test_a_file_is_the_old_one_or_the_new_one_and_the_fault_is_said(file, prepare, write, tmp_path):
    numbers = itertools.count()

    def fresh():
        folder = tmp_path / str(next(numbers)) / "disk"
        folder.mkdir(parents=True)
        if prepare is not None:
            prepare(folder / file)
        return folder, folder / file

    folder, path = fresh()
    before = content(path)
    write(path)
    after = content(path)
    names = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    probe, first = fresh()
    for disk in every_fault(probe, lambda: write(first)):
        folder, path = fresh()
        disk.folder = str(folder)
        said = ""
        with disk.mounted():
            try:
                write(path)
            except (PerfsuiteError, WriteFailed) as error:
                said = str(error)
        told = (disk.calls[: disk.at + 1], disk.lasting, said)
        assert "\n" not in said
        assert content(path) in (before, after), told
        if content(path) == before != after:
            assert "cannot be" in said, told
        assert "was written, but a power cut" not in said or content(path) == after, told
        here = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
        left = {path for path in here - set(names) if not (path.name.endswith(".lock") and "unlink" in told[0][-1:])}
        assert not left or disk.calls[disk.at] in ("unlink",), (told, left)


def run_a_journal(path, elsewhere=lambda: iter(())):
    writer = JournalWriter(path, HEADER, elsewhere)
    writer.result(result("a"))
    writer.failure("b", "rank 1 died")
    writer.result(result("c", kernel="6.1"))
    writer.check()
    return writer


@pytest.mark.parametrize("has_other_place", [True, False])
def test_a_journal_keeps_what_can_be_kept_and_counts_it(has_other_place, tmp_path):
    numbers = itertools.count()

    def places():
        folder = tmp_path / str(next(numbers))
        (folder / "disk").mkdir(parents=True)
        other = (lambda: iter([folder / "other" / "j.jsonl"])) if has_other_place else (lambda: iter(()))
        return folder, other

    probe, elsewhere = places()
    for disk in every_fault(probe / "disk", lambda: run_a_journal(probe / "disk" / "j.jsonl", elsewhere).close()):
        folder, other = places()
        disk.folder = str(folder / "disk")
        with disk.mounted():
            try:
                writer = run_a_journal(folder / "disk" / "j.jsonl", other)
            except JournalError:  # before anything was measured
                assert not any((folder / "disk").iterdir())
                continue
            problem = writer.problem
            writer.close()
        read = read_journal(writer.path)
        kept = len(read.results) + len(read.failures)
        said = int(problem.split()[1]) if problem else 3
        told = (disk.calls[: disk.at + 1], disk.lasting, problem)
        # A line that was written, could not be synced and not be taken back either is there and counts as lost.
        assert said == kept or (said < kept and disk.lasting and "fsync" in told[0][-1:]), told
        assert not problem or problem.startswith(f"journal: {said} of 3 cases kept in {writer.path}"), told
        assert said == 3 or f", {3 - said} lost: " in problem, told
        assert said == 3 or not has_other_place, told
        assert [path for path in folder.rglob(".*") if path.is_file()] == []


def overwrite(path):
    path.unlink()
    path.write_text("something else\n")


def turn_into_a_link(path):
    path.rename(path.with_name("mine.jsonl"))
    path.symlink_to("/dev/null")


MEDDLE = {
    "remove": lambda path: shutil.rmtree(path.parent),
    "rename": lambda path: path.rename(path.with_name("mine.jsonl")),
    "cut": lambda path: os.truncate(path, 10),
    "overwrite": overwrite,
    "add": lambda path: append(path, b"noise\n"),
    "turn into a link": turn_into_a_link,
}


@pytest.mark.parametrize("meddle", MEDDLE.values(), ids=MEDDLE)
@pytest.mark.parametrize("at_the_end", [False, True])
def test_a_journal_that_somebody_changes_is_whole_elsewhere(meddle, at_the_end, tmp_path):
    path, other = tmp_path / "disk" / "j.jsonl", tmp_path / "other" / "j.jsonl"
    writer = JournalWriter(path, HEADER, lambda: iter([other]))
    writer.result(result("a"))
    if at_the_end:
        writer.failure("b", "rank 1 died")
        meddle(path)
        writer.check()
    else:
        meddle(path)
        writer.failure("b", "rank 1 died")
    why = "another program removed, replaced or changed it during the run"
    assert writer.problem == f"journal: 2 of 2 cases kept in {other}: {path}: {why}"
    writer.close()
    journal = read_journal(other)
    assert (list(journal.results), list(journal.failures)) == (["a"], ["b"])


def test_a_limit_on_the_size_of_files_is_a_fault_like_others(tmp_path):
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    path = tmp_path / "x"
    put(path, b"old")
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, old[1]))
        writer = JournalWriter(tmp_path / "j.jsonl", HEADER)
        for number in range(10):
            writer.result(result(f"case{number}"))
        with pytest.raises(WriteFailed, match="cannot be written: File too large; the file is unchanged"):
            put(path, b"n" * 10_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, before)
    kept = len(read_journal(tmp_path / "j.jsonl").results)
    assert 0 < kept < 10
    assert writer.problem == (
        f"journal: {kept} of 10 cases kept in {tmp_path}/j.jsonl, {10 - kept} lost: File too large"
    )
    assert (path.read_bytes(), sorted(os.listdir(tmp_path))) == (b"old", ["j.jsonl", "x"])


WRITES = {"write_text", "write_bytes", "replace", "rename", "mkstemp", "NamedTemporaryFile"}
WRITE_THEMSELVES = {
    "base/writing.py": "the one place",
    "models/dataset.py": "a folder of arrays, put as a whole",
    "runtime/scratch.py": "a folder gets its name",
    "runtime/ranks/worker.py": "a file of the kernel, which resets the largest resident set",
    "runtime/transports/keys.py": "a key, held open while it is offered",
}


def test_no_other_module_writes_files():
    package = Path(store.__file__).parents[1]
    found = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WRITES:
                owner = ast.unparse(node.func.value)
                if node.func.attr in ("replace", "rename") and owner not in ("os", "draft", "fresh", "shutil"):
                    continue  # of a string or a dataclass
                found.add(path.relative_to(package).as_posix())
    assert found == set(WRITE_THEMSELVES)


def test_a_journal_that_no_place_takes_is_kept_in_memory_and_costs_no_case(tmp_path, monkeypatch):
    def full(*arguments, **named):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "j.jsonl"
    monkeypatch.setattr("perfsuite.record.journal_writer.cache_folder", lambda root: tmp_path / "file" / "in the way")
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("perfsuite.record.journal_writer.tempfile.mkdtemp", full)
    writer = JournalWriter(path, HEADER, lambda: other_places(tmp_path, path))
    with monkeypatch.context() as patch:
        patch.setattr("perfsuite.base.writing.os.write", full)
        writer.result(result("a"))
    assert "0 of 1 case kept in" in writer.problem
    writer.result(result("b"))
    writer.close()
    assert set(read_journal(path).results) == {"a", "b"}


def test_a_name_that_is_too_long_is_one_line():
    path = Path("/tmp") / ("x" * 300)
    for write in (put, append):
        with pytest.raises(WriteFailed, match="File name too long"):
            write(path, b"")
    with pytest.raises(ConfigurationError, match=r"^--o: .* cannot be written: File name too long; name another file"):
        require_writable(path, "--o")


def test_a_pipe_is_written_to_as_it_is(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_file(pipe, "text")
        assert os.read(reader, 10) == b"text"
    finally:
        os.close(reader)
    assert pipe.is_fifo()


def test_a_place_is_refused_by_the_option_that_named_it(tmp_path):
    with pytest.raises(ConfigurationError, match=r"^--out: .*x\.md cannot be written: No such file or directory"):
        write_file(tmp_path / "none" / "x.md", "text", option="--out")
    with pytest.raises(ConfigurationError, match=r"^--html: .* is a folder; name a file in it"):
        require_writable(tmp_path, "--html")
    with pytest.raises(ConfigurationError, match=r"^--html: .*cannot be written: No such file or directory"):
        require_writable(tmp_path / "none" / "x.html", "--html")
    require_writable(tmp_path / "made" / "x.html", "--html", with_folder=True)
    assert [entry.name for entry in tmp_path.rglob("*")] == ["made"]
