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

NEW = NewRuns(case=case_of(1), runs=(run_of("later", 27),))


def put_new(folder):
    return [folder / "page.html"], lambda: write_file(folder / "page.html", "new" * 2000)


def put_over(folder):
    (folder / "page.html").write_text("old" * 1000)
    return put_new(folder)


def put_over_a_link(folder):
    (folder / "there.html").write_text("old")
    (folder / "page.html").symlink_to("there.html")
    return [folder / "page.html"], lambda: write_file(folder / "page.html", "new")


def add_to_a_summary(folder):
    (folder / "step.md").write_text("others' lines\n")
    return [folder / "step.md"], lambda: append(folder / "step.md", b"ours\n" * 100)


def add_to_no_summary(folder):
    return [folder / "step.md"], lambda: append(folder / "step.md", b"ours\n" * 100)


def update_a_baseline(folder):
    path = make_file(folder, cases=2, runs=2)
    return [path], lambda: store.update(folder, HARDWARE, [NEW], mode="append")


def begin_a_baseline(folder):
    path = store.path_of(folder, HARDWARE)
    return [path], lambda: store.update(folder, HARDWARE, [NEW], mode="append")


def merge_baselines(folder):
    path = make_file(folder, cases=2, runs=2)
    other = shutil.copy(path, folder.parent / "other.json")
    store.update(folder, HARDWARE, [NEW], mode="append")
    return [path], lambda: store.merge_files(path, [Path(other)])


def add_to_a_history(folder):
    history_file.append(folder / "h.jsonl", session(1))
    return [folder / "h.jsonl"], lambda: history_file.append(folder / "h.jsonl", session(2))


def begin_a_history(folder):
    return [folder / "h.jsonl"], lambda: history_file.append(folder / "h.jsonl", session(2))


def write_an_index(folder):
    return [folder / "index.html"], lambda: write_index([("a", Path("a.json"), Path("a.svg"))], folder)


def write_a_calibration(folder):
    return [folder / "c.json"], lambda: write_calibration(Calibration(device="a100"), folder / "c.json")


def write_imported_figures(folder):
    (folder / "i.json").write_text("old")
    return [folder / "i.json"], lambda: write_imported(folder / "i.json", [])


WRITERS = (
    *(put_new, put_over, put_over_a_link, add_to_a_summary, add_to_no_summary, update_a_baseline, begin_a_baseline),
    *(merge_baselines, add_to_a_history, begin_a_history, write_an_index),
    *(write_a_calibration, write_imported_figures),
)


def contents(paths):
    return [path.read_bytes() if path.exists() else None for path in paths]


@pytest.mark.parametrize("prepare", WRITERS, ids=lambda prepare: prepare.__name__)
def test_a_file_is_the_old_one_or_the_new_one_and_the_fault_is_said(prepare, tmp_path):
    numbers = itertools.count()

    def fresh():
        folder = tmp_path / str(next(numbers)) / "disk"
        folder.mkdir(parents=True)
        return folder, *prepare(folder)

    folder, paths, act = fresh()
    before = contents(paths)
    act()
    after = contents(paths)
    names = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    probe, _, first_act = fresh()
    for disk in every_fault(probe, first_act):
        folder, paths, act = fresh()
        disk.folder = str(folder)
        said = ""
        with disk.mounted():
            try:
                act()
            except (PerfsuiteError, WriteFailed) as error:
                said = str(error)
        told = (disk.calls[: disk.at + 1], disk.lasting, said)
        assert "\n" not in said
        assert contents(paths) in (before, after), told
        if contents(paths) == before != after:
            assert "cannot be" in said, told
        assert "was written, but a power cut" not in said or contents(paths) == after, told
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


def remove(path):
    shutil.rmtree(path.parent)


def rename(path):
    path.rename(path.with_name("mine.jsonl"))


def cut(path):
    os.truncate(path, 10)


def overwrite(path):
    path.unlink()
    path.write_text("something else\n")


def add(path):
    with path.open("a") as file:
        file.write("noise\n")


def turn_into_a_link(path):
    path.rename(path.with_name("mine.jsonl"))
    path.symlink_to("/dev/null")


@pytest.mark.parametrize(
    "meddle", [remove, rename, cut, overwrite, add, turn_into_a_link], ids=lambda one: one.__name__
)
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
