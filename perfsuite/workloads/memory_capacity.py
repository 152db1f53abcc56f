"""Device memory that one process can allocate: blocks are allocated until there is no more memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from perfsuite.base.errors import InvalidParameter, UnsupportedCase, WrongResult
from perfsuite.base.mesh import MeshShape
from perfsuite.base.units import MIB, format_bytes, gib
from perfsuite.record.result import Work
from perfsuite.record.workload import Rank, Step, Workload, Yardstick
from perfsuite.workloads.checks import require_multiple

if TYPE_CHECKING:
    import torch

_ITEM_BYTES = 4
_SPARE_BLOCKS = 1  # Blocks that are freed before timing, as the check needs memory too


@dataclass(frozen=True, kw_only=True)
class MemoryCapacity(Workload):
    """All available memory in blocks of one size; one iteration writes all of it."""

    block_bytes: int = 256 * MIB  # Size of a block; the capacity is found to within one block.
    limit_bytes: int | None = None  # Largest size to allocate; required on a CPU, whose memory all programs share.

    metrics: ClassVar[tuple[str, ...]] = ("capacity_gib",)
    yardstick: ClassVar[Yardstick] = "memory"
    fills_memory: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_multiple(self, "block_bytes", _ITEM_BYTES, "fp32 elements")
        if self.limit_bytes is not None and self.limit_bytes < 2 * self.block_bytes:
            raise InvalidParameter(
                f"limit_bytes={self.limit_bytes} is less than two blocks of {self.block_bytes}; give more"
            )

    def work(self, shape: MeshShape) -> Work:
        """Return no operations: the size is found on the device."""
        return Work()

    def build(self, rank: Rank) -> _CapacityStep:
        """Return blocks of all free memory; raises UnsupportedCase on a CPU without a limit."""
        if rank.device.type == "cpu" and self.limit_bytes is None:
            raise UnsupportedCase("all programs share the memory of a CPU, so it needs a limit; give limit_bytes")
        return _CapacityStep(self, rank)

    def check(self, rank: Rank, step: Step) -> None:
        """Raise WrongResult unless every block holds its own number at both ends; blocks that share memory do not."""
        assert isinstance(step, _CapacityStep)
        for place, block in enumerate(step.blocks):
            for end in (0, -1):
                if (got := block[end].item()) != place + 1:
                    text = f"block {place} of {len(step.blocks)} of {format_bytes(self.block_bytes)}"
                    raise WrongResult(text, expected=float(place + 1), got=got)


class _CapacityStep(Step):
    """All blocks of one rank."""

    def __init__(self, workload: MemoryCapacity, rank: Rank) -> None:
        import torch

        size, limit = workload.block_bytes, workload.limit_bytes
        self.blocks: list[torch.Tensor] = []
        # The buffers of the yardstick, 0.5 GiB on an accelerator, count as available.
        held = 0 if rank.device.type == "cpu" else int(torch.get_device_module(rank.device).memory_allocated())
        while limit is None or (len(self.blocks) + 1) * size <= limit:
            try:
                self.blocks.append(torch.empty(size // _ITEM_BYTES, device=rank.device))
            except RuntimeError as error:
                if not isinstance(error, torch.OutOfMemoryError) and "out of memory" not in str(error).lower():
                    raise
                break
        rank.record("capacity_gib", gib(len(self.blocks) * size + held), unit="GiB", reduce="max")
        del self.blocks[len(self.blocks) - _SPARE_BLOCKS :]
        self.refill()

    def run(self) -> None:
        for place, block in enumerate(self.blocks):
            block.fill_(place + 1)

    def refill(self) -> None:
        for block in self.blocks:
            block.zero_()

    def close(self) -> None:
        self.blocks.clear()
