"""Scaled dot product attention: one kernel, forward or backward, by the backend that is to compute it.

Shapes: B batch, H heads of queries, K heads of keys (K divides H), S tokens, E features of a head.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from perfsuite.base.errors import InvalidParameter, UnsupportedCase, first_line
from perfsuite.base.mesh import MeshShape
from perfsuite.record.result import Work
from perfsuite.record.workload import Rank, Step, Workload, Yardstick
from perfsuite.workloads.kernels import require_dimensions
from perfsuite.workloads.product import ROUNDING

if TYPE_CHECKING:
    import torch

Backend = Literal["flash", "efficient", "math", "cudnn"]
Direction = Literal["forward", "backward"]

CONVENTION = "FlashAttention"
_BACKENDS = {
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "math": "MATH",
    "cudnn": "CUDNN_ATTENTION",
}
_NO_KERNEL = ("No available kernel", "No viable backend", "requires", "not supported", "does not support")


@dataclass(frozen=True, kw_only=True)
class Attention(Workload):
    """``scaled_dot_product_attention`` of one layer, in the layout (B, H, S, E)."""

    batch_size: int
    """B."""
    heads: int
    """H, of the queries."""
    kv_heads: int
    """K, of keys and values; H / K queries share each (grouped query attention), H for none."""
    sequence_length: int
    """S."""
    head_width: int
    """E."""
    dtype: str = "bf16"
    """fp32, bf16 or fp16."""
    causal: bool = True
    """A token sees itself and those before it."""
    backend: Backend = "flash"
    """The kernel; the case is skipped where the device has it not for these shapes."""
    direction: Direction = "forward"
    """``backward``: the three gradients alone, from the output of one forward."""

    metrics: ClassVar[tuple[str, ...]] = ("tflops",)
    captured: ClassVar[bool] = True
    yardstick: ClassVar[Yardstick] = "compute"

    def __post_init__(self) -> None:
        require_dimensions(
            batch_size=self.batch_size,
            heads=self.heads,
            kv_heads=self.kv_heads,
            sequence_length=self.sequence_length,
            head_width=self.head_width,
        )
        if self.heads % self.kv_heads:
            legal = [count for count in range(1, self.heads + 1) if not self.heads % count]
            raise InvalidParameter(f"kv_heads={self.kv_heads} does not divide heads={self.heads}; choose from {legal}")
        choices = (("backend", get_args(Backend)), ("direction", get_args(Direction)))
        for name, known in (*choices, ("dtype", ("fp32", "bf16", "fp16"))):
            if getattr(self, name) not in known:
                raise InvalidParameter(f"{name}={getattr(self, name)!r} is unknown; choose from {', '.join(known)}")

    def native_dtype(self) -> str:
        """The device must compute in it."""
        return self.dtype

    def work(self, shape: MeshShape) -> Work:
        """FlashAttention's convention: 4 B H S^2 E forward, half of it where causal, and 2.5 times that backward.

        Two products forward; five backward, the scores again among them, whether or not the backend computes them
        again.  Source: benchmarks/benchmark_flash_attention.py of Dao-AILab/flash-attention.

        >>> shape = MeshShape.of(dp=1)
        >>> sizes = dict(batch_size=2, heads=4, kv_heads=2, sequence_length=8, head_width=16)
        >>> [Attention(**sizes, direction=way).work(shape).flops for way in ("forward", "backward")]
        [{'FlashAttention': 16384.0}, {'FlashAttention': 40960.0}]
        """
        pairs = self.batch_size * self.heads * self.sequence_length**2 / (2 if self.causal else 1)
        products = 10.0 if self.direction == "backward" else 4.0
        return Work(flops={CONVENTION: products * pairs * self.head_width * shape.world_size}, dtype=self.dtype)

    def build(self, rank: Rank) -> AttentionStep:
        """Queries, keys and values on the device.  Raises UnsupportedCase where the backend has no kernel for them."""
        return AttentionStep(self, rank)

    def check(self, rank: Rank, step: Step) -> None:
        """Raise WrongResult unless output or gradients are right; see :mod:`perfsuite.workloads.attention_check`."""
        from perfsuite.workloads import attention_check

        assert isinstance(step, AttentionStep)
        if self.direction == "forward":
            attention_check.check_output(self, step)
        else:
            attention_check.check_gradients(self, step)

    @property
    def rounding(self) -> float:
        """Relative error of one rounding in this dtype."""
        return ROUNDING[self.dtype]


class AttentionStep(Step):
    """Inputs and results of one rank."""

    def __init__(self, workload: Attention, rank: Rank) -> None:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        case, dtype = workload, rank.dtype(workload.dtype)
        self._case, self._rank = case, rank
        self._chosen = contextlib.ExitStack()
        tail = (case.sequence_length, case.head_width)
        wide, narrow = (case.batch_size, case.heads, *tail), (case.batch_size, case.kv_heads, *tail)
        self.query, self.key, self.value, self.upstream = (
            torch.empty(shape, dtype=dtype, device=rank.device) for shape in (wide, narrow, narrow, wide)
        )
        self.out = self.upstream
        self.gradients: tuple[torch.Tensor, ...] = ()
        # Chosen once for all iterations: the switch is the process's, and setting it would be timed.
        self._chosen.enter_context(sdpa_kernel(getattr(SDPBackend, _BACKENDS[case.backend])))
        try:
            self.refill()
            self.run()
        except RuntimeError as error:
            self._chosen.close()
            if isinstance(error, torch.OutOfMemoryError) or not any(word in str(error) for word in _NO_KERNEL):
                raise
            group = (
                f", {case.heads // case.kv_heads} heads of queries on one of keys" if case.heads > case.kv_heads else ""
            )
            raise UnsupportedCase(
                f"attention has no {case.backend} kernel on {rank.device.type} for {case.dtype}, heads of "
                f"{case.head_width}{group}: {first_line(error)}"
            ) from None

    def _attend(self) -> Any:
        from torch.nn import functional

        attend: Any = functional.scaled_dot_product_attention
        grouped = {"enable_gqa": True} if self._case.heads > self._case.kv_heads else {}
        return attend(self.query, self.key, self.value, is_causal=self._case.causal, **grouped)

    def run(self) -> None:
        """One forward, or one backward from the kept output."""
        import torch

        if self._case.direction == "forward":
            with torch.no_grad():
                self.out = self._attend()
        else:
            inputs = (self.query, self.key, self.value)
            self.gradients = torch.autograd.grad(self.out, inputs, self.upstream, retain_graph=True)

    def refill(self) -> None:
        """Normal numbers from their seeds, results to what no attention gives; before a backward, one forward."""
        generator = self._rank.generator(1)
        for tensor in (self.query, self.key, self.value, self.upstream):
            tensor.requires_grad_(False).normal_(generator=generator)
        self.gradients = ()
        self.out = self.upstream
        if self._case.direction == "backward":
            for tensor in (self.query, self.key, self.value):
                tensor.requires_grad_()
            self.out = self._attend()

    def close(self) -> None:
        """Free everything and let every backend compute again."""
        self._chosen.close()
        del self.query, self.key, self.value, self.upstream, self.out, self.gradients
