"""Grouped products: every expert multiplies its own rows, in one kernel or in one product after the other."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import ClassVar, Literal, get_args

from perfsuite.base.errors import InvalidParameter
from perfsuite.base.mesh import MeshShape
from perfsuite.record.result import Work
from perfsuite.record.workload import Rank, Step, Workload, Yardstick
from perfsuite.workloads.kernels import require_dimensions, require_kernel, require_product
from perfsuite.workloads.matmul import ProductStep

Way = Literal["grouped", "loop"]


@dataclass(frozen=True, kw_only=True)
class GroupedMatmul(Workload):
    """C_g = A_g B_g for every group g: A_g has its share of ``rows`` rows and k columns, B_g is k x n."""

    groups: int
    """Experts."""
    rows: int
    """Of all groups together: tokens times experts of a token."""
    k: int
    """Columns of A."""
    n: int
    """Columns of C."""
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Of factors and result."""
    way: Way = "grouped"
    """``torch._grouped_mm``, or a loop of products."""
    skew: float = 1.0
    """Rows of the busiest group over the mean; the other groups share the rest evenly."""

    metrics: ClassVar[tuple[str, ...]] = ("tflops",)
    captured: ClassVar[bool] = True
    yardstick: ClassVar[Yardstick] = "compute"

    def __post_init__(self) -> None:
        require_dimensions(groups=self.groups, rows=self.rows, k=self.k, n=self.n)
        for name, known in (("way", get_args(Way)), ("dtype", ("bf16", "fp16", "fp32"))):
            if getattr(self, name) not in known:
                raise InvalidParameter(f"{name}={getattr(self, name)!r} is unknown; choose from {', '.join(known)}")
        if not 1 <= self.skew <= self.groups:
            raise InvalidParameter(f"skew={self.skew!r} is not from 1 to groups={self.groups}; choose between them")

    def native_dtype(self) -> str:
        """The device must multiply it itself."""
        return self.dtype

    def shares(self) -> list[int]:
        """Rows of each group, ``rows`` in all.

        >>> GroupedMatmul(groups=4, rows=10, k=8, n=8, skew=2.0).shares()
        [5, 1, 2, 2]
        """
        busiest = min(self.rows, round(self.rows * self.skew / self.groups))
        bounds = [(self.rows - busiest) * place // max(1, self.groups - 1) for place in range(self.groups)]
        return [busiest, *(end - start for start, end in pairwise(bounds))]

    def work(self, shape: MeshShape) -> Work:
        """2 rows k n operations on each rank, however the rows are shared."""
        return Work(flops={"exact": 2.0 * self.rows * self.k * self.n * shape.world_size}, dtype=self.dtype)

    def build(self, rank: Rank) -> GroupedStep:
        """Factors on the device.  Raises UnsupportedCase where torch has no grouped product there."""
        import torch

        dtype = rank.dtype(self.dtype)
        if self.way == "grouped":
            a, b = (torch.ones(*shape, dtype=dtype, device=rank.device) for shape in ((32, 32), (2, 32, 32)))
            ends = torch.tensor([16, 32], dtype=torch.int32, device=rank.device)
            what = f"grouped product of {self.dtype} (torch._grouped_mm)"
            require_kernel(what, rank.device, lambda: torch._grouped_mm(a, b, offs=ends))
        return GroupedStep(self, rank)

    def check(self, rank: Rank, step: Step) -> None:
        """Raise WrongResult unless every group's part of C is its product."""
        assert isinstance(step, GroupedStep)
        for group, (start, end) in enumerate(pairwise(step.bounds)):
            if end > start:
                rows = slice(start, end)
                require_product(f"C_{group}", self, step.a[rows], step.b[group], step.out[rows], dtype=self.dtype)


class GroupedStep(ProductStep):
    """Factors and product of one rank."""

    def __init__(self, workload: GroupedMatmul, rank: Rank) -> None:
        import torch

        super().__init__(rank)
        self._grouped = workload.way == "grouped"
        dtype = rank.dtype(workload.dtype)
        self.bounds = [0, *accumulate(workload.shares())]
        self._ends = torch.tensor(self.bounds[1:], dtype=torch.int32, device=rank.device)
        self.a = torch.empty(workload.rows, workload.k, dtype=dtype, device=rank.device)
        self.b = torch.empty(workload.groups, workload.k, workload.n, dtype=dtype, device=rank.device)
        self.out = torch.empty(workload.rows, workload.n, dtype=dtype, device=rank.device)
        self.refill()

    def run(self) -> None:
        """Every group once."""
        import torch

        if self._grouped:
            self.out = torch._grouped_mm(self.a, self.b, offs=self._ends)
            return
        for group, (start, end) in enumerate(pairwise(self.bounds)):
            torch.mm(self.a[start:end], self.b[group], out=self.out[start:end])
