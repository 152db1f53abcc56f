"""How much device memory one process can have: blocks are taken until there is no more, and each holds what it got."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from perfsuite.base.errors import InvalidParameter, UnsupportedCase, WrongResult
from perfsuite.base.mesh import MeshShape
from perfsuite.base.units import MIB, format_bytes, gib
from perfsuite.record.result import Work
from perfsuite.record.workload import Rank, Step, Workload, Yardstick

if TYPE_CHECKING:
    import torch

_ITEM_BYTES = 4
_SPARE_BLOCKS = 1
"""Given back before anything is timed: checking takes memory too."""


@dataclass(frozen=True, kw_only=True)
class MemoryCapacity(Workload):
    """All memory that can be had in blocks of one size; one iteration writes all of it."""

    block_bytes: int = 256 * MIB
    """Size of a block: the capacity is known to within one."""
    limit_bytes: int | None = None
    """Never take more; needed on a CPU, whose memory is everybody's."""

    metrics: ClassVar[tuple[str, ...]] = ("capacity_gib",)
    yardstick: ClassVar[Yardstick] = "memory"
    fills_memory: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.block_bytes < _ITEM_BYTES or self.block_bytes % _ITEM_BYTES:
            raise InvalidParameter(
                f"block_bytes={self.block_bytes} is no positive multiple of {_ITEM_BYTES} (fp32); choose e.g. 256 MiB"
            )
        if self.limit_bytes is not None and self.limit_bytes < 2 * self.block_bytes:
            raise InvalidParameter(
                f"limit_bytes={self.limit_bytes} is less than two blocks of {self.block_bytes}; give more"
            )

    def work(self, shape: MeshShape) -> Work:
        """How much is found out on the device: nothing to count before."""
        return Work()

    def build(self, rank: Rank) -> CapacityStep:
        """Blocks until there is no memory left.  Raises UnsupportedCase on a CPU without a limit."""
        if rank.device.type == "cpu" and self.limit_bytes is None:
            raise UnsupportedCase("the memory of a CPU is everybody's: nobody takes all of it; give limit_bytes")
        return CapacityStep(self, rank)

    def check(self, rank: Rank, step: Step) -> None:
        """Raise WrongResult unless every block holds its own number at both ends: two that share memory would not."""
        assert isinstance(step, CapacityStep)
        for place, block in enumerate(step.blocks):
            for end in (0, -1):
                if (got := block[end].item()) != place + 1:
                    text = f"block {place} of {len(step.blocks)} of {format_bytes(self.block_bytes)}"
                    raise WrongResult(text, expected=float(place + 1), got=got)


class CapacityStep(Step):
    """All blocks of one rank."""

    def __init__(self, workload: MemoryCapacity, rank: Rank) -> None:
        import torch

        size, limit = workload.block_bytes, workload.limit_bytes
        self.blocks: list[torch.Tensor] = []
        # The buffers of the yardstick, 0.5 GiB on an accelerator, are memory that the process could have.
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
        """Write every block."""
        for place, block in enumerate(self.blocks):
            block.fill_(place + 1)

    def refill(self) -> None:
        """No block's number anywhere."""
        for block in self.blocks:
            block.zero_()

    def close(self) -> None:
        """Give everything back."""
        self.blocks.clear()
