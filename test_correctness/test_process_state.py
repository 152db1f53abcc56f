"""State that a case changes in its rank's process: put back, or the process is replaced; and recorded as it was."""

import _thread
import contextlib
import copy
import ctypes
import decimal
import faulthandler
import functools
import gc
import importlib
import logging
import multiprocessing
import os
import pickle
import platform
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.optim import optimizer

from perfsuite.base.errors import UnsupportedCase
from perfsuite.platforms.cpu import CpuDevice
from perfsuite.record.workload import Budget
from perfsuite.runtime.ranks import placement
from perfsuite.runtime.ranks.process_state import SETTINGS, ProcessState
from test_correctness.helpers import leaks
from test_correctness.helpers.local_driver import driver_fixture, job, records
from test_correctness.helpers.processes import in_a_fork

QUICK = Budget(min_rounds=2, max_time_s=0.01, warmup_time_s=0.01, timeout_s=60.0)


def read():
    return ProcessState.read(CpuDevice())


@pytest.mark.parametrize(
    "change",
    [
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.set_num_threads(torch.get_num_threads() + 1),
        lambda: torch.set_grad_enabled(False),
        lambda: setattr(torch.backends.cudnn, "benchmark", True),
        lambda: torch.manual_seed(7),
        lambda: random.seed(7),
        lambda: warnings.simplefilter("error"),
        lambda: setattr(torch.utils.checkpoint, "_enable_checkpoint_early_stop", False),
    ],
)
def test_what_has_a_setter_is_put_back(change):
    def look():
        before = read()
        change()
        return bool(before.changed()), before.put_back()

    assert in_a_fork(look) == [True, []]


def test_a_fork_of_a_test_collects_no_garbage_of_its_parent():
    """A library that runs code in os.fork can start a collection: a frame of PyAV then waits for a thread for ever."""

    collected_in = []

    class Frame:
        def __del__(self):
            collected_in.append(os.getpid())

    def parent():
        os.register_at_fork(after_in_child=gc.collect)
        frame = Frame()
        frame.itself = frame
        del frame
        return in_a_fork(lambda: os.getpid() in collected_in), gc.get_freeze_count()

    assert in_a_fork(parent) == [False, 0]


def test_an_openblas_whose_file_was_replaced_is_left_out(tmp_path, monkeypatch):
    file = tmp_path / "libopenblas.so"
    file.write_text("not the file that was loaded")
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: f"0-1 r-xp 0 0 0 {file}\n")
    assert placement.openblas_threads() is None


def switch_faulthandler():
    """Asked when the test runs: tests before it in this process may have switched it."""
    if faulthandler.is_enabled():
        faulthandler.disable()
    else:
        faulthandler.enable(2)


def replace_a_kernel():
    library = torch.library.Library("aten", "IMPL")
    library.impl("relu", lambda x: x, "CPU")
    return library


def set_precision_of_convolutions():
    torch.backends.mkldnn.conv.fp32_precision = "bf16"


def start_a_raw_thread():
    """Python counts the thread when it runs, which may be later than the call."""
    running = _thread.allocate_lock()
    running.acquire()
    _thread.start_new_thread(lambda: (running.release(), time.sleep(1000)), ())
    running.acquire()


def set_the_io_priority():
    if platform.machine() != "x86_64":
        pytest.skip("the number of the system call is that of x86-64")
    assert ctypes.CDLL(None).syscall(251, 1, 0, 3 << 13) == 0  # ioprio_set: idle


def set_openblas_threads():
    threads = placement.openblas_threads()
    if threads is None:
        pytest.skip("NumPy is not built with OpenBLAS")
    path = re.search(r"/\S*openblas\S*\.so\S*", Path("/proc/self/maps").read_text())[0]
    names = [f"{head}openblas_set_num_threads{tail}" for head in ("scipy_", "") for tail in ("64_", "")]
    library = ctypes.CDLL(path)
    next(getattr(library, name) for name in names if hasattr(library, name))(threads[0] + 1)


def leave_autograd_out():
    torch._C._dispatch_tls_set_dispatch_key_excluded(torch._C.DispatchKey.AutogradCPU, True)


def move_another_thread():
    running, tasks = threading.Event(), set(os.listdir("/proc/self/task"))
    threading.Thread(target=lambda: (running.set(), time.sleep(1000)), daemon=True).start()
    running.wait()
    (task,) = set(os.listdir("/proc/self/task")) - tasks
    os.setpriority(os.PRIO_PROCESS, int(task), 5)


def leave_files_open():
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    for _ in range(140):
        os.open(os.devnull, os.O_RDONLY)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("I/O priority and NUMA policy", set_the_io_priority),
        ("threads of OpenBLAS", set_openblas_threads),
        ("priorities and cores of its threads", move_another_thread),
        ("torch.get_default_device", lambda: torch.set_default_device("meta")),
        ("torch.is_anomaly_enabled", lambda: torch.autograd.set_detect_anomaly(True)),
        ("torch.backends.mkldnn.enabled", lambda: setattr(torch.backends.mkldnn, "enabled", False)),
        ("flushing of denormal numbers", lambda: torch.set_flush_denormal(True)),
        ("functions of torch and Python", lambda: setattr(torch.Tensor, "relu_", None)),
        ("functions of torch and Python", lambda: setattr(torch.nn.functional, "relu", None)),
        ("environment variables", lambda: os.environ.update(TOKENIZERS_PARALLELISM="false")),
        ("torch.get_float32_matmul_precision", lambda: torch.set_float32_matmul_precision("medium")),
        ("environment variables", lambda: os.putenv("OMP_WAIT_POLICY", "active")),
        ("audit hooks", lambda: sys.addaudithook(lambda *_: None)),
        ("decimal context", lambda: decimal.getcontext().traps.__setitem__(decimal.Inexact, True)),
        ("decimal context", lambda: setattr(decimal.DefaultContext, "Emax", 9)),
        ("open files, half of the limit", leave_files_open),
        ("garbage collector", gc.disable),
        ("other switches of torch", lambda: torch._C._jit_set_texpr_fuser_enabled(False)),
        ("working directory", lambda: os.chdir("/")),
        ("umask and signals", lambda: os.umask(0o77)),
        ("interpreter", lambda: sys.setrecursionlimit(5000)),
        ("threads of Python", lambda: threading.Timer(1e6, print).start()),
        ("child processes", lambda: subprocess.Popen(["sleep", "1000"])),
        ("threads of Python", start_a_raw_thread),
        ("autocast", lambda: torch.set_autocast_dtype("cpu", torch.float16)),
        ("autocast", lambda: torch.set_autocast_enabled("cuda", True)),
        ("torch.backends.mkldnn.conv.fp32_precision", set_precision_of_convolutions),
        ("other switches of torch", lambda: torch.backends.nnpack.set_flags(False)),
        ("other switches of torch", lambda: torch.autograd.set_multithreading_enabled(False)),
        ("other switches of torch", torch.sparse.check_sparse_tensor_invariants.enable),
        ("hooks and modes of torch", lambda: optimizer.register_optimizer_step_post_hook(print)),
        ("hooks and modes of torch", torch._C._functorch._grad_increment_nesting),
        ("kernels of torch that Python replaced", replace_a_kernel),
        ("debug level of torch.distributed", lambda: dist.set_debug_level(dist.DebugLevel.DETAIL)),
        ("interpreter", lambda: torch.multiprocessing.set_sharing_strategy("file_system")),
        ("functions of torch and Python", lambda: setattr(torch.nn.Linear, "forward", None)),
        ("functions of torch and Python", lambda: setattr(torch.optim.AdamW, "step", None)),
        ("functions of torch and Python", lambda: setattr(os, "fsync", None)),
        ("levels of loggers", lambda: logging.getLogger("torch").setLevel(1)),
        ("timers", lambda: signal.setitimer(signal.ITIMER_VIRTUAL, 1000)),
        ("interpreter", lambda: threading.setprofile(print)),
        ("interpreter", switch_faulthandler),
        ("interpreter", tracemalloc.start),
        ("attributes of the process", lambda: ctypes.CDLL(None).prctl(29, 1_000_000)),  # PR_SET_TIMERSLACK
        ("attributes of the process", lambda: os.dup2(os.open(os.devnull, os.O_WRONLY), 1)),
        ("umask and signals", lambda: os.setpgid(0, 0)),
        ("functions of torch and Python", lambda: setattr(torch.utils.checkpoint, "checkpoint", None)),
        ("functions of torch and Python", lambda: setattr(torch.nn.utils, "clip_grad_norm_", None)),
        ("functions of torch and Python", lambda: setattr(torch.cuda, "synchronize", None)),
        ("functions of torch and Python", lambda: setattr(torch.optim.lr_scheduler.StepLR, "get_lr", None)),
        ("functions of torch and Python", lambda: setattr(torch.utils.data.RandomSampler, "__iter__", None)),
        ("functions of torch and Python", lambda: setattr(subprocess.Popen, "wait", None)),
        ("functions of torch and Python", lambda: setattr(random, "random", None)),
        ("hooks and modes of torch", leave_autograd_out),
        ("levels of loggers", lambda: logging.getLogger("torch").addHandler(logging.NullHandler())),
        ("settings of NumPy", lambda: np.set_printoptions(precision=2)),
        ("interpreter", lambda: sys.set_coroutine_origin_tracking_depth(2)),
        ("import path", lambda: sys.meta_path.insert(0, None)),
    ],
)
def test_what_has_none_is_named(name, change):
    def look():
        before = read()
        made = change()
        left = before.put_back()
        if isinstance(made, subprocess.Popen):
            made.kill()
        return left

    assert name in in_a_fork(look)


def test_a_process_that_nothing_changed_is_as_before():
    def look():
        before = read()
        torch.randn(8) @ torch.randn(8)
        return before.changed(), before.put_back(), before.recorded()

    assert in_a_fork(look) == [["random numbers of torch"], [], {}]


def test_copies_loggers_and_finished_threads_are_not_changes():
    def look():
        before = read()
        pickle.dumps(copy.deepcopy(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.GELU())))
        logging.getLogger("new.one").setLevel(1)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(str, range(4)))
        multiprocessing.get_context()
        return before.changed()

    assert in_a_fork(look) == ["random numbers of torch"]


def test_a_variable_that_is_put_back_is_no_change():
    """It is the last one of C's list then: a case that removes one for a while needs no new ranks."""

    def look():
        os.environ.update(FIRST="1", LAST="1")
        before = read()
        os.environ["FIRST"] = os.environ.pop("FIRST")
        return before.changed()

    assert in_a_fork(look) == []


def test_an_optimizer_and_the_compiler_that_wrap_functions_of_torch_change_nothing():
    def look():
        before = read()
        weight = torch.nn.Parameter(torch.ones(2))
        for each in (torch.optim.AdamW([weight]), torch.optim.Adam([weight])):
            weight.sum().backward()
            each.step()
        importlib.import_module("torch._dynamo")
        return before.changed()

    assert "functions of torch and Python" not in in_a_fork(look)


def test_compiled_code_is_removed_so_that_the_next_shape_is_compiled_as_in_a_new_process():
    def look():
        dynamic = []

        def backend(module, inputs):
            dynamic.append(any(isinstance(each, torch.SymInt) for each in inputs))
            return module.forward

        compiled = torch.compile(lambda x: x * 2, backend=backend)
        importlib.import_module("torch._dynamo")
        for put_back in (False, True):
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            before = read()
            compiled(torch.ones(4))
            left = before.put_back() if put_back else before.changed()
            compiled(torch.ones(8))
        return dynamic, left

    assert in_a_fork(look) == [[False, True, False, False], []]


def test_a_function_that_replaces_a_wrapped_one_is_a_change():
    def look():
        weight = torch.nn.Parameter(torch.ones(2))
        weight.sum().backward()
        torch.optim.Adam([weight]).step()
        before, step = read(), torch.optim.Adam.step
        torch.optim.Adam.step = functools.wraps(step)(lambda self: None)
        return before.changed()

    assert "functions of torch and Python" in in_a_fork(look)


def test_no_setting_of_this_torch_is_unreadable():
    values = read().values
    assert [setting.name for setting in SETTINGS if "Error" in str(values[setting.name])] == []


# -- on ranks ----------------------------------------------------------------------------------------------------


driver = driver_fixture()


def facts(driver, function, **arguments):
    """What rank 0 recorded of its process, and of itself."""
    measurement = driver.run(job(function, budget=QUICK, **arguments))
    return records(measurement), measurement.ranks[0]


def test_defaults_and_threads_of_one_case_are_not_there_for_the_next(driver):
    before, plain = facts(driver, leaks.plain)
    _, changed = facts(driver, leaks.as_training_scripts_do, more=False)
    after, again = facts(driver, leaks.plain)
    assert before == after  # the same process, dtype, threads and environment
    facts(driver, leaks.as_training_scripts_do, more=True)
    after, again = facts(driver, leaks.plain)
    assert before.pop("pid") != after.pop("pid")
    assert before == after
    assert plain.threads == again.threads > 0
    assert plain.settings == again.settings == {}
    assert changed.threads == 1  # as it was, not as it was given
    assert changed.settings["torch.get_default_dtype"] == "torch.float64"
    assert changed.settings["torch.is_grad_enabled"] == "False"


def test_the_largest_resident_set_is_that_of_the_case(driver):
    _, before = facts(driver, leaks.plain)
    _, large = facts(driver, leaks.large)
    _, after = facts(driver, leaks.plain)
    assert large.max_rss_bytes > before.max_rss_bytes + (250 << 20)
    assert after.max_rss_bytes < large.max_rss_bytes - (250 << 20)


@pytest.mark.parametrize("how", ["environment", "anomaly", "affinity", ""], ids=lambda how: how or "skipped after it")
def test_a_process_that_cannot_be_put_back_is_replaced(driver, how):
    before, _ = facts(driver, leaks.plain)
    with contextlib.nullcontext() if how else pytest.raises(UnsupportedCase):
        facts(driver, leaks.changes if how else leaks.changes_and_skips, **({"how": how} if how else {}))
    after, plain = facts(driver, leaks.plain)
    assert before.pop("pid") != after.pop("pid")
    assert before == after
    assert plain.settings == {}


def test_an_import_path_that_grew_since_the_ranks_started_replaces_no_process(driver, monkeypatch, tmp_path):
    before, _ = facts(driver, leaks.plain)
    (tmp_path / "link").symlink_to(tmp_path)  # each test module's folder is put there when it is collected
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "link"), *sys.path, "a name for a hook"])
    for _ in range(2):
        after, _ = facts(driver, leaks.plain)
        assert before == after


def test_random_numbers_of_numpy_are_put_back_where_the_case_loaded_that_part_of_it():
    def look():
        for name in [name for name in sys.modules if name.startswith("numpy.random")]:
            del sys.modules[name]
        vars(sys.modules["numpy"]).pop("random", None)
        state = read()
        sys.modules["numpy"].random.seed(7)
        seeded = sys.modules["numpy"].random.get_state()[1].tolist()
        stale = state.put_back()
        return [stale, seeded == sys.modules["numpy"].random.get_state()[1].tolist()]

    assert in_a_fork(look)[1] is False


def test_what_a_module_sets_when_it_is_loaded_is_there_for_its_next_case_too(driver, tmp_path):
    from test_correctness.helpers import leaks_when_loaded

    _, first = facts(driver, leaks_when_loaded.plain)
    _, second = facts(driver, leaks_when_loaded.plain)
    assert first.settings == second.settings == {"torch.get_default_dtype": "torch.float64"}
    assert facts(driver, leaks.plain)[1].settings == {}
