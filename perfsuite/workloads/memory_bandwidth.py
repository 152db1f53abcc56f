"""Memory bandwidth: copy and triad on the device, as STREAM counts them, and copies between host and device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from perfsuite.base.errors import UnsupportedCase, WrongResult
from perfsuite.base.mesh import MeshShape
from perfsuite.base.units import format_bytes
from perfsuite.record.result import Work
from perfsuite.record.workload import Rank, Step, Workload, Yardstick
from perfsuite.workloads.checks import PRIME, Pattern, difference, fill, poison, require_choices, require_multiple

if TYPE_CHECKING:
    import torch

Direction = Literal["host_to_device", "device_to_host"]

_ITEM_BYTES = 4  # Buffers are fp32: the width of the elements does not change a streaming kernel's bandwidth
_TRIAD_SCALAR = 3
# Values of rank 1 are a permutation of rank 0's, so the inputs differ nearly everywhere.
_PATTERN = Pattern(world_size=2, summed=False)


@dataclass(frozen=True, kw_only=True)
class _Streaming(Workload):
    """Base of the bandwidth workloads: the size of a buffer and the check of the target."""

    buffer_bytes: int  # Size S of each buffer; a multiple of 4.

    metrics: ClassVar[tuple[str, ...]] = ("gb_per_s",)
    captured: ClassVar[bool] = True
    yardstick: ClassVar[Yardstick] = "memory"

    def __post_init__(self) -> None:
        require_multiple(self, "buffer_bytes", _ITEM_BYTES, "fp32 elements")

    def expected(self) -> Sequence[int]:
        """Return one period of the target's expected values: by default the first source."""
        return _PATTERN.values(rank=0)

    def check(self, rank: Rank, step: Step) -> None:
        """Raise WrongResult unless every element of the target is right."""
        assert isinstance(step, StreamingStep)
        if found := difference(step.target, self.expected()):
            index, expected, got, count = found
            text = f"{type(self).__name__} of {format_bytes(self.buffer_bytes)}, element {index} ({count} are wrong)"
            raise WrongResult(text, expected=expected, got=got)


class MemoryCopy(_Streaming):
    """target = source in device memory: S bytes read, S written."""

    def work(self, shape: MeshShape) -> Work:
        """Return 2S bytes per rank."""
        moved = 2.0 * self.buffer_bytes
        return Work(bytes_moved=moved, memory_path="device", footprint_bytes=moved)

    def build(self, rank: Rank) -> StreamingStep:
        """Return two buffers on the device."""
        source, target = _buffers(2, self.buffer_bytes, rank.device)
        return StreamingStep(lambda: target.copy_(source), target, (source,))


class MemoryTriad(_Streaming):
    """target = b + 3 c in device memory: 2S bytes read, S written."""

    def work(self, shape: MeshShape) -> Work:
        """Return 3S bytes per rank: 2 reads and 1 write."""
        moved = 3.0 * self.buffer_bytes
        return Work(bytes_moved=moved, memory_path="device", footprint_bytes=moved)

    def expected(self) -> Sequence[int]:
        """Return b + 3 c, at most 448 and so exact in fp32."""
        b, c = (_PATTERN.values(rank=rank) for rank in (0, 1))
        return [b[index] + _TRIAD_SCALAR * c[index] for index in range(PRIME)]

    def build(self, rank: Rank) -> StreamingStep:
        """Return three buffers on the device."""
        import torch

        b, c, target = _buffers(3, self.buffer_bytes, rank.device)
        return StreamingStep(lambda: torch.add(b, c, alpha=_TRIAD_SCALAR, out=target), target, (b, c))


@dataclass(frozen=True, kw_only=True)
class HostDeviceCopy(_Streaming):
    """A copy of S bytes over the link between host and device, in one direction."""

    captured: ClassVar[bool] = False
    direction: Direction = "host_to_device"
    pinned: bool = True  # Whether the host's buffer is page-locked, so that the device reads it without a staging copy.

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choices(self, direction=get_args(Direction))

    def work(self, shape: MeshShape) -> Work:
        """Return S bytes per rank, counted once."""
        return Work(bytes_moved=float(self.buffer_bytes), memory_path=self.direction)

    def build(self, rank: Rank) -> StreamingStep:
        """Return one buffer on each side; raises UnsupportedCase if host and device share their memory."""
        if rank.device.type == "cpu":
            raise UnsupportedCase("cpu has no separate device memory, so it has no link to copy over")
        return self.between(rank.device)

    def between(self, device: torch.device) -> StreamingStep:
        """Return the step over the link to ``device``."""
        import torch

        (on_device,) = _buffers(1, self.buffer_bytes, device)
        (on_host,) = _buffers(1, self.buffer_bytes, torch.device("cpu"))
        if self.pinned:
            on_host = on_host.pin_memory()
        source, target = (on_host, on_device) if self.direction == "host_to_device" else (on_device, on_host)
        # A pinned copy is queued and timed by device events; an unpinned one blocks.
        return StreamingStep(lambda: target.copy_(source, non_blocking=self.pinned), target, (source,))


class StreamingStep(Step):
    """A kernel over flat buffers."""

    def __init__(self, kernel: Callable[[], object], target: torch.Tensor, sources: tuple[torch.Tensor, ...]) -> None:
        self._kernel, self.target, self.sources = kernel, target, sources
        self.refill()

    def run(self) -> None:
        """Run the kernel once."""
        self._kernel()

    def refill(self) -> None:
        """Fill the sources with their patterns, and the target with a value that no source has."""
        for rank, source in enumerate(self.sources):
            fill(source, _PATTERN.values(rank=rank))
        poison(self.target)

    def close(self) -> None:
        """Free the buffers."""
        del self._kernel, self.target, self.sources


def _buffers(count: int, buffer_bytes: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    import torch

    elements = buffer_bytes // _ITEM_BYTES
    return tuple(torch.empty(elements, dtype=torch.float32, device=device) for _ in range(count))
