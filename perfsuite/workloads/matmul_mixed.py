"""Matrix products of mixed width: fp8 factors with scales, and 16-bit factors with fp32 results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from perfsuite.base.errors import InvalidParameter
from perfsuite.record.workload import Rank, Step
from perfsuite.workloads.checks import require_choices, require_kernel, require_product
from perfsuite.workloads.matmul import MatrixProduct, ProductStep

if TYPE_CHECKING:
    import torch

Scaling = Literal["tensor", "row"]

_LARGEST_E4M3 = 448.0
_E4M3_TILE = 16  # k and n are multiples of this (a rule of cuBLASLt and torch for fp8)
_NARROW_ACCUMULATOR = 2.0**-13
"""Hopper's matrix units keep about 14 bits of a sum of fp8 products (DeepSeek-V3, arXiv 2412.19437, section 3.3.2)."""

_CUT_ACCUMULATOR = 2.0**-22
"""Matrix units cut sums of 16-bit products instead of rounding them; a result rounded to 16 bits differs far more."""


@dataclass(frozen=True, kw_only=True)
class ScaledMatmul(MatrixProduct):
    """C = (s_A A) (s_B B) in bf16; A of m x k and B of k x n, column by column, in fp8 (e4m3); fp32 scales s."""

    scaling: Scaling = "tensor"  # tensor: one scale per factor; row: one per row of A and per column of B.

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k % _E4M3_TILE or self.n % _E4M3_TILE:
            raise InvalidParameter(
                f"fp8 needs k and n divisible by {_E4M3_TILE}; k={self.k}, n={self.n} breaks it; choose multiples"
            )
        require_choices(self, scaling=get_args(Scaling))

    def native_dtype(self) -> str:
        """Return fp8; scaling is not counted."""
        return "fp8"

    def build(self, rank: Rank) -> _ScaledStep:
        """Return factors and scales on the device; raises UnsupportedCase if torch cannot multiply them there."""
        import torch

        rank.dtype("bf16")  # turns TF32 off
        ones = torch.ones(1, 1, device=rank.device)
        probe = torch.ones(32, 32, device=rank.device).to(torch.float8_e4m3fn)
        scales = (ones, ones) if self.scaling == "tensor" else (ones.expand(32, 1).clone(), ones.expand(1, 32).clone())
        require_kernel(
            f"fp8 product scaled by {self.scaling} (torch._scaled_mm)",
            rank.device,
            lambda: scaled_product(probe, probe.t(), *scales),
        )
        return _ScaledStep(self, rank)

    def check(self, rank: Rank, step: Step) -> None:
        """Raise WrongResult unless C is the product of the scaled factors."""
        assert isinstance(step, _ScaledStep)
        a, b = (step.a.float() * step.scale_a, step.b.float() * step.scale_b)
        require_product("C", self, a, b, step.out, dtype="bf16", accumulator=_NARROW_ACCUMULATOR)


class _ScaledStep(Step):
    """Factors, scales and product of one rank."""

    def __init__(self, workload: ScaledMatmul, rank: Rank) -> None:
        import torch

        self._rank, self._workload = rank, workload
        self.a = self.b = self.scale_a = self.scale_b = self.out = torch.empty(0)
        self.refill()

    def run(self) -> None:
        self.out = scaled_product(self.a, self.b, self.scale_a, self.scale_b)

    def refill(self) -> None:
        """Fill the factors with normal numbers, scaled so that the largest of each scale is 448; clear the product."""
        import torch

        case, generator = self._workload, self._rank.generator(1)
        self.out = torch.full((1, 1), float("nan"), device=self._rank.device)
        whole = case.scaling == "tensor"
        self.a, self.scale_a = _quantised(case.m, case.k, generator, whole=whole)
        b, scale_b = _quantised(case.n, case.k, generator, whole=whole)
        self.b, self.scale_b = b.t(), scale_b.t()

    def close(self) -> None:
        del self.a, self.b, self.scale_a, self.scale_b, self.out


def scaled_product(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor) -> torch.Tensor:
    """Return the product in bf16, with the fast accumulation of a training step's forward in fp8."""
    import torch

    product = torch._scaled_mm
    return product(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16, use_fast_accum=True)


def _quantised(
    rows: int, columns: int, generator: torch.Generator, *, whole: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rows x columns in e4m3, scale of 1 x 1 or rows x 1); their product is about standard normal."""
    import torch

    exact = torch.empty(rows, columns, device=generator.device).normal_(generator=generator)
    largest = exact.abs().amax().view(1, 1) if whole else exact.abs().amax(dim=1, keepdim=True)
    scale = largest / _LARGEST_E4M3
    return (exact / scale).to(torch.float8_e4m3fn), scale


@dataclass(frozen=True, kw_only=True)
class WideMatmul(MatrixProduct):
    """C = A B with A of m x k and B of k x n in 16 bits, and C in fp32, like summed gradients."""

    dtype: Literal["bf16", "fp16"] = "bf16"  # dtype of the factors.

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype not in ("bf16", "fp16"):
            raise InvalidParameter(f"dtype={self.dtype!r} is not narrower than its result in fp32; choose bf16 or fp16")

    def build(self, rank: Rank) -> ProductStep:
        """Return A, B and C on the device; raises UnsupportedCase if torch has no such product there."""
        import torch

        device, dtype = rank.device, rank.dtype(self.dtype)
        probe = torch.ones(32, 32, dtype=dtype, device=device)
        name = f"product of {self.dtype} with a result in fp32 (torch.mm(..., out_dtype=))"
        require_kernel(name, device, lambda: wide_product(probe, probe, torch.empty(32, 32, device=device)))
        sizes = ((self.m, self.k), (self.k, self.n))
        a, b = (torch.empty(rows, columns, dtype=dtype, device=device) for rows, columns in sizes)
        return ProductStep(rank, a, b, torch.empty(self.m, self.n, device=device), wide_product)

    def check(self, rank: Rank, step: Step) -> None:
        """Raise WrongResult unless C is A B and not rounded to 16 bits."""
        assert isinstance(step, ProductStep)
        require_product("C", self, step.a, step.b, step.out, dtype="fp32", accumulator=_CUT_ACCUMULATOR)


def wide_product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """Write A B into an fp32 ``out``."""
    import torch

    torch.mm(a, b, out_dtype=torch.float32, out=out)
