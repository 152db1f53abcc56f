"""Signs that a measurement was disturbed: other programs on the machine, and tools inside a rank's process.

The load average shows no other programs and is not used.

Some tools and debug settings slow a process: they are read in a rank's process during the measurement. Runs with and
without them cannot be compared. Settings that do not affect times, such as PYTHONFAULTHANDLER or a library's warnings,
are not listed.
"""

from __future__ import annotations

import gc
import math
import os
import re
import signal
import sys
import threading
import tracemalloc
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from types import MappingProxyType

from perfsuite.base.units import plural
from perfsuite.platforms.base import DeviceCode
from perfsuite.platforms.host import Host, Throttling, cpu_quota, read_throttling, throttled
from perfsuite.platforms.telemetry import family_of_processes
from perfsuite.record.run import NOT_QUIET, THROTTLED

STEAL_SHARE = 0.01
PRESSURE_PERCENT = 5.0
OTHERS_SHARE = 0.05  # Share of other programs: a tenth of a core of two. Idle systems use 0.01 to 0.02.


CoreTime = tuple[float, float, float]
"""Core seconds since boot of the cores that this run may use: all, those of programs (interrupts do not count), and
those of this run's processes, ended ones included."""


@dataclass(frozen=True, kw_only=True)
class HostLoad:
    """One reading of the kernel's counts about other programs."""

    ticks: tuple[int, int] | None
    """Time since boot that a hypervisor used for others, and all time; None if /proc/stat does not have it."""
    pressure_percent: float | None  # Share of the last 10 s with a waiting task (/proc/pressure/cpu).
    core_time: CoreTime | None = None  # None if /proc/stat does not have it.
    quota: str = ""  # Quota of the own control group, ``0.2 cores``; empty without a limit and if unknown.
    quota_share: float = 1.0  # The same as a share of the granted cores' time.
    throttling: Mapping[str, Throttling] = field(default_factory=dict)  # By the quotas of all own groups.


def read_host_load(host: Host, roots: Iterable[int]) -> HostLoad:
    """Return the present load; all processes of the run descend from ``roots``. Pressure includes the run's tasks."""
    quota = cpu_quota(host) or math.inf
    cpu = re.match(r"cpu((?:\s+\d+)+)", host.read("proc/stat") or "")
    ticks = [int(count) for count in cpu[1].split()] if cpu else []
    pressure = re.search(r"^some avg10=([\d.]+)", host.read("proc/pressure/cpu") or "", re.MULTILINE)
    return HostLoad(
        ticks=(ticks[7], sum(ticks[:8])) if len(ticks) > 7 else None,
        pressure_percent=float(pressure[1]) if pressure else None,
        core_time=_core_time(host, roots),
        quota=f"{quota:.3g} cores" if quota < math.inf else "",
        quota_share=min(1.0, quota / host.cores()),
        throttling=read_throttling(host),
    )


def _core_time(host: Host, roots: Iterable[int]) -> CoreTime | None:
    lines = re.findall(r"^cpu(\d+)((?:\s+\d+){8})", host.read("proc/stat") or "", re.MULTILINE)
    granted = host.granted()
    ticks = [[int(count) for count in counts.split()] for core, counts in lines if int(core) in granted]
    if not ticks:
        return None
    user, nice, system = 0, 1, 2
    busy = sum(core[user] + core[nice] + core[system] for core in ticks)
    a_second = os.sysconf("SC_CLK_TCK")
    return sum(map(sum, ticks)) / a_second, busy / a_second, _own_time(host, roots)


def _own_time(host: Host, roots: Iterable[int]) -> float:
    """Return the core time of the run's processes and their ended children."""
    ticks = 0
    for pid in family_of_processes(roots):
        after_name = (host.read(f"proc/{pid}/stat") or "").rpartition(")")[2].split()
        ticks += sum(map(int, after_name[11:15]))  # own and children's, in user code and in the kernel
    return ticks / os.sysconf("SC_CLK_TCK")


def others_share(before: HostLoad, after: HostLoad) -> float | None:
    """Return the share of the granted cores' time that other programs took between two readings; None if unknown.

    If the own control group exhausted its quota, the rest of the cores was not available to the run.

    >>> def reading(*core_time):
    ...     return HostLoad(ticks=None, pressure_percent=None, core_time=core_time)
    >>> others_share(reading(100.0, 50.0, 10.0), reading(300.0, 190.0, 110.0))
    0.2
    """
    one, other = before.core_time, after.core_time
    if one is None or other is None or other[0] <= one[0]:
        return None
    passed_s, busy_s, own_s = (now - then for then, now in zip(one, other, strict=True))
    others_s = busy_s - own_s
    if throttled(before.throttling, after.throttling):
        others_s -= (1 - after.quota_share) * passed_s
    return max(0.0, others_s) / passed_s


def steal_share(before: HostLoad, after: HostLoad) -> float | None:
    """Return the share of all core time that a hypervisor took between two readings, 0 to 1; None if unknown.

    >>> steal_share(*(HostLoad(ticks=ticks, pressure_percent=None) for ticks in ((10, 1000), (40, 2000))))
    0.03
    """
    if before.ticks is None or after.ticks is None:
        return None
    stolen, passed = (now - then for then, now in zip(before.ticks, after.ticks, strict=True))
    return stolen / passed if passed > 0 else None


def warnings(
    disturbances: Iterable[tuple[str, str]], *, before: HostLoad | None = None, after: HostLoad | None = None
) -> list[str]:
    """Return the lines about lost time, from (case, phrase) pairs and two readings.

    Time that the own control group's quota withholds does not count as taken by others.

    >>> warnings([("test_matmul[cpu-256]", "rank 0 got 81% of its core"), ("test_copy[cpu-1MiB]", "")])
    ['the machine is not quiet: 1 of 2 cases disturbed, e.g. test_matmul[cpu-256]: rank 0 got 81% of its core']
    """
    cases = list(disturbances)
    bad = [(case, phrase) for case, phrase in cases if phrase]
    disturbed = [f"{len(bad)} of {plural(len(cases), 'case')} disturbed, e.g. {bad[0][0]}: {bad[0][1]}"] if bad else []
    signs = _signs_of_others(before, after) if before and after else []
    quota = _held_by_quota(before, after) if before and after else ""
    lines = {THROTTLED: [quota], NOT_QUIET: signs}
    lines[THROTTLED if quota else NOT_QUIET] += disturbed  # last: the screen may cut the example
    return [head + "; ".join(filter(None, parts)) for head, parts in lines.items() if any(parts)]


def _held_by_quota(before: HostLoad, after: HostLoad) -> str:
    held = throttled(before.throttling, after.throttling)
    if held is None:
        return ""
    share = held.throttled / max(1, held.periods)
    limit = f" ({after.quota})" if after.quota else ""
    return (
        f"the CPU quota of the own cgroup{limit} throttled the run in {share:.0%} of its periods, {held.held_s:.3g} s "
        "over all cores"
    )


def _signs_of_others(before: HostLoad, after: HostLoad) -> list[str]:
    signs = []
    others = others_share(before, after)
    if others is not None and others > OTHERS_SHARE:
        signs.append(f"other programs took {others:.0%} of the core time")
    stolen = steal_share(before, after)
    if stolen is not None and stolen > STEAL_SHARE:
        signs.append(f"the hypervisor took {stolen:.1%} of the core time")
    if before.pressure_percent is not None and before.pressure_percent > PRESSURE_PERCENT:
        signs.append(f"tasks waited for a core in {before.pressure_percent:.0f} % of the 10 s before the first case")
    return signs


_UNSET = "\0"
_ON = r"(?i)(?!(0|false|off|no|none|\0)?$)"  # Values that turn a switch on.
_VARIABLES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "PYTHONMALLOC": ("debug$", "debug allocator of Python"),
        "MALLOC_PERTURB_": (_ON, "debug setting of the C allocator"),
        "GLIBC_TUNABLES": (r".*glibc\.malloc\.(perturb|check)=[^0]", "debug setting of the C allocator"),
        "HEAPPROFILE": (r"[^\0]", "heap profile of tcmalloc"),
        "PYTHONASYNCIODEBUG": (r"[^\0]", "debug mode of asyncio"),
        "TORCH_COMPILE_DEBUG": (_ON, "debug mode of torch.compile"),
        "TORCH_LOGS": (r".*(\+|all|distributed|c10d)", "debug log of torch"),
        "ONEDNN_VERBOSE": (_ON, "log of oneDNN"),
        "DNNL_VERBOSE": (_ON, "log of oneDNN"),
        "MKL_VERBOSE": (_ON, "log of MKL"),
        "OMP_TOOL_LIBRARIES": (_ON, "OpenMP tool"),
        "MALLOC_CONF": (r".*(junk|prof):true", "debug setting of jemalloc"),
        "LD_AUDIT": (r"[^\0]", "audit of the dynamic linker"),
        "LD_DEBUG": (r"[^\0]", "debug log of the dynamic linker"),
        "LD_PROFILE": (r"[^\0]", "profile of a library"),
    }
)
"""By name: pattern of the values that slow a process (matched from the start), and the feature they turn on."""
_LIBRARIES = re.compile(
    r"/(lib(?:asan|tsan|ubsan|msan|lsan|hwasan|c_malloc_debug|efence|duma|dmalloc|heaptrack_\w+|memray\w*|mtrace"
    r"|faketime\w*|darshan|scorep\w*|TAU\w*|\w*mpitrace|hpcrun|map-sampler|profiler\."
    r"|tcmalloc(?:_minimal)?_debug|tcmalloc_and_profiler|bytehound)"
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
    """Return the instruments of this process with their remedies: ``development mode of Python (unset
    PYTHONDEVMODE)``.  ``wrapper`` is the command that started the ranks.
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
    for timer, name in ((signal.ITIMER_PROF, "ITIMER_PROF"), (signal.ITIMER_VIRTUAL, "ITIMER_VIRTUAL")):
        if interval_s := signal.getitimer(timer)[1]:
            yield f"timer {name} of a profiler, each {interval_s:g} s (run without it)"
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
    for mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack():
        yield f"dispatch mode {type(mode).__name__} (leave it before the iterations)"
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
