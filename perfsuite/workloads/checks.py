"""Bases and checks of workloads: parameters, support by torch on the device, products, and buffers with a closed form.

A product is compared with fp64 in some rows element by element, and in all rows through a random vector.

Each element of a buffer is a small whole number that depends on its place and its rank.  Small whole numbers are exact
in every dtype from int8 to bf16.  So are their sums in any order up to 127, so results are compared for equality.
Values repeat after a prime number of places, so a buffer shifted or reordered in blocks is always found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perfsuite.base.errors import InvalidParameter, UnsupportedCase, WrongResult, first_line, nearest_multiples
from perfsuite.record.workload import Rank, Workload

if TYPE_CHECKING:
    import torch


class NativeWorkload(Workload):
    """Base of workloads whose device must compute in the dtype of the case itself."""

    dtype: str

    def native_dtype(self) -> str:
        """Return the dtype of the case."""
        return self.dtype


class MeshWorkload(Workload):
    """Base of workloads that a mesh of the case spreads."""

    mesh: str

    def layout(self) -> str:
        """Return the mesh."""
        return self.mesh


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


def require_multiple(case: object, name: str, unit: int, meaning: str) -> None:
    """Raise InvalidParameter unless this field of a case is a positive number of bytes, a multiple of ``unit``."""
    value = getattr(case, name)
    if not isinstance(value, int):
        raise InvalidParameter(f"{name}={value!r} is not a whole number of bytes; give an int")
    if value < unit or value % unit:
        raise InvalidParameter(
            f"{name}={value} is not a positive multiple of {unit} ({meaning}); "
            f"choose {nearest_multiples(max(0, value), unit)}"
        )


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
ROUNDING: Mapping[str, float] = {
    "fp64": 2.0**-53,
    "fp32": 2.0**-24,
    "tf32": 2.0**-10,
    "bf16": 2.0**-8,
    "fp16": 2.0**-11,
}
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
    """Raise WrongResult unless ``out`` is ``a`` of m x k times ``b`` of k x n, all three on any device. 16 rows are
    compared element by element with an fp64 product, and all rows through out x = a (b x) with a random x of +-1. int8
    must be equal.  Otherwise a and b are standard normal, so an element of out is of the order of sqrt(k). The allowed
    error is 4 u (|c| + sqrt(k)) with u = rounding of the dtype + sqrt(k) x rounding of the accumulator. If each of k
    partial sums is rounded, one standard deviation is u k / sqrt(6). So the limit is about ten standard deviations of a
    right kernel. A kernel of the next lower precision errs by at least 4 times more, and a skipped product by about 1:
    many of the thousands of compared elements show it. ``parts``: number of added products, each of which is rounded.
    ``accumulator``: rounding of an accumulator narrower than fp32; ``dtype`` is then that of the output.
    """
    import torch

    a, b, out = (matrix.cpu().double() for matrix in (a, b, out))
    (m, k), n = a.shape, b.shape[1]
    unit = 0.0  # integers up to 2**53 and their sums are exact in fp64
    if dtype != "int8":  # an upper bound of one standard deviation of the relative error of product and reference
        summed = math.sqrt(k) * (accumulator or ROUNDING["fp64" if dtype == "fp64" else "fp32"])
        unit = parts * ROUNDING[dtype] + summed + (math.sqrt(k) + math.sqrt(n)) * ROUNDING["fp64"]
    rows = torch.linspace(0, m - 1, min(m, _CHECKED_ROWS)).long()
    _compare(name, owner, rows, a[rows] @ b, out[rows], unit=unit, scale=math.sqrt(k))
    signs = torch.randint(0, 2, (n, 1), generator=torch.Generator().manual_seed(7)).double() * 2 - 1
    _compare(f"{name} x", owner, torch.arange(m), a @ (b @ signs), out @ signs, unit=unit, scale=math.sqrt(k * n))


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


PRIME = 113
_LARGEST_SUM = 127
_CHUNK_ELEMENTS = 1 << 24  # Elements per comparison, which allocates one byte per element


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """The inputs of all ranks of one case.

    >>> Pattern(world_size=2, summed=False).values(rank=1)[:4]
    [2, 4, 6, 8]
    >>> pattern = Pattern(world_size=2, summed=True)
    >>> [a + b for a, b in zip(pattern.values(rank=0), pattern.values(rank=1))] == pattern.totals()
    True
    """

    world_size: int
    summed: bool  # Whether the ranks' values are summed, so that all sums have to be exact

    @property
    def stride(self) -> int:
        """Every ``stride``-th rank adds to an element of a sum; above 127 ranks the others have zeros there."""
        return -(-self.world_size // _LARGEST_SUM) if self.summed else 1

    @property
    def period(self) -> int:
        """Places after which the values repeat."""
        return PRIME * self.stride

    def value(self, rank: int, index: int) -> int:
        """Return the input of ``rank`` at place ``index``, at least 0."""
        if (rank + index) % self.stride:
            return 0
        mixed = ((index + 1) * (rank % (PRIME - 1) + 1) + 31 * (rank // (PRIME - 1))) % PRIME
        contributors = -(-self.world_size // self.stride)
        return mixed % (_LARGEST_SUM // contributors + 1) if self.summed else mixed

    def values(self, *, rank: int, start: int = 0) -> list[int]:
        """Return one period of the inputs of ``rank`` from place ``start`` on."""
        return [self.value(rank, index) for index in range(start, start + self.period)]

    def totals(self, *, start: int = 0) -> list[int]:
        """Return one period of the sum over all ranks from place ``start`` on, at most 127 each."""
        return [
            sum(self.value(rank, index) for rank in range(self.world_size))
            for index in range(start, start + self.period)
        ]


def fill(buffer: torch.Tensor, values: Sequence[int]) -> None:
    """Write ``values`` into the flat ``buffer`` over and over."""
    import torch

    cycle = torch.tensor(values, dtype=buffer.dtype, device=buffer.device)
    whole = buffer.numel() // len(values) * len(values)
    buffer[:whole].view(-1, len(values)).copy_(cycle)
    buffer[whole:].copy_(cycle[: buffer.numel() - whole])


def poison(buffer: torch.Tensor) -> None:
    """Fill with a value that neither a pattern nor a sum has, so that an unwritten output is wrong."""
    import torch

    buffer.fill_(255 if buffer.dtype == torch.uint8 else -1)


def difference(buffer: torch.Tensor, values: Sequence[int]) -> tuple[int, float, float, int] | None:
    """Return the first element of the flat ``buffer`` that differs from repeated ``values``: index, expected and actual
    value, and the number of such elements; None if all are equal.
    """
    import torch

    cycle = torch.tensor(values, dtype=buffer.dtype, device=buffer.device)
    step = max(1, _CHUNK_ELEMENTS // len(values)) * len(values)
    first, wrong = -1, 0
    for start in range(0, buffer.numel(), step):
        part = buffer[start : start + step]
        repeats = -(-part.numel() // len(values))
        unequal = part != cycle.repeat(repeats)[: part.numel()]
        count = int(unequal.sum())
        if count and first < 0:
            first = start + int(unequal.to(torch.uint8).argmax())
        wrong += count
    return (first, values[first % len(values)], float(buffer[first]), wrong) if wrong else None


def texts_of_all(rank: Rank, text: str) -> list[str]:
    """Return the ``text`` of every rank, as bytes without pickle, in rank order; a collective."""
    import torch
    import torch.distributed as dist

    def exchange(own: torch.Tensor) -> list[list[int]]:
        everyone = [torch.empty_like(own) for _ in range(rank.world_size)]
        dist.all_gather(everyone, own, group=rank.group())
        return [row.tolist() for row in everyone]

    data = text.encode(errors="replace")
    lengths = [length for (length,) in exchange(torch.tensor([len(data)], device=rank.device))]
    padded = list(data.ljust(max(lengths), b"\0"))
    parts = exchange(torch.tensor(padded, dtype=torch.uint8, device=rank.device)) if padded else [[]] * rank.world_size
    return [bytes(part[:length]).decode() for part, length in zip(parts, lengths, strict=True)]


def raise_alike(rank: Rank, problem: str) -> None:
    """Raise WrongResult on every rank if any of them found a ``problem``, so that none waits for one that left."""
    for who, text in enumerate(texts_of_all(rank, problem)):
        if text:
            raise WrongResult(f"{text} (found by rank {who})")
