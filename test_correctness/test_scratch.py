"""Scratch directories and keys: gone with their process, however it ends; what anybody else has stays."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from perfsuite.runtime import scratch
from perfsuite.runtime.transports import keys
from perfsuite.runtime.transports.launchers import Launch, detect_launch

HOLDER = """
import os, sys
from perfsuite.runtime import scratch
from perfsuite.runtime.transports import keys
from perfsuite.runtime.transports.launchers import detect_launch
directory, offered = scratch.make_directory("run")[0], keys.offer_meeting(detect_launch(os.environ), {})
print(directory, offered.file, flush=True)
sys.stdin.read()
"""
ROOT = Path(__file__).parent.parent


def a_launch(run_id: str) -> dict[str, str]:
    return {
        "TORCHELASTIC_RUN_ID": run_id,
        **dict.fromkeys(("RANK", "LOCAL_RANK"), "0"),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "2"),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }


@pytest.fixture
def tmp(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def holder(tmp):
    """A process that has a directory and offers a key: (process, directory, key)."""
    environ = {**os.environ, **a_launch("another"), "TMPDIR": str(tmp), "PYTHONPATH": str(ROOT)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLDER], env=environ, **pipes) as process:
        yield (process, *map(Path, process.stdout.readline().split()))
        process.kill()


def test_what_a_living_process_has_stays_and_what_a_killed_one_left_goes(holder):
    process, directory, key = holder
    (directory / "rank0.log").write_text("last words")
    with scratch.directory("run") as mine:
        assert (mine.stat().st_mode & 0o777, mine.name.startswith("perfsuite-run-")) == (0o700, True)
        assert directory.exists()
        assert key.exists()
        process.kill()
        process.wait()
        scratch.clear()
        assert not directory.exists()
        assert not key.exists()
        assert mine.exists()
    assert not mine.exists()


def test_nothing_else_is_touched(tmp):
    notes, theirs, linked = tmp / "perfsuite-my-notes", tmp / "perfsuite-run-theirs", tmp / "perfsuite-run-linked"
    for directory in (notes, theirs):
        directory.mkdir()
    linked.symlink_to(notes)
    (tmp / "perfsuite-plain-file").write_text("")
    (theirs / scratch.LOCK).write_text("")
    (theirs / scratch.LOCK).chmod(0o666)
    if os.getuid() == 0:  # only root can give it away
        os.chown(theirs, 12345, -1)
        os.chown(theirs / scratch.LOCK, 12345, -1)
    else:
        (theirs / scratch.LOCK).unlink()
    before = sorted(tmp.rglob("*"))
    scratch.clear()
    assert sorted(tmp.rglob("*")) == before


def test_a_key_that_was_replaced_meanwhile_is_not_taken_for_the_old_one(tmp, monkeypatch):
    launch = detect_launch(a_launch("mine"))
    assert isinstance(launch, Launch)
    old = keys.offer_meeting(launch, {})
    old.lock.close()  # as at its driver's end
    hold, new = scratch.hold, []

    def hold_and_be_replaced(descriptor):
        monkeypatch.setattr(scratch, "hold", hold)
        new.append(keys.offer_meeting(launch, {}))
        return hold(descriptor)

    monkeypatch.setattr(scratch, "hold", hold_and_be_replaced)
    scratch.clear()
    assert new[0].file.read_bytes() == new[0].content
    new[0].discard()
    assert list(scratch.keys_home().iterdir()) == []


def come_and_go(tmp):
    tempfile.tempdir = tmp
    for _ in range(50):
        directory, remove = scratch.make_directory("run")
        (directory / "log").write_text("here")  # raises if another's start has taken it away
        assert (directory / scratch.LOCK).exists()
        remove()
        remove()


def test_runs_that_start_at_once_do_not_touch_each_other(tmp):
    with ProcessPoolExecutor(4) as pool:
        list(pool.map(come_and_go, [str(tmp)] * 4))
    assert list(tmp.iterdir()) == []
