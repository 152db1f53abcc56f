"""Sizes of LLaMA 2 and 3: rotary positions, RMS norms, SwiGLU, grouped queries, untied embeddings, no biases.

Sources: Touvron et al. 2023 (LLaMA 2), Grattafiori et al. 2024 (LLaMA 3) and the published configurations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from perfsuite.base.errors import InvalidParameter
from perfsuite.base.mesh import MeshShape
from perfsuite.models.base import require_sizes
from perfsuite.models.language import TRANSFORMER, GroupedModel, Split, multiple, twin_sizes


@dataclass(frozen=True, kw_only=True)
class Llama(GroupedModel):
    """A LLaMA configuration; the published context is 4096 tokens, that of LLaMA 3 8192.

    >>> Llama(name="llama2-7b", layers=32, width=4096, heads=32, kv_heads=32, hidden=11008).parameters
    6738415616
    """

    parallelize: ClassVar[Mapping[str, Split]] = MappingProxyType(
        {
            **TRANSFORMER,
            "tokens": "words",
            **dict.fromkeys((f"blocks.*.attention.{part}" for part in ("query", "key", "value")), "column"),
            **dict.fromkeys(("blocks.*.mlp.gate", "blocks.*.mlp.expand"), "column"),
            "output": "head",
        }
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = {"hidden": self.hidden, "words": self.words, "sequence_length": self.sequence_length}
        require_sizes(self.name, kv_heads=self.kv_heads, **sizes)
        self._require_kv_heads()
        if self.width // self.heads % 2:
            raise InvalidParameter(
                f"width={self.width} over heads={self.heads} of model {self.name} is odd; rotary positions turn pairs "
                "of features, so choose sizes with an even number of features per head"
            )

    @property
    def split_widths(self) -> Mapping[str, int]:
        """Features between the MLP's matrices."""
        return {"hidden": self.hidden}

    @property
    def _block_weights(self) -> int:
        """Numbers in the matrices of one block: 2 D^2 + 2 D K + 3 D F."""
        return self.width * (2 * self.width + 2 * self.key_width + 3 * self.hidden)

    @property
    def parameters(self) -> int:
        """Matrices and two gains in each block, embedding, output projection and the last gain."""
        return self.layers * (self._block_weights + 2 * self.width) + (2 * self.words + 1) * self.width

    @property
    def block_flops(self) -> float:
        """2 S per number in a matrix and 4 S^2 D for attention; grouped queries share keys but not scores."""
        tokens = self.sequence_length
        return self.layers * (2.0 * tokens * self._block_weights + 4.0 * tokens**2 * self.width)

    def twin(self, shape: MeshShape | None = None) -> Llama:
        """Return two blocks with heads of 12 features; pairs of heads share keys if the model's heads do."""
        heads, tokens, words = twin_sizes(shape)
        return dataclasses.replace(
            self,
            layers=2,
            width=12 * heads,
            heads=heads,
            kv_heads=heads if self.kv_heads == self.heads else heads // 2,
            hidden=multiple(shape.size("tp") if shape else 1, 80),
            words=words,
            sequence_length=tokens,
        )


_LLAMA3: Mapping[str, int] = MappingProxyType({"kv_heads": 8, "words": 128256, "sequence_length": 8192})

MODELS = (
    Llama(name="llama2-7b", layers=32, width=4096, heads=32, kv_heads=32, hidden=11008),
    Llama(name="llama2-13b", layers=40, width=5120, heads=40, kv_heads=40, hidden=13824),
    Llama(name="llama2-70b", layers=80, width=8192, heads=64, kv_heads=8, hidden=28672),
    Llama(name="llama3-8b", layers=32, width=4096, heads=32, hidden=14336, **_LLAMA3),
    Llama(name="llama3-70b", layers=80, width=8192, heads=64, hidden=28672, **_LLAMA3),
    Llama(name="llama3-405b", layers=126, width=16384, heads=128, hidden=53248, **_LLAMA3),
    Llama(name="llama2-tiny", layers=2, width=128, heads=4, kv_heads=2, hidden=344, words=512, sequence_length=64),
)
