"""Dense matrix products: the arithmetic rate of one device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from perfsuite.errors import InvalidParameter, UnsupportedCase, WrongResult
from perfsuite.mesh import MeshShape
from perfsuite.records import Work
from perfsuite.workload import Rank, Step, Workload, Yardstick

if TYPE_CHECKING:
    import torch

# Half the distance between neighbouring numbers at 1: the relative error of one rounding.  tf32 keeps 10 bits of each
# factor, and hardware may cut them off instead of rounding, which doubles the error.
_ROUNDING = {"fp64": 2.0**-53, "fp32": 2.0**-24, "tf32": 2.0**-10, "bf16": 2.0**-8, "fp16": 2.0**-11}
_CHECKED_ROWS = 16


@dataclass(frozen=True, kw_only=True)
class Matmul(Workload):
    """C = A B with A of m x k and B of k x n, into a preallocated C."""

    m: int
    """Rows of A and C."""
    k: int
    """Columns of A, rows of B."""
    n: int
    """Columns of B and C."""
    dtype: str = "fp32"
    """fp64, fp32, tf32, bf16, fp16, or int8 (C is then int32)."""

    metrics: ClassVar[tuple[str, ...]] = ("tflops",)
    yardstick: ClassVar[Yardstick] = "compute"

    def __post_init__(self) -> None:
        for name, value in (("m", self.m), ("k", self.k), ("n", self.n)):
            if not isinstance(value, int) or value < 1:
                raise InvalidParameter(f"{name}={value!r} is not a matrix dimension; choose a whole number from 1 on")
        choices = (*_ROUNDING, "int8")
        if self.dtype not in choices:
            raise InvalidParameter(f"dtype={self.dtype!r} has no matrix product here; choose from {', '.join(choices)}")
        if self.dtype == "int8" and (self.m <= 16 or self.k % 8 or self.n % 8):
            raise InvalidParameter(
                f"int8 needs m > 16 and k, n divisible by 8 (integer matrix units work on such tiles); "
                f"m={self.m}, k={self.k}, n={self.n} breaks it"
            )

    def native_dtype(self) -> str:
        """The device must multiply this dtype itself: emulated products say nothing about it."""
        return self.dtype

    def work(self, shape: MeshShape) -> Work:
        """2mkn operations on each rank: mkn products and as many additions."""
        return Work(flops={"exact": 2.0 * self.m * self.k * self.n * shape.world_size}, dtype=self.dtype)

    def build(self, rank: Rank) -> MatmulStep:
        """A, B and C on the device.  Raises UnsupportedCase where torch has no integer product for it."""
        if self.dtype == "int8":
            require_int8(rank.device)
        return MatmulStep(self, rank)

    def check(self, rank: Rank, step: Step) -> None:
        """Raise WrongResult unless C is A B.

        16 whole rows are compared element by element with a product in fp64, and all rows through C x = A (B x) with a
        random x of +-1.  int8 must be equal.  Otherwise A and B are standard normal, so an element of C is of the order
        of sqrt(k), and the error allowed is 4 u (|c| + sqrt(k)) with u = rounding of the dtype + sqrt(k) x rounding of
        the accumulator (when each of k partial sums is rounded, one standard deviation is u k / sqrt(6)).  That is
        about ten standard deviations of a right kernel.  A kernel of the next lower precision errs by at least 4 times
        more and a skipped product by about 1: of the thousands of elements that are looked at, many show it.
        """
        import torch

        assert isinstance(step, MatmulStep)
        a, b, out = (matrix.cpu().double() for matrix in (step.a, step.b, step.out))
        rows = torch.linspace(0, self.m - 1, min(self.m, _CHECKED_ROWS)).long()
        self._compare("C", rows, a[rows] @ b, out[rows], scale=math.sqrt(self.k))
        signs = torch.randint(0, 2, (self.n, 1), generator=torch.Generator().manual_seed(7)).double() * 2 - 1
        every = torch.arange(self.m)
        self._compare("C x", every, a @ (b @ signs), out @ signs, scale=math.sqrt(self.k * self.n))

    def _unit(self) -> float:
        """Relative error of one standard deviation, at most, of an element of C and of the reference."""
        if self.dtype == "int8":
            return 0.0  # integers up to 2**53 are exact in fp64, and so are all sums here
        accumulator = _ROUNDING["fp64" if self.dtype == "fp64" else "fp32"]
        reference = (math.sqrt(self.k) + math.sqrt(self.n)) * _ROUNDING["fp64"]
        return _ROUNDING[self.dtype] + math.sqrt(self.k) * accumulator + reference

    def _compare(self, what: str, rows: torch.Tensor, exact: torch.Tensor, got: torch.Tensor, *, scale: float) -> None:
        excess = (got - exact).abs() - 4 * self._unit() * (exact.abs() + scale)
        wrong = ~(excess <= 0)  # written so that a NaN is wrong
        if bool(wrong.any()):
            row, column = wrong.nonzero()[0].tolist()
            raise WrongResult(
                f"{what}[{int(rows[row])}, {column}] of {self} ({int(wrong.sum())} elements beyond rounding)",
                expected=float(exact[row, column]),
                got=float(got[row, column]),
            )


class MatmulStep(Step):
    """A, B and C of one rank."""

    def __init__(self, workload: Matmul, rank: Rank) -> None:
        import torch

        self._rank, self._workload = rank, workload
        dtype = rank.dtype(workload.dtype)
        integer = workload.dtype == "int8"
        self._multiply = torch._int_mm if integer else torch.mm
        self.a = torch.empty(workload.m, workload.k, dtype=dtype, device=rank.device)
        self.b = torch.empty(workload.k, workload.n, dtype=dtype, device=rank.device)
        self.out = torch.empty(workload.m, workload.n, dtype=torch.int32 if integer else dtype, device=rank.device)
        self.refill()

    def run(self) -> None:
        """One product."""
        self._multiply(self.a, self.b, out=self.out)

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


def require_int8(device: torch.device) -> None:
    """Raise UnsupportedCase unless torch has an integer product for ``device``, naming what is missing."""
    import torch

    if not hasattr(torch, "_int_mm"):
        raise UnsupportedCase(f"torch {torch.__version__} has no integer matrix product (torch._int_mm)")
    probe = torch.ones(32, 32, dtype=torch.int8, device=device)
    try:
        torch._int_mm(probe, probe)
    except (NotImplementedError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise UnsupportedCase(
            f"torch has no integer matrix product (torch._int_mm) on {device.type}: {reason}"
        ) from None
