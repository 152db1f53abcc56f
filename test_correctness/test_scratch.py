"""Scratch directories and keys: gone with their process, however it ends; what anybody else has stays."""

import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from perfsuite.base.errors import LaunchError
from perfsuite.runtime import scratch
from perfsuite.runtime.transports import keys
from test_correctness.helpers.agents import a_launch, an_agent, environ_of, started

HOLDER = """
import os, sys
from perfsuite.runtime import scratch
from perfsuite.runtime.transports import keys
from perfsuite.runtime.transports.launchers import detect_launch
directory, offered = scratch.make_directory("run")[0], keys.offer_meeting(detect_launch(os.environ), {})
print(directory, offered.file, flush=True)
sys.stdin.read()
"""
KEY = b"0123456789abcdef"


@pytest.fixture(autouse=True)
def tmp(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def holder(tmp):
    """A process that has a directory and offers a key: (process, directory, key)."""
    with started(HOLDER, environ_of(0, 2, tmp)) as process:
        yield (process, *map(Path, process.stdout.readline().split()))


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
    launch = a_launch()
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


# -- keys --------------------------------------------------------------------------------------------------------


def test_a_user_key_is_the_same_for_driver_and_agents(tmp_path):
    file = tmp_path / "key"
    file.write_bytes(KEY + b"\n")
    file.chmod(0o600)
    for launch in (a_launch(local_world_size=1), a_launch()):
        for environ in ({"PERFSUITE_KEY": KEY.decode()}, {"PERFSUITE_KEY_FILE": str(file)}):
            offered = keys.offer_meeting(launch, environ)
            assert offered.meeting == keys.find_meeting(an_agent(launch, 1), environ)
            assert offered.meeting.key == KEY
            assert KEY not in offered.content, "a key of the user's is not ours to write down"
            offered.discard()
    assert file.exists(), "nor to remove"


def test_a_key_that_only_the_driver_was_given_is_told():
    launch = a_launch()
    offered = keys.offer_meeting(launch, {"PERFSUITE_KEY": KEY.decode()})
    with pytest.raises(LaunchError, match="rank 1 has none: set the same key for all processes of the launch"):
        keys.find_meeting(an_agent(launch, 1), {})
    offered.discard()


def test_on_one_host_the_driver_makes_key_and_socket_and_removes_them(tmp_path):
    launch = a_launch()
    agent = an_agent(launch, 1)
    assert keys.find_meeting(agent, {}) is None
    killed_before = keys.offer_meeting(launch, {})
    offered = keys.offer_meeting(launch, {})
    assert offered.meeting == keys.find_meeting(agent, {})
    assert offered.meeting.key != killed_before.meeting.key
    assert offered.meeting.socket != killed_before.meeting.socket
    assert (offered.file.stat().st_mode & 0o777, offered.file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert offered.meeting.socket.parent.stat().st_mode & 0o777 == 0o700
    killed_before.discard()
    assert offered.file.exists(), "it belongs to the later launch"
    offered.discard()
    offered.discard()
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == []


def test_what_an_older_version_offers_is_nothing():
    launch = a_launch()
    offered = keys.offer_meeting(launch, {})
    for content in (b"0" * 64, b"[]", b"{}", b"\xff", b""):
        offered.file.write_bytes(content)
        assert keys.find_meeting(an_agent(launch, 1), {}) is None
    offered.discard()
    offered.file.unlink()


def test_several_hosts_without_a_key_are_refused():
    launch = a_launch(local_world_size=1)
    for ask in (keys.offer_meeting, keys.find_meeting):
        with pytest.raises(LaunchError, match=r"several hosts, and neither PERFSUITE_KEY nor.*token_hex"):
            ask(launch, {})


ROOT_ALONE = pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")


@pytest.mark.parametrize(
    ("mode", "owner", "told"),
    [
        *((mode, -1, f"has mode {mode:04o}: others could read.*chmod 0600") for mode in (0o644, 0o660, 0o604)),
        pytest.param(0o600, 12345, "belongs to user id 12345", marks=ROOT_ALONE),
    ],
)
def test_a_key_file_that_others_can_read_or_own_is_refused(tmp_path, mode, owner, told):
    file = tmp_path / "key"
    file.write_bytes(KEY)
    file.chmod(mode)
    os.chown(file, owner, -1)
    with pytest.raises(LaunchError, match=told):
        keys.offer_meeting(a_launch(), {"PERFSUITE_KEY_FILE": str(file)})


def test_short_missing_and_unkeepable_keys_are_refused(tmp_path):
    with pytest.raises(LaunchError, match=r"PERFSUITE_KEY has 3 characters: a key needs at least 16"):
        keys.offer_meeting(a_launch(), {"PERFSUITE_KEY": "abc"})
    with pytest.raises(LaunchError, match=r"PERFSUITE_KEY_FILE=.*nothing cannot be read \(No such file"):
        keys.find_meeting(a_launch(), {"PERFSUITE_KEY_FILE": str(tmp_path / "nothing")})
    (tmp_path / f"perfsuite-{os.getuid()}").mkdir(mode=0o755)
    with pytest.raises(LaunchError, match=r"has mode 0755: others could read or replace the key"):
        keys.offer_meeting(a_launch(), {})
    (tmp_path / f"perfsuite-{os.getuid()}").rmdir()
    (tmp_path / f"perfsuite-{os.getuid()}").write_text("")
    with pytest.raises(LaunchError, match=r"is not a directory"):
        keys.offer_meeting(a_launch(), {})


@pytest.mark.parametrize(
    "failing",
    [
        (tempfile, "mkdtemp"),
        (scratch, "hold"),
        (Path, "rename"),
        (tempfile, "mkstemp"),
        (keys, "hold"),
        (os, "replace"),
    ],
    ids=lambda failing: f"{failing[0].__name__}.{failing[1]}",
)
def test_a_failed_offer_leaves_no_file_and_no_descriptor(tmp, monkeypatch, failing):
    (tmp / f"perfsuite-{os.getuid()}").mkdir(mode=0o700)
    before, descriptors = sorted(tmp.rglob("*")), os.listdir("/proc/self/fd")

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(*failing, fail)
        with pytest.raises(LaunchError, match=r"no key can be written under .* \(No space left on device\)"):
            keys.offer_meeting(a_launch(), {})
    assert sorted(tmp.rglob("*")) == before
    assert os.listdir("/proc/self/fd") == descriptors
