"""Folders in a directory that everybody writes to: another user's is never used, and that is said."""

import getpass
import os
import subprocess
import sys
from pathlib import Path

import pytest

from perfsuite.base.errors import ConfigurationError, UnsupportedCase
from perfsuite.base.writing import why_not_private
from perfsuite.runtime import scratch
from perfsuite.runtime.transports.forkserver import boot_command
from simmusa import build

ME = os.getuid()


@pytest.fixture
def tmp(tmp_path, monkeypatch):
    """A temporary directory of everybody, and a cache of this user's."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(scratch.INDUCTOR, raising=False)
    return folder


def of_another(path):
    path.mkdir(mode=0o700)
    os.chown(path, 12345, 12345)


def a_link(path):
    target = path.with_name(f"target-{path.name}")
    target.mkdir(mode=0o700)
    path.symlink_to(target)


def open_to_all(path):
    path.mkdir()
    path.chmod(0o777)


def open_to_a_group(path):
    path.mkdir()
    path.chmod(0o770)


def a_file(path):
    path.write_text("")


def a_dangling_link(path):
    path.symlink_to("/nowhere/at/all")


TRAPS = [
    pytest.param(
        of_another,
        f"belongs to user id 12345, not to yours ({ME})",
        marks=pytest.mark.skipif(ME != 0, reason="only root can give a folder away"),
    ),
    (a_link, "is a symbolic link"),
    (open_to_all, "has mode 0777: other users can write to it"),
    (open_to_a_group, "has mode 0770: other users can write to it"),
    (a_file, "is not a folder"),
    (a_dangling_link, "is a symbolic link"),
]


@pytest.mark.parametrize(("trap", "why"), TRAPS)
def test_what_others_can_write_to_is_not_used_and_said(tmp, tmp_path, trap, why):
    data, compiled = tmp / f"perfsuite-data-{ME}", tmp / f"torchinductor_{getpass.getuser()}"
    for path in (data, compiled):
        trap(path)
    assert scratch.data_folder() == tmp_path / "cache" / "perfsuite" / "data"
    assert scratch.compiler_variables() == {scratch.INDUCTOR: str(tmp_path / "cache" / "perfsuite" / "compiled")}
    assert (tmp_path / "cache" / "perfsuite" / "data").stat().st_mode & 0o777 == 0o700
    assert scratch.remarks() == [f"{path} {why}: perfsuite uses another folder" for path in (data, compiled)]


def test_an_own_folder_is_used_where_it_always_was(tmp):
    data, compiled = tmp / f"perfsuite-data-{ME}", tmp / f"torchinductor_{getpass.getuser()}"
    data.mkdir(mode=0o755)  # as earlier versions made it: only this user could write to it
    assert scratch.remarks() == []
    assert scratch.data_folder() == data
    assert scratch.compiler_variables() == {}
    assert [path.stat().st_mode & 0o777 for path in (data, compiled)] == [0o700, 0o700]


def test_a_folder_that_the_user_named_is_the_users(tmp, monkeypatch):
    monkeypatch.setenv(scratch.INDUCTOR, "/somewhere")
    of_compiler = tmp / f"torchinductor_{getpass.getuser()}"
    open_to_all(of_compiler)
    assert (scratch.compiler_variables(), scratch.remarks()) == ({}, [])


def test_a_temporary_directory_in_which_others_can_rename_is_not_used(tmp, tmp_path):
    tmp.chmod(0o777)
    assert scratch.data_folder() == tmp_path / "cache" / "perfsuite" / "data"
    assert "where other users can replace it" in why_not_private(tmp / "any")


def test_nowhere_is_an_error_for_data_and_a_new_folder_for_compiled_code(tmp, tmp_path):
    for path in (tmp / f"perfsuite-data-{ME}", tmp / f"torchinductor_{getpass.getuser()}", tmp_path / "cache"):
        a_file(path)
    with pytest.raises(PermissionError) as caught:
        scratch.data_folder()
    assert "is not a folder" in caught.value.strerror
    folder = Path(scratch.compiler_variables()[scratch.INDUCTOR])
    assert folder.parent == tmp
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_torch_that_has_no_name_for_the_user(monkeypatch):
    def nameless():
        raise KeyError("getpwuid(): uid not found: 4711")

    monkeypatch.setattr(getpass, "getuser", nameless)
    assert scratch._user() == str(ME)


def test_kernels_are_not_compiled_into_a_folder_of_others(tmp_path):
    pytest.importorskip("deepspeed")
    from perfsuite.strategies.deepspeed.engine import compiling

    open_to_all(tmp_path / "perfsuite")
    told = r"has mode 0777: .*; set TORCH_EXTENSIONS_DIR to a folder of your own"
    with pytest.raises(ConfigurationError, match=told):
        compiling(tmp_path).__enter__()


def test_the_simulated_device_is_not_loaded_from_a_folder_of_others(tmp_path, monkeypatch):
    monkeypatch.delenv("SIMMUSA_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    open_to_all(tmp_path / "simmusa")
    folder = tmp_path / "simmusa" / build.key()
    folder.mkdir()
    (folder / f"{build.NAME}.so").write_bytes(b"code of somebody else")
    with pytest.raises(UnsupportedCase, match=r"has mode 0777: .*; set SIMMUSA_CACHE to a folder of your own"):
        build.ensure_built()


def test_a_module_that_lies_in_the_working_directory_is_not_run(tmp_path):
    for name in ("json", "signal", "perfsuite"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('code of somebody else ran')")
    command = boot_command("os:getpid", {})
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
