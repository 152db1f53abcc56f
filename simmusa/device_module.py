"""``torch.musa`` of the simulated device: only names that torch_musa has.

:func:`install` registers the device with torch, as importing torch_musa does.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from perfsuite.base.errors import ConfigurationError
from perfsuite.platforms.host import Host
from perfsuite.platforms.musa import Musa
from perfsuite.platforms.quirks import numbers
from simmusa.costs import S4000, VARIABLE, Costs
from simmusa.native import native
from simmusa.registered import NEWEST, VERSION, registered

DEVICES = "SIMMUSA_DEVICES"
"""Environment: how many devices a process sees."""
DEFAULT_DEVICES = 8
_ARCHITECTURE = (2, 2)
_FOLLOWS_THE_ACCELERATOR = (2, 7)
"""First torch_musa whose torch pins memory for any accelerator, and which turns TF32 on."""
_OTHER_SETTINGS = frozenset({"MCCL_DEBUG", "MCCL_IB_HCA", "MCCL_IB_GID_INDEX"})
"""Variables in MCCL's guides that perfsuite never sets."""


def devices_asked() -> int:
    """Return the number of devices in the environment."""
    return int(os.environ.get(DEVICES, DEFAULT_DEVICES))


def _index(device: Any = None) -> int:
    if device is None:
        return int(native().current_device())
    if isinstance(device, int):
        return device
    named = torch.device(device)
    return int(native().current_device()) if named.index is None else named.index


# -- streams and events ------------------------------------------------------------------------------------------


class Event(torch.Event):
    """A moment in a stream."""

    timed: bool

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Event:
        """Return an event that is not recorded yet; only a timed one measures durations."""
        if interprocess:
            raise RuntimeError("events of simmusa belong to their process")
        made = super().__new__(cls, device="musa", enable_timing=enable_timing, blocking=blocking)  # type: ignore[call-arg]
        made.timed = enable_timing
        return made

    def elapsed_time(self, end_event: Event) -> float:
        """Return milliseconds between two completed events; torch's own method accepts no subclass."""
        if not (self.timed and end_event.timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if not (self.event_id and end_event.event_id):
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if not (self.query() and end_event.query()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return float(native().elapsed_ms(self.event_id, end_event.event_id))


class Stream(torch.Stream):
    """A queue of work on a device."""

    def __new__(cls, device: Any = None, priority: int = 0, **description: Any) -> Stream:
        """Return a new stream of ``device``, or the existing one of ``description``."""
        if description:
            return super().__new__(cls, priority=priority, **description)  # type: ignore[call-arg]
        return super().__new__(cls, device=torch.device("musa", _index(device)), priority=priority)  # type: ignore[call-arg]

    def record_event(self, event: Any = None) -> Any:
        """Record ``event``, by default a new one."""
        event = Event() if event is None else event
        event.record(self)
        return event


def _stream(device: int, stream_id: int) -> Stream:
    kind = torch._C._autograd.DeviceType.PrivateUse1.value
    return Stream(stream_id=stream_id, device_index=device, device_type=kind)


def current_stream(device: Any = None) -> Stream:
    """Return the stream for work of this thread."""
    index = _index(device)
    return _stream(index, native().current_stream_id(index))


def default_stream(device: Any = None) -> Stream:
    """Return the stream with which every thread begins."""
    return _stream(_index(device), 0)


def set_stream(stream: Any) -> None:
    """Send this thread's work to ``stream``."""
    if stream is not None:
        native().set_stream(stream.device_index, stream.stream_id)


class StreamContext:
    """Work of the block goes to ``stream``; None changes nothing."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self._device = native().current_device()
            native().set_device(self.stream.device_index)
            self._before = current_stream(self.stream.device_index)
            set_stream(self.stream)

    def __exit__(self, *_: object) -> None:
        if self.stream is not None:
            set_stream(self._before)
            native().set_device(self._device)


class device:
    """Work of the block goes to this device."""

    def __init__(self, device: Any) -> None:
        self.idx = -1 if device is None else _index(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = native().current_device()
        if self.idx >= 0:
            native().set_device(self.idx)

    def __exit__(self, *_: object) -> None:
        native().set_device(self.prev_idx)


def synchronize(device: Any = None) -> None:
    """Wait for all work of a device."""
    native().synchronize(_index(device))


# -- devices -----------------------------------------------------------------------------------------------------


def get_device_properties(device: Any = None) -> SimpleNamespace:
    """Return the driver's properties of a device."""
    _index(device)
    major, minor = _ARCHITECTURE
    return SimpleNamespace(
        name="MTT S4000",
        major=major,
        minor=minor,
        total_memory=native().memory_limit(),
        multi_processor_count=64,
        is_integrated=0,
        is_multi_gpu_board=0,
    )


def _exchange_device(index: int) -> int:
    before = int(native().current_device())
    if index >= 0:
        native().set_device(index)
    return before


# -- memory ------------------------------------------------------------------------------------------------------


def _memory(device: Any = None) -> dict[str, int]:
    return dict(native().memory(_index(device)))


def memory_stats(device: Any = None) -> dict[str, int]:
    """Return bytes and blocks of the caching allocator."""
    now = _memory(device)
    statistics = {
        "num_alloc_retries": now["retries"],
        "num_ooms": now["failures"],
        "allocation.all.current": now["blocks"],
        "reserved_bytes.all.current": now["reserved"],
        "reserved_bytes.all.peak": now["reserved_peak"],
    }
    for kind in ("allocated_bytes", "active_bytes"):
        statistics |= {f"{kind}.all.{name}": now[name] for name in ("current", "peak", "allocated", "freed")}
    return statistics


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Return (free, total)."""
    return _memory(device)["free"], int(native().memory_limit())


# -- random numbers: the CPU's generators -------------------------------------------------------------------------


def _seed_all(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


@contextmanager
def fork_rng(*_: Any, **__: Any) -> Iterator[None]:
    """Restore the generator's state at the end of the block."""
    state = torch.default_generator.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(state)


def _names() -> dict[str, Any]:
    generator = torch.default_generator
    return {
        "Event": Event,
        "Stream": Stream,
        "StreamContext": StreamContext,
        "current_device": native().current_device,
        "current_stream": current_stream,
        "default_stream": default_stream,
        "device": device,
        "device_count": native().device_count,
        "empty_cache": lambda: native().empty_cache(_index()),
        "fork_rng": fork_rng,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "get_device_capability": lambda device=None: _ARCHITECTURE,
        "get_device_name": lambda device=None: get_device_properties(device).name,
        "get_device_properties": get_device_properties,
        "get_rng_state": lambda device=None: generator.get_state(),
        "get_rng_state_all": lambda: [generator.get_state()],
        "initial_seed": generator.initial_seed,
        "is_available": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_initialized": lambda: True,
        "manual_seed": _seed_all,
        "manual_seed_all": _seed_all,
        "max_memory_allocated": lambda device=None: _memory(device)["peak"],
        "max_memory_reserved": lambda device=None: _memory(device)["reserved_peak"],
        "mem_get_info": mem_get_info,
        "memory_allocated": lambda device=None: _memory(device)["current"],
        "memory_reserved": lambda device=None: _memory(device)["reserved"],
        "memory_stats": memory_stats,
        "reset_peak_memory_stats": lambda device=None: native().reset_peak(_index(device)),
        "seed": generator.seed,
        "set_device": _set_device,
        "set_rng_state": lambda state, device=None: generator.set_state(state),
        "set_rng_state_all": lambda states: generator.set_state(states[0]),
        "set_stream": set_stream,
        "stream": StreamContext,
        "synchronize": synchronize,
        # torch calls these names of a device module, although torch_musa does not document them.
        "_exchange_device": _exchange_device,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "_maybe_exchange_device": _exchange_device,
    }


class _Mudnn(ModuleType):
    """``torch.backends.mudnn``: one switch for matrix products and convolutions, on since torch_musa 2.7.0."""

    def __init__(self, *, allowed: bool) -> None:
        super().__init__("torch.backends.mudnn")
        self.allow_tf32 = allowed

    @property
    def allow_tf32(self) -> bool:
        """Whether fp32 products may run in TF32."""
        return self._allowed

    @allow_tf32.setter
    def allow_tf32(self, allowed: bool) -> None:
        self._allowed = bool(allowed)
        native().set_tf32(self._allowed)


def _pin_as_torch_25() -> None:
    """Pin only for a named device: before torch 2.7 a DataLoader otherwise pins for CUDA alone, as torch_musa does."""
    base: Any = importlib.import_module("torch.utils.data.dataloader")._BaseDataLoaderIter
    made = base.__init__

    def init(self: Any, loader: Any) -> None:
        pins, loader.pin_memory = loader.pin_memory, loader.pin_memory and bool(loader.pin_memory_device)
        made(self, loader)
        loader.pin_memory = pins

    base.__init__ = init


def require_known_settings() -> None:
    """Raise ConfigurationError for a variable that MCCL's guides do not contain: the library would ignore it."""
    names = {name for setting in Musa.communication_settings.values() for name in setting} | _OTHER_SETTINGS
    if unknown := sorted(name for name in os.environ if name.startswith("MCCL_") and name not in names):
        raise ConfigurationError(f"MCCL has no variable {', '.join(unknown)}; known are {', '.join(sorted(names))}")


def _under_settings(costs: Costs) -> Costs:
    """Return costs with the factors of settings: ``slow["MCCL_PROTOS=2"]`` slows mccl's operations if that is set."""
    factor = math.prod(costs.slow.get(f"{name}={value}", 1.0) for name, value in os.environ.items())
    names = ("allreduce", "allgather", "reduce_scatter", "broadcast", "reduce", "alltoall", "send", "recv")
    slow = {f"mccl::{name}": costs.slow.get(f"mccl::{name}", 1.0) * factor for name in names} if factor != 1 else {}
    return replace(costs, slow={**costs.slow, **slow})


def _set_device(device: Any) -> None:
    """Make a device the current one; ``slow["device 3"]`` slows the kernels of device 3."""
    index = _index(device)
    native().set_device(index)
    costs = S4000.changed(os.environ.get(VARIABLE, "{}"))
    factor = costs.slow.get(f"device {index}", 1.0)
    if factor != 1.0:
        rates = {dtype: rate / factor for dtype, rate in costs.flops_per_s.items()}
        slower = replace(costs, flops_per_s=rates, bytes_per_s=costs.bytes_per_s / factor)
        native().set_costs(_under_settings(slower).held(devices_asked(), Host()).as_dict())


def _make_mccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    return native().make_mccl(dist.ProcessGroupGloo(store, rank, size, timeout), rank, size)


@functools.lru_cache(maxsize=1)
def install() -> ModuleType:
    """Register the device and its backend with torch, once, with the costs of ``$SIMMUSA_COSTS``.

    Raises UnsupportedCase if it cannot be built, ConfigurationError for invalid costs or an unknown version.
    """
    require_known_settings()
    costs = _under_settings(S4000.changed(os.environ.get(VARIABLE, "{}"))).held(devices_asked(), Host())
    native().set_device_count(devices_asked())
    native().set_costs(costs.as_dict())
    offered = registered(os.environ.get(VERSION, NEWEST))
    native().set_registered(offered.version, offered.operators, offered.dtypes, offered.architectures)
    torch.utils.rename_privateuse1_backend("musa")
    module = ModuleType("torch.musa")
    vars(module).update(_names())
    torch._register_device_module("musa", module)
    sys.modules["torch.musa"] = module
    torch.utils.generate_methods_for_privateuse1_backend()
    newer = numbers(offered.version) >= _FOLLOWS_THE_ACCELERATOR
    torch.backends.mudnn = _Mudnn(allowed=newer)  # type: ignore[attr-defined]
    if not newer:
        _pin_as_torch_25()
    dist.Backend.register_backend("mccl", _make_mccl, devices=["musa"])
    return module
