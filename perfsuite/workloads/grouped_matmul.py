"""Grouped products: every expert multiplies its own rows, in one kernel or in one product after another."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from perfsuite.base.errors import InvalidParameter
from perfsuite.base.mesh import MeshShape
from perfsuite.record.result import Work
from perfsuite.record.workload import Rank, Step
from perfsuite.workloads.checks import NativeWorkload, require_choices, require_counts, require_kernel, require_product
from perfsuite.workloads.matmul import ProductStep

if TYPE_CHECKING:
    import torch

Way = Literal["grouped", "loop"]


@dataclass(frozen=True, kw_only=True)
class GroupedMatmul(NativeWorkload):
    """C_g = A_g B_g for every group g: A_g has its share of ``rows`` rows and k columns, B_g is k x n."""

    groups: int  # Number of experts.
    rows: int  # Rows of all groups: tokens times experts of a token.
    k: int  # Columns of A.
    n: int  # Columns of C.
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"  # dtype of factors and result.
    way: Way = "grouped"  # grouped: ``torch._grouped_mm``; loop: one product after another.
    skew: float = 1.0  # Rows of the busiest group over the mean; the other groups share the rest evenly.

    metrics: ClassVar[tuple[str, ...]] = ("tflops",)
    captured: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_counts(self, "groups", "rows", "k", "n")
        require_choices(self, way=get_args(Way), dtype=("bf16", "fp16", "fp32"))
        if not 1 <= self.skew <= self.groups:
            raise InvalidParameter(f"skew={self.skew!r} is not from 1 to groups={self.groups}; choose between them")

    def shares(self) -> list[int]:
        """Return the rows of each group, ``rows`` in all.

        >>> GroupedMatmul(groups=4, rows=10, k=8, n=8, skew=2.0).shares()
        [5, 1, 2, 2]
        """
        busiest = min(self.rows, round(self.rows * self.skew / self.groups))
        bounds = [(self.rows - busiest) * place // max(1, self.groups - 1) for place in range(self.groups)]
        return [busiest, *(end - start for start, end in pairwise(bounds))]

    def work(self, shape: MeshShape) -> Work:
        """Return 2 rows k n operations per rank, for any shares."""
        return Work(flops={"exact": 2.0 * self.rows * self.k * self.n * shape.world_size}, dtype=self.dtype)

    def build(self, rank: Rank) -> _GroupedStep:
        """Return factors on the device; raises UnsupportedCase if torch has no grouped product there."""
        import torch

        dtype = rank.dtype(self.dtype)
        if self.way == "grouped":
            a, b = (torch.ones(*shape, dtype=dtype, device=rank.device) for shape in ((32, 32), (2, 32, 32)))
            ends = torch.tensor([16, 32], dtype=torch.int32, device=rank.device)
            name = f"grouped product of {self.dtype} (torch._grouped_mm)"
            require_kernel(name, rank.device, lambda: torch._grouped_mm(a, b, offs=ends))
        return _GroupedStep(self, rank)

    def check(self, rank: Rank, step: Step) -> None:
        """Raise WrongResult unless every group's part of C is its product."""
        assert isinstance(step, _GroupedStep)
        for group, (start, end) in enumerate(pairwise(step.bounds)):
            if end > start:
                rows = slice(start, end)
                require_product(f"C_{group}", self, step.a[rows], step.b[group], step.out[rows], dtype=self.dtype)


class _GroupedStep(ProductStep):
    """Factors and product of one rank."""

    def __init__(self, workload: GroupedMatmul, rank: Rank) -> None:
        import torch

        self.bounds = [0, *accumulate(workload.shares())]
        ends = torch.tensor(self.bounds[1:], dtype=torch.int32, device=rank.device)
        sizes = ((workload.rows, workload.k), (workload.groups, workload.k, workload.n), (workload.rows, workload.n))
        a, b, out = (torch.empty(size, dtype=rank.dtype(workload.dtype), device=rank.device) for size in sizes)

        def grouped(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
            self.out = torch._grouped_mm(a, b, offs=ends)

        def loop(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
            for group, (start, end) in enumerate(pairwise(self.bounds)):
                torch.mm(a[start:end], b[group], out=out[start:end])

        super().__init__(rank, a, b, out, grouped if workload.way == "grouped" else loop)
