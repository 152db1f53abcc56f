"""Checks of workloads of one kernel: dimensions, support by torch on the device, and the result of a product.

A product is compared with fp64 in some rows element by element, and in all rows through a random vector.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from perfsuite.base.errors import InvalidParameter, UnsupportedCase, WrongResult, first_line

if TYPE_CHECKING:
    import torch


def require_counts(case: object, *names: str) -> None:
    """Raise InvalidParameter unless these fields of a case are whole numbers from 1."""
    for name in names:
        if type(value := getattr(case, name)) is not int or value < 1:
            raise InvalidParameter(f"{name}={value!r} is not valid; choose a whole number from 1")


def require_choices(case: object, **choices: Iterable[str]) -> None:
    """Raise InvalidParameter unless each of these fields of a case has one of its ``choices``."""
    for name, legal in choices.items():
        if (value := getattr(case, name)) not in legal:
            raise InvalidParameter(f"{name}={value!r} is unknown; choose from {', '.join(legal)}")


def require_kernel(name: str, device: torch.device, call: Callable[[], object]) -> None:
    """Raise UnsupportedCase, with torch's reason, unless ``call`` succeeds.  Out of memory is raised unchanged.  So is
    an error after which the device does not answer: the kernel exists but is faulty, and the process cannot run another
    case.
    """
    import torch

    try:
        call()
        if not _answers(device):
            call()  # later calls report a fault
    except torch.OutOfMemoryError:
        raise
    except (NotImplementedError, RuntimeError, TypeError, AttributeError, ValueError) as error:
        if not _answers(device):
            raise
        raise UnsupportedCase(
            f"torch {torch.__version__} has no {name} on {device.type}: {first_line(error)}"
        ) from None


def _answers(device: torch.device) -> bool:
    """Return whether this process can still use the device; it cannot after a fault of a kernel."""
    import torch

    try:
        if device.type != "cpu":
            torch.get_device_module(device).synchronize()
    except RuntimeError:
        return False
    return True


# Relative error of one rounding: half the distance between neighbouring numbers at 1. tf32 keeps 10 bits of each
# factor; hardware may cut bits off instead of rounding, which doubles the error.
ROUNDING: Mapping[str, float] = MappingProxyType(
    {"fp64": 2.0**-53, "fp32": 2.0**-24, "tf32": 2.0**-10, "bf16": 2.0**-8, "fp16": 2.0**-11}
)
"""Rounding by dtype of floating-point products."""
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
    """Raise WrongResult unless ``out`` is ``a`` of m x k times ``b`` of k x n, all three on any device.  16 rows are
    compared element by element with an fp64 product, and all rows through out x = a (b x) with a random x of +-1.  int8
    must be equal.

    Otherwise a and b are standard normal, so an element of out is of the order of sqrt(k). The allowed error is 4 u
    (|c| + sqrt(k)) with u = rounding of the dtype + sqrt(k) x rounding of the accumulator.  If each of k partial sums
    is rounded, one standard deviation is u k / sqrt(6).  So the limit is about ten standard deviations of a right
    kernel.  A kernel of the next lower precision errs by at least 4 times more, and a skipped product by about 1: many
    of the thousands of compared elements show it.  ``parts``: number of added products, each of which is rounded.
    ``accumulator``: rounding of an accumulator narrower than fp32; ``dtype`` is then that of the output.
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
    """Return an upper bound of one standard deviation of the relative error of product and reference."""
    if dtype == "int8":
        return 0.0  # integers up to 2**53 and their sums are exact in fp64
    accumulator = accumulator or ROUNDING["fp64" if dtype == "fp64" else "fp32"]
    reference = (math.sqrt(k) + math.sqrt(n)) * ROUNDING["fp64"]
    return parts * ROUNDING[dtype] + math.sqrt(k) * accumulator + reference


def _compare(
    name: str, owner: object, rows: torch.Tensor, exact: torch.Tensor, got: torch.Tensor, *, unit: float, scale: float
) -> None:
    excess = (got - exact).abs() - 4 * unit * (exact.abs() + scale)
    wrong = ~(excess <= 0)  # a NaN is wrong too
    if bool(wrong.any()):
        row, column = wrong.nonzero()[0].tolist()
        raise WrongResult(
            f"{name}[{int(rows[row])}, {column}] of {owner} ({int(wrong.sum())} elements beyond rounding)",
            expected=float(exact[row, column]),
            got=float(got[row, column]),
        )
