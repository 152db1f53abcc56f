"""Language models without torch: their base classes, and the configurations of GPT and LLaMA.

GPT: learned positions, layer norms before attention and MLP, tied embeddings.  Sources: GPT-2 (Radford et al. 2019),
GPT-3 (Brown et al. 2020, table 2.1), OneFlow's published GPT benchmark (hidden size x layers; 2048 tokens; vocabulary
padded to a multiple of 128 times the ranks that share it).  The GPT-3 paper prints a width of 5140 for 13B, which its
40 heads do not divide; the usual 5120 is used here.

LLaMA 2 and 3: rotary positions, RMS norms, SwiGLU, grouped queries, untied embeddings, no biases.  Sources: Touvron et
al. 2023 (LLaMA 2), Grattafiori et al. 2024 (LLaMA 3) and the published configurations.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from perfsuite.base.errors import InvalidParameter
from perfsuite.base.mesh import MeshShape
from perfsuite.models.base import Model, SampleTensor, divisors, require_sizes

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

    words: int  # Different tokens of the data; the vocabulary may have more rows.

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
    def forward_flops(self) -> float:
        """Operations of the blocks and 2 S D V for the logits."""
        return self.block_flops + 2.0 * self.tokens_per_sample * self.width * self.vocabulary

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

    kv_heads: int  # Heads of keys and values; divide ``heads``.
    hidden: int  # Features between the matrices of an MLP without experts (F).
    words: int = 32000  # Rows of the embedding (V).
    sequence_length: int = 4096  # Tokens of a sample (S).

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

    def _require_kv_heads(self) -> None:
        if self.heads % self.kv_heads:
            raise InvalidParameter(
                f"kv_heads={self.kv_heads} does not divide heads={self.heads} of model {self.name}; choose a divisor"
            )


def twin_sizes(shape: MeshShape | None) -> tuple[int, int, int]:
    """Return (heads, tokens, words) of a twin: at least 4, 16 and 64, divisible by tp, cp and both halves of zig-zag.

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


@dataclass(frozen=True, kw_only=True)
class Gpt(LanguageModel):
    """A GPT configuration.

    >>> Gpt(name="gpt2", layers=12, width=768, heads=12).parameters
    124439808
    """

    words: int = 50257
    words_multiple: int = 1
    """The token embedding, which is also the output projection, is padded to a multiple of this many rows (V)."""
    context: int = 1024  # Number of learned positions.
    sequence_length: int = 0  # Tokens of a sample (S), at most ``context``; 0: as many as ``context``.

    parallelize: ClassVar[Mapping[str, Split]] = {
        **TRANSFORMER,
        **{"tokens": "tied", "positions": "positions"},
        **dict.fromkeys(("blocks.*.attention.qkv", "blocks.*.mlp.expand"), "column"),
    }

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

        >>> gpt = next(gpt for gpt in GPTS if gpt.name == "gpt-1536x16")
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

    def twin(self, shape: MeshShape | None = None) -> Gpt:
        """Return two blocks with heads of 12 features."""
        heads, tokens, words = twin_sizes(shape)
        sizes: dict[str, Any] = {"layers": 2, "width": 12 * heads, "heads": heads, "words": words, "context": tokens}
        return dataclasses.replace(self, **sizes, words_multiple=1, sequence_length=0)


_ONEFLOW: Mapping[str, int] = {"words_multiple": 128, "context": 2048}

GPTS = (
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


class Llama(GroupedModel):
    """A LLaMA configuration. LLaMA 2 is published with 4096 tokens of context, and LLaMA 3 with 8192.

    >>> Llama(name="llama2-7b", layers=32, width=4096, heads=32, kv_heads=32, hidden=11008).parameters
    6738415616
    """

    parallelize: ClassVar[Mapping[str, Split]] = {
        **TRANSFORMER,
        "tokens": "words",
        **dict.fromkeys((f"blocks.*.attention.{part}" for part in ("query", "key", "value")), "column"),
        **dict.fromkeys(("blocks.*.mlp.gate", "blocks.*.mlp.expand"), "column"),
        "output": "head",
    }

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


_LLAMA3: Mapping[str, int] = {"kv_heads": 8, "words": 128256, "sequence_length": 8192}

LLAMAS = (
    Llama(name="llama2-7b", layers=32, width=4096, heads=32, kv_heads=32, hidden=11008),
    Llama(name="llama2-13b", layers=40, width=5120, heads=40, kv_heads=40, hidden=13824),
    Llama(name="llama2-70b", layers=80, width=8192, heads=64, kv_heads=8, hidden=28672),
    Llama(name="llama3-8b", layers=32, width=4096, heads=32, hidden=14336, **_LLAMA3),
    Llama(name="llama3-70b", layers=80, width=8192, heads=64, hidden=28672, **_LLAMA3),
    Llama(name="llama3-405b", layers=126, width=16384, heads=128, hidden=53248, **_LLAMA3),
    Llama(name="llama2-tiny", layers=2, width=128, heads=4, kv_heads=2, hidden=344, words=512, sequence_length=64),
)
