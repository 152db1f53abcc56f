"""A torch that cannot be imported: the first cause is reported, not what fails because of it."""

import contextlib
import time

import pytest

from perfsuite.base.errors import RanksFailed
from perfsuite.runtime.transports.local import LocalTransport, _raised_in
from test_correctness.helpers.local_driver import ROOT
from test_correctness.helpers.processes import run_python

pytestmark = pytest.mark.usefixtures("cold")
NO_CUDNN = "libcudnn.so.9: cannot open shared object file: No such file or directory"
ONCE = f"""
import sys
if hasattr(sys, "tried"):
    raise RuntimeError("torch can only be initialized once per process")
sys.tried = True
raise ImportError("{NO_CUDNN}")
"""
"""As torch 2.15: the second attempt fails for another reason."""
NO_SUCH_INSTRUCTION = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """Give ranks this torch; the folder of their logs."""

    def write(text):
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch" / "__init__.py").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))
        return tmp_path / "logs"

    return write


@pytest.mark.parametrize("start_method", ["fork", "exec"])
def test_a_library_that_torch_lacks_is_what_is_said(broken, start_method):
    transport = LocalTransport(start_method=start_method, preload=("torch",), log_directory=broken(ONCE))
    with contextlib.closing(transport), pytest.raises(RanksFailed) as raised:
        transport.open_store(60)
    headline = str(raised.value).partition("\n")[0]
    assert headline.startswith("no rank process can run here, the first ended with exit code ")
    assert headline.endswith(f": ImportError: {NO_CUDNN}")


def test_a_rank_with_variables_of_its_own_says_it_too(broken):
    transport = LocalTransport(start_method="fork", preload=(), log_directory=broken(ONCE))
    events = []
    until = time.monotonic() + 60
    with contextlib.closing(transport):
        transport.acquire(1, fresh=True, env={"ANY": "1"}, deadline_s=60)
        while not events and time.monotonic() < until:
            events = transport.poll(1)
    assert [("exit", True)] == [(event.kind, event.text.endswith(f": ImportError: {NO_CUDNN}")) for event in events]


def test_a_torch_that_kills_its_process_is_named_by_the_signal_and_the_import(broken):
    transport = LocalTransport(start_method="fork", preload=("torch",), log_directory=broken(NO_SUCH_INSTRUCTION))
    said = r"the forkserver, was killed by SIGILL while it imported torch\n"
    with contextlib.closing(transport), pytest.raises(RanksFailed, match=said):
        transport.open_store(60)


def test_a_preload_that_failed_fails_again_for_the_same_reason(tmp_path):
    """Seen with DeepSpeed 0.15 and torch 2.7: "partially initialized module" instead of triton's "0 active drivers"."""
    (tmp_path / "half.py").write_text(ONCE.replace("ImportError", "ValueError"))
    text = (
        "from perfsuite.runtime.transports.forkserver import _import; _import(['half', 'json'])\n"
        "try:\n    import half\nexcept ImportError as error:\n    print(error)\nimport json"
    )
    done = run_python("-c", text, cwd=ROOT, PYTHONPATH=str(tmp_path))
    assert f"ValueError: {NO_CUDNN}\n" == done.stdout


def test_a_log_without_an_exception_adds_nothing():
    assert "" == _raised_in("")
    assert "" == _raised_in("an Error happened\n  ValueError: in a nested line")
    assert ": torch.OutOfMemoryError: no room" == _raised_in("ValueError: first\ntorch.OutOfMemoryError: no room\nmore")
