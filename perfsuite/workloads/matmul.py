"""Dense matrix products: the arithmetic rate of one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from perfsuite.base.errors import InvalidParameter
from perfsuite.base.mesh import MeshShape
from perfsuite.record.result import Work
from perfsuite.record.workload import Rank, Step
from perfsuite.workloads.checks import ROUNDING, NativeWorkload, require_counts, require_kernel, require_product

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class MatrixProduct(NativeWorkload):
    """Base of products of A of m x k by B of k x n into C."""

    m: int  # Rows of A and C.
    k: int  # Columns of A, rows of B.
    n: int  # Columns of B and C.

    metrics: ClassVar[tuple[str, ...]] = ("tflops",)
    captured: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_counts(self, "m", "k", "n")

    def work(self, shape: MeshShape) -> Work:
        """Return 2mkn operations per rank: mkn products and as many additions."""
        return Work(flops={"exact": 2.0 * self.m * self.k * self.n * shape.world_size}, dtype=self.native_dtype())


class ProductStep(Step):
    """A, B and C of one rank, and the function that multiplies them."""

    def __init__(
        self, rank: Rank, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, multiply: Callable[..., object]
    ) -> None:
        """``multiply`` takes A, B and the keyword ``out``."""
        self._rank, self.a, self.b, self.out, self._multiply = rank, a, b, out, multiply
        self.refill()

    def run(self) -> None:
        """Compute one product."""
        self._multiply(self.a, self.b, out=self.out)

    def refill(self) -> None:
        """Fill A and B from their seeds, and C with a value that no product has."""
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
    """C = A B into a preallocated C.  int8 needs B column by column, the layout that cuBLAS always supports."""

    dtype: str = "fp32"  # fp64, fp32, tf32, bf16, fp16, or int8 (C is then int32).

    def __post_init__(self) -> None:
        super().__post_init__()
        choices = (*ROUNDING, "int8")
        if self.dtype not in choices:
            raise InvalidParameter(f"dtype={self.dtype!r} has no matrix product here; choose from {', '.join(choices)}")
        if self.dtype == "int8" and (self.m <= 16 or self.k % 8 or self.n % 8):
            raise InvalidParameter(
                f"int8 needs m > 16 and k, n divisible by 8 (tiles of integer matrix units); "
                f"m={self.m}, k={self.k}, n={self.n} breaks it; choose larger or divisible sizes"
            )

    def build(self, rank: Rank) -> ProductStep:
        """Return A, B and C on the device; raises UnsupportedCase if torch has no integer product for it."""
        import torch

        dtype, device, integer = rank.dtype(self.dtype), rank.device, self.dtype == "int8"
        if integer:
            require_int8(device)
        rows, columns = (self.n, self.k) if integer else (self.k, self.n)
        b = torch.empty(rows, columns, dtype=dtype, device=device)
        return ProductStep(
            rank,
            torch.empty(self.m, self.k, dtype=dtype, device=device),
            b.t() if integer else b,
            torch.empty(self.m, self.n, dtype=torch.int32 if integer else dtype, device=device),
            torch._int_mm if integer else torch.mm,
        )

    def check(self, rank: Rank, step: Step) -> None:
        """Raise WrongResult unless C is A B."""
        assert isinstance(step, ProductStep)
        require_product("C", self, step.a, step.b, step.out, dtype=self.dtype)


@dataclass(frozen=True, kw_only=True)
class Soak(Matmul):
    """The product of :class:`Matmul`, timed so long that thermal or power throttling shows."""

    seconds: float  # Seconds of timing, unless ``--perf-sustain`` sets another time.

    metrics: ClassVar[tuple[str, ...]] = ("tflops", "last_minute_percent")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (isinstance(self.seconds, (int, float)) and 0 < self.seconds < 1e6):
            raise InvalidParameter(f"seconds={self.seconds!r} is not a time; choose for example 300.0")

    def sustained_s(self) -> float:
        """Return the seconds of timing."""
        return self.seconds


def require_int8(device: torch.device) -> None:
    """Raise UnsupportedCase, with torch's reason, unless torch has an integer product for ``device``."""
    import torch

    probe = torch.ones(32, 32, dtype=torch.int8, device=device)
    require_kernel("integer matrix product (torch._int_mm)", device, lambda: torch._int_mm(probe, probe.t()))
