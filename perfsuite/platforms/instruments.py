"""Tools and debug settings that slow a process: read in a rank's process during the measurement.

Runs with and without them cannot be compared. Settings that do not affect times, such as PYTHONFAULTHANDLER or a
library's warnings, are not listed.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import threading
import tracemalloc
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from types import MappingProxyType

from perfsuite.platforms.base import DeviceCode

_UNSET = "\0"
_ON = r"(?i)(?!(0|false|off|no|none|\0)?$)"  # Values that turn a switch on.
_VARIABLES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "PYTHONMALLOC": ("debug$", "debug allocator of Python"),
        "MALLOC_PERTURB_": (_ON, "debug setting of the C allocator"),
        "GLIBC_TUNABLES": (r".*glibc\.malloc\.(perturb|check)=[^0]", "debug setting of the C allocator"),
        "TORCH_COMPILE_DEBUG": (_ON, "debug mode of torch.compile"),
        "TORCH_LOGS": (r".*(\+|all|distributed|c10d)", "debug log of torch"),
        "ONEDNN_VERBOSE": (_ON, "log of oneDNN"),
        "DNNL_VERBOSE": (_ON, "log of oneDNN"),
        "MKL_VERBOSE": (_ON, "log of MKL"),
        "OMP_TOOL_LIBRARIES": (_ON, "OpenMP tool"),
    }
)
"""By name: pattern of the values that slow a process (matched from the start), and the feature they turn on."""
_LIBRARIES = re.compile(
    r"/(lib(?:asan|tsan|ubsan|msan|lsan|hwasan|c_malloc_debug|efence|duma|dmalloc|heaptrack_\w+|memray\w*|mtrace)"
    r"|clang_rt\.\w*san|vgpreload|libToolsInjection|libcupti_injection|libscalene)[^/ ]*$",
    re.MULTILINE,
)
"""Debug allocators, sanitizers and injected profilers among the mapped files."""
_PROGRAMS = re.compile(
    r"(nsys|ncu|nvprof|msys|perf|strace|ltrace|gdb|valgrind|rr|vtune|py-spy|scalene|heaptrack|rocprof|uftrace|memray"
    r"|austin|kernprof|coverage)$"
)
"""Programs that a wrapper may use to start the ranks."""
_AUTOMATIC = ("ddtrace", "newrelic", "elasticapm", "opentelemetry", "scalene", "sentry")
"""Packages that instrument a program by their own sitecustomize."""


def instruments(code: DeviceCode, wrapper: str = "") -> tuple[str, ...]:
    """Return the instruments of this process with their remedies: ``development mode of Python (unset PYTHONDEVMODE)``.

    ``wrapper`` is the command that started the ranks.
    """
    found = [*_in_python(), *_in_torch(), *_from_outside(wrapper)]
    for name, (values, feature) in {**_VARIABLES, **code.instrument_variables}.items():
        if re.match(values, os.environ.get(name, _UNSET)):
            found.append(f"{feature} (unset {name})")
    return tuple(dict.fromkeys(found))


def _in_python() -> Iterator[str]:
    tracer = sys.gettrace() or threading.gettrace()
    if tracer is not None:
        yield f"tracer {_name_of(tracer)} (run without coverage of subprocesses or a debugger)"
    profiler = sys.getprofile() or threading.getprofile()
    if profiler is not None:
        yield f"profiler {_name_of(profiler)} (run without it)"
    monitoring = getattr(sys, "monitoring", None)
    tools = [monitoring.get_tool(number) for number in range(6)] if monitoring else []
    for tool in filter(None, tools):
        yield f"monitoring tool {tool} (run without it)"
    if sys.flags.dev_mode:
        yield "development mode of Python (unset PYTHONDEVMODE)"
    if tracemalloc.is_tracing():
        yield "tracemalloc (unset PYTHONTRACEMALLOC)"
    if hasattr(sys, "gettotalrefcount"):
        yield "debug build of Python (use a release build)"
    if getattr(sys, "is_stack_trampoline_active", bool)():
        yield "perf support of Python (unset PYTHONPERFSUPPORT)"
    if gc.get_debug():
        yield "debug mode of the garbage collector (gc.set_debug(0))"
    site = str(getattr(sys.modules.get("sitecustomize"), "__file__", ""))
    for package in _AUTOMATIC:
        if package in PurePath(site).parts:
            yield f"instrumentation by {package} (start pytest without it)"


def _in_torch() -> Iterator[str]:
    torch = sys.modules.get("torch")
    if torch is None:
        return
    if torch.is_anomaly_enabled():
        yield "anomaly mode of torch (torch.autograd.set_detect_anomaly(False))"
    if torch.autograd._profiler_enabled():
        yield "profiler of torch (end it before the iterations)"
    if torch.version.debug:
        yield "debug build of torch (use a release build)"
    if torch.distributed.is_available() and torch.distributed.get_debug_level() == torch.distributed.DebugLevel.DETAIL:
        yield "debug level DETAIL of torch.distributed (unset TORCH_DISTRIBUTED_DEBUG)"


def _text(path: str) -> str:
    """Read a file that may contain paths and names which are not UTF-8."""
    return Path(path).read_text(encoding="utf-8", errors="replace")


def _from_outside(wrapper: str) -> Iterator[str]:
    tracer = re.search(r"^TracerPid:\s*([1-9]\d*)", _text("/proc/self/status"), re.MULTILINE)
    if tracer:
        try:
            name = _text(f"/proc/{tracer[1]}/comm").strip()
        except OSError:
            name = f"process {tracer[1]}"
        yield f"tracer {name} (detach it)"
    for library in sorted(set(_LIBRARIES.findall(_text("/proc/self/maps")))):
        yield f"library {library} (unset LD_PRELOAD)"
    for program in filter(_PROGRAMS.match, (PurePath(word).name for word in wrapper.split())):
        yield f"wrapper {program} (unset PERFSUITE_WRAPPER)"


def _name_of(hook: object) -> str:
    """Return ``coverage.CTracer``, ``pydevd.trace_dispatch``."""
    owner = getattr(hook, "__self__", None)
    named = hook if hasattr(hook, "__qualname__") and owner is None else type(owner or hook)
    return f"{getattr(named, '__module__', '')}.{getattr(named, '__qualname__', type(hook).__name__)}".strip(".")
