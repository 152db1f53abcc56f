"""What all tests share: how Hypothesis draws, one build of the simulated device, an old torch's skips."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import subprocess
import sys
from collections.abc import Generator
from importlib.metadata import version
from pathlib import Path

import cpuinfo  # noqa: F401
import pytest
from hypothesis import HealthCheck, settings

# pytester forgets what a run in this process imported first, and its caches, and the next run imports it again.
import perfsuite.expectations.judge
import perfsuite.platforms.cuda
import perfsuite.platforms.musa
import perfsuite.plugin.gating
import perfsuite.plugin.summary
import perfsuite.record.journal
import perfsuite.reports.page.page
import perfsuite.reports.tables.report  # noqa: F401
from perfsuite.base.errors import UnsupportedCase
from perfsuite.base.git import without_git
from perfsuite.plugin.launch import PRELOAD
from perfsuite.record.workload import FunctionWorkload
from perfsuite.runtime.transports.base import WRAPPER
from simmusa import build
from test_correctness.helpers import warm
from test_correctness.helpers.gated_repository import kept, machine, repo, stored  # noqa: F401  # fixtures

with contextlib.suppress(ImportError):
    import psutil  # noqa: F401

# No deadline: how long an example takes is up to whatever else the machine does.
settings.register_profile(
    "gate", derandomize=True, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
# Other examples in every run (tox -e explore); what fails prints the blob that brings it back under either profile.
settings.register_profile("explore", settings.get_profile("gate"), derandomize=False, database=None, max_examples=500)
settings.load_profile("gate")  # --hypothesis-profile is read later and decides

COMPLETE = (2, 13)
"""Of torch: 2.5.1, 2.7.1 and 2.8.0 cannot do all that the tests run on a CPU; from this one on none may."""

TRAINING = (
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch._dynamo",
    "torch._inductor.compile_fx",
)
OF_RANKS = (*PRELOAD, *FunctionWorkload.preload, *TRAINING)
"""What the ranks of tests import: once in the template, those of training alone take 5 s of a core."""


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """A folder's fast tests run in two processes, unless ``-n`` says otherwise or pytest-xdist is missing.

    None of them depends on how long anything takes, and many wait for processes most of the time.
    """
    option = config.option
    asked = getattr(option, "numprocesses", 0) is not None or option.usepdb or option.collectonly
    fast = "not slow" in option.markexpr and any(Path(argument).is_dir() for argument in config.args)
    if fast and not (asked or hasattr(config, "workerinput")):
        option.numprocesses, option.dist = 2, "worksteal"


def pytest_configure(config: pytest.Config) -> None:
    """Load pytester; children start fast, and take signals that a shell in the background has them ignore."""
    config.pluginmanager.import_plugin("pytester")
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    works_for_another = hasattr(config, "workerinput")
    theirs = os.environ.keys() - without_git(os.environ).keys()  # of a hook of git that runs these tests
    os.environ.pop("COLUMNS", None)  # with it commands fold their lines as in a terminal
    for name in theirs | {name for name in os.environ if name.startswith("PYTEST_XDIST_")}:
        del os.environ[name]  # runs that tests start are nobody's workers
    if works_for_another or not getattr(config.option, "numprocesses", None):
        gc.disable()  # until all is collected: imports and tests make little garbage, and each search goes through all
        # No child needs the first, which takes 0.7 s to import, and none runs in several processes.
        os.environ.setdefault("PYTEST_ADDOPTS", "-p no:hypothesispytest -p no:xdist -p no:xdist.looponfail")
    if not works_for_another:
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # of container images: each child would compile perfsuite anew
        # Two threads of a rank spin for each other between small operations, and take the cores that others need.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        template = contextlib.ExitStack()
        os.environ.update(template.enter_context(warm.offered(str(config.rootpath), OF_RANKS)))
        config.add_cleanup(template.close)


@pytest.fixture
def pytester(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Runs without pytest-rerunfailures, which leaves a socket and a thread in this process for each; or name it."""
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:rerunfailures")
    return pytester


@pytest.fixture(scope="module")
def cold() -> Generator[None, None, None]:
    """Forkservers that this file starts, those of shared fixtures too, are new interpreters, as everybody's are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(WRAPPER, raising=False)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Skip where an older torch than :data:`COMPLETE` made a case unsupported; elsewhere it is a failure."""
    try:
        yield
    except UnsupportedCase as error:
        if tuple(map(int, re.findall(r"\d+", version("torch"))[:2])) >= COMPLETE:
            raise
        pytest.skip(str(error))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """File by file from the end of the alphabet: the longest are late in it, and two processes then end together."""
    items.sort(key=lambda item: item.path, reverse=True)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Build the simulated device beside the tests that come before those that need it, which wait for it.

    What was collected stays to the end: the garbage collection that ends every pytester run need not walk through it,
    which takes 0.2 s.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
    os.environ["SIMMUSA_CACHE"] = str(build.cache())  # pytester gives every test a home of its own
    if session.config.option.collectonly or not any("simmusa" in item.path.name for item in session.items):
        return
    if not build.why_not() and not build.library().exists():
        builder = subprocess.Popen(
            ["nice", sys.executable, "-m", "simmusa.build"],
            cwd=session.config.rootpath,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        session.config.add_cleanup(lambda: _end(builder))


def _end(builder: subprocess.Popen[bytes]) -> None:
    if builder.poll() is None:
        os.killpg(builder.pid, signal.SIGKILL)  # and the compilers; a build that dies leaves nothing to wait for
        builder.wait()
