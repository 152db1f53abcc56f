"""Build the C++ part once for each state of sources, torch and Python, in a cache that all processes share.

The cache is ``$SIMMUSA_CACHE``, else ``simmusa`` in the user's cache directory. One process builds and the others wait;
a build that dies blocks no other process. torch is imported in a separate process.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from perfsuite.base.errors import UnsupportedCase
from perfsuite.base.writing import why_not_private

NAME = "simmusa_device"
SOURCES = Path(__file__).parent / "csrc"
FLAGS = ("-O1", "-g0", "-fvisibility=hidden")
LONGEST_BUILD_S = 3600.0
"""Wall time: 40 s on two quiet cores, more than 900 s under a load of 20."""
_TAIL_LINES = 15


def key() -> str:
    """Return the name of a build: a digest of sources, flags, torch and Python."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    for fact in (*FLAGS, version("torch"), sysconfig.get_platform(), sys.implementation.cache_tag):
        digest.update(fact.encode() + b"\0")
    return digest.hexdigest()[:16]


def cache() -> Path:
    """Return the folder of the builds."""
    folder = os.environ.get("SIMMUSA_CACHE")
    if folder:
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "simmusa"


def library() -> Path:
    """Return the path of the build of the present sources, which may not exist yet."""
    return cache() / key() / f"{NAME}.so"


def why_not() -> str:
    """Return the missing requirement of a build with its remedy; empty if there is none, or if the build exists."""
    if not os.environ.get("SIMMUSA_CACHE") and (problem := why_not_private(cache())):
        return f"{cache()} {problem}; set SIMMUSA_CACHE to a folder of your own"
    try:
        if library().exists():
            return ""
    except PackageNotFoundError:
        return "simmusa needs torch; install it"
    compiler = os.environ.get("CXX", "c++")
    if not shutil.which(compiler):
        return f"simmusa needs a C++ compiler and {compiler!r} is not found; install g++ or set CXX"
    if not shutil.which("ninja", path=_path()):
        return "simmusa needs ninja to build and there is none; pip install ninja"
    return ""


def ensure_built(longest_s: float = LONGEST_BUILD_S) -> Path:
    """The library, built now if it is not there; UnsupportedCase says why it cannot be."""
    missing = why_not()
    if missing:
        raise UnsupportedCase(missing)
    target = library()
    if target.exists():
        return target
    cache().mkdir(parents=True, exist_ok=True)
    with _one_at_a_time(target, longest_s):
        if not target.exists():
            _build(target, longest_s)
    return target


@contextmanager
def _one_at_a_time(target: Path, longest_s: float) -> Iterator[None]:
    """Hold the lock of this build.  The kernel drops it when its holder ends, however that is."""
    path = target.parent.with_suffix(".lock")
    until = time.monotonic() + longest_s
    with path.open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if target.exists():
                    break
                if time.monotonic() > until:
                    raise UnsupportedCase(
                        f"another process has been building simmusa for {longest_s:.0f} s ({path}); end it, or wait"
                    ) from None
                time.sleep(0.2)
        yield


def _build(target: Path, longest_s: float) -> None:
    workplace = target.parent.with_suffix(f".{os.getpid()}")
    for left in cache().glob(f"{target.parent.name}.[0-9]*"):  # of builders that were killed: this one has the lock
        shutil.rmtree(left, ignore_errors=True)
    workplace.mkdir()
    root = Path(__file__).parent.parent
    environment = {**os.environ, "PATH": _path(), "PYTHONPATH": os.pathsep.join([str(root), *filter(None, sys.path)])}
    command = [sys.executable, "-m", "simmusa.build", str(workplace), str(os.getpid())]
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command,
        cwd=workplace,  # -m puts the working directory first on the path
        stdout=pipe,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=longest_s)
        if process.returncode:
            output = "\n".join(output.splitlines()[-_TAIL_LINES:])
            raise UnsupportedCase(f"simmusa did not build with torch {version('torch')}: {output}")
        if not target.exists():
            target.parent.mkdir(exist_ok=True)
            os.replace(workplace / target.name, target)
    except subprocess.TimeoutExpired:
        raise UnsupportedCase(f"simmusa was not built within {longest_s:.0f} s") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # compilers outlive their parent
            process.communicate()
        shutil.rmtree(workplace, ignore_errors=True)


def _path() -> str:
    """Return a path with the programs of this interpreter's environment first, such as its ninja."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def _end_after(builder: int) -> None:
    """Wait for the end of this process's parent, then end this process and its compilers, which it leads."""
    while os.getppid() == builder:
        time.sleep(0.2)
    os.killpg(0, signal.SIGKILL)


def _compile(directory: str, builder: int) -> None:
    from torch.utils.cpp_extension import load

    threading.Thread(target=_end_after, args=(builder,), daemon=True).start()
    load(
        NAME,
        [str(path) for path in sorted(SOURCES.glob("*.cpp"))],
        build_directory=directory,
        extra_cflags=list(FLAGS),
        is_python_module=False,
        verbose=False,
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _compile(sys.argv[1], int(sys.argv[2]))
    else:
        print(ensure_built())
