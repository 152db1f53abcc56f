"""Where a baseline file may lie, how large it may be, and how its lines end."""

import os

import pytest

from perfsuite.base.errors import BaselineError
from perfsuite.baselines import store
from perfsuite.cli import main as cli
from test_correctness.helpers.stored_files import HARDWARE, offer, run_of, sessions_in


@pytest.fixture
def linked(tmp_path):
    """A folder whose file is a link to one outside of it, and that one."""
    path = offer(tmp_path / "real", run_of("s0")).path
    folder = tmp_path / "linked" / "cpu"
    folder.mkdir(parents=True)
    (folder / path.name).symlink_to(path)
    return tmp_path / "linked", path


def test_a_link_out_of_the_folder_is_neither_read_nor_written(linked):
    folder, path = linked
    before = path.read_bytes()
    for use in (lambda: store.load(folder, HARDWARE), lambda: offer(folder, run_of("s1", 0.5))):
        with pytest.raises(BaselineError, match=r"is a link to .* outside .*perfsuite baselines --links"):
            use()
    assert path.read_bytes() == before


def test_a_linked_folder_of_a_platform_is_outside_as_well(linked):
    folder, path = linked
    (folder / "cpu" / path.name).unlink()
    (folder / "cpu").rmdir()
    (folder / "cpu").symlink_to(path.parent)
    with pytest.raises(BaselineError, match="is a link to"):
        store.load(folder, HARDWARE)


def test_a_link_that_is_allowed_stays_one_and_permissions_stay(linked):
    folder, path = linked
    path.chmod(0o640)
    offer(folder, run_of("s1", 0.5), links=True)
    assert (folder / "cpu" / path.name).is_symlink()
    assert path.stat().st_mode & 0o777 == 0o640
    assert sessions_in(path.parents[1]) == ["s0", "s1"]


def test_links_inside_the_folder_and_a_linked_folder_are_no_concern(tmp_path):
    path = offer(tmp_path / "real", run_of("s0")).path
    kept = path.rename(tmp_path / "real" / "kept.json")
    path.symlink_to(kept)
    (tmp_path / "whole").symlink_to(tmp_path / "real")
    offer(tmp_path / "whole", run_of("s1", 0.5))
    assert sessions_in(tmp_path / "whole") == ["s0", "s1"]


def test_the_command_line_refuses_links_unless_told(linked, capsys):
    folder, path = linked
    file = str(folder / "cpu" / path.name)
    assert cli.main(["baselines", "verify", str(folder)]) == 1
    assert "is a link to" in capsys.readouterr().out
    for command in (["show", file], ["prune", file, "--superseded"], ["merge", file, str(path)]):
        assert cli.main(["baselines", *command]) == 4
        assert cli.main(["baselines", *command, "--links"]) == 0
    assert cli.main(["baselines", "verify", str(folder), "--links"]) == 0


def test_a_large_file_is_refused_by_its_size_unread(tmp_path, monkeypatch):
    path = store.path_of(tmp_path, HARDWARE)
    path.parent.mkdir(parents=True)
    with open(path, "wb") as file:
        os.truncate(file.fileno(), 200_000_000)
    monkeypatch.setattr("pathlib.Path.read_bytes", lambda path: pytest.fail("it was read"))
    for use in (lambda: store.load(tmp_path, HARDWARE), lambda: offer(tmp_path, run_of("s0"))):
        told = f"cannot be read: it has 200000000 bytes; the limit is {store.MAX_BYTES}"
        with pytest.raises(BaselineError, match=told):
            use()


def test_no_file_is_written_that_is_too_large_to_be_read(tmp_path, monkeypatch):
    path = offer(tmp_path, run_of("s0")).path
    before = path.read_bytes()
    monkeypatch.setattr(store, "MAX_BYTES", len(before) + 10)
    with pytest.raises(BaselineError, match="the file was not changed: drop cases with perfsuite baselines prune"):
        offer(tmp_path, run_of("s1", 0.5))
    assert path.read_bytes() == before


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_line_ends_stay(tmp_path, line_end):
    path = offer(tmp_path, run_of("s0")).path
    path.write_bytes(path.read_bytes().replace(b"\n", line_end))
    offer(tmp_path, run_of("s1", 0.5))
    data = path.read_bytes()
    assert data.count(line_end) == data.count(b"\n") > 10
    assert sessions_in(tmp_path) == ["s0", "s1"]
    store.merge_files(path, [offer(tmp_path / "other", run_of("s2", 0.2)).path])
    assert path.read_bytes().count(line_end) == path.read_bytes().count(b"\n")
