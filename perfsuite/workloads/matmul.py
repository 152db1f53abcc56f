"""Dense matrix products: the arithmetic rate of one device."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from perfsuite.base.errors import InvalidParameter
from perfsuite.base.mesh import MeshShape
from perfsuite.record.result import Work
from perfsuite.record.workload import Rank, Step, Workload, Yardstick
from perfsuite.workloads.kernels import ROUNDING, require_dimensions, require_kernel, require_product

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class MatrixProduct(Workload):
    """Base of those that multiply A of m x k by B of k x n into C."""

    m: int
    """Rows of A and C."""
    k: int
    """Columns of A, rows of B."""
    n: int
    """Columns of B and C."""

    metrics: ClassVar[tuple[str, ...]] = ("tflops",)
    captured: ClassVar[bool] = True
    yardstick: ClassVar[Yardstick] = "compute"

    def __post_init__(self) -> None:
        require_dimensions(m=self.m, k=self.k, n=self.n)

    @abstractmethod
    def native_dtype(self) -> str:
        """The device must multiply this dtype itself: emulated products say nothing about it."""

    def work(self, shape: MeshShape) -> Work:
        """2mkn operations on each rank: mkn products and as many additions."""
        return Work(flops={"exact": 2.0 * self.m * self.k * self.n * shape.world_size}, dtype=self.native_dtype())


class ProductStep(Step):
    """A, B and C of one rank, made by the subclass."""

    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def refill(self) -> None:
        """A and B from their seeds, C to what no product gives."""
        generator = self._rank.generator(1)
        for matrix in (self.a, self.b):
            if matrix.dtype.is_floating_point:
                matrix.normal_(generator=generator)
            else:
                matrix.random_(-128, 128, generator=generator)
        self.out.fill_(float("nan") if self.out.dtype.is_floating_point else -(2**31))

    def close(self) -> None:
        """Free the matrices."""
        del self.a, self.b, self.out


@dataclass(frozen=True, kw_only=True)
class Matmul(MatrixProduct):
    """C = A B into a preallocated C.

    B lies row by row, for int8 column by column: the one layout that cuBLAS multiplies everywhere.
    """

    dtype: str = "fp32"
    """fp64, fp32, tf32, bf16, fp16, or int8 (C is then int32)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        choices = (*ROUNDING, "int8")
        if self.dtype not in choices:
            raise InvalidParameter(f"dtype={self.dtype!r} has no matrix product here; choose from {', '.join(choices)}")
        if self.dtype == "int8" and (self.m <= 16 or self.k % 8 or self.n % 8):
            raise InvalidParameter(
                f"int8 needs m > 16 and k, n divisible by 8 (integer matrix units work on such tiles); "
                f"m={self.m}, k={self.k}, n={self.n} breaks it"
            )

    def native_dtype(self) -> str:
        """That of A and B."""
        return self.dtype

    def build(self, rank: Rank) -> MatmulStep:
        """A, B and C on the device.  Raises UnsupportedCase where torch has no integer product for it."""
        if self.dtype == "int8":
            require_int8(rank.device)
        return MatmulStep(self, rank)

    def check(self, rank: Rank, step: Step) -> None:
        """Raise WrongResult unless C is A B."""
        assert isinstance(step, MatmulStep)
        require_product("C", self, step.a, step.b, step.out, dtype=self.dtype)


@dataclass(frozen=True, kw_only=True)
class Soak(Matmul):
    """The same product for so long that a device which cannot keep its speed shows it."""

    seconds: float
    """How long it is timed, unless ``--perf-sustain`` asks for another time."""

    metrics: ClassVar[tuple[str, ...]] = ("tflops", "last_minute_percent")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (isinstance(self.seconds, (int, float)) and 0 < self.seconds < 1e6):
            raise InvalidParameter(f"seconds={self.seconds!r} is not a time; choose for example 300.0")

    def sustained_s(self) -> float:
        """The time that was asked for."""
        return self.seconds


class MatmulStep(ProductStep):
    """A, B and C of one dtype, or C in int32."""

    def __init__(self, workload: Matmul, rank: Rank) -> None:
        import torch

        super().__init__(rank)
        dtype = rank.dtype(workload.dtype)
        integer = workload.dtype == "int8"
        self._multiply = torch._int_mm if integer else torch.mm
        self.a = torch.empty(workload.m, workload.k, dtype=dtype, device=rank.device)
        rows, columns = (workload.n, workload.k) if integer else (workload.k, workload.n)
        self.b = torch.empty(rows, columns, dtype=dtype, device=rank.device)
        self.b = self.b.t() if integer else self.b
        self.out = torch.empty(workload.m, workload.n, dtype=torch.int32 if integer else dtype, device=rank.device)
        self.refill()

    def run(self) -> None:
        """One product."""
        self._multiply(self.a, self.b, out=self.out)


def require_int8(device: torch.device) -> None:
    """Raise UnsupportedCase unless torch has an integer product for ``device``, naming what is missing."""
    import torch

    probe = torch.ones(32, 32, dtype=torch.int8, device=device)
    require_kernel("integer matrix product (torch._int_mm)", device, lambda: torch._int_mm(probe, probe.t()))
