"""Files that somebody asked for: whole or not there, refused before the work, and what is no file stays what it is."""

import os

import pytest

from perfsuite.base.errors import ConfigurationError
from perfsuite.base.writing import require_writable, write_file


def test_a_file_is_whole_and_nothing_lies_beside_it(tmp_path):
    path = tmp_path / "report.md"
    path.write_text("old")
    write_file(path, "new")
    assert [(entry.name, entry.read_text()) for entry in tmp_path.iterdir()] == [("report.md", "new")]


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
