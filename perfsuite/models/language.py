"""Language models without torch: what every one of them offers to those that spread it over ranks."""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from perfsuite.base.errors import InvalidParameter
from perfsuite.base.mesh import MeshShape
from perfsuite.models.base import Model, SampleTensor

Split = Literal["words", "positions", "tied", "sequence", "gathered", "column", "row", "head", "experts"]
"""How tensor parallelism treats a part of a model: an embedding split by words or by positions; the tied embedding, by
words; a norm, which works on its rank's tokens; a part whose input is gathered once; matrices split by columns (what
comes out) or by rows (what goes in); the output projection, by words; experts, which have a dispatcher of their own."""


@dataclass(frozen=True, kw_only=True)
class LanguageModel(Model):
    """A model that tells the next token; its blocks need nothing but what the block before gives.

    So a range of its layers is a stage of a pipeline.
    """

    parallelize: ClassVar[Mapping[str, Split]]
    """By the part's name in the module; ``blocks.*.`` stands for every block."""

    @property
    def parts(self) -> tuple[SampleTensor, ...]:
        """S + 1 tokens: inputs and, one later, targets."""
        return (SampleTensor(name="tokens", shape=(self.tokens_per_sample + 1,), below=self.different_tokens),)

    @property
    @abstractmethod
    def different_tokens(self) -> int:
        """Words that samples are made of; the vocabulary may have more rows."""

    @property
    def key_heads(self) -> int:
        """Heads of keys and values."""
        return self.heads

    @property
    def key_width(self) -> int:
        """Features of all keys of a token (K)."""
        return self.width // self.heads * self.key_heads

    @property
    def split_widths(self) -> Mapping[str, int]:
        """Sizes, by name, that tensor parallelism divides beside the heads and the vocabulary."""
        return {}

    def padding(self, tp: int) -> Mapping[str, int]:
        """Return the overrides that pad the words to a multiple of 128 x ``tp``; none where ``tp`` divides them."""
        return {"words": multiple(128 * tp, self.vocabulary)} if self.padded(tp).vocabulary % tp else {}

    def built_for(self, tp: int) -> LanguageModel:
        """Return the configuration with its words padded as :meth:`padding` says."""
        model = dataclasses.replace(self, **self.padding(tp)).padded(tp)  # type: ignore[arg-type] # fields of its kind
        assert isinstance(model, LanguageModel)
        return model

    def check_tensor_parallel(self, tp: int) -> None:
        """Raise InvalidParameter, the nearest choice first, unless ``tp`` ranks can share heads, features and words."""
        sizes = {"heads": self.heads, "key heads": self.key_heads, **self.split_widths}
        for what, size in sizes.items():
            if size % tp:
                all_divide = math.gcd(*sizes.values())
                divisors = [count for count in range(1, all_divide + 1) if all_divide % count == 0]
                legal = ", ".join(str(count) for count in sorted(divisors, key=lambda count: abs(count - tp)))
                others = ", ".join(f"{name}={other}" for name, other in sizes.items() if other != size)
                raise InvalidParameter(
                    f"tp{tp} does not divide {what}={size} of model {self.name}; choose tp from {legal}"
                    + (f", which divide {others} too" if others else "")
                )
        if self.vocabulary % tp:
            padded = math.ceil(self.vocabulary / (128 * tp)) * 128 * tp
            raise InvalidParameter(
                f"tp{tp} does not divide the {self.vocabulary} rows of the vocabulary of model {self.name}; pad it to "
                f"{padded} with overrides: {self._padding(tp)}"
            )

    def _padding(self, tp: int) -> str:
        """The override that makes the vocabulary divide."""
        return f"words={math.ceil(self.vocabulary / (128 * tp)) * 128 * tp}"


def twin_sizes(shape: MeshShape | None) -> tuple[int, int, int]:
    """(heads, tokens, words) of a twin, the smallest from 4, 16 and 64 that tp, cp and both halves of zig-zag divide.

    Half as many key heads divide as well.

    >>> twin_sizes(MeshShape.parse("pp2-tp2")), twin_sizes(MeshShape.parse("cp2-tp4"))
    ((4, 16, 64), (16, 16, 64))
    """
    tp, cp = (shape.size("tp"), shape.size("cp")) if shape else (1, 1)
    heads = 2 * tp * cp
    tokens = 2 * cp * tp
    return multiple(heads, 4), multiple(tokens, 16), multiple(tp, 64)


def multiple(of: int, least: int) -> int:
    """The smallest multiple of ``of`` from ``least`` on.

    >>> multiple(12, 64)
    72
    """
    return -(-least // of) * of
