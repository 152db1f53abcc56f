"""Sizes of GPT-2 and GPT-3: learned positions, layer norms before attention and MLP, tied embeddings.

Sources: GPT-2 (Radford et al. 2019), GPT-3 (Brown et al. 2020, table 2.1), OneFlow's published GPT benchmark (hidden
size x layers; 2048 tokens; vocabulary padded to a multiple of 128 times the ranks that share it).  The GPT-3 paper
prints a width of 5140 for 13B, which its 40 heads do not divide; the usual 5120 is used here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from perfsuite.base.errors import InvalidParameter
from perfsuite.base.mesh import MeshShape
from perfsuite.models.base import require_sizes
from perfsuite.models.language import TRANSFORMER, LanguageModel, Split, twin_sizes


@dataclass(frozen=True, kw_only=True)
class Gpt(LanguageModel):
    """A GPT configuration.

    >>> Gpt(name="gpt2", layers=12, width=768, heads=12).parameters
    124439808
    """

    words: int = 50257
    words_multiple: int = 1
    """The token embedding, which is also the output projection, is padded to a multiple of this many rows (V)."""
    context: int = 1024
    """Number of learned positions."""
    sequence_length: int = 0
    """Tokens of a sample (S), at most ``context``; 0: as many as ``context``."""

    parallelize: ClassVar[Mapping[str, Split]] = MappingProxyType(
        {
            **TRANSFORMER,
            **{"tokens": "tied", "positions": "positions"},
            **dict.fromkeys(("blocks.*.attention.qkv", "blocks.*.mlp.expand"), "column"),
        }
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_sizes(self.name, words=self.words, words_multiple=self.words_multiple, context=self.context)
        if not isinstance(self.sequence_length, int) or not 0 <= self.sequence_length <= self.context:
            raise InvalidParameter(
                f"sequence_length={self.sequence_length!r} does not fit context={self.context} of model {self.name}; "
                f"choose 1 to {self.context}, or 0 for all of it"
            )

    @property
    def tokens_per_sample(self) -> int:
        """S."""
        return self.sequence_length or self.context

    @property
    def vocabulary(self) -> int:
        """V."""
        return math.ceil(self.words / self.words_multiple) * self.words_multiple

    def padding(self, tp: int) -> Mapping[str, int]:
        """Return the override with which :meth:`padded` makes ``tp`` divide the words; empty if it does already."""
        return {"words_multiple": 128} if self.padded(tp).vocabulary % tp else {}

    def padded(self, parts: int) -> Gpt:
        """Return the configuration with ``parts`` times the multiple of a padded vocabulary, so that ``parts`` divides
        it.

        >>> gpt = next(gpt for gpt in MODELS if gpt.name == "gpt-1536x16")
        >>> [gpt.padded(parts).vocabulary for parts in (1, 2, 4, 8, 16, 32)]
        [50304, 50432, 50688, 51200, 51200, 53248]
        """
        multiple = self.words_multiple
        return dataclasses.replace(self, words_multiple=multiple * parts) if multiple > 1 else self

    @property
    def parameters(self) -> int:
        """12 D^2 + 13 D in each block, the embeddings, and the last norm's 2 D."""
        block = 12 * self.width**2 + 13 * self.width
        return self.layers * block + (self.vocabulary + self.context + 2) * self.width

    @property
    def block_flops(self) -> float:
        """24 S D^2 for the projections and 4 S^2 D for attention, in each block."""
        tokens = self.tokens_per_sample
        return self.layers * (24.0 * tokens * self.width**2 + 4.0 * tokens**2 * self.width)

    @property
    def forward_flops(self) -> float:
        """Operations of the blocks and 2 S D V for the logits."""
        return self.block_flops + 2.0 * self.tokens_per_sample * self.width * self.vocabulary

    def twin(self, shape: MeshShape | None = None) -> Gpt:
        """Return two blocks with heads of 12 features."""
        heads, tokens, words = twin_sizes(shape)
        sizes: dict[str, Any] = {"layers": 2, "width": 12 * heads, "heads": heads, "words": words, "context": tokens}
        return dataclasses.replace(self, **sizes, words_multiple=1, sequence_length=0)


_ONEFLOW: Mapping[str, int] = {"words_multiple": 128, "context": 2048}

MODELS = (
    Gpt(name="gpt2", layers=12, width=768, heads=12),
    Gpt(name="gpt2-xl", layers=48, width=1600, heads=25),
    Gpt(name="gpt3-13b", layers=40, width=5120, heads=40, context=2048),
    Gpt(name="gpt3-175b", layers=96, width=12288, heads=96, context=2048),
    Gpt(name="gpt-768x12", layers=12, width=768, heads=12, **_ONEFLOW),
    Gpt(name="gpt-1536x16", layers=16, width=1536, heads=16, **_ONEFLOW),
    Gpt(name="gpt-2304x24", layers=24, width=2304, heads=24, **_ONEFLOW),
    Gpt(name="gpt-3072x16", layers=16, width=3072, heads=32, **_ONEFLOW),
    Gpt(name="gpt-3072x32", layers=32, width=3072, heads=32, **_ONEFLOW),
    # Named like OneFlow's models; eight ranks of tp and four stages divide its sizes.
    Gpt(name="gpt-64x4", layers=4, width=64, heads=8, words=250, words_multiple=8, context=32),
    Gpt(name="gpt2-tiny", layers=2, width=128, heads=4, words=512, context=64),
    # As small as its own twin, so that compilation takes little time.
    Gpt(name="gpt2-micro", layers=2, width=48, heads=4, words=64, context=16),
)
