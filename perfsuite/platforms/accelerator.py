"""Common rank side of all accelerator families: torch's device module, and the interface of attention kernels."""

from __future__ import annotations

import functools
import re
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, cast

from perfsuite.base.errors import DeviceUnusable
from perfsuite.base.units import MIB
from perfsuite.platforms.base import Clock, DeviceCode, measured_facts
from perfsuite.platforms.detection import family_class, family_names, import_object
from perfsuite.record.result import ClockFacts

if TYPE_CHECKING:
    import torch


_LAST_LEVEL_CACHE_BYTES = 128 * MIB  # More than every device of platforms.toml has (RTX 6000 Ada: 96 MiB).
_NO_MEMORY = re.compile(r"out of memory|STATUS_ALLOC_FAILED|Failed to \w+ [cm]alloc", re.IGNORECASE)
"""Messages of the runtime, of a library that allocates outside of torch (cublasCreate), and of communicator buffers
(NCCL's alloc.h: "Failed to CUDA calloc 6291456 bytes")."""
_EVENT_RESOLUTION_S = 0.5e-6  # Resolution by the CUDA runtime's manual, if no steps are visible.


class EventClock(Clock):
    """Timing events of a device module: recorded in the current stream, read in milliseconds."""

    queues = True

    def __init__(self, module: Any, name: str) -> None:
        self._module = module
        self._name = name

    def stamp(self) -> object:
        """Return an event in the current stream."""
        event = self._module.Event(enable_timing=True)
        event.record()
        return event

    def wait(self, stamp: object) -> None:
        """Block until the device has reached the event."""
        cast(Any, stamp).synchronize()

    def elapsed_s(self, start: object, end: object) -> float:
        """Return the seconds between two events that the device has passed."""
        return float(cast(Any, start).elapsed_time(end)) * 1e-3

    def facts(self) -> ClockFacts:
        """Measure 200 pairs of events without work between them."""
        return self._facts

    @functools.cached_property
    def _facts(self) -> ClockFacts:
        return measured_facts(self, self._name, 200, _EVENT_RESOLUTION_S)


class Accelerator(DeviceCode):
    """Rank side over ``torch.get_device_module(family)``; a subclass adds its TF32 switch and its versions.  It uses
    only names that every supported vendor's module has, and not ``torch.accelerator``: some backends lack its guard and
    its memory functions.
    """

    # Large enough to measure the device instead of a launch or a cache: half a millisecond and more of fp32 on every
    # row of platforms.toml, and a copy of twice the largest last-level cache.
    yardstick_side = 2048
    yardstick_bytes = 2 * _LAST_LEVEL_CACHE_BYTES
    open_remedies: ClassVar[Mapping[str, str]] = {"out of memory": "other programs hold its memory; end them"}
    """Remedies of errors at the first use of a device, by a pattern of the message."""

    def __init__(self, module: Any = None) -> None:
        self._module = self._load() if module is None else module
        self.clock = EventClock(self._module, f"{self.family}.Event")

    def _load(self) -> ModuleType:
        """Return the device module; raise DeviceUnusable if this torch has none."""
        import torch

        try:
            return cast(ModuleType, torch.get_device_module(self.family))
        except (RuntimeError, AttributeError):
            raise DeviceUnusable(
                f"torch {torch.__version__} has no device {self.family!r}; use the vendor's build of torch"
            ) from None

    def open(self, index: int) -> torch.device:
        """Make device ``index`` current and use it; raise DeviceUnusable with a remedy if torch cannot."""
        import torch

        try:
            self._module.set_device(index)
            self._module.synchronize()  # makes the context, which the choice of device 0 may not need
        except Exception as error:  # torch wraps some in classes of its own
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            found = (remedy for words, remedy in self.open_remedies.items() if re.search(words, first))
            remedy = next(found, "install a torch built for this device and its driver")
            raise DeviceUnusable(
                f"torch {torch.__version__} cannot open device {self.family}:{index} ({first}); {remedy}"
            ) from error
        return torch.device(self.family, index)

    def synchronize(self) -> None:
        """Wait for all streams of the current device."""
        self._module.synchronize()

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Recognise torch's OutOfMemoryError, and RuntimeErrors of runtime and libraries about memory."""
        import torch

        return isinstance(error, torch.OutOfMemoryError) or (
            isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)) is not None
        )

    def peak_memory_bytes(self) -> int | None:
        """Return the most bytes of live tensors, without the allocator's cache."""
        return int(self._module.max_memory_allocated())

    def reset_peak_memory(self) -> None:
        """Call ``reset_peak_memory_stats``; torch_musa 2.1.1's ``reset_max_memory_allocated`` is broken."""
        self._module.reset_peak_memory_stats()

    def memory_bytes(self) -> tuple[int, int] | None:
        """Return the driver's (free, total) bytes."""
        free, total = self._module.mem_get_info()
        return int(free), int(total)

    def cache_bytes(self) -> int:
        """Return torch's L2 size, else more than any device in the table has."""
        properties = self._module.get_device_properties(self._module.current_device())
        return int(getattr(properties, "L2_cache_size", 0) or _LAST_LEVEL_CACHE_BYTES)

    def pci_address(self, index: int) -> str | None:
        """Return an empty text; vendors with an address in the properties override it."""
        return ""

    def release(self) -> None:
        """Return the allocator's cache to the device."""
        self._module.empty_cache()

    def settings(self) -> dict[str, str]:
        """Return the current device and stream."""
        return {"device": str(self._module.current_device()), "stream": str(self._module.current_stream())}

    def versions(self) -> dict[str, str]:
        """Return the version of torch; a subclass adds its own."""
        import torch

        return {"torch": torch.__version__}


_KERNELS = 100  # Runs in the graph: its own start adds a hundredth to the time of a kernel.
_REPLAYS = 20


def captured_kernel_s(device: torch.device, run: Callable[[], object]) -> float | None:
    """Return the median seconds of one ``run`` among many in a graph; None if torch cannot capture it here."""
    import torch

    module: Any = torch.get_device_module(device)
    make = getattr(module, f"{device.type.upper()}Graph", None)  # vendors name it after their device
    if make is None or not hasattr(module, "graph"):
        return None
    run()  # its first-time set-up cannot be captured
    module.synchronize()
    graph = make()
    try:
        with module.graph(graph):
            for _ in range(_KERNELS):
                run()
        graph.replay()
    except (RuntimeError, NotImplementedError):
        return None
    clock, times_s = EventClock(module, ""), list[float]()
    for _ in range(_REPLAYS):
        module.synchronize()
        start = clock.stamp()
        graph.replay()
        end = clock.stamp()
        clock.wait(end)
        times_s.append(clock.elapsed_s(start, end) / _KERNELS)
    return statistics.median(times_s)


@dataclass(frozen=True, kw_only=True)
class AttentionBlock:
    """Some queries, and some of the keys that they see."""

    query: torch.Tensor  # (B, H, S, E).
    key: torch.Tensor  # (B, K, T, E).
    value: torch.Tensor  # (B, K, T, E).
    causal: bool  # Query i sees keys 0 to i (S = T); otherwise all of them.


@dataclass(frozen=True, kw_only=True)
class Attended:
    """Attention to the keys of one block, or the sum over several blocks."""

    out: torch.Tensor  # (B, H, S, E).
    log_sum: torch.Tensor  # (B, H, S) in fp32: logarithm of the sum of the exponentials of a query's scores.
    rest: tuple[Any, ...] = ()  # Further data that the kernel's backward needs, of any block.


class AttentionKernel(ABC):
    """Softmax attention of one block, scores scaled by 1 / sqrt(E), with the data for a sum over blocks."""

    grouped: ClassVar[bool] = False  # Whether it accepts fewer heads of keys than of queries.

    @abstractmethod
    def takes(self, block: AttentionBlock) -> bool:
        """Return whether it supports this dtype and these shapes."""

    @abstractmethod
    def forward(self, block: AttentionBlock) -> Attended:
        """Return the attention to the keys of the block."""

    @abstractmethod
    def backward(
        self, gradient: torch.Tensor, block: AttentionBlock, whole: Attended
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the block's share of the gradients of query, key and value.  ``whole`` is the attention of the block's
        queries to all keys, ``gradient`` that of its output.
        """


def attention_kernels(device: str) -> Mapping[str, AttentionKernel]:
    """Return the kernels of torch's device type ``device``, the best first; none if its family has none."""
    if device not in family_names():
        return {}
    place = family_class(device).attention
    return cast(Mapping[str, AttentionKernel], import_object(place)()) if place else {}
