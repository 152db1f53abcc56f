"""Tools and debug settings that slow ranks: seen by the rank itself, told under trust, never compared, never stored."""

from __future__ import annotations

import dataclasses
import gc
import signal
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from perfsuite.platforms.cpu import CpuDevice
from perfsuite.platforms.cuda import CudaDevice
from perfsuite.platforms.musa import MusaDevice
from perfsuite.platforms.quiet import instruments
from test_correctness.helpers import leaks
from test_correctness.helpers.local_driver import job, local_driver
from test_correctness.helpers.processes import in_a_fork

DEVELOPMENT = "development mode of Python (unset PYTHONDEVMODE)"


@pytest.fixture
def plain(monkeypatch):
    """What the tests themselves run under, a coverage say, is not seen."""
    monkeypatch.setattr(sys, "gettrace", lambda: None)
    monkeypatch.setattr("threading.gettrace", lambda: None)
    for name in ("PYTHONMALLOC", "TORCH_LOGS", "MALLOC_PERTURB_"):
        monkeypatch.delenv(name, raising=False)
    before = instruments(CpuDevice())
    assert before == ((DEVELOPMENT,) if sys.flags.dev_mode else ())
    return monkeypatch


def after(change, wrapper=""):
    """What a process sees of itself after a change, which ends with it."""

    def look():
        change()
        return instruments(CpuDevice(), wrapper)

    return [name for name in in_a_fork(look) if name != DEVELOPMENT]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda: sys.setprofile(lambda *_: None), "profiler "),
        (tracemalloc.start, "tracemalloc (unset PYTHONTRACEMALLOC)"),
        (lambda: gc.set_debug(gc.DEBUG_STATS), "debug mode of the garbage collector"),
        (lambda: torch.autograd.set_detect_anomaly(True), "anomaly mode of torch"),
        (torch.autograd.profiler.profile().__enter__, "profiler of torch"),
        (lambda: torch.distributed.set_debug_level(torch.distributed.DebugLevel.DETAIL), "debug level DETAIL"),
        (lambda: signal.setitimer(signal.ITIMER_PROF, 1000, 0.001), "timer ITIMER_PROF of a profiler, each 0.001 s"),
        (lambda: FlopCounterMode(display=False).__enter__(), "dispatch mode "),
    ],
)
def test_what_a_process_does_to_itself_is_seen(plain, change, told):
    assert [name[: len(told)] for name in after(change)] == [told]


def test_a_tracer_is_named(plain):
    plain.undo()
    assert any("tracer" in name for name in after(lambda: sys.settrace(lambda *_: None)))


@pytest.mark.parametrize(
    ("device", "name", "value", "seen"),
    [
        (CpuDevice, "PYTHONMALLOC", "debug", True),
        (CpuDevice, "PYTHONMALLOC", "malloc", False),
        (CpuDevice, "MALLOC_PERTURB_", "165", True),
        (CpuDevice, "MALLOC_PERTURB_", "0", False),
        (CpuDevice, "MALLOC_ARENA_MAX", "1", False),
        (CpuDevice, "GLIBC_TUNABLES", "glibc.malloc.tcache_count=0:glibc.malloc.perturb=1", True),
        (CpuDevice, "GLIBC_TUNABLES", "glibc.malloc.hugetlb=1", False),
        (CpuDevice, "ONEDNN_VERBOSE", "1", True),
        (CpuDevice, "ONEDNN_VERBOSE", "none", False),
        (CpuDevice, "MKL_VERBOSE", "0", False),
        (CpuDevice, "MALLOC_CONF", "prof:true,junk:false", True),
        (CpuDevice, "MALLOC_CONF", "background_thread:true", False),
        (CpuDevice, "HEAPPROFILE", "/x/heap", True),
        (CpuDevice, "PYTHONASYNCIODEBUG", "1", True),
        (CudaDevice, "TORCH_NCCL_NAN_CHECK", "1", True),
        (CudaDevice, "NCCL_PROFILER_PLUGIN", "example", True),
        (CudaDevice, "NCCL_PROFILER_PLUGIN", "none", False),
        (CpuDevice, "LD_AUDIT", "/x/audit.so", True),
        (CpuDevice, "TORCH_LOGS", "+all", True),
        (CpuDevice, "TORCH_LOGS", "recompiles", False),
        (CpuDevice, "TORCH_SHOW_CPP_STACKTRACES", "1", False),
        (CpuDevice, "PYTHONFAULTHANDLER", "1", False),
        (CpuDevice, "TORCH_CPP_LOG_LEVEL", "INFO", False),
        (CpuDevice, "PYTHONUNBUFFERED", "1", False),
        (CpuDevice, "NCCL_DEBUG", "INFO", False),  # of another platform's library
        (CudaDevice, "CUDA_LAUNCH_BLOCKING", "1", True),
        (CudaDevice, "CUDA_LAUNCH_BLOCKING", "0", False),
        (CudaDevice, "NCCL_DEBUG", "TRACE", True),
        (CudaDevice, "NCCL_DEBUG", "WARN", False),
        (CudaDevice, "NCCL_DEBUG", "VERSION", False),
        (CudaDevice, "PYTORCH_NO_CUDA_MEMORY_CACHING", "0", True),  # torch asks only whether it is set
        (CudaDevice, "MUSA_LAUNCH_BLOCKING", "1", False),
        (MusaDevice, "MUSA_LAUNCH_BLOCKING", "1", True),
        (MusaDevice, "MCCL_DEBUG", "INFO", True),
        (MusaDevice, "MCCL_DEBUG", "WARN", False),
    ],
)
def test_variables_are_instruments_by_their_value_and_platform(plain, device, name, value, seen):
    plain.setenv(name, value)
    code = device() if device is CpuDevice else device(module=object())
    told = [text for text in instruments(code) if text != DEVELOPMENT]
    assert [f"(unset {name})" in text for text in told] == [True] * seen


@pytest.mark.parametrize(
    ("wrapper", "told"),
    [
        ("nsys profile -o ranks", ["wrapper nsys (unset PERFSUITE_WRAPPER)"]),
        ("/usr/bin/strace -f", ["wrapper strace (unset PERFSUITE_WRAPPER)"]),
        ("env LD_PRELOAD=libjemalloc.so.2 numactl --cpunodebind=0", []),
        ("", []),
    ],
)
def test_a_wrapper_is_an_instrument_where_it_is_a_profiler(plain, wrapper, told):
    assert after(lambda: None, wrapper) == told


def tell(plain, files):
    """Let these texts be the files of /proc."""
    plain.setattr("perfsuite.platforms.quiet.Path", lambda path: SimpleNamespace(read_text=lambda **_: files[path]))


@pytest.mark.parametrize(
    ("library", "seen"),
    [
        ("/usr/lib/gcc/x86_64-linux-gnu/12/libasan.so.8.0.0", True),
        ("/usr/lib/x86_64-linux-gnu/libc_malloc_debug.so.0", True),
        ("/usr/libexec/valgrind/vgpreload_core-amd64-linux.so", True),
        ("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1", True),
        ("/opt/scorep/lib/libscorep_adapter_mpi_event.so.0", True),
        ("/usr/lib/libdarshan.so", True),
        ("/usr/lib/x86_64-linux-gnu/libjemalloc.so.2", False),
        ("/usr/lib/x86_64-linux-gnu/libtcmalloc.so.4", False),
    ],
)
def test_preloaded_debug_libraries_are_seen_in_what_is_mapped(plain, tmp_path, library, seen):
    files = {
        "/proc/self/maps": f"7f00-7f01 r--p 00000000 08:01 1 {library}\n7f02-7f03 r--p 0 08:01 2 /usr/lib/libc.so.6\n",
        "/proc/self/status": "Name:\tpython\nTracerPid:\t0\n",
    }
    tell(plain, files)
    assert any("(unset LD_PRELOAD)" in text for text in instruments(CpuDevice())) == seen


def test_a_process_that_traces_the_rank_is_named(plain):
    files = {"/proc/self/maps": "", "/proc/self/status": "TracerPid:\t77\n", "/proc/77/comm": "strace\n"}
    tell(plain, files)
    assert "tracer strace (detach it)" in instruments(CpuDevice())


# -- in a pytest run ---------------------------------------------------------------------------------------------


@pytest.fixture
def slowed(stored, machine, monkeypatch):
    """The repository with stored runs, whose ranks are instrumented from now on."""
    stored.driver.script = under(DEVELOPMENT, machine, range(3))
    return stored


def under(instrument, machine, numbers):
    """A script of this machine; the ranks of the cases with these numbers are instrumented."""

    def script(job):
        measured = machine(job)
        told = (instrument,) if job.workload.parameters().get("number") in numbers else ()
        ranks = tuple(dataclasses.replace(rank, instruments=told) for rank in measured.ranks)
        return dataclasses.replace(measured, ranks=ranks)

    return script


@pytest.mark.extended
def test_an_instrumented_run_says_so_under_trust_in_summary_and_journal(slowed):
    done = slowed.run("--perf-summary=summary.md", "--perf-journal=journal.jsonl", "--perf-history=history.jsonl")
    assert done.ret == pytest.ExitCode.TESTS_FAILED
    printed = " ".join(done.stdout.str().split())  # long lines are folded
    told = "compared 0 of 3 cases with a baseline, 3 not-comparable; its ranks were instrumented"
    assert f"{told}: {DEVELOPMENT}" in printed
    done.stdout.fnmatch_lines(["trust*INSTRUMENTED: 3 of 3 cases ran under development mode of Python*"])
    assert "--perf-update=append stores" not in printed
    assert "the ranks were instrumented: 3 of 3 cases ran under development mode" in Path("summary.md").read_text()
    assert DEVELOPMENT in Path("journal.jsonl").read_text()
    told = "perfsuite: error: nothing was added to the history: the ranks were instrumented: 3 of 3 cases*"
    done.stdout.fnmatch_lines([told])
    assert not Path("history.jsonl").exists()


def test_a_gate_refuses_instrumented_ranks_with_the_reason(slowed):
    done = slowed.run("--perf-gate")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.assert_outcomes(failed=3)
    done.stdout.fnmatch_lines(
        [
            f"*its ranks were instrumented: {DEVELOPMENT}*",
            f"error: --perf-gate compared nothing: its ranks were instrumented: {DEVELOPMENT}",
        ]
    )


@pytest.mark.parametrize("mode", ["append", "accept"])
def test_no_update_stores_instrumented_runs(slowed, mode):
    before = {path: path.read_bytes() for path in Path("baselines").rglob("*.json")}
    reason = ["--perf-reason=wanted"] if mode == "accept" else []
    done = slowed.run(f"--perf-update={mode}", *reason)
    assert done.ret == pytest.ExitCode.TESTS_FAILED
    done.stdout.fnmatch_lines([f"*cpu-1*: not stored, its ranks were instrumented: {DEVELOPMENT}*"])
    assert before == {path: path.read_bytes() for path in Path("baselines").rglob("*.json")}


def test_one_instrumented_case_fails_alone(stored, machine):
    stored.driver.script = under("anomaly mode of torch", machine, [1])
    done = stored.run("--perf-gate")
    assert done.ret == pytest.ExitCode.TESTS_FAILED
    done.assert_outcomes(failed=1, passed=2)


# -- on ranks ----------------------------------------------------------------------------------------------------


@pytest.mark.extended
def test_ranks_say_themselves_under_what_they_ran(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONDEVMODE", "1")
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    with local_driver(tmp_path) as driver:
        detail = "debug level DETAIL of torch.distributed (unset TORCH_DISTRIBUTED_DEBUG)"
        assert driver.run(job(leaks.plain)).instruments == (DEVELOPMENT, detail)
        told = driver.run(job(leaks.changes, how="anomaly")).instruments
        assert "anomaly mode of torch (torch.autograd.set_detect_anomaly(False))" in told
        assert driver.environment()["instruments"][0] == DEVELOPMENT
