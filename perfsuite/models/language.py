"""Base classes of language models, without torch: sizes and split of a model over ranks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from perfsuite.base.errors import InvalidParameter
from perfsuite.base.mesh import MeshShape
from perfsuite.models.base import Model, SampleTensor, divisors

Split = Literal["words", "positions", "tied", "sequence", "gathered", "column", "row", "head", "experts"]
"""How tensor parallelism splits a part of a model: an embedding by words or by positions; the tied embedding by words;
a norm works on its rank's tokens (sequence); a part gathers its input once; matrices by columns (outputs) or by rows
(inputs); the output projection by words (head); experts have their own dispatcher."""
TRANSFORMER: Mapping[str, Split] = {
    **dict.fromkeys(("blocks.*.norm1", "blocks.*.norm2", "norm"), "sequence"),
    **dict.fromkeys(("blocks.*.attention", "blocks.*.mlp"), "gathered"),
    **dict.fromkeys(("blocks.*.attention.project", "blocks.*.mlp.contract"), "row"),
}
"""Split of the parts that GPT and LLaMA share."""


@dataclass(frozen=True, kw_only=True)
class LanguageModel(Model):
    """A model that predicts the next token; blocks need only the previous block, so stages are ranges of layers."""

    parallelize: ClassVar[Mapping[str, Split]]
    """Split of each part, by its name in the module; ``blocks.*.`` is every block."""

    words: int
    """Different tokens of the data; the vocabulary may have more rows."""

    @property
    def parts(self) -> tuple[SampleTensor, ...]:
        """S + 1 tokens: the inputs, and the targets one place later."""
        return (SampleTensor(name="tokens", shape=(self.tokens_per_sample + 1,), below=self.words),)

    @property
    def key_heads(self) -> int:
        """Heads of keys and values; divide ``heads``."""
        return self.heads

    @property
    def key_width(self) -> int:
        """Features of all keys of a token (K)."""
        return self.width // self.heads * self.key_heads

    @property
    def split_widths(self) -> Mapping[str, int]:
        """Sizes, by name, that tensor parallelism divides in addition to heads and vocabulary."""
        return {}

    def padding(self, tp: int) -> Mapping[str, int]:
        """Return the overrides that pad the vocabulary so that ``tp`` divides it; empty if it does already."""
        return {"words": multiple(128 * tp, self.vocabulary)} if self.padded(tp).vocabulary % tp else {}

    def built_for(self, tp: int) -> LanguageModel:
        """Return the configuration with the overrides of :meth:`padding`."""
        model = dataclasses.replace(self, **self.padding(tp)).padded(tp)  # type: ignore[arg-type] # fields of its kind
        assert isinstance(model, LanguageModel)
        return model

    def check_tensor_parallel(self, tp: int) -> None:
        """Raise InvalidParameter, with the legal tp, unless ``tp`` ranks can share heads, features and words."""
        sizes = {"heads": self.heads, "key heads": self.key_heads, **self.split_widths}
        for field, size in sizes.items():
            if size % tp:
                legal = ", ".join(map(str, divisors(math.gcd(*sizes.values()), tp)))
                others = ", ".join(f"{name}={other}" for name, other in sizes.items() if other != size)
                raise InvalidParameter(
                    f"tp{tp} does not divide {field}={size} of model {self.name}; choose tp from {legal}"
                    + (f", which divide {others} too" if others else "")
                )
        if self.vocabulary % tp:
            overrides = ", ".join(f"{name}={value}" for name, value in self.padding(tp).items())
            raise InvalidParameter(
                f"tp{tp} does not divide the {self.vocabulary} rows of the vocabulary of model {self.name}; pad it to "
                f"{self.built_for(tp).vocabulary} with overrides: {overrides}"
            )


@dataclass(frozen=True, kw_only=True)
class GroupedModel(LanguageModel):
    """A language model whose queries may share heads of keys, and whose vocabulary is not padded."""

    kv_heads: int
    """Heads of keys and values; divide ``heads``."""
    hidden: int
    """Features between the matrices of an MLP without experts (F)."""
    words: int = 32000
    """Rows of the embedding (V)."""
    sequence_length: int = 4096
    """Tokens of a sample (S)."""

    @property
    def key_heads(self) -> int:
        """``kv_heads``."""
        return self.kv_heads

    @property
    def tokens_per_sample(self) -> int:
        """S."""
        return self.sequence_length

    @property
    def vocabulary(self) -> int:
        """V."""
        return self.words

    @property
    def forward_flops(self) -> float:
        """Operations of the blocks and 2 S D V for the logits."""
        return self.block_flops + 2.0 * self.sequence_length * self.width * self.words

    def _require_kv_heads(self) -> None:
        if self.heads % self.kv_heads:
            raise InvalidParameter(
                f"kv_heads={self.kv_heads} does not divide heads={self.heads} of model {self.name}; choose a divisor"
            )


def twin_sizes(shape: MeshShape | None) -> tuple[int, int, int]:
    """Return (heads, tokens, words) of a twin: at least 4, 16 and 64, divisible by tp, cp and both halves of
    zig-zag.

    tp and cp divide half as many key heads too.

    >>> twin_sizes(MeshShape.parse("pp2-tp2")), twin_sizes(MeshShape.parse("cp2-tp4"))
    ((4, 16, 64), (16, 16, 64))
    """
    tp, cp = (shape.size("tp"), shape.size("cp")) if shape else (1, 1)
    return multiple(2 * tp * cp, 4), multiple(2 * tp * cp, 16), multiple(tp, 64)


def multiple(of: int, least: int) -> int:
    """Return the smallest multiple of ``of`` that is at least ``least``.

    >>> multiple(12, 64)
    72
    """
    return -(-least // of) * of
