"""State of a rank's process that a case may change: restored after the case, or the process is replaced.

Exploratory runs reuse ranks for the next case. SETTINGS has a row for each setting that such a case could inherit. Rows
with ``put`` are restored; after any other change the driver replaces the process.
"""

from __future__ import annotations

import _thread
import builtins
import contextlib
import ctypes
import decimal
import faulthandler
import gc
import inspect
import itertools
import locale
import logging
import multiprocessing
import operator
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives, distributed_c10d
from torch.optim import optimizer

from perfsuite.platforms.base import DeviceCode
from perfsuite.runtime.protocol import PROFILER
from perfsuite.runtime.ranks import placement
from perfsuite.runtime.transports.orphans import children

_TINY = 5e-324  # A denormal number: zero if the processor flushes them.
_OWN_NAMES = {"__abstractmethods__", "_abc_impl", "__annotations__", "__warningregistry__", "__slotnames__", "_"}
"""Names that Python itself sets in classes and modules."""
_FLAGS = re.compile(
    r"_(get|is)_\w*(enabled|disabled|allow\w*|deterministic\w*|order|backend|precision|optimize|warnAlways|memory)"
    r"|_jit_(?!set|nvfuser)\w*(enabled|can_fuse_on_\w+)|_jit_get_inline_everything_mode"
)
"""Names of the functions in ``torch._C`` that return a switch."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One row of the table."""

    name: str
    read: Callable[[], Any]  # Returns a value that later changes do not affect.
    put: Callable[[Any], object] | None = None  # Restores the value of ``read``; None if that is impossible.
    is_recorded: bool = False  # Whether a rank's record has the value if it differed during the samples.
    loads: bool = True  # Whether changes by loading the workload count: a loaded module does not repeat them.


class _Names:
    """Objects by owner and name; unequal if one was replaced or a class of both has a new name."""

    def __init__(self, owners: Mapping[Any, Mapping[Any, Any]]) -> None:
        self._kept = owners

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Names):
            return NotImplemented
        both = self._kept.keys() & other._kept.keys()
        return all(_are_same(owner, self._kept[owner], other._kept[owner]) for owner in both)

    __hash__ = None  # type: ignore[assignment]


def _are_same(owner: Any, before: Mapping[Any, Any], now: Mapping[Any, Any]) -> bool:
    if [*before] == [*now] and all(map(operator.is_, before.values(), now.values())):
        return True
    names = before.keys() | now.keys() if isinstance(owner, type) else before.keys() & now.keys()
    pairs = [(before.get(name, _OWN_NAMES), now.get(name, _OWN_NAMES)) for name in names - _OWN_NAMES]
    changed = [pair for pair in pairs if pair[0] is not pair[1]]
    if isinstance(owner, ModuleType):
        changed = [pair for pair in changed if any(map(callable, pair))]  # others count calls or keep settings
    return all(_is_wrapped(*pair) or _is_wrapped(*pair[::-1]) for pair in changed)


def _is_wrapped(old: Any, new: Any) -> bool:
    """Return whether ``new`` is torch's own wrapper of ``old`` or of an inherited function, as around ``step``."""
    if not getattr(getattr(new, "__code__", None), "co_filename", "").startswith(torch.__path__[0]):
        return False
    return hasattr(new, "__wrapped__") and (old is _OWN_NAMES or inspect.unwrap(new, stop=lambda f: f is old) is old)


def _functions() -> _Names:
    modules = [torch, torch.nn.functional, torch.autograd, dist, distributed_c10d, _functional_collectives]
    modules += [torch.linalg, torch.cuda, torch.utils.checkpoint, torch.utils.data, torch.nn.init, torch.nn.utils]
    modules += [builtins, os, random, socket, subprocess, threading, time, *filter(None, [sys.modules.get("numpy")])]
    classes = [torch.Tensor, torch.utils.data.DataLoader, dist.ProcessGroup, threading.Thread, subprocess.Popen]
    bases = (torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.utils.data.Sampler)
    classes += [each for base in bases for each in _classes(base)]
    return _Names({owner: dict(vars(owner)) for owner in (*modules, *classes)})


def _classes(base: type) -> Iterator[type]:
    if base.__module__.startswith("torch."):
        yield base
    subclasses: list[type] = base.__subclasses__()
    for subclass in subclasses:
        yield from _classes(subclass)


def _loggers() -> _Names:
    """Return the level, switches and number of handlers of every logger; a new logger is not a change."""
    logs = [each for each in logging.root.manager.loggerDict.values() if isinstance(each, logging.Logger)]
    return _Names({log: dict(enumerate((log.level, log.disabled, log.propagate, len(log.handlers)))) for log in logs})


def _attribute(path: str, *, recorded: bool = True, puts: bool = True) -> Setting:
    owner, _, name = path.rpartition(".")
    parent = operator.attrgetter(owner)
    return Setting(
        name=f"torch.{path}",
        read=lambda: getattr(parent(torch), name),
        put=(lambda value: setattr(parent(torch), name, value)) if puts else None,
        is_recorded=recorded,
    )


def _function(path: str, put: Callable[[Any], object] | None = None, *arguments: Any) -> Setting:
    """Return a row for a function below ``torch`` that returns a setting."""
    return Setting(
        name=f"torch.{path}", read=lambda: operator.attrgetter(path)(torch)(*arguments), put=put, is_recorded=True
    )


def _numpy_random() -> Any:
    if "numpy" not in sys.modules:
        return None
    state = sys.modules["numpy"].random.get_state()
    return (state[0], state[1].tobytes(), *state[2:])


def _numpy_settings() -> Any:
    numpy = sys.modules.get("numpy")
    return numpy and (numpy.geterr(), numpy.geterrcall(), numpy.getbufsize(), str(numpy.get_printoptions()))


def _put_numpy_random(state: Any) -> None:
    numpy = sys.modules["numpy"]
    numpy.random.set_state((state[0], numpy.frombuffer(state[1], dtype=numpy.uint32), *state[2:]))


def _hooks() -> tuple[Any, ...]:
    """Return the numbers of global hooks of modules and optimizers and of entered modes and transformations."""
    globals_ = [*vars(torch.nn.modules.module).items(), *vars(optimizer).items()]
    kept = [len(value) for name, value in globals_ if name.startswith("_global") and isinstance(value, dict)]
    stacks: tuple[Any, ...] = (torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack())
    stacks += (str(torch._C._dispatch_tls_local_include_set()), str(torch._C._dispatch_tls_local_exclude_set()))
    level = torch._C._functorch.maybe_current_level()
    return (*kept, *stacks, level, torch._C._autograd._top_saved_tensors_default_hooks(True) is None)


def _flags() -> dict[str, Any]:
    """Return the switches of torch by the name of their function or variable."""
    values: dict[str, Any] = {name: value for name, value in vars(torch.__future__).items() if isinstance(value, bool)}
    values["sparse"] = torch._C._check_sparse_tensor_invariants()
    for name in filter(_FLAGS.fullmatch, dir(torch._C)):
        with contextlib.suppress(Exception):  # some take arguments
            values[name] = str(getattr(torch._C, name)())
    return values


def _autocast() -> tuple[Any, ...]:
    """Return the cache's switch, and for every kind of device whether autocast is on and its dtype."""
    kinds = ("cpu", "cuda", torch._C._get_privateuse1_backend_name())
    return torch.is_autocast_cache_enabled(), *(
        (torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds
    )


def _interpreter() -> tuple[Any, ...]:
    calls: list[Callable[[], Any]] = [sys.getrecursionlimit, sys.getswitchinterval, sys.gettrace, sys.getprofile]
    calls += [sys.getdlopenflags, threading.gettrace, threading.getprofile, threading.stack_size]
    calls += [tracemalloc.is_tracing, faulthandler.is_enabled, socket.getdefaulttimeout]
    calls += [torch.multiprocessing.get_sharing_strategy, sys.get_coroutine_origin_tracking_depth]
    starts = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    hooks = (sys.excepthook, sys.unraisablehook, threading.excepthook, sys.stdout, sys.stderr)
    return (starts, *hooks, *(call() for call in calls))


def _compiler() -> list[str]:
    """Return the non-default lines of the configuration of torch's compiler; none until it is loaded."""
    names = [f"torch.{name}.config" for name in ("_dynamo", "_inductor", "_functorch")]
    return [
        line
        for config in (sys.modules[name] for name in names if name in sys.modules)
        for line in config.codegen_config().splitlines()
    ]


def compiled_frames() -> int:
    """Return how many frames torch.compile has compiled in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.counters["frames"]["total"] if dynamo else 0


def _forget_compiled(_: int) -> None:
    """Remove compiled code: for other shapes torch would compile code with variable shapes, or none at all."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def _restore_when_called(owner: Any, name: str) -> None:
    """Make the first call of a function restore it: this change shows that it was called."""
    original = getattr(owner, name, int)  # older torch lacks one, and calls none

    def first_call(*arguments: Any, **named: Any) -> None:
        setattr(owner, name, original)
        original(*arguments, **named)

    setattr(owner, name, first_call)


def _variables_of_c() -> list[bytes]:
    """Return the sorted environment that C code and child processes see, which ``os.putenv`` changes too."""
    variables: Any = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    return sorted(itertools.takewhile(bool, variables))


def _contexts() -> list[tuple[Any, ...]]:
    contexts = (decimal.getcontext(), decimal.DefaultContext)
    return [(c.prec, c.rounding, c.Emin, c.Emax, c.capitals, c.clamp, dict(c.traps)) for c in contexts]


_restore_when_called(torch.autograd.profiler, "_run_on_profiler_start")
_restore_when_called(sys, "addaudithook")
SETTINGS: tuple[Setting, ...] = (
    Setting(name=PROFILER, read=lambda: operator.attrgetter("_run_on_profiler_start")(torch.autograd.profiler)),
    Setting(name="audit hooks", read=lambda: sys.addaudithook),
    _function("get_default_dtype", torch.set_default_dtype),
    _function("get_default_device"),
    _function("get_num_threads", torch.set_num_threads),
    _function("get_num_interop_threads"),
    _function("is_grad_enabled", torch.set_grad_enabled),
    _function("is_inference_mode_enabled"),
    _function("is_anomaly_enabled"),
    Setting(name="autocast", read=_autocast, is_recorded=True),
    _function("get_deterministic_debug_mode"),
    _function("get_float32_matmul_precision"),
    *(
        _attribute(f"backends.{path}")
        for path in ("cuda.matmul.allow_tf32", "cudnn.allow_tf32", "cudnn.benchmark", "cudnn.deterministic")
    ),
    *(
        _attribute(f"backends.{path}", puts=False)
        for path in (
            *("cudnn.enabled", "cudnn.benchmark_limit", "cuda.matmul.allow_fp16_reduced_precision_reduction"),
            *("cuda.matmul.allow_bf16_reduced_precision_reduction", "cuda.matmul.allow_fp16_accumulation"),
            *("fp32_precision", "mkldnn.enabled", "mkldnn.deterministic", "mkldnn.matmul.fp32_precision"),
            *("opt_einsum.enabled", "opt_einsum.strategy", "quantized.engine", "mkldnn.conv.fp32_precision"),
            *("mkldnn.rnn.fp32_precision", "cudnn.conv.fp32_precision", "cudnn.rnn.fp32_precision"),
        )
    ),
    *(
        _function(f"backends.{path}")
        for path in (
            *("cuda.flash_sdp_enabled", "cuda.mem_efficient_sdp_enabled", "cuda.math_sdp_enabled"),
            *("cuda.cudnn_sdp_enabled", "cuda.preferred_linalg_library", "cuda.preferred_blas_library"),
            "mha.get_fastpath_enabled",
        )
    ),
    Setting(name="configuration of torch.compile", read=_compiler, is_recorded=True),
    Setting(name="code that torch compiled", read=compiled_frames, put=_forget_compiled),
    Setting(
        name="early stop of activation checkpoints",
        read=lambda: (torch.utils.checkpoint._enable_checkpoint_early_stop,),
        put=lambda kept: setattr(torch.utils.checkpoint, "_enable_checkpoint_early_stop", *kept),
        is_recorded=True,
    ),
    Setting(name="flushing of denormal numbers", read=lambda: _TINY * float("1") == 0, is_recorded=True),
    Setting(name="hooks and modes of torch", read=_hooks),
    Setting(name="print options of torch", read=lambda: dict(vars(torch._tensor_str.PRINT_OPTS))),
    Setting(name="other switches of torch", read=_flags),
    Setting(name="functions of torch and Python", read=_functions),
    Setting(
        name="kernels of torch that Python replaced",
        read=lambda: {each for each in torch.library._impls if each.startswith("aten/") and "/Meta" not in each},
    ),
    Setting(
        name="debug level of torch.distributed",
        read=lambda: str(torch._C._distributed_c10d.get_debug_level()),
        is_recorded=True,
    ),
    Setting(
        name="random numbers of torch",
        read=lambda: bytes(torch.get_rng_state().tolist()),
        put=lambda state: torch.set_rng_state(torch.tensor(list(state), dtype=torch.uint8)),
        loads=False,
    ),
    Setting(name="random numbers of Python", read=random.getstate, put=random.setstate, loads=False),
    Setting(name="random numbers of NumPy", read=_numpy_random, put=_put_numpy_random, loads=False),
    Setting(name="settings of NumPy", read=_numpy_settings),
    Setting(
        name="garbage collector", read=lambda: (gc.isenabled(), gc.get_threshold(), gc.get_debug()), is_recorded=True
    ),
    Setting(name="callbacks of the garbage collector", read=lambda: tuple(map(id, gc.callbacks))),
    Setting(name="environment variables", read=lambda: (dict(os.environ), _variables_of_c())),
    Setting(name="working directory", read=os.getcwd),
    Setting(name="import path", read=lambda: (frozenset(sys.path), [*sys.meta_path], [*sys.path_hooks]), loads=False),
    Setting(name="umask and signals", read=placement.status),
    Setting(name="attributes of the process", read=placement.attributes),
    Setting(name="timers", read=lambda: [signal.getitimer(which)[0] > 0 for which in range(3)]),
    Setting(name="signal handlers", read=lambda: {each: signal.getsignal(each) for each in signal.valid_signals()}),
    Setting(name="cores that it may use", read=lambda: tuple(sorted(os.sched_getaffinity(0))), is_recorded=True),
    Setting(
        name="priority", read=lambda: (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)), is_recorded=True
    ),
    Setting(name="priorities and cores of its threads", read=placement.of_threads),
    Setting(name="I/O priority and NUMA policy", read=placement.input_and_memory, is_recorded=True),
    Setting(name="threads of OpenBLAS", read=placement.openblas_threads, is_recorded=True),
    Setting(name="debug mode of activation checkpoints", read=lambda: torch.utils.checkpoint._checkpoint_debug_enabled),
    Setting(name="resource limits", read=lambda: [resource.getrlimit(number) for number in range(16)]),
    Setting(name="interpreter", read=_interpreter),
    Setting(name="locale", read=lambda: locale.setlocale(locale.LC_ALL)),
    Setting(name="decimal context", read=_contexts),
    Setting(
        name="open files, half of the limit",
        read=lambda: 2 * len(os.listdir("/proc/self/fd")) > resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    ),
    Setting(
        name="logging", read=lambda: (logging.root.level, logging.root.manager.disable, tuple(logging.root.handlers))
    ),
    Setting(name="levels of loggers", read=_loggers),
    Setting(
        name="filters of warnings",
        read=lambda: list(warnings.filters),
        put=lambda filters: operator.setitem(warnings.filters, slice(None), filters),  # type: ignore[call-overload]
        loads=False,
    ),
    Setting(name="threads of Python", read=lambda: (frozenset(threading.enumerate()), _thread._count())),
    Setting(name="child processes", read=lambda: frozenset(child.pid for child in children() if not child.has_ended)),
)


@dataclass(frozen=True, kw_only=True)
class ProcessState:
    """Value of every setting at one moment."""

    values: Mapping[str, Any]
    settings: tuple[Setting, ...]

    @classmethod
    def read(cls, code: DeviceCode) -> ProcessState:
        """Read the current state; ``code`` adds the settings of its device."""
        device = Setting(name="settings of the device", read=code.settings, is_recorded=True)
        settings = (*SETTINGS, device)
        return cls(values={setting.name: _value(setting) for setting in settings}, settings=settings)

    def changed(self, *, by_loading: bool = False) -> list[str]:
        """Return the names of settings that now differ from this state; a value None is not compared."""
        return [
            setting.name
            for setting in self.settings
            if (setting.loads or not by_loading) and self.values[setting.name] not in (None, _value(setting))
        ]

    def loaded(self) -> ProcessState:
        """Return this state with the current values of settings that loading a workload may change for good."""
        kept = {each.name: _value(each) for each in self.settings if not each.loads and each.put is None}
        return replace(self, values={**self.values, **kept})

    def recorded(self) -> dict[str, str]:
        """Return the recorded settings that now differ from this state, with their values."""
        values = ((setting, _value(setting)) for setting in self.settings if setting.is_recorded)
        return {setting.name: str(value) for setting, value in values if value != self.values[setting.name]}

    def put_back(self) -> list[str]:
        """Restore this state; return the names of the settings that still differ."""
        for setting in self.settings:
            if setting.put is not None and self.values[setting.name] not in (None, _value(setting)):
                with contextlib.suppress(Exception):  # the setting then still differs
                    setting.put(self.values[setting.name])
        return self.changed()


def _value(setting: Setting) -> Any:
    try:
        return setting.read()
    except Exception as error:  # older torch lacks some; torch refuses to read settings made by two APIs
        return f"{type(error).__name__}"
