"""What workloads of one kernel ask: are these dimensions, has torch the kernel on this device, is a product right.

A product is checked by some rows element by element against fp64, and by all rows through a random vector.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from perfsuite.base.errors import InvalidParameter, UnsupportedCase, WrongResult, first_line

if TYPE_CHECKING:
    import torch


def require_dimensions(**dimensions: int) -> None:
    """Raise InvalidParameter, which names it, for what is no dimension of a tensor."""
    for name, value in dimensions.items():
        if type(value) is not int or value < 1:
            raise InvalidParameter(f"{name}={value!r} is not a matrix dimension; choose a whole number from 1 on")


def require_kernel(what: str, device: torch.device, call: Callable[[], object]) -> None:
    """Raise UnsupportedCase, with torch's reason, unless ``call`` succeeds.

    Running out of memory stays what it is, and so does an error after which the device answers no more: what a kernel
    does wrong is no lack of one, and its process is of no use to the next case.
    """
    import torch

    try:
        call()
        if not _answers(device):
            call()  # a fault is told by whatever comes after it
    except torch.OutOfMemoryError:
        raise
    except (NotImplementedError, RuntimeError, TypeError, AttributeError, ValueError) as error:
        if not _answers(device):
            raise
        raise UnsupportedCase(
            f"torch {torch.__version__} has no {what} on {device.type}: {first_line(error)}"
        ) from None


def _answers(device: torch.device) -> bool:
    """Whether the device is still there for this process, as it is not after a fault of a kernel."""
    import torch

    try:
        if device.type != "cpu":
            torch.get_device_module(device).synchronize()
    except RuntimeError:
        return False
    return True


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
