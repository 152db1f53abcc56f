"""Interface of a device's attention kernel, for attention computed block by block of its keys.

Shapes: B batch, H heads of queries, K heads of keys (K divides H), S queries, T keys, E features of a head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from perfsuite.platforms.detection import family_class, family_names, import_object

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class AttentionBlock:
    """Some queries, and some of the keys that they see."""

    query: torch.Tensor  # (B, H, S, E).
    key: torch.Tensor  # (B, K, T, E).
    value: torch.Tensor  # (B, K, T, E).
    causal: bool  # Query i sees keys 0 to i (S = T); otherwise all of them.


@dataclass(frozen=True, kw_only=True)
class Attended:
    """Attention to the keys of one block, or the sum over several blocks."""

    out: torch.Tensor  # (B, H, S, E).
    log_sum: torch.Tensor  # (B, H, S) in fp32: logarithm of the sum of the exponentials of a query's scores.
    rest: tuple[Any, ...] = ()  # Further data that the kernel's backward needs, of any block.


class AttentionKernel(ABC):
    """Softmax attention of one block, scores scaled by 1 / sqrt(E), with the data for a sum over blocks."""

    grouped: ClassVar[bool] = False  # Whether it accepts fewer heads of keys than of queries.

    @abstractmethod
    def takes(self, block: AttentionBlock) -> bool:
        """Return whether it supports this dtype and these shapes."""

    @abstractmethod
    def forward(self, block: AttentionBlock) -> Attended:
        """Return the attention to the keys of the block."""

    @abstractmethod
    def backward(
        self, gradient: torch.Tensor, block: AttentionBlock, whole: Attended
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the block's share of the gradients of query, key and value.  ``whole`` is the attention of the block's
        queries to all keys, ``gradient`` that of its output.
        """


def attention_kernels(device: str) -> Mapping[str, AttentionKernel]:
    """Return the kernels of torch's device type ``device``, the best first; none if its family has none."""
    if device not in family_names():
        return {}
    place = family_class(device).attention
    kernels: Mapping[str, AttentionKernel] = import_object(place)() if place else {}
    return kernels
