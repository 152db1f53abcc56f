"""Is a matrix product right: some rows element by element against fp64, and all rows through a random vector."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from perfsuite.base.errors import WrongResult

if TYPE_CHECKING:
    import torch

# Half the distance between neighbouring numbers at 1: the relative error of one rounding.  tf32 keeps 10 bits of each
# factor, and hardware may cut them off instead of rounding, which doubles the error.
ROUNDING: Mapping[str, float] = MappingProxyType(
    {"fp64": 2.0**-53, "fp32": 2.0**-24, "tf32": 2.0**-10, "bf16": 2.0**-8, "fp16": 2.0**-11}
)
"""By dtype that has products of floating-point numbers."""
_CHECKED_ROWS = 16


def require_product(
    name: str,
    owner: object,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    *,
    dtype: str,
    parts: int = 1,
    accumulator: float | None = None,
) -> None:
    """Raise WrongResult unless ``out`` is ``a`` of m x k times ``b`` of k x n, all three on any device.

    16 whole rows are compared element by element with a product in fp64, and all rows through out x = a (b x) with a
    random x of +-1.  int8 must be equal.  Otherwise a and b are standard normal, so an element of out is of the order
    of sqrt(k), and the error allowed is 4 u (|c| + sqrt(k)) with u = rounding of the dtype + sqrt(k) x rounding of
    the accumulator (when each of k partial sums is rounded, one standard deviation is u k / sqrt(6)).  That is
    about ten standard deviations of a right kernel.  A kernel of the next lower precision errs by at least 4 times
    more and a skipped product by about 1: of the thousands of elements that are looked at, many show it.
    Where ``parts`` products were added up, each is rounded, and so is each of their sums.  ``accumulator`` is the
    rounding of one that is narrower than fp32; ``dtype`` is then that of the output.
    """
    import torch

    a, b, out = (matrix.cpu().double() for matrix in (a, b, out))
    (m, k), n = a.shape, b.shape[1]
    unit = _unit(dtype, k, n, parts, accumulator)
    rows = torch.linspace(0, m - 1, min(m, _CHECKED_ROWS)).long()
    _compare(name, owner, rows, a[rows] @ b, out[rows], unit=unit, scale=math.sqrt(k))
    signs = torch.randint(0, 2, (n, 1), generator=torch.Generator().manual_seed(7)).double() * 2 - 1
    _compare(f"{name} x", owner, torch.arange(m), a @ (b @ signs), out @ signs, unit=unit, scale=math.sqrt(k * n))


def _unit(dtype: str, k: int, n: int, parts: int, accumulator: float | None) -> float:
    """Relative error of one standard deviation, at most, of an element of the product and of the reference."""
    if dtype == "int8":
        return 0.0  # integers up to 2**53 are exact in fp64, and so are all sums here
    accumulator = accumulator or ROUNDING["fp64" if dtype == "fp64" else "fp32"]
    reference = (math.sqrt(k) + math.sqrt(n)) * ROUNDING["fp64"]
    return parts * ROUNDING[dtype] + math.sqrt(k) * accumulator + reference


def _compare(
    what: str, owner: object, rows: torch.Tensor, exact: torch.Tensor, got: torch.Tensor, *, unit: float, scale: float
) -> None:
    excess = (got - exact).abs() - 4 * unit * (exact.abs() + scale)
    wrong = ~(excess <= 0)  # written so that a NaN is wrong
    if bool(wrong.any()):
        row, column = wrong.nonzero()[0].tolist()
        raise WrongResult(
            f"{what}[{int(rows[row])}, {column}] of {owner} ({int(wrong.sum())} elements beyond rounding)",
            expected=float(exact[row, column]),
            got=float(got[row, column]),
        )
