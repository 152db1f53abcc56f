"""Products beside an all-reduce: how much of a message hides behind work, and how much both slow each other down.

Three cases belong together: both at once, the products alone, the message alone.  Of the shorter of the two so much
is hidden: (products + message - both) / shorter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from perfsuite.base.errors import InvalidParameter
from perfsuite.base.mesh import MeshShape
from perfsuite.record.result import Work
from perfsuite.record.workload import Rank, Step, Workload, Yardstick
from perfsuite.workloads.collective import AllReduce
from perfsuite.workloads.collective_base import CollectiveStep
from perfsuite.workloads.matmul import Matmul, MatmulStep

if TYPE_CHECKING:
    import torch.distributed as dist

Part = Literal["both", "products", "message"]


@dataclass(frozen=True, kw_only=True)
class MatmulBesideAllReduce(Workload):
    """``products`` products of side x side while one message is summed over all ranks."""

    side: int
    """Rows and columns of the matrices."""
    products: int
    """One after the other."""
    message_bytes: int
    """Of the all-reduce, on each rank."""
    part: Part = "both"
    """What of it runs."""
    dtype: str = "bf16"
    """Of both."""

    metrics: ClassVar[tuple[str, ...]] = ("latency_us",)
    yardstick: ClassVar[Yardstick] = "compute"

    def __post_init__(self) -> None:
        if self.part not in get_args(Part):
            raise InvalidParameter(f"part={self.part!r} is unknown; choose {', '.join(get_args(Part))}")
        if not isinstance(self.products, int) or self.products < 1:
            raise InvalidParameter(f"products={self.products!r} is not a count; choose a whole number from 1")
        _ = self.product, self.message  # they check their sizes

    @property
    def product(self) -> Matmul:
        """One of the products."""
        return Matmul(m=self.side, k=self.side, n=self.side, dtype=self.dtype)

    @property
    def message(self) -> AllReduce:
        """The message."""
        return AllReduce(message_bytes=self.message_bytes, dtype=self.dtype)

    def native_dtype(self) -> str:
        """Emulated products would hide any message."""
        return "" if self.part == "message" else self.dtype

    def work(self, shape: MeshShape) -> Work:
        """No rate of its own: what is told is time."""
        self.message.require_ranks(shape.world_size)
        return Work(dtype=self.dtype)

    def build(self, rank: Rank) -> Beside:
        """Matrices and buffers of this rank."""
        return Beside(self, rank)

    def check(self, rank: Rank, step: Step) -> None:
        """Raise WrongResult unless product and sum are right."""
        assert isinstance(step, Beside)
        if step.matrices is not None:
            self.product.check(rank, step.matrices)
        if step.message is not None:
            self.message.check(rank, step.message)


class Beside(Step):
    """One rank's products and its message."""

    def __init__(self, workload: MatmulBesideAllReduce, rank: Rank) -> None:
        self._products = workload.products
        self.matrices = None if workload.part == "message" else MatmulStep(workload.product, rank)
        self.message = None if workload.part == "products" else CollectiveStep(workload.message, rank)

    def run(self) -> None:
        """Post the message, multiply, wait for the message."""
        import torch.distributed as dist

        sent: dist.Work | None = None
        if self.message is not None:
            end = self.message.end
            sent = dist.all_reduce(end.source, group=end.group, async_op=True)
        if self.matrices is not None:
            for _ in range(self._products):
                self.matrices.run()
        if sent is not None:
            sent.wait()

    def refill(self) -> None:
        """Both to their patterns."""
        for part in (self.matrices, self.message):
            if part is not None:
                part.refill()

    def close(self) -> None:
        """Free everything."""
        for part in (self.matrices, self.message):
            if part is not None:
                part.close()
