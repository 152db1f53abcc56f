"""Products and an all-reduce at the same time: the hidden part of a message, and the slowdown of both.

Three cases belong together: both at once, only the products, only the message.  The hidden share of the shorter one is
(products + message - both) / shorter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from perfsuite.base.mesh import MeshShape
from perfsuite.record.result import Work
from perfsuite.record.workload import Rank, Step, Workload
from perfsuite.workloads.checks import require_choices, require_counts
from perfsuite.workloads.collective import AllReduce
from perfsuite.workloads.collective_base import CollectiveStep
from perfsuite.workloads.matmul import Matmul

if TYPE_CHECKING:
    import torch.distributed as dist

Part = Literal["both", "products", "message"]


@dataclass(frozen=True, kw_only=True)
class MatmulBesideAllReduce(Workload):
    """``products`` products of side x side during the sum of one message over all ranks."""

    side: int  # Rows and columns of the matrices.
    products: int  # Number of products, one after the other.
    message_bytes: int  # Size of the all-reduce on each rank.
    part: Part = "both"  # Run both, or only one of them.
    dtype: str = "bf16"  # dtype of both.

    def __post_init__(self) -> None:
        require_choices(self, part=get_args(Part))
        require_counts(self, "products")
        _ = self.product, self.message  # these check their sizes

    @property
    def product(self) -> Matmul:
        """One of the products."""
        return Matmul(m=self.side, k=self.side, n=self.side, dtype=self.dtype)

    @property
    def message(self) -> AllReduce:
        """The message."""
        return AllReduce(message_bytes=self.message_bytes, dtype=self.dtype)

    def native_dtype(self) -> str:
        """Return the dtype of the products; emulated ones would hide any message."""
        return "" if self.part == "message" else self.dtype

    def work(self, shape: MeshShape) -> Work:
        """Return no operations: the result is a time."""
        self.message.require_ranks(shape.world_size)
        return Work(dtype=self.dtype)

    def build(self, rank: Rank) -> _ContentionStep:
        """Return matrices and buffers of this rank."""
        return _ContentionStep(self, rank)

    def check(self, rank: Rank, step: Step) -> None:
        """Raise WrongResult unless product and sum are right."""
        assert isinstance(step, _ContentionStep)
        if step.matrices is not None:
            self.product.check(rank, step.matrices)
        if step.message is not None:
            self.message.check(rank, step.message)


class _ContentionStep(Step):
    """One rank's products and message."""

    def __init__(self, workload: MatmulBesideAllReduce, rank: Rank) -> None:
        self._products = workload.products
        self.matrices = None if workload.part == "message" else workload.product.build(rank)
        self.message = None if workload.part == "products" else CollectiveStep(workload.message, rank)

    def run(self) -> None:
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
        for part in (self.matrices, self.message):
            if part is not None:
                part.refill()

    def close(self) -> None:
        for part in (self.matrices, self.message):
            if part is not None:
                part.close()
