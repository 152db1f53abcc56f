"""The plan of a training step, without torch."""

from __future__ import annotations

from dataclasses import dataclass

from perfsuite.models.base import AttentionMethod, Checkpointing, Model


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Model, batch and precision of a training step; the same for every strategy."""

    model: Model
    dtype: str  # fp32, tf32, or bf16 or fp16: the dtype of products under autocast.
    micro_batch_size: int  # Samples of one forward on one rank.
    accumulation: int = 1  # Micro-batches whose gradients are summed before the optimizer steps.
    checkpointing: Checkpointing = "none"
    attention: AttentionMethod = "auto"
    compiled: bool = False  # torch.compile on every block.
    learning_rate: float = 1e-4
    clip: float | None = None  # Largest L2 norm of all gradients together; None: gradients are not clipped.
    loss_scale: float | None = None  # Fixed loss scale in fp16; None: a dynamic one.
    seed: int = 0  # Initial values depend only on it and on the parameters' names.

    @property
    def half(self) -> bool:
        """Whether matrix products run in a dtype narrower than the parameters."""
        return self.dtype in ("bf16", "fp16")

    @property
    def batch_size(self) -> int:
        """Samples of one replica per step: LBS x GAS."""
        return self.micro_batch_size * self.accumulation
